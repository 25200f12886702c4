"""ZB-H1: 1F1B with a split backward, whose weight gradients fill the drain; no more memory than 1F1B.

D=4, N=6 (digit = forward, small letter = input gradient, capital = weight gradients; F = I = W):

    P0  0 1 2 3 . . . a A 4 b B 5 c C d D e E f F
    P1  . 0 1 2 . . a 3 b A 4 c B 5 d C e D f E F
    P2  . . 0 1 . a 2 b 3 c A 4 d B 5 e C f D E F
    P3  . . . 0 a 1 b 2 c 3 d A 4 e B 5 f C D E F

Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024, arXiv 2401.10241) section 2.2, Figure 2.
"""

from __future__ import annotations

from counterflow.schedule.ir import Schedule
from counterflow.schedule.orders.zero_bubble_order import zero_bubble_order, zero_bubble_workload
from counterflow.schedule.scheme import MICRO_BATCHES, Option, Scheme


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """1F1B with weight gradients delayed by s micro-batches on stage s; no worker stashes more than D.

    Args:
        stages: depth D, the number of workers, 1 or more.
        micro_batches: N, 1 or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*zb_h1(stages=2, micro_batches=3).orders[1])
    F0.1 I0.1 F1.1 I1.1 W0.1 F2.1 I2.1 W1.1 W2.1
    """
    workload = zero_bubble_workload(stages, micro_batches)
    orders = tuple(zero_bubble_order(s, micro_batches, in_flight=stages - s, delay=s) for s in range(stages))
    options = (("stages", stages), ("micro_batches", micro_batches))
    return Schedule("zb-h1", options, workload, orders)


SCHEME = Scheme(
    name="zb-h1",
    build=zb_h1,
    workload=zero_bubble_workload,
    summary="1F1B with a split backward whose weight gradients fill the drain",
    source="Qi et al. 2024 (Zero Bubble)",
    options=(
        Option("stages", "1 or more", "depth D: stages, one on each worker", letter="D"),
        MICRO_BATCHES,
    ),
    most_stashed=lambda stages, **_: stages,
)
