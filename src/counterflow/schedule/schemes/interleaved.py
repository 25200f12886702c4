"""Interleaved 1F1B: each worker holds several chunks of the model and alternates between them.

P=2, chunks=2, N=2 (micro-batch.stage; B = 2F):

    P0: F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0
    P1: F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1

Micro-batches go in rounds; a round passes chunk after chunk. Rounds have P micro-batches; if P does not
divide N, the remainder is spread over the rounds, so a round never has fewer than P (or N) and no worker
waits for a round too short to fill the pipeline. The warm-up of worker w is (chunks − 1)·round + 2·(P − 1 −
w) forwards, or P − 1 − w with one chunk, where this is DAPPLE.

Source: Narayanan et al., Megatron-LM (SC'21) section 2.2; the same order as
torch.distributed.pipelining's ScheduleInterleaved1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from counterflow.schedule.ir import Op, OpKind, OptionValue, Schedule
from counterflow.schedule.op import B, F
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.slots import spread
from counterflow.schedule.orders.split import split_backwards, split_workload
from counterflow.schedule.placement import looped
from counterflow.schedule.scheme import MICRO_BATCHES, SPLIT, Option, Scheme, counts
from counterflow.schedule.workload import Workload, plain


def interleaved(workers: int, micro_batches: int, chunks: int = 2, split: bool = False) -> Schedule:
    """Megatron's interleaved 1F1B on the looped placement.

    Args:
        workers: P, 1 or more.
        micro_batches: N, 1 or more; P need not divide it.
        chunks: number of stages that a worker holds, 1 or more; the model is cut into ``workers * chunks``
            stages.
        split: whether backwards are split (``split_backwards``).

    Raises:
        ConfigError: an option is out of range.

    >>> print(*interleaved(workers=2, micro_batches=2).orders[1])
    F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1
    """
    workload = _workload(workers, micro_batches, chunks)
    rounds = spread(micro_batches, max(1, micro_batches // workers))
    orders = tuple(_order(w, workers, chunks, rounds) for w in range(workers))
    options = (("workers", workers), ("micro_batches", micro_batches), ("chunks", chunks))
    return split_backwards(Schedule("interleaved", options, workload, orders), split)


def _workload(workers: int, micro_batches: int, chunks: int = 2, split: bool = False) -> Workload:
    at_least("workers", workers, 1)
    at_least("micro_batches", micro_batches, 1)
    at_least("chunks", chunks, 1)
    return split_workload(plain(looped(workers, chunks), micro_batches), split)


def _order(worker: int, workers: int, chunks: int, rounds: list[int]) -> tuple[Op, ...]:
    stages = [chunk * workers + worker for chunk in range(chunks)]
    forwards = list(in_rounds(F, stages, rounds))
    backwards = list(in_rounds(B, stages[::-1], rounds))
    behind = workers - 1 - worker
    warm_up = behind if chunks == 1 else (chunks - 1) * rounds[0] + 2 * behind
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[len(forwards) - warm_up :]
    return tuple(order)


def in_rounds(kind: OpKind, stages: list[int], rounds: list[int]) -> Iterator[Op]:
    """A worker's ops of one kind: round after round, stage after stage, micro-batch after micro-batch."""
    first = 0
    for size in rounds:
        for stage in stages:
            for m in range(first, first + size):
                yield Op(kind, stage, (m,))
        first += size


def _planned(workers: int, _micro_batches: int, layers: int) -> Iterator[Mapping[str, OptionValue]]:
    # With one chunk this is 1F1B without chunks, and one worker has nothing to interleave.
    for chunks in counts(2, layers // workers) if workers > 1 else ():
        yield {"chunks": chunks}


def _most_stashed(workers: int, micro_batches: int, chunks: int = 2, split: bool = False) -> int | None:
    largest = max(spread(micro_batches, max(1, micro_batches // workers)))
    return None if split else (chunks - 1) * largest + 2 * workers - 1


SCHEME = Scheme(
    name="interleaved",
    aliases=("interleaved-1f1b",),
    build=interleaved,
    workload=_workload,
    summary="1F1B with several chunks of the model on each worker",
    source="Narayanan et al. 2021 (Megatron-LM)",
    options=(
        Option("workers", "1 or more", "workers of one pipeline group", letter="P"),
        MICRO_BATCHES,
        Option("chunks", "1 or more", "stages that a worker holds", default=2, noun="chunk", multiplies=True),
        SPLIT,
    ),
    planner=_planned,
    needs="two layers or more for each of two workers or more",
    most_stashed=_most_stashed,
)
