"""Interleaved 1F1B with a split backward: half of its warm-up, and weight gradients fill the drain.

P=2, chunks=2, N=2 (micro-batch.stage):

    P0: F0.0 F1.0 F0.2 F1.2 I0.2 W0.2 I1.2 W1.2 I0.0 W0.0 I1.0 W1.0
    P1: F0.1 F1.1 F0.3 I0.3 F1.3 I1.3 W0.3 I0.1 W1.3 I1.1 W0.1 W1.1

Rounds are those of ``interleaved``. The warm-up of worker w is (chunks − 1)·round + P − 1 − w forwards; then
forward and input gradient take turns, and weight gradients come w input gradients after their own.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), on Megatron-LM's chunks; the same
order as torch.distributed.pipelining's ScheduleInterleavedZeroBubble.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from counterflow.schedule.ir import Op, OptionValue, Schedule
from counterflow.schedule.op import F, I, W
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.slots import spread
from counterflow.schedule.placement import looped
from counterflow.schedule.scheme import MICRO_BATCHES, Option, Scheme, counts
from counterflow.schedule.workload import Workload, plain

from .interleaved import in_rounds


def interleaved_zb(workers: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B whose weight gradients come later on later workers.

    Args:
        workers: P, 1 or more.
        micro_batches: N, 1 or more; P need not divide it.
        chunks: number of stages that a worker holds, 1 or more; the model is cut into ``workers * chunks``
            stages.

    Raises:
        ConfigError: an option is out of range.

    >>> print(*interleaved_zb(workers=2, micro_batches=2).orders[1])
    F0.1 F1.1 F0.3 I0.3 F1.3 I1.3 W0.3 I0.1 W1.3 I1.1 W0.1 W1.1
    """
    workload = _workload(workers, micro_batches, chunks)
    rounds = _rounds(workers, micro_batches)
    orders = tuple(_order(w, workers, chunks, rounds) for w in range(workers))
    options = (("workers", workers), ("micro_batches", micro_batches), ("chunks", chunks))
    return Schedule("interleaved-zb", options, workload, orders)


def _workload(workers: int, micro_batches: int, chunks: int = 2) -> Workload:
    at_least("workers", workers, 1)
    at_least("micro_batches", micro_batches, 1)
    at_least("chunks", chunks, 1)
    return plain(looped(workers, chunks), micro_batches, split=True)


def _rounds(workers: int, micro_batches: int) -> list[int]:
    return spread(micro_batches, max(1, micro_batches // workers))


def _order(worker: int, workers: int, chunks: int, rounds: list[int]) -> tuple[Op, ...]:
    stages = [chunk * workers + worker for chunk in range(chunks)]
    forwards = list(in_rounds(F, stages, rounds))
    gradients = list(in_rounds(I, stages[::-1], rounds))
    weights = [op._replace(kind=W) for op in gradients]
    warm_up = min((chunks - 1) * rounds[0] + workers - 1 - worker, len(forwards))
    order = forwards[:warm_up]
    for index, gradient in enumerate(gradients):
        order += forwards[warm_up + index : warm_up + index + 1]
        order.append(gradient)
        if index >= worker:
            order.append(weights[index - worker])
    return (*order, *weights[max(0, len(weights) - worker) :])


def _most_stashed(workers: int, micro_batches: int, chunks: int = 2) -> int:
    return (chunks - 1) * _rounds(workers, micro_batches)[0] + workers


def _planned(workers: int, _micro_batches: int, layers: int) -> Iterator[Mapping[str, OptionValue]]:
    for chunks in counts(2, layers // workers) if workers > 1 else ():
        yield {"chunks": chunks}


SCHEME = Scheme(
    name="interleaved-zb",
    aliases=("interleaved-zero-bubble",),
    build=interleaved_zb,
    workload=_workload,
    summary="interleaved 1F1B with a split backward",
    source="Qi et al. 2024 (Zero Bubble), Megatron-LM",
    options=(
        Option("workers", "1 or more", "workers of one pipeline group", letter="P"),
        MICRO_BATCHES,
        Option("chunks", "1 or more", "stages that a worker holds", default=2, noun="chunk", multiplies=True),
    ),
    planner=_planned,
    needs="two layers for each worker, and two workers",
    most_stashed=_most_stashed,
)
