"""Number of NCCL communicators of each worker: they take GPU memory outside PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Iterable

from counterflow.schedule.ir import Schedule


def communicators(
    schedule: Schedule, replicas: int = 1, ties: Iterable[Iterable[int]] = ()
) -> tuple[int, ...]:
    """Number of communicators of each worker of one group.

    A worker has two for each peer that it exchanges messages with, one per direction, and one for each set of
    workers that it sums with.

    Args:
        schedule: the schedule that runs.
        replicas: number of pipeline groups.
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
            sender, receiver = holders[source], holders[target]
            if sender != receiver:
                peers[sender].add(receiver)
                peers[receiver].add(sender)
    sums: list[set[tuple[int, ...]]] = [set() for _ in peers]
    for stages in (*((stage,) for stage in range(schedule.stages)), *map(tuple, ties)):
        members = tuple(sorted({worker for s in stages for _, worker in placement.copies(s)}))
        if replicas * len(members) > 1:
            for worker in members:
                sums[worker].add(members)
    return tuple(
        2 * len(peers_of_worker) + len(sets) for peers_of_worker, sets in zip(peers, sums, strict=True)
    )
