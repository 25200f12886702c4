"""Memory that the order alone determines: stashed forwards and weight versions."""

from __future__ import annotations

from collections.abc import Iterator

from .ir import Op, Product, Schedule, Workload


def stash_change(op: Op, workload: Workload | None = None) -> float:
    """Change of a worker's stashed forwards by an op, in (stage x micro-batch) units.

    A forward is stashed until its weight gradients are computed. Without a workload slices count as equally
    long.
    """
    return op.kind.stash * (op.work if workload is None else workload.work(op))


def peak_activations(schedule: Schedule, stages: range | None = None) -> tuple[float, ...]:
    """Maximum forwards stashed at once on each worker, in (stage x micro-batch) units.

    Args:
        schedule: the schedule.
        stages: count only these stages (WPipe's groups); None counts all.
    """
    peaks = []
    for order in schedule.orders:
        stashed = peak = 0.0
        for op in order:
            if stages is not None and op.stage not in stages:
                continue
            stashed += stash_change(op, schedule.workload)
            peak = max(peak, stashed)
        peaks.append(peak)
    return tuple(peaks)


def version_lives(schedule: Schedule, worker: int) -> Iterator[tuple[int, int, int, int | None]]:
    """The life of each weight version on a worker: (stage, born, dies) with indices into its order.

    Yields (stage, version, born, dies): the version exists from after op ``born`` (−1 for the first one)
    until after op ``dies`` (None: until the end). Version v + 1 is born with the last backward of period v. A
    version dies once nothing later uses it and a newer one exists.
    """
    order = schedule.orders[worker]
    last_backward: dict[tuple[int, int, int], int] = {}
    last_use: dict[tuple[int, int, int], int] = {}
    for index, op in enumerate(order):
        last_use[op.pipe, op.stage, op.version] = index
        if Product.WEIGHT_GRADIENTS in op.kind.makes:
            last_backward[op.pipe, op.stage, schedule.period_of(op)] = index
    for pipe, stage in schedule.placement.stages_on(worker):
        # A synchronous schedule ends with its update, which is made in place.
        updates = 0 if schedule.synchronous else schedule.periods
        for version in range(updates + 1):
            born = last_backward.get((pipe, stage, version - 1), -1) if version else -1
            dies = None
            if version < updates:
                replaced = last_backward.get((pipe, stage, version), -1)
                dies = max(replaced, last_use.get((pipe, stage, version), -1))
            yield stage, version, born, dies


def weight_copies(schedule: Schedule) -> tuple[int, ...]:
    """Maximum number of stages held at once on each worker, every version of a stage counted."""
    most = []
    for worker in range(schedule.workers):
        changes: list[tuple[int, int]] = []
        for _stage, _version, born, dies in version_lives(schedule, worker):
            changes.append((born, 1))
            if dies is not None:
                changes.append((dies, -1))
        copies = peak = 0
        # If a version dies with the op after which another is born, the new one takes its place.
        for _index, change in sorted(changes):
            copies += change
            peak = max(peak, copies)
        most.append(peak)
    return tuple(most)
