"""1F1B with a split backward; zb-h1 and zb-h2 differ in the number of forwards in flight and the delay of
weight gradients.
"""

from __future__ import annotations

from counterflow.schedule.ir import Op, OpKind
from counterflow.schedule.op import F, I, W
from counterflow.schedule.placement import linear
from counterflow.schedule.workload import Workload, plain

from .legal import at_least


def zero_bubble_workload(stages: int, micro_batches: int) -> Workload:
    """A workload with one stage per worker, every backward split.

    Raises:
        ConfigError: an option is below 1.
    """
    at_least("stages", stages, 1)
    at_least("micro_batches", micro_batches, 1)
    return plain(linear(stages), micro_batches, split=True)


def zero_bubble_order(stage: int, micro_batches: int, in_flight: int, delay: int) -> tuple[Op, ...]:
    """The ops of ``stage``: forwards first, then input gradient, weight gradients and forward in turn.

    Args:
        stage: the stage, which is also its worker.
        micro_batches: N.
        in_flight: forwards before the first input gradient, 1 or more.
        delay: number of micro-batches by which weight gradients follow their input gradient.

    >>> print(*zero_bubble_order(1, micro_batches=3, in_flight=1, delay=1))
    F0.1 I0.1 F1.1 I1.1 W0.1 F2.1 I2.1 W1.1 W2.1
    """

    def op(kind: OpKind, m: int) -> Op:
        return Op(kind, stage, (m,))

    warm_up = min(in_flight, micro_batches)
    order = [op(F, m) for m in range(warm_up)]
    for m in range(micro_batches):
        order.append(op(I, m))
        if m >= delay:
            order.append(op(W, m - delay))
        if m + warm_up < micro_batches:
            order.append(op(F, m + warm_up))
    late = range(max(0, micro_batches - delay), micro_batches)
    return (*order, *(op(W, m) for m in late))
