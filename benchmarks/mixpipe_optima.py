"""The least makespans at MixPipe's memory, computed and proved by ``cf.synthesize``, beside MixPipe's orders.

    python benchmarks/mixpipe_optima.py [--seconds 60] [--keep]

N = D micro-batches go two ways, F = 1, B = 2, messages are free, and a worker stashes at most K + Γ. Columns
are idle times, makespan less 3N. ``listed`` is the least one with K/2 forwards injected first
(``mixpipe_sweep.py``); a computed order need not do that, so it may idle less. ``--keep`` writes
``results/mixpipe_optima.txt``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from machine import machine, shown
from mixpipe_sweep import OPTIMUM, legal

import counterflow as cf
from counterflow.schedule.placement import bidirectional
from counterflow.schedule.workload import plain

KEPT = Path(__file__).parent / "results" / "mixpipe_optima.txt"
DEPTHS = (4, 6, 8)


def rows(depth: int, peak: int, seconds: float) -> list[str]:
    """Of every K and Γ with this peak."""
    workload = plain(bidirectional(depth), depth, pipe_of=lambda m: m % 2)
    began = time.monotonic()
    found = cf.synthesize(workload, peak=peak, seconds=seconds)
    took = time.monotonic() - began
    assert max(found.peak) <= peak
    told = []
    for k, g in legal(depth):
        if k + g != peak:
            continue
        built = cf.simulate(cf.schemes.mixpipe(depth, depth, injected=k, early_forwards=g))
        idle = [round(span - 3 * depth, 6) for span in (built.makespan, found.makespan, found.lower_bound)]
        told.append(
            f"{depth:2} {k:2} {g:2} {peak:4}  {idle[0]:7g} {OPTIMUM.get((depth, k, g), '-')!s:>7}"
            f"{idle[1]:9g} {idle[2]:6g}  {'proved' if found.proved else f'{found.gap:.1%}':7}{took:7.1f}"
            f"  {found.method}"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each memory")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    lines = [shown(machine()), " D  K  Γ peak  mixpipe  listed computed  bound  gap    seconds  found by"]
    print(*lines, sep="\n", flush=True)
    for depth in DEPTHS:
        for peak in sorted({k + g for k, g in legal(depth)}):
            for line in rows(depth, peak, given.seconds):
                lines.append(line)
                print(line, flush=True)
    if given.keep:
        KEPT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
