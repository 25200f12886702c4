"""The least makespans of sliced micro-batches at each memory, computed and proved, beside Seq1F1B's.

    python benchmarks/sliced_orders.py [--seconds 10] [--keep]

Claims: at the memory of Seq1F1B (1F1B whose micro-batches are cut in slices) no order of the same ops is
faster, nor is any with a slice more; with less memory, where Seq1F1B has no order, there are orders down to
that of one micro-batch. All are proved to be the best.

D stages lie on D workers, F = 1 and B = 2 a micro-batch, messages are free, and each of the n slices costs
1/n. ``held`` is the most slices of a stage that a worker may stash. ``Seq1F1B`` is its makespan where it
stays within that. ``split`` rows split the backward, so that the orders may be zero-bubble ones; beside them
stands zb-h1, sliced. ``--keep`` writes ``results/sliced_orders.txt``.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path

from machine import machine, shown

import counterflow as cf
from counterflow.schedule.ir import Schedule
from counterflow.schedule.orders.slices import sliced_workload
from counterflow.schedule.placement import linear
from counterflow.schedule.workload import plain

KEPT = Path(__file__).parent / "results" / "sliced_orders.txt"
HEAD = " D  N  n        held  scheme  computed    bound  gap     seconds  found by"


def beside(stages: int, micro_batches: int, slices: int, *, split: bool) -> Schedule:
    scheme = cf.schemes.zb_h1 if split else cf.schemes.dapple
    return scheme(stages=stages, micro_batches=micro_batches, slices=slices)


def row(stages: int, micro_batches: int, slices: int, held: int, seconds: float, *, split: bool) -> str:
    """The best order that holds at most so many slices."""
    scheme = cf.simulate(beside(stages, micro_batches, slices, split=split))
    fits = max(scheme.peak_activations) * slices <= held + 1e-9
    workload = sliced_workload(plain(linear(stages), micro_batches, split=split), slices)
    began = time.monotonic()
    found = cf.synthesize(workload, peak=held / slices, seconds=seconds)
    took = time.monotonic() - began
    cf.check(found.schedule)
    assert max(found.peak) * slices <= held + 1e-9
    if fits:
        assert found.makespan <= scheme.makespan * (1 + 1e-9)
    told = f"{scheme.makespan:7g}" if fits else "      -"
    gap = "proved" if found.proved else f"{found.gap:.1%}"
    kind = "split" if split else ""
    return (
        f"{stages:2} {micro_batches:2} {slices:2} {kind:6}{held:5} {told} {found.makespan:9g} "
        f"{found.lower_bound:8g}  {gap:7}{took:8.1f}  {found.method}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each memory")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    lines = [shown(machine()), HEAD]
    print(*lines, sep="\n", flush=True)
    for split, stages, micro_batches, slices in product((False, True), (2, 3, 4), (2, 4), (2, 4)):
        most = min(stages + slices, micro_batches * slices)  # one more than Seq1F1B, or all
        for held in range(slices, most + 1):
            lines.append(row(stages, micro_batches, slices, held, given.seconds, split=split))
            print(lines[-1], flush=True)
    if given.keep:
        KEPT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
