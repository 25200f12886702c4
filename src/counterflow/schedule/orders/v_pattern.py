"""Orders in a V that repeat a building block; V-Half and V-Min differ in the positions of its ops.

A block is one micro-batch on all workers: the start of each of its forwards and input gradients, in op times.
A new block follows every six op times, and weight gradients take the times that are left. Waits in warm-up
and drain are then filled, within the memory of the blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from counterflow.schedule.ir import Op, OptionValue, Schedule
from counterflow.schedule.op import F, I, W
from counterflow.schedule.orders.fill import filled
from counterflow.schedule.orders.split import weights_in_waits
from counterflow.schedule.placement import wave
from counterflow.schedule.residency import peak_activations
from counterflow.schedule.scheme import MICRO_BATCHES, Directions, Option, Scheme
from counterflow.schedule.workload import Workload, plain

from .legal import at_least

Starts = tuple[int, int, int, int]
"""Starts of a worker's F0, F1, I1 and I0 of the first micro-batch; 0 and 1 are its stages on the way down and
back.
"""

INTERVAL = 6
"""Op times after which the next micro-batch's block starts: the ops of two stages, one each."""

KINDS = F, F, I, I


def v_workload(workers: int, micro_batches: int) -> Workload:
    """A workload with two stages per worker in a V, every backward split.

    Raises:
        ConfigError: an option is below 1.
    """
    at_least("workers", workers, 1)
    at_least("micro_batches", micro_batches, 1)
    return plain(wave(workers, 1), micro_batches, split=True)


def v_scheme(
    name: str,
    build: Callable[..., Schedule],
    *,
    summary: str,
    source: str,
    most_stashed: Callable[..., int],
    aliases: tuple[str, ...] = (),
) -> Scheme:
    """The record of a scheme with two stages per worker in a V; arguments as in ``Scheme``."""
    return Scheme(
        name=name,
        build=build,
        workload=v_workload,
        summary=summary,
        source=source,
        aliases=aliases,
        options=(
            Option("workers", "1 or more", "workers of one pipeline group", letter="P"),
            MICRO_BATCHES,
        ),
        directions=Directions.WAVES,
        planner=two_layers_a_worker,
        needs="two layers for each worker",
        most_stashed=most_stashed,
        chunk="leg",
    )


def two_layers_a_worker(
    workers: int, _micro_batches: int, layers: int
) -> Iterator[Mapping[str, OptionValue]]:
    """The planner of a scheme with two stages per worker and no further options."""
    if layers >= 2 * workers:
        yield {}


def v_schedule(
    scheme: str, workers: int, micro_batches: int, starts: Callable[[int, int], Starts]
) -> Schedule:
    """The schedule of a building block, with its waits filled.

    Args:
        scheme: name of the scheme.
        workers: P, 1 or more; the model is cut into 2P stages.
        micro_batches: N, 1 or more.
        starts: function of worker and P that returns the worker's part of the block.

    Raises:
        ConfigError: an option is out of range.
    """
    workload = v_workload(workers, micro_batches)
    orders = tuple(tuple(_order(w, workers, micro_batches, starts(w, workers))) for w in range(workers))
    options: tuple[tuple[str, OptionValue], ...] = (("workers", workers), ("micro_batches", micro_batches))
    blocks = Schedule(scheme, options, workload, orders)
    limits = [max(peak_activations(blocks))] * workers
    return weights_in_waits(filled(blocks, limits), limits)


def _order(worker: int, workers: int, micro_batches: int, starts: Starts) -> Iterator[Op]:
    stages = worker, 2 * workers - 1 - worker
    stages_by_kind = stages[0], stages[1], stages[1], stages[0]
    placed = {
        start + INTERVAL * m: Op(kind, stage, (m,))
        for start, kind, stage in zip(starts, KINDS, stages_by_kind, strict=True)
        for m in range(micro_batches)
    }
    waiting = deque[Op]()
    for time in range(max(placed) + 1):
        op = placed.get(time)
        if op is not None:
            yield op
            if op.kind is I:
                waiting.append(Op(W, op.stage, op.micro_batches))
        elif waiting:
            yield waiting.popleft()
    yield from waiting
