"""False alarms of ``counterflow lint`` on drawn correct schedules, and the public hangs that it finds.

    python benchmarks/lint.py [--count N] [--keep]

Three kinds of correct lists, a third of each: programs of this library (any scheme, size and options), which
its checker proves; orders of ops in which each op comes after what it needs, drawn over placements of one and
two stages a rank, whose messages torch's own pass adds; and recorded calls in one order of all messages
(``tests/lint/drawn.py``). An alarm is a broken rule, of any rule.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from kit import arguments, keep, machine_line
from torch.distributed.pipelining import schedules as torch_schedules

from counterflow.errors import ConfigError
from counterflow.lint.calls import CallLists, CommunicatorScope
from counterflow.lint.op_rules import op_findings
from counterflow.lint.program_lists import program_lists
from counterflow.lint.torch_lists import read_torch_lists
from counterflow.lint.verdicts import LintFinding, lint
from counterflow.program.lowering import lower
from counterflow.schedule import registry
from counterflow.schedule.graph import OpGraph

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.lint.drawn import correct_lists
from tests.lint.hangs.cases import HANGS

SIZES = ("stages", "workers")


def drawn_program(draw: random.Random) -> tuple[CallLists, list[LintFinding]]:
    """A program of a drawn scheme; its communicators are those of the engine."""
    while True:
        name = draw.choice(list(registry.SCHEMES))
        sizes = {draw.choice(SIZES): draw.randint(2, 5), "micro_batches": draw.randint(1, 8)}
        options = {"periods": 3} if name.startswith("pipedream") or name == "wpipe" else {}
        try:
            schedule = registry.build(name, {**sizes, **options})
        except ConfigError:
            continue
        return program_lists(lower(schedule), OpGraph(schedule)), []


def drawn_torch(draw: random.Random) -> tuple[CallLists, list[LintFinding]]:
    """A drawn order of ops on drawn stages of ranks, with messages where torch's pass adds them."""
    ranks, chunks, micro_batches = draw.randint(2, 5), draw.randint(1, 2), draw.randint(1, 5)
    shape = draw.choice(["loop", "vee"])
    holder = [
        rank if shape == "loop" or chunk % 2 == 0 else ranks - 1 - rank
        for chunk in range(chunks)
        for rank in range(ranks)
    ]
    rows = _order(draw, holder, ranks, micro_batches)
    actions = {r: [torch_schedules._Action.from_str(cell) for cell in row] for r, row in enumerate(rows)}
    lowered = torch_schedules._add_send_recv(actions, holder.__getitem__, len(holder))
    text = "\n".join(",".join(map(str, lowered[rank])) for rank in range(ranks))
    findings, remark = op_findings(text, "drawn")
    assert not remark
    return read_torch_lists(text, "drawn", draw.choice(list(CommunicatorScope))), findings


def _order(draw: random.Random, holder: list[int], ranks: int, micro_batches: int) -> list[list[str]]:
    split, last = draw.random() < 0.5, len(holder) - 1
    backward = "I" if split else "B"
    rows: list[list[str]] = [[] for _ in range(ranks)]
    ready = [(0, "F", number) for number in range(micro_batches)]
    while ready:
        stage, letter, number = ready.pop(draw.randrange(len(ready)))
        rows[holder[stage]].append(f"{stage}{letter}{number}")
        if letter == "F":
            ready.append((stage + 1, "F", number) if stage < last else (stage, backward, number))
        elif letter != "W":
            ready += [(stage - 1, backward, number)] * (stage > 0)
            ready += [(stage, "W", number)] * split
    return rows


def drawn_recorded(draw: random.Random) -> tuple[CallLists, list[LintFinding]]:
    """Recorded calls in one order of all messages."""
    return correct_lists(draw.randrange(10**9), most=40), []


KINDS = {
    "programs of this library": drawn_program,
    "orders with torch's messages": drawn_torch,
    "recorded calls": drawn_recorded,
}


def kind_row(name: str, count: int) -> str:
    """The alarms of so many lists of a kind."""
    draw = random.Random(0)
    calls, alarms = 0, Counter[str]()
    for _ in range(count):
        lists, findings = KINDS[name](draw)
        verdict = lint(lists, further=findings, mend=False)
        calls += lists.calls
        alarms.update(finding.rule for finding in verdict.findings if not finding.ok)
    listed = ", ".join(f"{rule}: {number}" for rule, number in sorted(alarms.items())) or "none"
    return f"{name}: {count:,} lists, {calls:,} calls, alarms: {listed}"


def hang_rows() -> Iterator[str]:
    """What is found of each public hang, and the change that ends it."""
    for name, hang in HANGS.items():
        verdict = lint(hang.lists())
        broken = [finding.rule for finding in verdict.findings if not finding.ok]
        result = ", ".join(broken) or ("lost time" if verdict.stalls else "NOT FOUND")
        fix = "; ".join(verdict.fix.changes) if verdict.fix else "–"
        yield f"{name}: {result} | change: {fix}"


def main() -> None:
    parser: Any = arguments(__doc__, "lint.txt")
    parser.add_argument("--count", type=int, default=10_000, help="correct lists of all kinds together")
    options = parser.parse_args()
    lines = [f"# python benchmarks/lint.py, {machine_line()}"]
    with ProcessPoolExecutor(len(KINDS)) as pool:
        lines += pool.map(kind_row, KINDS, repeat(options.count // len(KINDS) + 1))
    lines += hang_rows()
    print("\n".join(lines))
    if options.keep:
        keep("lint", lines)


if __name__ == "__main__":
    main()
