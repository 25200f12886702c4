"""DualPipeV: DualPipe folded into a V, so half the number of workers suffices and no worker holds a second
copy.

P=2, N=4 (digit = forward, small letter = backward or input gradient, capital = weight gradients, bar = of the
stage on the way back; F = I = W, and a whole backward takes both):

    P0  0  1  2  0' a' A' 1' 3  b' b' 2' a  a  c' c' 3' .  b  b  d' d' c  C  d  D
    P1  .  0  0' 1  1' 2  a' a' 2' a  a  3  b' b' 3' b  b  c' c' c  c  d' d  D' D

Source: the public code of DualPipe (DeepSeek, 2025), dualpipev; the same order as
torch.distributed.pipelining's ScheduleDualPipeV.
"""

from __future__ import annotations

from counterflow.schedule.ir import Op, OpKind, Schedule
from counterflow.schedule.orders.dual_order import dual_order, passes_split, split_in
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.v_pattern import two_layers_a_worker
from counterflow.schedule.orders.words import ops_of
from counterflow.schedule.placement import wave
from counterflow.schedule.scheme import Directions, Option, Scheme
from counterflow.schedule.workload import Workload


def dualpipe_v(workers: int, micro_batches: int) -> Schedule:
    """Two stages per worker in a V; most backwards are whole; peak 2P + 1 half stages.

    Args:
        workers: P, 1 or more; the model is cut into 2P stages.
        micro_batches: N, 2P or more.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*dualpipe_v(workers=1, micro_batches=2).orders[0])
    F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 I1.0 W1.0
    """
    workload = _workload(workers, micro_batches)
    orders = tuple(_order(w, workers, micro_batches) for w in range(workers))
    options = (("workers", workers), ("micro_batches", micro_batches))
    return Schedule("dualpipe-v", options, workload, orders)


def _workload(workers: int, micro_batches: int) -> Workload:
    at_least("workers", workers, 1)
    at_least("micro_batches", micro_batches, 2 * workers, ": twice the workers")
    split = [split_in(distance, workers, micro_batches) for distance in range(workers)]
    early, late = zip(*split, strict=True)
    return Workload(wave(workers, 1), micro_batches, passes_split([*early, *late[::-1]], micro_batches))


def _order(worker: int, workers: int, micro_batches: int) -> tuple[Op, ...]:
    def op(kind: OpKind, chunk: int, m: int) -> Op:
        return Op(kind, 2 * workers - 1 - worker if chunk else worker, (m,))

    return tuple(ops_of(dual_order(worker, workers, micro_batches), op))


SCHEME = Scheme(
    name="dualpipe-v",
    build=dualpipe_v,
    workload=_workload,
    summary="dualpipe folded into a V, without a second copy",
    source="DeepSeek 2025 (DualPipe)",
    options=(
        Option("workers", "1 or more", "workers of one pipeline group", letter="P"),
        Option("micro_batches", "2·workers or more", "N: micro-batches of a mini-batch", letter="N"),
    ),
    directions=Directions.WAVES,
    planner=two_layers_a_worker,
    needs="two layers for each worker, and twice as many micro-batches as workers",
    most_stashed=lambda workers, **_: 2 * workers + 1,
    chunk="leg",
)
