"""DualPipe: two directions that start from both ends and meet in the middle; few backwards are split.

D=4, N=8 (0..3 down, 4..7 up; digit = forward, small letter = backward or input gradient, capital = weight
gradients; F = I = W, and a whole backward takes both):

    P0  0 1 2 4 e E 5 3 f f 6 a a g g 7 . b b h h c C d D
    P1  . 0 4 1 5 2 e e 6 a a 3 f f 7 b b g g c c h d H D
    P2  . 4 0 5 1 6 a a 2 e e 7 b b 3 f f c c g g d h D H
    P3  4 5 6 0 a A 1 7 b b 2 e e c c 3 . f f d d g G h H

Source: DeepSeek-V3 technical report (arXiv 2412.19437) section 3.2.1, Figure 5; the public code of DualPipe.
"""

from __future__ import annotations

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.orders.dual_order import dual_order, passes_split, split_in
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.words import ops_of
from counterflow.schedule.placement import bidirectional
from counterflow.schedule.scheme import Directions, Option, Scheme
from counterflow.schedule.workload import Workload


def dualpipe(stages: int, micro_batches: int) -> Schedule:
    """A down and an up pipe with half of the micro-batches each; every worker holds two stages, peak D + 1.

    Args:
        stages: depth D, the number of workers, even.
        micro_batches: N, even, 2D or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*dualpipe(stages=2, micro_batches=4).orders[0])
    F0.0 F2.1p1 F1.0 B2.1p1 F3.1p1 B0.0 B3.1p1 I1.0 W1.0
    """
    workload = _workload(stages, micro_batches)
    orders = tuple(_order(w, stages, micro_batches // 2) for w in range(stages))
    options = (("stages", stages), ("micro_batches", micro_batches))
    return Schedule("dualpipe", options, workload, orders)


def _workload(stages: int, micro_batches: int) -> Workload:
    at_least("stages", stages, 2)
    placement = bidirectional(stages)
    at_least("micro_batches", micro_batches, 2 * stages, ": twice the stages")
    if micro_batches % 2:
        raise ConfigError(
            f"micro_batches={micro_batches}: must be even, half of them for each direction; "
            f"use {micro_batches - 1} or {micro_batches + 1}"
        )
    half, per_pipe = stages // 2, micro_batches // 2
    split = [split_in(distance, half, per_pipe) for distance in range(half)]
    early, late = zip(*split, strict=True)
    return Workload(placement, micro_batches, passes_split([*early, *late[::-1]], per_pipe, pipes=2))


def _order(worker: int, stages: int, per_pipe: int) -> tuple[Op, ...]:
    """Near the lower end the down pipe is first, near the upper end the up pipe."""
    nearer = int(worker >= stages // 2)

    def op(kind: OpKind, which: int, m: int) -> Op:
        pipe = which ^ nearer
        return Op(kind, stages - 1 - worker if pipe else worker, (pipe * per_pipe + m,), pipe)

    distance = min(worker, stages - 1 - worker)
    return tuple(ops_of(dual_order(distance, stages // 2, per_pipe), op))


SCHEME = Scheme(
    name="dualpipe",
    build=dualpipe,
    workload=_workload,
    summary="two directions from both ends, few backwards split",
    source="DeepSeek 2025 (DualPipe)",
    options=(
        Option("stages", "even, 2 or more", "depth D: stages of each pipe, and workers", letter="D"),
        Option("micro_batches", "even, 2·stages or more", "N: micro-batches of a mini-batch", letter="N"),
    ),
    directions=Directions.TWO,
    needs="an even depth, and twice as many micro-batches, an even number",
    most_stashed=lambda stages, **_: stages + 1,
)
