"""Which slips in a module its tests do not see: mutmut makes them one by one and runs that module's tests.

``python benchmarks/mutants.py [MODULE ...]``; without a name all of ``MODULES``. It needs the extra
``mutants``, is run by hand, and works in a copy under ``build/mutants``. The row of each module in
``results/mutants.txt`` is written anew; what survived and changes nothing has its reason in ``mutants.toml``,
by the changed line, and what survived otherwise is listed. mutmut changes functions and methods, but none
that is decorated otherwise than as a class or static method (properties, cached functions). ``--stale`` runs
nothing: it lists the reasons whose line no mutant of today's source has (a minute).
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from kit import arguments, machine

ROOT = Path(__file__).parents[1]
PACKAGE = "src/counterflow"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.txt"
EQUIVALENT = ROOT / "benchmarks" / "mutants.toml"

RULES = "program/test_rules.py", "schedule/test_skips.py", "program/test_posting.py"

MODULES: dict[str, tuple[str, ...]] = {
    "program/rules/order_rules.py": RULES,
    "program/rules/traffic.py": RULES,
    "program/rules/updates.py": RULES,
    "program/sync.py": ("program/test_sync.py",),
    "program/lowering.py": (
        *("program/test_lowering.py", "program/test_posting.py"),
        *("schedule/test_skips.py", "program/test_segments.py"),
    ),
    "planning/search/bounds.py": ("planning/search/test_bounds.py",),
    "planning/search/order_free_bounds.py": ("planning/search/test_bounds.py",),
    "planning/search/path_bounds.py": ("planning/search/test_bounds.py",),
    "planning/search/least_times.py": ("planning/search/test_bounds.py",),
    "synthesis/bounds/lower.py": ("synthesis/bounds",),
    "synthesis/bounds/windows.py": ("synthesis/bounds",),
    "runtime/parameters/weights.py": ("runtime/parameters/test_one_worker.py",),
    "runtime/parameters/local_state.py": ("runtime/parameters/test_local_state.py",),
    "runtime/parameters/mutation_check.py": ("runtime/parameters/test_mutation_check.py",),
    "runtime/parameters/statistics.py": ("runtime/parameters/test_statistics.py",),
    "runtime/parameters/parameter_placement.py": ("runtime/parameters/test_parameter_placement.py",),
    "runtime/parameters/gradients.py": (
        *("runtime/parameters/test_gradient_groups.py", "runtime/parameters/test_gradients.py"),
    ),
    "runtime/parameters/flat_gradients.py": (
        *("runtime/parameters/test_gradient_groups.py", "runtime/parameters/test_low_precision.py"),
    ),
    "runtime/parameters/gradient_norms.py": (
        *("runtime/parameters/test_gradient_groups.py", "runtime/parameters/test_gradients.py"),
    ),
    "verification/training_agreement.py": (
        *("verification/test_compare.py", "verification/test_training_agreement.py"),
        *("verification/test_reference.py", "verification/test_verify.py"),
    ),
    "verification/reference.py": ("verification/test_reference.py", "verification/test_verify.py"),
    "verification/reference_parts.py": ("verification/test_reference.py", "verification/test_verify.py"),
    "training/supervision/exclusive.py": ("training/supervision/test_exclusive.py",),
    "checkpoints/index.py": ("checkpoints/test_index.py", "checkpoints/test_renames.py"),
}
"""The tests of each module, from ``tests``: those that say what it does, and are quick."""

USES_TORCH = ("runtime/", "verification/", "training/", "checkpoints/")
"""Rooms whose tests start threads of torch, which a fork of the process that ran them would lack."""

SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["{package}/{module}"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist"]
pytest_add_cli_args_test_selection = {tests}
process_isolation = "{isolation}"
use_git_change_detection = false
track_dependencies = false
timeout_constant = 2.0
"""

ALIVE = (0, 33, None)
"""What tests end with that see nothing: they passed, or none of them runs the function."""

HEAD = [
    f"{'module':<32}  mutants  killed  survived-equivalent  survived  seconds  date        machine",
    "(killed: a test fails or hangs; survived: no test looks at what changed, which is below the row)",
    "(seconds: of the tests; where mutmut does not note them, of the last run, which --again makes short)",
    "(what a whole run left was tried again, --again or alone, by the tests that were written for it)",
]


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a module's mutants."""

    module: str
    mutants: int
    killed: int
    equivalent: int
    survived: int
    seconds: float
    day: str
    machine: str

    def __str__(self) -> str:
        return (
            f"{self.module:<32}  {self.mutants:>7}  {self.killed:>6}  {self.equivalent:>19}  "
            f"{self.survived:>8}  {self.seconds:>7.0f}  {self.day}  {self.machine}"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(MODULES))
    parser.add_argument(
        "--again", action="store_true", help="only what survived in an earlier run, by today's tests"
    )
    parser.add_argument(
        "--stale", action="store_true", help="only list reasons for lines that no mutant has; exit 1 if any"
    )
    given = parser.parse_args()
    unknown = set(given.modules) - set(MODULES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(MODULES)}")
    if given.stale:
        stale = [f"{module}: {line}" for module in given.modules or MODULES for line in stale_reasons(module)]
        print("\n".join(stale) or "every reason has its mutant")
        sys.exit(bool(stale))
    for module in given.modules or MODULES:
        row, left = mutated(module, again=given.again)
        keep_row(row, left)
        print(row, *left, sep="\n", flush=True)


