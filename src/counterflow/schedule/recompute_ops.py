"""Recomputation of whole stages as ops of their own: from a schedule to the same schedule with them.

A recomputation needs nothing of another stage. So a worker that would wait for the gradient that a backward
takes runs it in the meantime.

Invariant: each recomputation is immediately before its backward in the worker's order. Nothing else runs
while its graph exists, so the worker's largest memory is that of a backward that recomputes by itself.

Source: WPipe (Yang et al., ICLR 2022), appendix A.3, Figure 13; GPipe (Huang et al., arXiv 1811.06965),
section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from counterflow.errors import ConfigError

from .ir import Op, OpKind, Schedule
from .modes import Recompute

KEPT_SCHEDULES = 8
"""Number of schedules whose result is cached, because callers try many costs on a few schedules."""

_recent: tuple[tuple[Schedule, Schedule], ...] = ()
"""Schedules, each with its result, the newest last; replaced as a whole, because threads share it."""


def with_recomputations(schedule: Schedule) -> Schedule:
    """The schedule with a recomputation before each backward; itself, if it has some or no backwards.

    Pairs of ops are dropped (``with_pairs`` finds those of the new orders). The same object is returned for
    the same schedule again.

    >>> from .schemes import dapple
    >>> print(*with_recomputations(dapple(stages=2, micro_batches=2)).orders[0])
    F0.0 F1.0 R0.0 B0.0 R1.0 B1.0
    """
    global _recent  # noqa: PLW0603 - a cache
    workload = schedule.workload
    if workload.recomputes or not workload.trains:
        return schedule
    for known, recomputed in _recent:
        if known is schedule:
            return recomputed
    orders = tuple(tuple(_recomputed(order)) for order in schedule.orders)
    recomputed = replace(
        schedule,
        workload=workload.recomputing(recomputes=True),
        orders=orders,
        steady=_moved(schedule),
        pairs=(),
    )
    _recent = (*_recent, (schedule, recomputed))[-KEPT_SCHEDULES:]
    return recomputed


def recomputed_ahead(schedule: Schedule, recompute: Recompute, *, ahead: bool) -> Schedule:
    """Add the recomputations of a kind of recomputation to the schedule.

    Args:
        schedule: the schedule.
        recompute: what is computed again.
        ahead: True if the system computes stages again while their workers wait for gradients; otherwise
            backwards do, as with torch's checkpoint.
    """
    return with_recomputations(schedule) if ahead and recompute is Recompute.STAGE else schedule


def without_recomputations(schedule: Schedule) -> Schedule:
    """The schedule without its recomputations; itself, if it has none."""
    if not schedule.workload.recomputes:
        return schedule
    steady = schedule.steady
    if steady is not None:
        rows = zip(map(_other_ops_before, schedule.orders), steady, strict=True)
        steady = tuple((counts[begin], counts[stop]) for counts, (begin, stop) in rows)
    orders = (filter(_is_other, order) for order in schedule.orders)
    workload = schedule.workload.recomputing(recomputes=False)
    return replace(schedule, workload=workload, orders=tuple(map(tuple, orders)), steady=steady, pairs=())


def as_recomputed(schedule: Schedule, recompute: Recompute) -> Schedule:
    """The schedule as it runs with a kind of recomputation.

    Raises:
        ConfigError: it has recomputations, and the kind is another one.
    """
    if recompute is Recompute.STAGE:
        return with_recomputations(schedule)
    if schedule.workload.recomputes:
        raise ConfigError(
            f"{schedule} recomputes whole stages (R), but recompute={recompute.value!r}; give "
            "recompute='stage', or a schedule without R"
        )
    return schedule


def _recomputed(order: tuple[Op, ...]) -> Iterator[Op]:
    for op in order:
        if op.kind.again is not None:
            yield op._replace(kind=OpKind.RECOMPUTATION)
        yield op


def _moved(schedule: Schedule) -> tuple[tuple[int, int], ...] | None:
    if schedule.steady is None:
        return None
    moved = []
    for order, (begin, stop) in zip(schedule.orders, schedule.steady, strict=True):
        before = [0, *accumulate(op.kind.again is not None for op in order)]
        moved.append((begin + before[begin], stop + before[stop]))
    return tuple(moved)


def _other_ops_before(order: tuple[Op, ...]) -> list[int]:
    return [0, *accumulate(map(_is_other, order))]


def _is_other(op: Op) -> bool:
    return op.kind is not OpKind.RECOMPUTATION
