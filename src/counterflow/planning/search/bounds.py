"""Lower bounds of a candidate, computed without building or simulating its schedule.

The search simulates candidates by rising bound and stops when no bound is below the best plans; so the bounds
decide which candidates are never simulated, and have to be true. Each is proved where it is computed. They
use the placement of a schedule's workload and the number of micro-batches through each pipe (``Shape``);
about the order they use only what the scheme promises. If backwards are split, a micro-batch's way back is
that of its input gradients; weight gradients may be computed at any time after these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement

from ..cost.device_placement import Network
from ..cost.memory import counted_twice, message_buffers
from ..cost.sharded_state import ShardedState
from ..cost.stages import StageCosts
from ..inputs.cluster import Cluster
from ..play import sync_crossings, sync_seconds
from .least_times import Times, least_times
from .shape import Shape


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds for every sync mode of a candidate.

    Attributes:
        seconds: minimum duration of an update, if it fits.
        seconds_in_any_memory: the same with unlimited memory.
        least_bytes: minimum memory of the fullest worker, without the reserve.
        fullest: this worker or, if devices differ, the one with the least room.
        too_many_bytes: bytes that it has too many; 0 or less: none.
    """

    seconds: float
    seconds_in_any_memory: float
    least_bytes: float
    fullest: int
    too_many_bytes: float


