"""The least idle time of MixPipe's symmetric orders for every K and Γ, proved, and these orders.

    python benchmarks/mixpipe_symmetric.py [--seconds 60] [--keep]

N = D micro-batches go two ways, F = 1, B = 2, messages are free. A worker stashes at most K + Γ, each pipe's
first stage runs exactly K/2 forwards before its worker's first backward, micro-batches keep their order on
every stage, and worker D-1-w does with micro-batch m ^ 1 what worker w does with m. ``listed`` is the idle
time of the list schedules of ``mixpipe_plan.py``, ``published`` is 5D-3K-4-3Γ. ``--keep`` writes
``results/mixpipe_symmetric.txt``, and those orders that are shorter than listed ones to
``schedule/orders/mixpipe_optima.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from kit import arguments, keep, machine_line
from ortools.sat.python import cp_model

from counterflow.papers.closed_forms import mixpipe_idle
from counterflow.schedule.orders import mixpipe_optima, mixpipe_plan


def legal(depth: int) -> list[tuple[int, int]]:
    """K and Γ of a depth."""
    return [(k, g) for k in range(2, depth + 1, 2) for g in range((depth - k) // 2 + 1)]


DEPTHS = range(4, 13, 2)
SECONDS = {"F": 1, "B": 2}


def best(depth: int, k: int, g: int, most_idle: int, seconds: float) -> tuple[int, bool, list[str]]:
    """The least idle time, whether it is proved, and the order of each of the first D/2 workers.

    One pipe is folded onto D/2 workers, as in ``mixpipe_plan.py``: worker w has the stages w and D-1-w.
    """
    model, pairs, span = cp_model.CpModel(), range(depth // 2), 3 * depth + most_idle
    start = {
        (kind, stage, pair): model.new_int_var(0, span - SECONDS[kind], "")
        for kind, stage, pair in product("FB", range(depth), pairs)
    }
    end = {key: time + SECONDS[key[0]] for key, time in start.items()}
    for stage, pair in product(range(depth), pairs):
        if stage > 0:
            model.add(start["F", stage, pair] >= end["F", stage - 1, pair])
            model.add(start["B", stage - 1, pair] >= end["B", stage, pair])
        for kind in "FB" if pair > 0 else "":
            model.add(start[kind, stage, pair] >= end[kind, stage, pair - 1])
    last = depth - 1
    for pair in pairs:
        model.add(start["B", last, pair] >= end["F", last, pair])
        model.add(start["B", last, pair] >= end["F", 0, min(k // 2, depth // 2) - 1])
    if k < depth:
        model.add(start["F", 0, k // 2] >= end["B", last, 0])
    for worker in pairs:
        own = list(product((worker, last - worker), pairs))
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(start[kind, *op], SECONDS[kind], "")
                for kind, op in product("FB", own)
            ]
        )
        stashed = [
            model.new_interval_var(start["F", *op], model.new_int_var(3, span, ""), end["B", *op], "")
            for op in own
        ]
        model.add_cumulative(stashed, [1] * len(stashed), k + g)
    model.minimize(end["B", 0, pairs[-1]])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
    status = solver.solve(model)
    words = [
        "".join(
            letter
            for _, letter in sorted(
                (
                    solver.value(start[letter.upper(), worker if letter.isupper() else last - worker, pair]),
                    letter,
                )
                for letter, pair in product("FfBb", pairs)
            )
        )
        for worker in pairs
    ]
    return round(solver.objective_value) - 3 * depth, status == cp_model.OPTIMAL, words


def listed(depth: int, k: int, g: int) -> int:
    """The idle time of the shortest list schedule."""
    shape = mixpipe_plan.PlanConstraints(depth, depth // 2, k + g, k // 2)
    end = (depth + 1) * (depth // 2) - 1
    return min(plan[end] for plan in mixpipe_plan._tries(shape)) - 3 * depth


def entry_of(setting: tuple[int, ...], words: Sequence[str]) -> str:
    """A setting's order as an entry of a module's table, a line a worker."""
    rows = "".join(f'        "{word}",\n' for word in words)
    return f"    {setting}: (\n{rows}    ),\n"


def store(module: Path, entries: Sequence[str]) -> None:
    """Write entries in the place of those of a module's table, which is last in it."""
    head = module.read_text(encoding="utf-8").partition(" = {\n")[0]
    module.write_text(f"{head} = {{\n{''.join(entries)}}}\n", encoding="utf-8")


def main() -> None:
    parser = arguments(__doc__, "mixpipe_symmetric.*")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each K and Γ")
    given = parser.parse_args()
    lines, shorter = [machine_line(), " D  K  Γ  published  listed  best"], list[str]()
    print(*lines, sep="\n", flush=True)
    for depth in DEPTHS:
        for k, g in legal(depth):
            now = listed(depth, k, g)
            idle, proved, words = best(depth, k, g, now, given.seconds)
            published = int(mixpipe_idle(depth, k, g))
            lines.append(
                f"{depth:2} {k:2} {g:2}  {published:9}  {now:6}  {idle:4}  {'proved' if proved else ''}"
            )
            print(lines[-1], flush=True)
            if idle < now:
                shorter.append(entry_of((depth, k, g), words))
    if given.keep:
        keep("mixpipe_symmetric", lines)
        store(Path(mixpipe_optima.__file__), shorter)


if __name__ == "__main__":
    main()
