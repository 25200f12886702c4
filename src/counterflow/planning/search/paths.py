"""The way of a micro-batch along each pipe, at the least, as columns over pipes and stages.

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
class Held:
    """The (pipe, stage) pairs of a placement, pipe by pipe: who holds each, and what each worker holds.

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
        found: Floats = np.bincount(self.worker, values.ravel(), self.workers).astype(np.float64, copy=False)
        return found

    def least(self, values: Floats) -> Floats:
        """The least of each worker's pairs."""
        found: Floats = values.ravel()[self.pairs].min(axis=0)
        return found

    def most(self, values: Floats) -> Floats:
        """The most of each worker's pairs."""
        found: Floats = values.ravel()[self.pairs].max(axis=0)
        return found


@lru_cache(maxsize=256)
def held_pairs(placement: Placement) -> Held:
    """The pairs of a placement, each of whose workers holds a stage."""
    worker = np.array(placement.pipes_stages, dtype=np.int64).ravel()
    own: list[list[int]] = [[] for _ in range(placement.workers)]
    for pair, holder in enumerate(worker.tolist()):
        own[holder].append(pair)
    longest = max(map(len, own))
    padded = [pairs + pairs[:1] * (longest - len(pairs)) for pairs in own]
    stages = [{pair % placement.stages for pair in pairs} for pairs in own]
    return Held(placement.workers, worker, np.array(padded, dtype=np.int64).T.copy(), stages)


@dataclass(frozen=True, slots=True)
class Hops:
    """What messages from each stage of each pipe to the next one cost, ``[pipe][stage]``, and back.

    Attributes:
        up: seconds of an output, without those of its bytes.
        up_per_byte: seconds of one of its bytes.
        down: the same of an input gradient.
        down_per_byte: the same of an input gradient.
        like: for each pipe, the first one that differs from it in nothing but which workers it is on.
        ways: of each pipe, the slowness of its fastest worker, and the seconds of all its hops up and down,
            without bytes, by a byte up, and by a byte down.
    """

    up: Floats
    up_per_byte: Floats
    down: Floats
    down_per_byte: Floats
    like: tuple[int, ...]
    ways: tuple[tuple[float, float, float, float], ...]

    @classmethod
    def of(cls, placement: Placement, network: Network) -> Hops:
        """The hops of a placement; stages on one worker send nothing."""
        holders = np.array(placement.pipes_stages, dtype=np.int64)
        one, other = holders[:, :-1], holders[:, 1:]
        apart = one != other
        latency, per_byte = np.array(network.latency_seconds), np.array(network.seconds_per_byte)
        ends = (one, other), (other, one)
        tables = [np.where(apart, each[at], 0.0) for at in ends for each in (latency, per_byte)]
        up, up_per_byte, down, down_per_byte = tables
        first: dict[object, int] = {}
        like = []
        for pipe, workers in enumerate(placement.pipes_stages):
            simple = len({*workers}) == len(workers) and not network.slowness
            key = tuple(table[pipe].tobytes() for table in tables) if simple else workers
            like.append(first.setdefault(key, pipe))
        slow = np.array(network.slowness)[holders].min(axis=1) if network.slowness else np.ones(len(holders))
        sums = (slow, (up + down).sum(axis=1), up_per_byte.sum(axis=1), down_per_byte.sum(axis=1))
        ways = tuple(zip(*(each.tolist() for each in sums), strict=True))
        return cls(up, up_per_byte, down, down_per_byte, tuple(like), ways)


@dataclass(frozen=True, slots=True)
class Paths:
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
    def of(cls, hops: Hops, times: PipeTimes, sizes: Sequence[float], shares: tuple[float, int]) -> Paths:
        """The ways along the pipes of a placement.

        Args:
            hops: what its messages cost.
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


def _in_turn(ones: Floats, others: Floats) -> Floats:
    """Sums up to each of ``ones``, between every two of which one of ``others`` is added."""
    both = np.empty((len(ones), ones.shape[1] + others.shape[1]))
    both[:, ::2], both[:, 1::2] = ones, others
    found: Floats = np.cumsum(both, axis=1)[:, ::2]
    return found