@dataclass(frozen=True, slots=True)
class Common:
    """Common part of the bounds of candidates that differ only in the peak they promise.

    Attributes:
        least: minimum seconds of an update, without promises about the order.
        after: seconds of the sum that follows the last op in any order.
        workers: data for promises; empty if no promise helps.
        trips: for each pipe, its micro-batches and the minimum seconds of one from stage 0 to the last and
            back.
        together: maximum micro-batches that go through a pipe together.
        states: memory of workers by ``zero_stage``.
    """

    least: float
    after: float
    workers: tuple[_Worker, ...]
    trips: frozenset[tuple[int, float]]
    together: int
    states: tuple[_State, ...]

    def bounds(
        self, most_stashed: int | None, zero_stage: int = 0, most_in_flight: int | None = None
    ) -> Bounds:
        """The bounds if no worker stashes more than ``most_stashed`` micro-batches (of a stage), and no pipe
        has more than ``most_in_flight`` in flight; None: unknown.

        (2c) When the k-th forward of stage 0 after k first ones starts, one of these has returned; so each k
        of a pipe follow the k before by at least a way to the last stage and back.
        """
        state = self.states[zero_stage]
        at_all = self.least
        if most_in_flight is not None:
            for count, seconds in self.trips:
                at_all = max(at_all, -(-count // most_in_flight) * seconds + self.after)
        if most_stashed is not None:
            for worker in self.workers:
                at_all = max(at_all, worker.promised(most_stashed, self.together) + self.after)
        at_all += state.update
        stored = state.stored + self.after + state.update
        return Bounds(max(at_all, stored), at_all, state.least_bytes, state.fullest, state.too_many_bytes)


@dataclass(frozen=True, slots=True)
class _State:
    """Bounds that depend on where optimiser state is held.

    Attributes:
        update: seconds of the update, and of sending updated weights.
        stored: minimum seconds by memory, without the work after the last op.
        least_bytes: minimum memory of the worker with the least room.
        fullest: this worker.
        too_many_bytes: bytes that it has too many.
    """

    update: float
    stored: float
    least_bytes: float
    fullest: int
    too_many_bytes: float

    @classmethod
    def of(
        cls,
        update: float,
        fixed: Sequence[float],
        stash: Sequence[float],
        usable: Sequence[float],
        stashes: Sequence[_Stashes],
    ) -> _State:
        """The state of workers with this fixed memory, and at least one stash of their largest stage."""
        over = [f + s - there for f, s, there in zip(fixed, stash, usable, strict=True)]
        fullest = max(range(len(over)), key=over.__getitem__)
        rooms = ((usable[worker] - fixed[worker], around, occupied) for worker, around, occupied in stashes)
        stored = max((around + occupied / room for room, around, occupied in rooms if room > 0), default=0.0)
        return cls(update, stored, fixed[fullest] + stash[fullest], fullest, over[fullest])


_Stashes = tuple[int, float, float]
"""A worker, the seconds before its first op and after its last, and the byte-seconds of its stashes."""


def common(
    shape: Shape,
    stages: StageCosts,
    network: Network,
    cluster: Cluster,
    recompute: Recompute,
    *,
    update_seconds_per_byte: float = 0.0,
    step_overhead_seconds: float = 0.0,
    barrier: bool = True,
    sharded: ShardedState | None = None,
) -> Common:
    """The common bounds of a candidate; ``bounds`` adds those that follow from promises about its order.

    Args:
        shape: shape of its schedule.
        stages: costs of its stages.
        network: costs of its messages and all-reduces.
        cluster: the cluster, whose memory is the limit.
        recompute: what a backward computes again.
        update_seconds_per_byte: time of the optimiser's update per byte of weights.
        step_overhead_seconds: time of an update in addition to ops, syncs and the optimiser.
        barrier: whether a step begins when the previous one has ended on all workers.
        sharded: owners with ``zero_stage`` 1; None: it is not tried.
    """
    every = least_times(shape, stages, recompute)
    held = stages.held(recompute)
    pipes = shape.placement.pipes_stages
    slowness = network.slowness
    times = [every.on(holders, slowness) for holders in pipes]
    largest, least = (most(shape.lengths) / sum(shape.lengths) for most in (max, min))
    paths = _paths(pipes, times, stages, network, (least, shape.parts))
    owned = owned_stages(shape.placement)
    each = [fixed + weights for fixed, weights in zip(held.fixed, held.weights, strict=True)]
    fixed = [sum([each[s] for _, s in mine]) for mine in owned]
    if stages.ties:
        twice = counted_twice(shape.placement, stages)
        fixed = [all_ - more for all_, more in zip(fixed, twice, strict=True)]
    # If memory of messages is computed, there may be no messages at a worker's peak.
    none = (0.0,) * len(owned)
    buffers = (
        none if stages.measured else message_buffers(shape.placement, max(shape.together) * largest, stages)
    )
    # Minimum memory: what exists throughout, and one stash of the worker's largest stage.
    stashes = [
        [together * size for size in held.stash] if count else [0.0] * len(held.stash)
        for together, count in zip(shape.together, shape.passes, strict=True)
    ]
    stash = [max([stashes[p][s] for p, s in mine], default=0.0) for mine in owned]
    fixed = [f + b for f, b in zip(fixed, buffers, strict=True)]
    usable = network.usable_bytes or (cluster.usable_bytes,) * len(owned)
    passes, both, trained = shape.passes, [one.both for one in times], stages.trained
    work = [sum([passes[p] * both[p][s] for p, s in mine]) for mine in owned]
    updated = [sum([trained[s] for _, s in mine]) for mine in owned]
    found: list[_Stashes] = []

    def state(updated: Sequence[float], fixed: Sequence[float], sent: float = 0.0) -> _State:
        if slowness:
            updated = [size * slow for size, slow in zip(updated, slowness, strict=True)]
        update = update_seconds_per_byte * max(updated) + step_overhead_seconds + sent
        return _State.of(update, fixed, stash, usable, found)

    def states() -> tuple[_State, ...]:
        """Owners are known to the byte, and so are their messages: these are not less in any order."""
        whole = state(updated, fixed)
        if sharded is None:
            return (whole,)
        less = [f - spared for f, spared in zip(fixed, sharded.spared, strict=True)]
        return whole, state(sharded.most, less, sharded.seconds)

    if (shape.split and shape.parts > 1) or not shape.synchronous or not barrier:
        # In any order, and in the steady state too, a worker runs every op of an update.
        return Common(max(work), 0.0, (), frozenset(), 1, states())
    syncs = sync_seconds(stages, network) if network.copies > 1 else (0.0,) * len(held.weights)
    ops = alone = 0.0
    workers = []
    for number, (mine, busy) in enumerate(zip(owned, work, strict=True)):
        used = [(p, s) for p, s in mine if passes[p]]
        if used:
            worker = _Worker.of(shape, used, times, paths)
            workers.append(worker)
            ops = max(ops, worker.around + worker.through)
            # (2) Memory over time. A stash stays from the start of its forward to the end of its
            # backward, and between these the micro-batch goes up to the last stage and back: ``stay``.
            # None is there before the worker's first op and after its last. What all stashes occupy, in
            # byte-seconds, has to find place in the free memory between these two.
            occupied = sum([passes[p] * held.stash[s] * paths[p].stay[s] for p, s in used])
            found.append((number, worker.around, occupied))
            if shape.split:
                # (1b) Split, weight gradients may come last of all, and a sum of its stages after them.
                first = min([paths[p].before[s] for p, s in used])
                alone = max(alone, first + busy + min([syncs[s] for _, s in used]))
    summed = all_summed(owned, stages, network, _ready(shape, times, paths)) if network.copies > 1 else 0.0
    # (3) The op that ends last is a backward of stage 0 (every other backward has one to follow it), and the
    # sum of stage 0's gradients cannot start before: whatever the sync mode, it comes on top. Split, likewise
    # of input gradients, which weight gradients follow.
    least = max(ops + syncs[0], alone, summed)
    trips = frozenset((count, path.stay[0]) for count, path in zip(shape.passes, paths, strict=True))
    return Common(least, syncs[0], tuple(workers), trips, max(shape.together), states())


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker's part in the bounds: until the last input gradient of stage 0 ends.

    Attributes:
        around: seconds before its first op, and from the end of its last input gradient to that of stage 0.
        through: seconds of all its forwards and of all ops that make input gradients.
        count: micro-batches that pass its stages.
        stay: total time that the stashes of all of them exist.
        apart: minimum seconds of weight gradients, if backwards may be split; otherwise 0.
        slope: minimum seconds of a forward and a backward.
    """

    around: float
    through: float
    count: int
    stay: float
    apart: float
    slope: float

    @classmethod
    def of(cls, shape: Shape, used: list[tuple[int, int]], times: list[Times], paths: list[_Path]) -> _Worker:
        """The worker that holds these (pipe, stage) pairs, through which micro-batches pass."""
        # (1) Work. A worker's first op is a forward of one of its stages, whose input has come down the pipe;
        # the last to make an input gradient is a backward of one of its stages, whose gradient has to go down
        # to stage 0; between them it runs all its forwards and all that makes input gradients, one at a time.
        passes = shape.passes
        first = min([paths[p].before[s] for p, s in used])
        last = min([paths[p].after[s] for p, s in used])
        return cls(
            first + last,
            sum([passes[p] * times[p].through[s] for p, s in used]),
            sum([passes[p] for p, _ in used]),
            sum([passes[p] * paths[p].stay[s] for p, s in used]),
            min([times[p].both[s] - times[p].through[s] for p, s in used]) if shape.split else 0.0,
            min([times[p].forward[s] for p, s in used]) + min([times[p].backward_op[s] for p, s in used]),
        )

    def promised(self, most_stashed: int, together: int) -> float:
        """Bound that follows if a scheme promises a peak of k stashes.

        If backwards are split, all but k have had their weight gradients at the start of the last forward.

        (2b) Memory over time, as in (2), in micro-batches. The number of stashes grows by one in a forward's
        time and falls by one in a backward's, so below a peak of k stashes at both ends k(k−1)/2 · (F + B) is
        left empty, k(k−2)/2 · (F + B) where two begin at once; the worker runs k forwards and backwards or
        more one at a time, so that the two ends do not meet.
        """
        made = max(self.count - most_stashed, 0) * self.apart
        most = min(most_stashed, self.count)
        filled = self.stay / most + (most - together) / 2 * self.slope
        return self.around + max(self.through + made, filled)


@lru_cache(maxsize=256)
def owned_stages(placement: Placement) -> list[list[tuple[int, int]]]:
    """The (pipe, stage) pairs of each worker."""
    owned: list[list[tuple[int, int]]] = [[] for _ in range(placement.workers)]
    for pipe, stages in enumerate(placement.pipes_stages):
        for stage, worker in enumerate(stages):
            owned[worker].append((pipe, stage))
    return owned


def _ready(shape: Shape, times: list[Times], paths: list[_Path]) -> list[float]:
    """Earliest times at which all copies have the gradients of each stage.

    A stage's last backward follows that of the next stage. Before it, its worker has run one at a time, once
    the first input is there, of all micro-batches of the pipe: the stage's own ops, the forwards of the
    pipe's earlier stages that it holds, and the forwards and backwards of later ones.
    """
    ready, last = [0.0] * shape.placement.stages, shape.placement.stages - 1
    for holders, takes, path, count in zip(
        shape.placement.pipes_stages, times, paths, shape.passes, strict=True
    ):
        if not count:
            continue
        forwards = [0.0] * shape.placement.workers  # by worker, for its stages up to here
        begins = [math.inf] * shape.placement.workers
        earlier = []
        for stage, worker in enumerate(holders):
            earlier.append(forwards[worker])
            forwards[worker] += takes.forward[stage]
            begins[worker] = min(begins[worker], path.before[stage])
        behind = [0.0] * shape.placement.workers  # by worker, for its later stages
        later = 0.0
        for stage in range(last, -1, -1):
            worker, through = holders[stage], takes.through[stage]
            others = earlier[stage] + behind[worker]
            if stage < last:
                # The way from the end of a backward of the next stage to the end of this one's.
                later += path.after[stage + 1] - path.after[stage]
            later = max(begins[worker] + count * (others + through), later)
            ready[stage] = max(ready[stage], later, begins[worker] + count * (others + takes.both[stage]))
            behind[worker] += through
    return ready


def all_summed(
    owned: list[list[tuple[int, int]]], stages: StageCosts, network: Network, ready: Sequence[float]
) -> float:
    """Earliest time at which all gradients are summed; ``ready`` has the time when each stage's are
    computed.
    """
    summed = _summed([{s for _, s in mine} for mine in owned], sync_seconds(stages, network), ready)
    # (4b) The same for messages on the single way out of a node: it carries all of them, in whatever order.
    if (crossings := sync_crossings(stages, network)) is not None:
        by_way: dict[int, set[int]] = {}
        for stage, (ways, _) in enumerate(crossings):
            for way in ways:
                by_way.setdefault(way, set()).add(stage)
        crossed = tuple(seconds for _, seconds in crossings)
        summed = max(summed, _summed(list({*map(frozenset, by_way.values())}), crossed, ready))
    return summed


def _summed(together: Sequence[Collection[int]], syncs: tuple[float, ...], ready: Sequence[float]) -> float:
    """(4) A worker sums the gradients of one stage after the other: those that are ready last, and all that
    are not ready earlier, come after the moment at which the first of these is.
    """
    latest = 0.0
    for stages in together:
        lasts = 0.0
        for stage in sorted(stages, key=lambda s: -ready[s]):
            lasts += syncs[stage]
            latest = max(latest, ready[stage] + lasts)
    return latest


@dataclass(frozen=True, slots=True)
class _Path:
    """Minimum seconds along one pipe, by stage.

    ``before``: until its first forward can start; ``after``: from the end of a backward of it to the end of
    the backward of stage 0 that follows; ``stay``: from the start of a forward of it to the end of the
    backward of the same micro-batch.
    """

    before: list[float]
    after: list[float]
    stay: list[float]

    @classmethod
    def of(
        cls,
        holders: tuple[int, ...],
        times: Times,
        stages: StageCosts,
        network: Network,
        shares: tuple[float, int],
    ) -> _Path:
        """The way along a pipe whose stages these workers hold.

        ``shares`` are the share of a micro-batch in the shortest slice, and the parts of its backward, to
        each of which a gradient belongs.
        """
        least, parts = shares
        latency, per_byte, sizes = network.latency_seconds, network.seconds_per_byte, stages.message_bytes
        forward, backward = times.forward, times.backward_op
        count = len(holders)
        before, after, stay = [0.0] * count, [0.0] * count, [0.0] * count
        ways = [0.0] * count  # for each stage, from the previous one and back
        for stage in range(1, count):
            one, other = holders[stage - 1], holders[stage]
            up = down = 0.0
            if one != other:
                size = least * sizes[stage - 1]
                up = latency[one][other] + per_byte[one][other] * size
                down = latency[other][one] + per_byte[other][one] * size / parts
            before[stage] = before[stage - 1] + forward[stage - 1] + up
            after[stage] = after[stage - 1] + backward[stage - 1] + down
            ways[stage] = up + down
        beyond = 0.0
        for stage in reversed(range(count)):
            beyond += forward[stage] + backward[stage]
            stay[stage] = beyond
            beyond += ways[stage]
        return cls(before, after, stay)


def _paths(
    pipes: tuple[tuple[int, ...], ...],
    times: list[Times],
    stages: StageCosts,
    network: Network,
    shares: tuple[float, int],
) -> list[_Path]:
    every = zip(pipes, times, strict=True)
    return [_Path.of(holders, takes, stages, network, shares) for holders, takes in every]
