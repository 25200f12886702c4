"""How many communicators each worker has over NCCL: memory of its GPU that no tensor of PyTorch's is in."""

from __future__ import annotations

from collections.abc import Iterable

from counterflow.schedule.ir import Schedule


def communicators(
    schedule: Schedule, replicas: int = 1, ties: Iterable[Iterable[int]] = ()
) -> tuple[int, ...]:
    """How many each worker of one group has.

    Two for each worker that it exchanges messages with, one a direction, and one for each set of workers that
    it sums with.

    Args:
        schedule: what runs.
        replicas: pipeline groups.
        ties: the stages of each weight that several stages share.

    >>> from counterflow.schedule.schemes import chimera, dapple
    >>> communicators(dapple(stages=4, micro_batches=4)), communicators(dapple(4, 4), replicas=2)
    ((2, 4, 4, 2), (3, 5, 5, 3))
    >>> communicators(chimera(stages=4, micro_batches=4))
    (3, 5, 5, 3)
    """
    placement = schedule.placement
    peers: list[set[int]] = [set() for _ in range(schedule.workers)]
    links = [(skip.source, skip.target) for skip in schedule.workload.skips]
    links += [(stage, stage + 1) for stage in range(schedule.stages - 1)]
    for holders in placement.pipes_stages:
        for source, target in links:
            one, other = holders[source], holders[target]
            if one != other:
                peers[one].add(other)
                peers[other].add(one)
    sums: list[set[tuple[int, ...]]] = [set() for _ in peers]
    for stages in (*((stage,) for stage in range(schedule.stages)), *map(tuple, ties)):
        members = tuple(sorted({worker for s in stages for _, worker in placement.copies(s)}))
        if replicas * len(members) > 1:
            for worker in members:
                sums[worker].add(members)
    return tuple(2 * len(others) + len(sets) for others, sets in zip(peers, sums, strict=True))
