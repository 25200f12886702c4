"""Minimum times of a micro-batch along each pipe, as columns over pipes and stages.

Invariant: sums are made stage by stage from the one end or the other, so that equal pipes have equal numbers
to the last digit, and all the same as a sum by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from counterflow.schedule.placement import Placement

from ..cost.device_placement import Network
from .least_times import PipeTimes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageHolders:
    """The (pipe, stage) pairs of a placement, pipe by pipe: the holder of each, and the pairs of each worker.

    Attributes:
        workers: number of workers.
        worker: of each pair.
        pairs: ``[k][worker]``, its k-th pair; its first again if it has fewer.
        stages: stages of each worker.
    """

    workers: int
    worker: Ints
    pairs: Ints
    stages: list[set[int]]

    def summed(self, values: Floats) -> Floats:
        """The sum of each worker's pairs, from the first to the last one."""
        sums: Floats = np.bincount(self.worker, values.ravel(), self.workers).astype(np.float64, copy=False)
        return sums

    def least(self, values: Floats) -> Floats:
        """The least of each worker's pairs."""
        minima: Floats = values.ravel()[self.pairs].min(axis=0)
        return minima

    def most(self, values: Floats) -> Floats:
        """The most of each worker's pairs."""
        maxima: Floats = values.ravel()[self.pairs].max(axis=0)
        return maxima


@lru_cache(maxsize=256)
def stage_holders(placement: Placement) -> StageHolders:
    """The pairs of a placement, each of whose workers holds a stage."""
    worker = np.array(placement.pipes_stages, dtype=np.int64).ravel()
    pairs_of_worker: list[list[int]] = [[] for _ in range(placement.workers)]
    for pair, holder in enumerate(worker.tolist()):
        pairs_of_worker[holder].append(pair)
    longest = max(map(len, pairs_of_worker))
    padded = [pairs + pairs[:1] * (longest - len(pairs)) for pairs in pairs_of_worker]
    stages = [{pair % placement.stages for pair in pairs} for pairs in pairs_of_worker]
    return StageHolders(placement.workers, worker, np.array(padded, dtype=np.int64).T.copy(), stages)


@dataclass(frozen=True, slots=True)
class HopCosts:
    """Costs of messages from each stage of each pipe to the next one and back, ``[pipe][stage]``.

    Attributes:
        up: seconds of an output, without those of its bytes.
        up_per_byte: seconds of one of its bytes.
        down: the same of an input gradient.
        down_per_byte: the same of an input gradient.
        like: for each pipe, the first one that differs from it in nothing but which workers it is on.
        round_trips: of each pipe, the slowness of its fastest worker, and the seconds of all its hops up and
            down, without bytes, by a byte up, and by a byte down.
    """

    up: Floats
    up_per_byte: Floats
    down: Floats
    down_per_byte: Floats
    like: tuple[int, ...]
    round_trips: tuple[tuple[float, float, float, float], ...]

    @classmethod
    def of(cls, placement: Placement, network: Network) -> HopCosts:
        """The hops of a placement; stages on one worker send nothing."""
        holders = np.array(placement.pipes_stages, dtype=np.int64)
        sender, receiver = holders[:, :-1], holders[:, 1:]
        remote = sender != receiver
        latency, per_byte = np.array(network.latency_seconds), np.array(network.seconds_per_byte)
        ends = (sender, receiver), (receiver, sender)
        tables = [np.where(remote, cost[at], 0.0) for at in ends for cost in (latency, per_byte)]
        up, up_per_byte, down, down_per_byte = tables
        first: dict[object, int] = {}
        like = []
        for pipe, workers in enumerate(placement.pipes_stages):
            simple = len({*workers}) == len(workers) and not network.slowness
            key = tuple(table[pipe].tobytes() for table in tables) if simple else workers
            like.append(first.setdefault(key, pipe))
        slow = np.array(network.slowness)[holders].min(axis=1) if network.slowness else np.ones(len(holders))
        sums = (slow, (up + down).sum(axis=1), up_per_byte.sum(axis=1), down_per_byte.sum(axis=1))
        round_trips = tuple(zip(*(cost.tolist() for cost in sums), strict=True))
        return cls(up, up_per_byte, down, down_per_byte, tuple(like), round_trips)


@dataclass(frozen=True, slots=True)
class PathBounds:
    """Minimum seconds along each pipe, ``[pipe][stage]``.

    Attributes:
        before: until its first forward can start.
        after: from the end of a backward of it to the end of the backward of stage 0 that follows.
        stay: from the start of a forward of it to the end of the backward of the same micro-batch.
    """

    before: Floats
    after: Floats
    stay: Floats

    @classmethod
    def of(
        cls, hops: HopCosts, times: PipeTimes, sizes: Sequence[float], shares: tuple[float, int]
    ) -> PathBounds:
        """The minimum seconds along the pipes of a placement.

        Args:
            hops: costs of its messages.
            times: minimum times of its stages.
            sizes: bytes of the message that contains each stage's output.
            shares: the share of a micro-batch in the shortest slice, and the parts of its backward, to each
                of which a gradient belongs.
        """
        least, parts = shares
        forward, backward = times.forward, times.backward_op
        size = least * np.array(sizes)[:-1]
        up = hops.up + hops.up_per_byte * size
        down = hops.down + hops.down_per_byte * size / parts
        none = np.zeros((len(up), 1))
        back = _in_turn((forward + backward)[:, ::-1], (up + down)[:, ::-1])
        return cls(
            before=_in_turn(np.concatenate((none, up), axis=1), forward[:, :-1]),
            after=_in_turn(np.concatenate((none, down), axis=1), backward[:, :-1]),
            stay=back[:, ::-1],
        )


def _in_turn(terms: Floats, gaps: Floats) -> Floats:
    both = np.empty((len(terms), terms.shape[1] + gaps.shape[1]))
    both[:, ::2], both[:, 1::2] = terms, gaps
    sums: Floats = np.cumsum(both, axis=1)[:, ::2]
    return sums