def mutated(module: str, *, again: bool) -> tuple[Row, list[str]]:
    """The mutants of a module, and the changed lines of those that survived and change something."""
    folder = ROOT / "build" / "mutants" / re.sub(r"\W", "-", module)
    if not again:
        shutil.rmtree(folder, ignore_errors=True)
    copy(module, folder)
    command = [sys.executable, "-m", "mutmut"]
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # the copy comes first
    names = [name for name, code in codes_in(folder).items() if code in ALIVE] if again else []
    began = time.perf_counter()
    subprocess.run([*command, "run", "--max-children", "1", *names], cwd=folder, env=alone, check=True)
    took = time.perf_counter() - began
    codes = codes_in(folder)
    alive = [name for name, code in codes.items() if code in ALIVE]
    reasons = reasons_of(module)
    left, equivalent = [], 0
    for name in alive:
        shown = subprocess.run(
            [*command, "show", name], cwd=folder, env=alone, check=True, capture_output=True, text=True
        )
        changed = changed_lines(shown.stdout.splitlines())
        if added_line(changed) in reasons or only_strict(changed):
            equivalent += 1
        else:
            left.append(
                f"  {name.rpartition('.')[2]}: " + " | ".join(line[0] + line[1:].strip() for line in changed)
            )
    killed = len(codes) - len(alive)
    seconds = seconds_in(folder) or took
    today = str(dt.date.today())
    place = f"{os.cpu_count()} cores of an {machine()['cpu']}"
    return Row(module, len(codes), killed, equivalent, len(left), seconds, today, place), left


def reasons_of(module: str) -> dict[str, str]:
    """Reasons why mutants of a module change nothing, by the changed line."""
    return dict(tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get(module, {}))


def changed_lines(diff: Iterable[str]) -> list[str]:
    """Removed and added lines of a unified diff, each with its sign."""
    return [line for line in diff if re.match(r"[-+](?![-+])", line)]


def added_line(changed: Iterable[str]) -> str:
    """Added lines in one."""
    return " ".join(line[1:].strip() for line in changed if line[0] == "+")


def stale_reasons(module: str) -> list[str]:
    """Lines with a reason that no mutant of today's source has."""
    reasons = reasons_of(module)
    if not reasons:
        return []
    import libcst  # noqa: PLC0415 - of the extra
    from mutmut.mutation.file_mutation import create_mutations, deep_replace  # noqa: PLC0415

    path = ROOT / PACKAGE / module
    known, empty = set(), libcst.Module([])
    for mutation in create_mutations(str(path), path.read_text(encoding="utf-8"))[1]:
        if (function := mutation.contained_by_top_level_function) is not None:
            mutant = deep_replace(function, mutation.original_node, mutation.mutated_node)
            sides = [empty.code_for_node(node).splitlines() for node in (function, mutant)]
            known.add(added_line(changed_lines(unified_diff(*sides, lineterm=""))))
    return [line for line in reasons if line not in known]


def seconds_in(folder: Path) -> float:
    """What the tests of all mutants took; 0 where mutmut does not note it (forkserver)."""
    found = 0.0
    for path in (folder / "mutants").rglob("*.meta"):
        found += sum(json.loads(path.read_text(encoding="utf-8"))["durations_by_key"].values())
    return found


def codes_in(folder: Path) -> dict[str, int | None]:
    """What the tests of each mutant ended with."""
    found: dict[str, int | None] = {}
    for path in (folder / "mutants").rglob("*.meta"):
        found |= json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
    return found


def only_strict(changed: list[str]) -> bool:
    """Whether only ``strict=True`` of a ``zip`` is gone: what it joins is equally long by construction."""
    sides = ["".join(line[1:] for line in changed if line[0] == sign) for sign in "-+"]
    was, now = (re.sub(r"strict=(True|False|None)|[\s,]", "", side) for side in sides)
    return "strict=True" in sides[0] and was == now


def copy(module: str, folder: Path) -> None:
    """What mutmut needs of the tree, with its settings; the tests alone where the rest is there."""
    folder.mkdir(parents=True, exist_ok=True)
    away = shutil.ignore_patterns("__pycache__")
    places = [folder, folder / "mutants"] if (folder / "src").exists() else [folder]
    for place in places:
        shutil.copytree(ROOT / "tests", place / "tests", ignore=away, dirs_exist_ok=True)
    if len(places) > 1:
        return
    shutil.copytree(ROOT / "src", folder / "src", ignore=away)
    tests = [f"tests/{test}" for test in MODULES[module]]
    isolation = "forkserver" if module.startswith(USES_TORCH) else "fork"
    settings = SETTINGS.format(package=PACKAGE, module=module, tests=json.dumps(tests), isolation=isolation)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(project + settings, encoding="utf-8")


def keep_row(row: Row, left: list[str]) -> None:
    """Put a module's row and its survivors in place of the ones before."""
    rows: dict[str, list[str]] = {}
    module = ""
    for line in RESULTS.read_text(encoding="utf-8").splitlines()[len(HEAD) :] if RESULTS.exists() else ():
        module = module if line.startswith("  ") else line.split()[0]
        rows.setdefault(module, []).append(line)
    rows[row.module] = [str(row), *left]
    ordered = [line for name in MODULES for line in rows.get(name, [])]
    RESULTS.write_text("\n".join([*HEAD, *ordered]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
