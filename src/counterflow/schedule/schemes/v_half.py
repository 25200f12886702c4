"""V-Half: two stages per worker in a V, with about half the memory of 1F1B and half of its waits.

P=4, N=3 (digit = forward, small letter = input gradient, capital = weight gradients, bar = of the stage on
the way back; F = I = W):

    P0  0  1  2  .  .  .  .  0' a' 1' b' 2' c' A' B' a  C' b  A  B  .  c  C
    P1  .  0  1  2  .  .  0' .  1' a' 2' b' A' B' a  c' b  A  C' B  c  C  .
    P2  .  .  0  1  2  0' .  1' .  2' a' A' b' a  B' b  c' A  B  c  C' C  .
    P3  .  .  .  0  0' 1  1' 2  2' .  .  a' a  b' b  A' A  c' c  B' B  C' C

Source: Qi et al., Pipeline Parallelism with Controllable Memory (NeurIPS 2024, arXiv 2405.15362), V-Half.
"""

from __future__ import annotations

from counterflow.schedule.ir import Schedule
from counterflow.schedule.orders.v_pattern import Starts, v_schedule, v_scheme


def v_half(workers: int, micro_batches: int) -> Schedule:
    """Two stages per worker in a V; peak P + 2 half stages, or one less with an odd number of workers.

    Args:
        workers: P, 1 or more; the model is cut into 2P stages.
        micro_batches: N, 1 or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*v_half(workers=2, micro_batches=1).orders[0])
    F0.0 F0.3 I0.3 W0.3 I0.0 W0.0
    """
    return v_schedule("v-half", workers, micro_batches, _starts)


def _starts(worker: int, workers: int) -> Starts:
    shift = 0 if workers % 2 else 3
    down, back = 2 * worker, 3 * workers - worker - 2
    return down, back, 3 * workers + shift + 2 * worker - 1, 6 * workers + shift - worker - 2


SCHEME = v_scheme(
    "v-half",
    v_half,
    summary="two stages per worker in a V, half the memory of 1F1B",
    source="Qi et al. 2024 (Controllable Memory)",
    most_stashed=lambda workers, **_: workers + 2 - workers % 2,
)
