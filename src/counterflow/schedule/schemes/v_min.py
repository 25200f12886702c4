"""V-Min: two stages per worker in a V, with about a third of the memory of 1F1B and two thirds of its waits.

P=4, N=3 (digit = forward, small letter = input gradient, capital = weight gradients, bar = of the stage on
the way back; F = I = W):

    P0  0  1  2  .  .  .  .  0' a' A' .  .  1' b' B' a  A  .  .  2' c' b  C' B  .  .  .  c  C
    P1  .  0  1  2  .  .  0' .  .  a' A' 1' .  .  a  b' A  B' 2' .  b  c' B  C' .  .  c  C  .
    P2  .  .  0  1  .  0' .  1' .  .  a' A' 2  a  A  .  b' 2' B' b  B  .  c' C' .  c  C  .  .
    P3  .  .  .  0  0' 1  1' .  .  .  .  a' a  A' 2  A  2' b' b  B' B  .  .  c' c  C' C  .  .

Waits grow with N where F, I and W differ.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (NeurIPS 2024, arXiv 2405.15362), V-Min.
"""

from __future__ import annotations

from counterflow.schedule.ir import Schedule
from counterflow.schedule.orders.v_pattern import Starts, v_schedule, v_scheme


def v_min(workers: int, micro_batches: int) -> Schedule:
    """Two stages per worker in a V; peak 2⌊(P + 4)/3⌋ half stages.

    Args:
        workers: P, 1 or more; the model is cut into 2P stages.
        micro_batches: N, 1 or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*v_min(workers=2, micro_batches=1).orders[0])
    F0.0 F0.3 I0.3 W0.3 I0.0 W0.0
    """
    return v_schedule("v-min", workers, micro_batches, _starts)


def _starts(worker: int, workers: int) -> Starts:
    shift = 0 if workers % 3 else 2
    return (
        worker,
        2 * workers - worker - 1,
        2 * workers + shift + worker,
        4 * workers + shift - worker - 1,
    )


SCHEME = v_scheme(
    "v-min",
    v_min,
    summary="two stages per worker in a V, a third of the memory of 1F1B",
    source="Qi et al. 2024 (Controllable Memory)",
    most_stashed=lambda workers, **_: 2 * ((workers + 4) // 3),
)
