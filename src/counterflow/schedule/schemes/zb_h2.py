"""ZB-H2: about twice the forwards of 1F1B in flight, so no worker waits once it has begun.

D=3, N=6 (digit = forward, small letter = input gradient, capital = weight gradients; F = I = W):

    P0  0 1 2 3 4 a A 5 b B c C d D e E f F . .
    P1  . 0 1 2 a 3 b 4 c A 5 d B e C f D E F .
    P2  . . 0 a 1 b 2 c 3 d 4 e A 5 f B C D E F

Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024, arXiv 2401.10241) section 2.3, Figure 3.
"""

from __future__ import annotations

from counterflow.schedule.ir import Schedule
from counterflow.schedule.op import W
from counterflow.schedule.orders.fill import filled
from counterflow.schedule.orders.zero_bubble_order import zero_bubble_order, zero_bubble_workload
from counterflow.schedule.residency import peak_activations
from counterflow.schedule.scheme import MICRO_BATCHES, Option, Scheme


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """2(D - s) - 1 forwards first, weight gradients delayed by 2s on stage s; peak 2D - 1 on every worker.

    Args:
        stages: depth D, the number of workers, 1 or more.
        micro_batches: N, 1 or more. With fewer than 2D - 1 weight gradients fill waits.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*zb_h2(stages=2, micro_batches=4).orders[1])
    F0.1 I0.1 F1.1 I1.1 F2.1 I2.1 W0.1 F3.1 I3.1 W1.1 W2.1 W3.1
    """
    workload = zero_bubble_workload(stages, micro_batches)
    orders = tuple(
        zero_bubble_order(s, micro_batches, in_flight=2 * (stages - s) - 1, delay=2 * s)
        for s in range(stages)
    )
    options = (("stages", stages), ("micro_batches", micro_batches))
    schedule = Schedule("zb-h2", options, workload, orders)
    if micro_batches >= 2 * stages - 1:  # no worker waits after its first input gradient
        return schedule
    peaks = peak_activations(schedule)
    return filled(schedule, peaks, movable=lambda op: op.kind is W)


SCHEME = Scheme(
    name="zb-h2",
    build=zb_h2,
    workload=zero_bubble_workload,
    summary="twice the forwards of 1F1B in flight, and no waits between",
    source="Qi et al. 2024 (Zero Bubble)",
    options=(
        Option("stages", "1 or more", "depth D: stages, one on each worker", letter="D"),
        MICRO_BATCHES,
    ),
    most_stashed=lambda stages, **_: 2 * stages - 1,
)
