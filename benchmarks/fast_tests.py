"""Which test files are slow, and how many cases of slow tests `make test` takes, by what a whole run took.

    WHOLE=1 PYTEST_ADDOPTS=--junitxml=/tmp/junit.xml make test
    python benchmarks/fast_tests.py /tmp/junit.xml [--seconds 190] [--share 3] [--keep]

The cheapest files are fast until their seconds, added up over all workers of pytest, are used up; the others
are slow, and so are those that were and of which this run skipped a part: what they need is missing here. To
start and to load the fast files takes a worker of pytest about 15 s more. Of a test in a slow file `make
test` takes as many cases as take the seconds of a share, at least one; tests/tables.py chooses them. --keep
writes tests/slow.txt, which tests/conftest.py reads.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "slow.txt"


def cases(report: Path) -> Iterator[tuple[str, str, float, bool]]:
    """Give of each case its file, its test, its seconds, and True if it was skipped."""
    for case in ET.parse(report).iter("testcase"):
        parts = (case.attrib["classname"] or case.attrib["name"]).split(".")  # a module that is skipped
        classes: list[str] = []
        while parts and not (ROOT / Path(*parts)).with_suffix(".py").is_file():
            classes.insert(0, parts.pop())
        if parts and parts[0] == "tests":
            path = str(Path(*parts).with_suffix(".py"))
            name = "::".join([path, *classes, case.attrib["name"].partition("[")[0]])
            yield path, name, float(case.attrib["time"]), case.find("skipped") is not None


def limits(seconds: Mapping[str, Sequence[float]], share: float) -> dict[str, int]:
    """Largest number of cases of each test that takes longer than a share; the mean case counts.

    Args:
        seconds: seconds of each case by test.
        share: seconds of a test.
    """
    counts = {
        name: max(1, int(share * len(times) / sum(times))) for name, times in seconds.items() if sum(times)
    }
    return {name: count for name, count in sorted(counts.items()) if count < len(seconds[name])}


def main() -> None:
    """Print the split, and keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--share", type=float, default=3.0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    files: dict[str, float] = defaultdict(float)
    tests: dict[str, list[float]] = defaultdict(list)
    skipped: set[str] = set()
    for path, name, seconds, was_skipped in cases(options.report):
        files[path] += seconds
        tests[name].append(seconds)
        if was_skipped:
            skipped.add(path)
    slow = sorted(skipped.intersection(LIST.read_text(encoding="utf-8").split()))
    remaining = options.seconds
    for path, seconds in sorted(files.items(), key=lambda pair: pair[1]):
        if path not in slow:
            remaining -= seconds
            if remaining < 0:
                slow.append(path)
    counts = limits(
        {name: row for name, row in tests.items() if name.partition("::")[0] in slow}, options.share
    )
    for path in slow:
        print(f"{files[path]:8.1f} s  {path}")
    total = sum(files.values())
    fast = total - sum(files[path] for path in slow)
    print(f"{len(slow)} of {len(files)} files are slow; the others take {fast:.0f} of {total:.0f} s")
    saved = sum(sum(tests[name]) * (1 - count / len(tests[name])) for name, count in counts.items())
    print(f"{len(counts)} slow tests have some of their cases in `make test`, which saves {saved:.0f} s")
    dear = Counter({name: sum(row) / len(row) * counts.get(name, len(row)) for name, row in tests.items()})
    print(*(f"{seconds:8.1f} s  {name}" for name, seconds in dear.most_common(20)), sep="\n")
    if options.keep:
        lines = sorted([*slow, *(f"{name} {count}" for name, count in counts.items())])
        LIST.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
