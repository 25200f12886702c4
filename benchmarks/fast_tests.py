"""Which test files are slow, and how many cases of slow tests `make test` takes, by what a whole run took.

    WHOLE=1 PYTEST_ADDOPTS=--junitxml=/tmp/junit.xml make test
    python benchmarks/fast_tests.py /tmp/junit.xml [--seconds 190] [--share 0.5] [--longest 1.5] [--keep]

The cheapest files are fast until their seconds, added up over all workers of pytest, are used up; the others
are slow, and so are those that were and of which this run skipped a part: what they need is missing here. To
start and to load the fast files takes a worker of pytest about 15 s more. Of a test in a slow file `make
test` takes as many cases as take the seconds of a share, at least one, but none that takes longer than
--longest, unless ALWAYS names the test; tests/tables.py chooses them. --keep writes tests/slow.txt, which
tests/conftest.py reads.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "slow.txt"
ALWAYS = (
    "capture/test_families.py::test_the_layers_are_the_model",
    "capture/test_families.py::test_tokens_of_decoders_are_those_of_their_own_generate",
    "capture/test_layers.py::test_stages_train_as_one_process",
    "docs/test_readme.py::test_messages_in_troubleshooting_are_the_librarys",
    "examples/test_examples.py::test_own_model_trains_and_goes_on",
    "examples/test_wheel.py::test_the_wheel",
    "integrations/test_transformers.py::test_one_worker_trains_as_the_trainer_and_goes_on_from_a_checkpoint",
    "measure/test_own_model_memory.py::test_planned_memory_is_that_which_the_engine_counts",
    "models/hf/test_slice_attention.py::test_options_train_as_one_process",
    "planning/search/test_search.py::test_no_candidate_beats_its_bound",
    "planning/search/test_search.py::test_the_search_finds_what_brute_force_finds",
    "program/test_checker.py::test_everything_the_schemes_make_passes",
    "program/test_pairs.py::test_the_checker_accepts_pairs_and_all_their_lists",
    "runtime/execution/test_added_losses.py::test_options",
    "runtime/execution/test_evaluation.py::test_options",
    "runtime/execution/test_slices.py::test_further_options_with_slices",
    "runtime/stages/test_captured.py::test_replays_have_the_numbers_of_plain_torch",
    "runtime/stages/test_compiled.py::test_compiled_layers_give_the_same",
    "runtime/stages/test_split_graphs.py::test_numbers_are_those_of_plain_stages",
    "runtime/test_counted_memory.py::test_one_worker_is_counted_as_it_is_measured",
    "runtime/test_generation.py::test_the_most_likely_tokens_are_those_of_whole_sequences",
    "runtime/workers/test_launch.py::test_a_hanging_worker",
    "test_time_limits.py::test_hangs_are_failures_with_a_name",
    "training/supervision/test_restarts.py::test_it_goes_on_as_if_nothing_had_been",
    "training/test_resuming.py::test_a_killed_run_goes_on_as_if_nothing_had_been",
    "training/test_run.py::test_losses_are_the_same_whatever_the_schedule_and_width",
)
"""Tests of which `make test` takes a case however long it takes: no shorter one makes its claim."""


def cases(report: Path) -> Iterator[tuple[str, str, float, bool]]:
    """Give of each case its file, its name, its seconds, and True if it was skipped."""
    for case in ET.parse(report).iter("testcase"):
        parts = (case.attrib["classname"] or case.attrib["name"]).split(".")  # a module that is skipped
        classes: list[str] = []
        while parts and not (ROOT / Path(*parts)).with_suffix(".py").is_file():
            classes.insert(0, parts.pop())
        if parts and parts[0] == "tests":
            path = str(Path(*parts).with_suffix(".py"))
            name = "::".join([path, *classes, case.attrib["name"]])
            yield path, name, float(case.attrib["time"]), case.find("skipped") is not None


def limits(seconds: Mapping[str, Mapping[str, float]], share: float, longest: float) -> dict[str, int]:
    """Largest number of cases by test, where this is less than all; 0 by case that is not taken at all.

    Args:
        seconds: seconds of each case by test and case.
        share: seconds of a test.
        longest: seconds of a case, beyond which it is not taken.
    """
    counts: dict[str, int] = {}
    for test, times in sorted(seconds.items()):
        always = test.removeprefix("tests/") in ALWAYS
        short = {case: time for case, time in times.items() if time <= longest or always}
        count = min(len(short), max(1, int(share * len(short) / max(sum(short.values()), 1e-9))))
        if count < len(short) or not short:
            counts[test] = count
        if short and not always:
            counts |= dict.fromkeys(times.keys() - short.keys(), 0)
    return counts


def main() -> None:
    """Print the split, and keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--longest", type=float, default=1.5)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    files: dict[str, float] = defaultdict(float)
    tests: dict[str, dict[str, float]] = defaultdict(dict)
    skipped: set[str] = set()
    for path, name, seconds, was_skipped in cases(options.report):
        files[path] += seconds
        tests[name.partition("[")[0]][name] = seconds
        if was_skipped:
            skipped.add(path)
    slow = sorted(skipped.intersection(LIST.read_text(encoding="utf-8").splitlines()))
    remaining = options.seconds
    for path, seconds in sorted(files.items(), key=lambda pair: pair[1]):
        if path not in slow:
            remaining -= seconds
            if remaining < 0:
                slow.append(path)
    of_slow = {name: row for name, row in tests.items() if name.partition("::")[0] in slow}
    counts = limits(of_slow, options.share, options.longest)
    for path in slow:
        print(f"{files[path]:8.1f} s  {path}")
    total = sum(files.values())
    fast = total - sum(files[path] for path in slow)
    print(f"{len(slow)} of {len(files)} files are slow; the others take {fast:.0f} of {total:.0f} s")
    omitted = [name for name, count in counts.items() if not count]
    print(f"`make test` limits the cases of {len(counts) - len(omitted)} slow tests, and takes none of:")
    print(*omitted, sep="\n")
    if options.keep:
        lines = sorted([*slow, *(f"{name} {count}" for name, count in counts.items())])
        LIST.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
