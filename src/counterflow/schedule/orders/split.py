"""Split backwards: input gradients in place of the backwards, weight gradients where a worker would wait.

Invariant: a worker never stashes more forwards than it may. No op starts later than in the original order if
input gradient and weight gradients together take the time of the backward: a worker only waits when it has no
weight gradients left to compute, so until then it has done at most the same work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from counterflow.errors import ConfigError

from ..ir import Op, Schedule
from ..residency import peak_activations, stash_change
from ..workload import Workload
from .fill import filled


def split_workload(workload: Workload, split: bool = True) -> Workload:
    """The same work with every backward split in two; unchanged if ``split`` is false.

    Raises:
        ConfigError: ``split`` is neither true nor false.
    """
    if not isinstance(split, bool):
        raise ConfigError(f"split={split!r}: must be true or false")
    if not split:
        return workload
    stages = tuple(range(workload.placement.stages))
    passes = tuple(
        replace(work, shares=tuple(replace(share, split=stages) for share in work.shares))
        for work in workload.passes
    )
    return replace(workload, passes=passes)


def split_backwards(schedule: Schedule, split: bool = True) -> Schedule:
    """The same order with every backward split in two; unchanged if ``split`` is false.

    Each backward becomes an input gradient; see ``weights_in_waits`` for its weight gradients. A worker
    stashes no more forwards than before.

    Args:
        schedule: a synchronous schedule whose backwards are whole.
        split: whether to split.

    Raises:
        ConfigError: ``split`` is neither true nor false.

    >>> from counterflow.schedule.schemes import dapple
    >>> print(*split_backwards(dapple(stages=2, micro_batches=3)).orders[0])
    F0.0 F1.0 I0.0 W0.0 F2.0 I1.0 W1.0 I2.0 W2.0
    """
    workload = split_workload(schedule.workload, split)
    if not split:
        return schedule
    halves = replace(
        schedule,
        options=(*schedule.options, ("split", True)),
        workload=workload,
        orders=tuple(tuple(_halves(order)) for order in schedule.orders),
    )
    return weights_in_waits(halves, peak_activations(schedule))


def weights_in_waits(schedule: Schedule, limits: Sequence[float]) -> Schedule:
    """The same order, except that weight gradients fill waits.

    They run where their worker would otherwise wait in unit times (F = I = W = 1), the oldest first; before a
    forward for which there is no room; or at the end.

    Args:
        schedule: a schedule with split backwards.
        limits: maximum forwards that each worker may stash, in (stage x micro-batch) units; not less than it
            stashes if weight gradients follow their input gradients at once.
    """
    late = (tuple(_late(order, limit)) for order, limit in zip(schedule.orders, limits, strict=True))
    return filled(replace(schedule, orders=tuple(late)), limits, lambda op: op.kind.takes is None)


def _halves(order: Sequence[Op]) -> Iterator[Op]:
    for op in order:
        yield from (op._replace(kind=kind) for kind in op.kind.halves)


def _late(order: Sequence[Op], limit: float) -> Iterator[Op]:
    stashed, waiting = 0.0, deque[Op]()
    for op in order:
        if op.kind.takes is None:
            continue
        while waiting and stashed + stash_change(op) > limit:
            stashed += stash_change(waiting[0])
            yield waiting.popleft()
        stashed += stash_change(op)
        if op.kind.rest is not None:
            waiting.append(op._replace(kind=op.kind.rest))
        yield op
    yield from waiting
