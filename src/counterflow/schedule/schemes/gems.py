"""GEMS: two pipes in opposite directions, one micro-batch in memory at a time.

D=4, N=2 (0 down, 1 up; digit = forward, letter = backward, B = 2F):

    P0  0 . . . . . . . . . a a 1 b b . . . . . .
    P1  . 0 . . . . . . a a 1 . . . . b b . . . .     (the forward of 1 follows
    P2  . . 0 . . . a a 1 . . . . . . . . b b . .      the backward of 0 on every
    P3  . . . 0 a a 1 . . . . . . . . . . . . b b      worker)

Micro-batch m runs on pipe m mod 2. Makespan D·F + N·D·B + (N−1)·F, peak 1 on every worker.

Source: Jain et al., GEMS (SC'20); Chimera (SC'21) section 2, Figure 2.
"""

from __future__ import annotations

from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.op import B, F
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.split import split_backwards, split_workload
from counterflow.schedule.placement import bidirectional
from counterflow.schedule.scheme import MICRO_BATCHES, SPLIT, Directions, Option, Scheme
from counterflow.schedule.workload import Workload, plain


def gems(stages: int, micro_batches: int, split: bool = False) -> Schedule:
    """One micro-batch at a time, alternating the direction.

    Args:
        stages: depth D, the number of workers, even.
        micro_batches: N, 1 or more.
        split: whether backwards are split (``split_backwards``).

    Raises:
        ConfigError: an option is out of range.

    >>> print(*gems(stages=2, micro_batches=2).orders[0])
    F0.0 B0.0 F1.1p1 B1.1p1
    """
    workload = _workload(stages, micro_batches)
    orders = tuple(
        tuple(
            Op(kind, worker if m % 2 == 0 else stages - 1 - worker, (m,), pipe=m % 2)
            for m in range(micro_batches)
            for kind in (F, B)
        )
        for worker in range(stages)
    )
    options = (("stages", stages), ("micro_batches", micro_batches))
    return split_backwards(Schedule("gems", options, workload, orders), split)


def _workload(stages: int, micro_batches: int, split: bool = False) -> Workload:
    at_least("stages", stages, 2)
    at_least("micro_batches", micro_batches, 1)
    work = plain(bidirectional(stages), micro_batches, pipe_of=lambda m: m % 2)
    return split_workload(work, split)


SCHEME = Scheme(
    name="gems",
    build=gems,
    workload=_workload,
    summary="two directions, one micro-batch in memory at a time",
    source="Jain et al. 2020",
    options=(
        Option("stages", "even, 2 or more", "depth D: stages of each pipe, and workers", letter="D"),
        MICRO_BATCHES,
        SPLIT,
    ),
    directions=Directions.TWO,
    needs="an even depth",
    most_stashed=lambda **_: 1,
)
