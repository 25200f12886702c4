"""The least idle time of symmetric and asymmetric two-way orders by depth and peak, proved, and the orders.

    python benchmarks/mixpipe_asymmetric.py [--seconds 300] [--keep]

N = D micro-batches go two ways, half of them in each direction, F = 1, B = 2, messages are free. A worker
stashes at most ``peak`` activations; how many forwards a pipe runs first is free. ``symmetric`` is the least
idle time if worker D-1-w does with micro-batch m ^ 1 what worker w does with m, ``asymmetric`` the least one
of all orders, ``injected`` the least one of MixPipe's symmetric orders with this peak, whose pipes run K/2
forwards first. A pipe's micro-batches keep their order on every stage, which costs nothing since they are
alike. ``--keep`` writes ``results/mixpipe_asymmetric.txt``, and the asymmetric orders that are shorter than
every symmetric one to ``schedule/orders/mixpipe_asymmetric.py``.
"""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

from kit import arguments, keep, machine_line
from mixpipe_symmetric import entry_of, legal, store
from ortools.sat.python import cp_model

import counterflow as cf
from counterflow.schedule.orders import mixpipe_asymmetric

DEPTHS = range(4, 13, 2)
SECONDS = {"F": 1, "B": 2}


def order_of(depth: int, peak: int, most: int, pipes: int, seconds: float) -> tuple[str, list[str]]:
    """The solver's answer, and the word of each worker of an order with a makespan of ``most`` or less.

    Args:
        depth: D.
        peak: maximum activations of a worker.
        most: longest makespan.
        pipes: 2; or 1 for symmetric orders, whose first D/2 workers also run the other half's late stages.
        seconds: time limit.

    Every op has a window: its stages before and after it, and the micro-batches of its pipe on its ops stage.
    """
    model, pairs, last = cp_model.CpModel(), range(depth // 2), depth - 1
    start = {}
    for pipe, stage, pair in product(range(pipes), range(depth), pairs):
        back = 2 * stage + 2 * (len(pairs) - 1 - pair)  # from the end of this backward to the end of the last
        for kind, head, tail in (
            ("F", stage + pair, last - stage + 2 * depth + 2 * (len(pairs) - 1 - pair)),
            ("B", depth + 2 * (last - stage) + 2 * pair, back),
        ):
            latest = most - SECONDS[kind] - tail
            if latest < head:
                return "INFEASIBLE", []
            start[pipe, kind, stage, pair] = model.new_int_var(head, latest, "")
    end = {key: at + SECONDS[key[1]] for key, at in start.items()}
    for pipe, stage, pair in product(range(pipes), range(depth), pairs):
        if stage > 0:
            model.add(start[pipe, "F", stage, pair] >= end[pipe, "F", stage - 1, pair])
            model.add(start[pipe, "B", stage - 1, pair] >= end[pipe, "B", stage, pair])
        else:
            model.add(start[pipe, "B", last, pair] >= end[pipe, "F", last, pair])
        for kind in "FB" if pair > 0 else "":
            model.add(start[pipe, kind, stage, pair] >= end[pipe, kind, stage, pair - 1])
    workers = []
    for worker in range(depth * pipes // 2):
        ops = [("FB", 0, worker, pair) for pair in pairs] + [
            ("fb", pipes - 1, last - worker, pair) for pair in pairs
        ]
        workers.append(ops)
        busy = [
            model.new_fixed_size_interval_var(start[pipe, kind, stage, pair], SECONDS[kind], "")
            for _, pipe, stage, pair in ops
            for kind in "FB"
        ]
        model.add_no_overlap(busy)
        stashed = [
            model.new_interval_var(
                start[pipe, "F", stage, pair], model.new_int_var(3, most, ""), end[pipe, "B", stage, pair], ""
            )
            for _, pipe, stage, pair in ops
        ]
        model.add_cumulative(stashed, [1] * len(stashed), peak)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
    status = solver.status_name(solver.solve(model))
    if status not in ("OPTIMAL", "FEASIBLE"):
        return status, []
    words = []
    for ops in workers:
        letters = [
            (solver.value(start[pipe, letter.upper(), stage, pair]), letter)
            for both, pipe, stage, pair in ops
            for letter in both
        ]
        words.append("".join(letter for _, letter in sorted(letters)))
    return status, words


def least(depth: int, peak: int, most: int, pipes: int, seconds: float) -> tuple[int, bool, list[str]]:
    """The least makespan, whether it is proved, and its words; ``most + 1`` and none if no order is shorter.

    The makespan falls by one from order to order until the solver refutes the next.
    """
    words: list[str] = []
    while True:
        status, shorter = order_of(depth, peak, most, pipes, seconds)
        if not shorter:
            return most + 1, status == "INFEASIBLE", words
        most, words = most - 1, shorter


def main() -> None:
    parser = arguments(__doc__, "mixpipe_asymmetric.*")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each question to the solver")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    options = parser.parse_args()
    lines, stored = [machine_line(), " D peak  injected  symmetric  asymmetric  seconds"], list[str]()
    print(*lines, sep="\n", flush=True)
    for depth in options.depths:
        spans: dict[int, int] = {}
        for k, g in legal(depth):
            span = round(cf.simulate(cf.schemes.mixpipe(depth, depth, injected=k, early_forwards=g)).makespan)
            spans[k + g] = min(span, spans.get(k + g, span))
        for peak, span in sorted(spans.items()):
            began = time.monotonic()
            symmetric, proved, _ = least(depth, peak, span - 1, 1, options.seconds)
            asymmetric, refuted, words = least(depth, peak, symmetric - 1, 2, options.seconds)
            idle = [
                f"{makespan - 3 * depth:>{width}}"
                for makespan, width in ((span, 8), (symmetric, 9), (asymmetric, 10))
            ]
            status = "proved" if proved and refuted else "open"
            lines.append(f"{depth:2} {peak:4}  {'  '.join(idle)}  {time.monotonic() - began:7.1f}  {status}")
            print(lines[-1], flush=True)
            if words:
                stored.append(entry_of((depth, peak), words))
    if options.keep:
        keep("mixpipe_asymmetric", lines)
        store(Path(mixpipe_asymmetric.__file__), stored)


if __name__ == "__main__":
    main()
