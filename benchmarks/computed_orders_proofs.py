"""Least makespans and spans of small pipelines, each computed and proved by ``cf.synthesize``.

    python benchmarks/computed_orders_proofs.py [--seconds 60] [--keep]

Messages are free; the limit is the number of activations that a worker stashes, from a forward's start to the
end of its weight gradients. Values that are known to be the least ones stand beside what was computed. What
was still to be proved when the time was out has its bound. ``--keep`` writes
``results/computed_orders_proofs.txt``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from machine import machine, shown

import counterflow as cf
from counterflow.schedule.placement import Placement, bidirectional, linear, wave
from counterflow.schedule.workload import plain

KEPT = Path(__file__).parent / "results" / "computed_orders_proofs.txt"

Case = tuple[str, Placement, int, tuple[int, int, int], int, int | None, int | None]

CASES: list[Case] = [
    # placement, workers, N, (F, I, W), peak, least makespan, least span (with nothing between steps)
    ("straight", linear(4), 8, (1, 1, 1), 4, 27, 27),
    ("straight", linear(4), 8, (1, 1, 1), 5, 27, 26),
    ("straight", linear(4), 8, (1, 1, 1), 7, 27, 24),
    ("vee", wave(4, 1), 8, (1, 1, 1), 8, 51, 48),
    ("vee", wave(4, 1), 8, (1, 1, 1), 6, 53, None),
    ("vee", wave(4, 1), 8, (1, 1, 1), 4, 59, None),
    ("two-way", bidirectional(4), 8, (1, 1, 1), 4, 25, 24),
    ("straight", linear(8), 16, (1, 1, 1), 8, 55, None),
    ("vee", wave(8, 1), 16, (1, 1, 1), 16, 103, 96),
    ("two-way", bidirectional(8), 16, (1, 1, 1), 8, 51, 48),
    ("vee", wave(4, 1), 8, (3, 4, 2), 8, 156, None),
    ("vee", wave(4, 1), 8, (3, 4, 2), 6, 169, None),
    ("vee", wave(4, 1), 8, (3, 4, 2), 4, 200, None),
]


def computed(case: Case, objective: str, seconds: float) -> str:
    """A row of the table."""
    name, placement, count, (f, i, w), peak, makespan, span = case
    known = makespan if objective == "makespan" else span
    workload = plain(placement, count, split=True, pipe_of=lambda m: m % placement.pipes)
    costs = cf.Costs(forward=f, input_gradient=i, weight_gradients=w)
    began = time.monotonic()
    found = cf.synthesize(workload, costs, peak=peak, objective=objective, seconds=seconds)
    took = time.monotonic() - began
    assert max(found.peak) <= peak
    named = "-" if found.named is None else f"{found.named[1]:g}"
    return (
        f"{name:9} {placement.workers:2} {count:3} {f},{i},{w} {peak:3}  {objective:9}{found.value:7g}"
        f"{found.lower_bound:7g}{known or '-':>6}  {'proved' if found.proved else f'{found.gap:.1%}':7}"
        f"{named:>6} {took:6.1f}  {found.method}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each value")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    lines = [
        shown(machine()),
        "placement  P   N F,I,W cap  objective  value  bound known  gap     named  seconds  found by",
    ]
    print(*lines, sep="\n", flush=True)
    for case in CASES:
        for objective in ("makespan", *(["steady"] if case[-1] is not None else [])):
            lines.append(computed(case, objective, given.seconds))
            print(lines[-1], flush=True)
    if given.keep:
        KEPT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
