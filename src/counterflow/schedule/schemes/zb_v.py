"""ZB-V: two stages per worker in a V, without waits if F = I = W, with the memory of 1F1B.

P=2, N=4 (digit = forward, small letter = input gradient, capital = weight gradients, bar = of the stage on
the way back; F = I = W):

    P0  0  1  2  0' a' A' 1' b' B' 3  a  A  2' c' C' b  B  3' d' D' c  C  d  D  .
    P1  .  0  0' 1  1' a' A' 2  a  A  2' b' B' 3  b  B  3' c' C' c  d' d  C  D' D

Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024, arXiv 2401.10241) section 6; the same order as
torch.distributed.pipelining's ScheduleZBVZeroBubble.
"""

from __future__ import annotations

from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.orders.v_pattern import v_scheme, v_workload
from counterflow.schedule.orders.words import ops_of


def zb_v(workers: int, micro_batches: int) -> Schedule:
    """Two stages per worker: stage w on the way down, stage 2P - 1 - w on the way back; peak 2P half stages.

    Args:
        workers: P, 1 or more; the model is cut into 2P stages.
        micro_batches: N, 1 or more. Fewer than 2P - 1 do not fill the pipeline.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*zb_v(workers=2, micro_batches=1).orders[0])
    F0.0 F0.3 I0.3 W0.3 I0.0 W0.0
    """
    workload = v_workload(workers, micro_batches)
    orders = tuple(_order(w, workers, micro_batches) for w in range(workers))
    options = (("workers", workers), ("micro_batches", micro_batches))
    return Schedule("zb-v", options, workload, orders)


def _order(worker: int, workers: int, micro_batches: int) -> tuple[Op, ...]:
    last = 2 * workers - 1

    def op(kind: OpKind, chunk: int, m: int) -> Op:
        return Op(kind, last - worker if chunk else worker, (m,))

    words = _words(worker, workers, max(last, micro_batches))
    return tuple(made_op for made_op in ops_of(words, op) if made_op.micro_batches[0] < micro_batches)


def _words(worker: int, workers: int, micro_batches: int) -> list[str]:
    behind = workers - worker
    steady = ["F0", "I0", "W0", "F1", "I1", "W1"]
    return [
        *["F0"] * (2 * behind - 1),
        *["F1", "F0"] * worker,
        *["F1", "I1", "W1"] * behind,
        *steady * (micro_batches - workers - behind + 1),
        *steady[1:] * (behind - 1),
        *["I0", "I1"] * worker,
        *["I0", "W0"] * behind,
        *["W1"] * worker,
        *["W0"] * worker,
    ]


SCHEME = v_scheme(
    "zb-v",
    zb_v,
    summary="two stages per worker in a V, no waits if F = I = W",
    source="Qi et al. 2024 (Zero Bubble)",
    most_stashed=lambda workers, **_: 2 * workers,
    aliases=("zbv-zero-bubble",),
)
