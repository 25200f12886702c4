"""The 1F1B order of one stage: some forwards first, then backward and forward in turn, then the rest.

DAPPLE, PipeDream and PipeDream-2BW share it; they differ in when the weights change.
"""

from __future__ import annotations

from collections.abc import Callable

from counterflow.schedule.ir import Op, OpKind
from counterflow.schedule.op import B, F


def one_forward_one_backward(
    stage: int,
    micro_batches: int,
    in_flight: int,
    version: Callable[[int], int] | None = None,
) -> tuple[Op, ...]:
    """The ops of ``stage`` with at most ``in_flight`` forwards stashed.

    Args:
        stage: the stage, which is also its worker.
        micro_batches: all micro-batches of all periods.
        in_flight: forwards before the first backward, 1 or more.
        version: the weight version that micro-batch m uses on this stage; None: always 0.

    >>> print(*one_forward_one_backward(0, micro_batches=3, in_flight=2))
    F0.0 F1.0 B0.0 F2.0 B1.0 B2.0
    """

    def op(kind: OpKind, m: int) -> Op:
        return Op(kind, stage, (m,), version=version(m) if version else 0)

    warm_up = min(in_flight, micro_batches)
    order = [op(F, m) for m in range(warm_up)]
    for m in range(micro_batches):
        order.append(op(B, m))
        if m + warm_up < micro_batches:
            order.append(op(F, m + warm_up))
    return tuple(order)


def steady_slices(warm_up: list[int], micro_batches: int, periods: int) -> tuple[tuple[int, int], ...] | None:
    """Each stage's slice of whole periods between its warm-up forwards and its drain, if all have one."""
    slices = []
    for forwards in warm_up:
        batches = (micro_batches * periods - forwards) // micro_batches
        if batches < 1:
            return None
        slices.append((forwards, forwards + 2 * micro_batches * batches))
    return tuple(slices)
