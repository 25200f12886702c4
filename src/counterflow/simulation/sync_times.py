"""Begin and end of gradient syncs, on a lane in parallel with each worker's compute.

Invariant: a worker's syncs run one after another in the planned order, none before all of its members are
ready. What it does not do: decide that order, or let ops wait for a sync. Syncs that share ways slow each
other, which no list says; the others the player could play as lists, to the last bit alike and no quicker (32
syncs in 174 µs and 184 here, 8 in 36 and 34).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterflow.program.player import Floats
from counterflow.program.sync import PlannedSync

if TYPE_CHECKING:
    from .costs import Crossings


def sync_times(
    planned: Sequence[PlannedSync],
    released: Floats,
    first: Sequence[int],
    lasts: Sequence[float],
    lane: Floats,
    *,
    crossings: Crossings | None = None,
) -> list[tuple[int, float, float, list[int]]]:
    """Stage, start, end and workers of each sync.

    Those in flight at one time share the ways that they have in common: with k on a way, each takes k times
    its seconds there.

    Args:
        planned: the syncs, with their places.
        released: when each op's worker goes on.
        first: each worker's first op.
        lasts: seconds of each stage's sync alone.
        lane: from when on each worker's lane is free; changed.
        crossings: see ``Costs.sync_crossings``.
    """
    syncs = []
    for item in planned:
        stage, members = item.sync.stage, list(item.sync.workers)
        ready = [released[first[worker] + before - 1] for worker, before in item.starts if before]
        syncs.append(_Sync(stage, members, float(max(ready, default=0.0)), lasts[stage]))
    if crossings is None:
        for sync in syncs:
            sync.begin = max(sync.ready, float(lane[sync.members].max()))
            sync.end = sync.begin + sync.remaining
            lane[sync.members] = sync.end
    else:
        for sync in syncs:
            ways, crossing = crossings[sync.stage]
            sync.ways, sync.share = ways, min(1.0, crossing / sync.remaining) if sync.remaining else 0.0
        _share(syncs, lane)
    return [(sync.stage, sync.begin, sync.end, sync.members) for sync in syncs]


@dataclass(slots=True, eq=False)
class _Sync:
    """A sync on its way.

    Attributes:
        stage: stage whose gradients it sums.
        members: the workers that take part.
        ready: when the last of them starts its part.
        remaining: seconds it still takes alone.
        ways: ways that it shares.
        share: of its seconds, those that are on a shared way.
    """

    stage: int
    members: list[int]
    ready: float
    remaining: float
    ways: Sequence[int] = ()
    share: float = 0.0
    begin: float = 0.0
    end: float = 0.0

    def slower(self, users: Counter[int]) -> float:
        """Factor by which it takes longer with the given number of syncs on each way."""
        return 1 + (max((users[way] for way in self.ways), default=1) - 1) * self.share


def _share(syncs: list[_Sync], lane: Floats) -> None:
    """Begin and end of syncs that share ways, from one begin or end to the next."""
    before = [0] * len(syncs)  # syncs of the same workers that have not ended
    followers: list[list[int]] = [[] for _ in syncs]
    last: dict[int, int] = {}
    for number, sync in enumerate(syncs):
        sync.ready = max(sync.ready, float(lane[sync.members].max()))
        for earlier in {last[worker] for worker in sync.members if worker in last}:
            before[number] += 1
            followers[earlier].append(number)
        last |= dict.fromkeys(sync.members, number)
    now = 0.0
    in_flight: list[int] = []
    due = [number for number, count in enumerate(before) if not count]
    while in_flight or due:
        users = Counter(way for number in in_flight for way in syncs[number].ways)
        ends = {number: now + syncs[number].remaining * syncs[number].slower(users) for number in in_flight}
        at = max(now, min([*ends.values(), *(syncs[number].ready for number in due)]))
        for number, end in ends.items():
            syncs[number].remaining -= (at - now) / syncs[number].slower(users)
            if end > at:
                continue
            syncs[number].end = end
            for follower in followers[number]:
                before[follower] -= 1
                if not before[follower]:
                    due.append(follower)
        now = at
        begun = [number for number in due if syncs[number].ready <= now]
        for number in begun:
            syncs[number].begin = now
        due = [number for number in due if syncs[number].ready > now]
        in_flight = [number for number in in_flight if ends[number] > now] + begun
    for sync in syncs:
        lane[sync.members] = sync.end
