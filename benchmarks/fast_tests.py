"""Which test modules are slow: those that do not fit the time of `make test-fast`, by what a whole run took.

    PYTEST_ADDOPTS=--junitxml=/tmp/junit.xml make test
    python benchmarks/fast_tests.py /tmp/junit.xml [--seconds 190] [--keep]

The cheapest modules are fast until their seconds, added up over all workers of pytest, are used up; the
others are slow, and so are those that were and of which this run skipped a part: what they need is missing
here. To start and to load the fast modules takes a worker of pytest about 15 s more. --keep writes
tests/slow.txt, which tests/conftest.py turns into a marker.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "slow.txt"


def seconds_by_module(report: Path) -> tuple[Counter[str], set[str]]:
    """What each file of tests took, by its path, and the files of which a part was skipped."""
    found: Counter[str] = Counter()
    skipped: set[str] = set()
    for case in ET.parse(report).iter("testcase"):
        parts = (case.attrib["classname"] or case.attrib["name"]).split(".")  # a module that is skipped
        while parts and not (ROOT / Path(*parts)).with_suffix(".py").is_file():
            parts.pop()  # a class in a module
        if parts and parts[0] == "tests":
            path = str(Path(*parts).with_suffix(".py"))
            found[path] += float(case.attrib["time"])
            if case.find("skipped") is not None:
                skipped.add(path)
    return found, skipped


def main() -> None:
    """Print the split, and keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    modules, skipped = seconds_by_module(options.report)
    slow = sorted(skipped.intersection(LIST.read_text(encoding="utf-8").split()))
    left = options.seconds
    for module, seconds in sorted(modules.items(), key=lambda pair: pair[1]):
        if module not in slow:
            left -= seconds
            if left < 0:
                slow.append(module)
    for module in slow:
        print(f"{modules[module]:8.1f} s  {module}")
    total, kept = sum(modules.values()), sum(modules.values()) - sum(modules[m] for m in slow)
    print(f"{len(slow)} of {len(modules)} modules are slow; the others take {kept:.0f} of {total:.0f} s")
    if options.keep:
        LIST.write_text("".join(f"{module}\n" for module in sorted(slow)), encoding="utf-8")


if __name__ == "__main__":
    main()
