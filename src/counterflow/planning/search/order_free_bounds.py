"""Lower bounds of an update in any memory: of its work, its paths along the pipes, its sums.

Each is proved where it is computed; ``bounds.py`` says what for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement

from ..cost.device_placement import Network
from ..cost.stages import StageCosts
from ..play import sync_crossings, sync_seconds
from .least_times import PipeTimes, least_times
from .path_bounds import Floats, HopCosts, Ints, PathBounds, StageHolders, stage_holders
from .shape import WorkloadShape


@dataclass(frozen=True, slots=True)
class OrderFreeBounds:
    """Bounds that do not depend on memory.

    Attributes:
        least: minimum seconds of an update, without promises about the order.
        after: seconds of the sum that follows the last op in any order.
        workers: data for promises; none if no promise helps.
        trips: for each pipe with micro-batches, their number and the minimum seconds of one from stage 0 to
            the last and back.
        together: maximum micro-batches that go through a pipe together.
        stay: minimum seconds that a stash exists, ``[pipe][stage]``.
    """

    least: float
    after: float
    workers: WorkerBounds
    trips: frozenset[tuple[int, float]]
    together: int
    stay: Floats

    def seconds(self, most_stashed: int | None, most_in_flight: int | None) -> float:
        """Minimum seconds if no worker stashes more than ``most_stashed`` micro-batches (of a stage), and no
        pipe has more than ``most_in_flight`` in flight; None: unknown.

        (2c) When the k-th forward of stage 0 after k first ones starts, one of these has returned; so each k
        of a pipe follow the k before by at least a way to the last stage and back. Without a promise all may
        be in flight at once.
        """
        seconds = self.least
        for count, trip in self.trips:
            seconds = max(seconds, -(-count // (most_in_flight or count)) * trip + self.after)
        if most_stashed is not None and len(self.workers.which):
            promised = self.workers.promised(most_stashed, self.together)
            seconds = max(seconds, float(promised.max()) + self.after)
        return seconds


@dataclass(frozen=True, slots=True)
class WorkerBounds:
    """The part of each worker, through which micro-batches pass, until stage 0's last input gradient ends.

    Attributes:
        which: numbers of these workers.
        around: seconds before its first op, and from the end of its last input gradient to that of stage 0.
        through: seconds of all its forwards and of all ops that make input gradients.
        count: micro-batches that pass its stages.
        stay: total time that the stashes of all of them exist.
        weight_gradients: minimum seconds of weight gradients, if backwards may be split; otherwise 0.
        slope: minimum seconds of a forward and a backward.
    """

    which: Ints
    around: Floats
    through: Floats
    count: Floats
    stay: Floats
    weight_gradients: Floats
    slope: Floats

    @classmethod
    def none(cls) -> WorkerBounds:
        """No worker."""
        return cls(np.zeros(0, dtype=np.int64), *np.zeros((6, 0)))

    @classmethod
    def of(
        cls, shape: WorkloadShape, holders: StageHolders, times: PipeTimes, paths: PathBounds
    ) -> WorkerBounds:
        """The workers of a placement, by the times and paths of each of its pipes."""
        passes = np.array(shape.passes)[:, np.newaxis]
        used = passes > 0

        def least(values: Floats) -> Floats:
            return holders.least(np.where(used, values, math.inf))

        # (1) Work. A worker's first op is a forward of one of its stages, whose input has come down the pipe;
        # the last to make an input gradient is a backward of one of its stages, whose gradient has to go down
        # to stage 0; between them it runs all its forwards and all that makes input gradients, one at a time.
        count = holders.summed(passes * np.ones_like(paths.stay))
        which = np.flatnonzero(count)
        columns = (
            least(paths.before) + least(paths.after),
            holders.summed(passes * times.through),
            count,
            holders.summed(passes * paths.stay),
            least(times.both - times.through) if shape.split else np.zeros(holders.workers),
            least(times.forward) + least(times.backward_op),
        )
        return cls(which, *(column[which] for column in columns))

    def promised(self, most_stashed: int, together: int) -> Floats:
        """Bound of each worker that follows if a scheme promises a peak of k stashes.

        If backwards are split, all but k have had their weight gradients at the start of the last forward.

        (2b) Memory over time, as in (2), in micro-batches. The number of stashes grows by one in a forward's
        time and falls by one in a backward's, so below a peak of k stashes at both ends k(k−1)/2 · (F + B) is
        left empty, k(k−2)/2 · (F + B) where two begin at once; the worker runs k forwards and backwards or
        more one at a time, so that the two ends do not meet.
        """
        computed = np.maximum(self.count - most_stashed, 0) * self.weight_gradients
        most = np.minimum(most_stashed, self.count)
        filled = self.stay / most + (most - together) / 2 * self.slope
        return self.around + np.maximum(self.through + computed, filled)


def order_free_bounds(
    shape: WorkloadShape,
    stages: StageCosts,
    network: Network,
    recompute: Recompute,
    *,
    barrier: bool = True,
    hops: HopCosts | None = None,
    halves_alone: bool = False,
) -> OrderFreeBounds:
    """The bounds of a candidate in any memory.

    Args:
        shape: shape of its schedule.
        stages: costs of its stages.
        network: costs of its messages and all-reduces.
        recompute: what a backward computes again.
        barrier: whether a step begins when the previous one has ended on all workers.
        hops: costs of its messages along its pipes, if they are known.
        halves_alone: whether no backward is of more than half a micro-batch.
    """
    placement = shape.placement
    holders, passes = stage_holders(placement), np.array(shape.passes)[:, np.newaxis]
    stage_times = least_times(shape, stages, recompute, halves_alone=halves_alone)
    times = stage_times.on(placement.pipes_stages, network.slowness)
    work = holders.summed(passes * times.both)
    if shape.only_work_counts(barrier=barrier):
        # In any order, and in the steady state too, a worker runs every op of an update.
        return OrderFreeBounds(
            float(work.max()), 0.0, WorkerBounds.none(), frozenset(), 1, np.zeros_like(times.both)
        )
    shares = min(shape.lengths) / sum(shape.lengths), shape.parts
    hops = hops or HopCosts.of(placement, network)
    paths = PathBounds.of(hops, times, stages.message_bytes, shares)
    workers = WorkerBounds.of(shape, holders, times, paths)
    syncs = sync_seconds(stages, network) if network.copies > 1 else (0.0,) * placement.stages
    split_end = summed = 0.0
    if shape.split:
        # (1b) Split, weight gradients may come last of all, and a sum of its stages after them.
        first, sync = (
            holders.least(np.where(passes > 0, values, math.inf))
            for values in (paths.before, np.array(syncs))
        )
        split_end = float((first + work + sync)[workers.which].max(initial=0.0))
    if network.copies > 1:
        ready = _ready(shape, times, paths, hops.like)
        summed = all_summed(placement, stages, network, ready)
    # (3) The op that ends last is a backward of stage 0 (every other backward has one to follow it), and the
    # sum of stage 0's gradients cannot start before: whatever the sync mode, it comes on top. Split, likewise
    # of input gradients, which weight gradients follow.
    ops = float((workers.around + workers.through).max(initial=0.0))
    least = max(ops + syncs[0], split_end, summed)
    trips = frozenset(
        (count, way) for count, way in zip(shape.passes, paths.stay[:, 0].tolist(), strict=True) if count
    )
    return OrderFreeBounds(least, syncs[0], workers, trips, max(shape.together), paths.stay)


def _ready(shape: WorkloadShape, times: PipeTimes, paths: PathBounds, like: Sequence[int]) -> list[float]:
    """Earliest times at which all copies have the gradients of each stage.

    Of pipes that are ``like`` others the one with most micro-batches decides. A stage's last backward follows
    that of the next stage. Before it, its worker has run one at a time, once the first input is there, of all
    micro-batches of the pipe: the stage's own ops, the forwards of the pipe's earlier stages that it holds,
    and the forwards and backwards of later ones.
    """
    placement = shape.placement
    ready, last = [0.0] * placement.stages, placement.stages - 1
    most: dict[int, int] = {}
    for pipe, count in zip(like, shape.passes, strict=True):
        most[pipe] = max(most.get(pipe, 0), count)
    for pipe, count in most.items():
        if not count:
            continue
        holders = placement.pipes_stages[pipe]
        before, after, forward, through, both = (
            rows[pipe].tolist()
            for rows in (paths.before, paths.after, times.forward, times.through, times.both)
        )
        forwards = [0.0] * placement.workers  # by worker, for its stages up to here
        begins = [math.inf] * placement.workers
        earlier = []
        for stage, worker in enumerate(holders):
            earlier.append(forwards[worker])
            forwards[worker] += forward[stage]
            begins[worker] = min(begins[worker], before[stage])
        behind = [0.0] * placement.workers  # by worker, for its later stages
        later = 0.0
        for stage in range(last, -1, -1):
            worker = holders[stage]
            other_ops = earlier[stage] + behind[worker]
            if stage < last:
                # The path from the end of a backward of the next stage to the end of this one's.
                later += after[stage + 1] - after[stage]
            later = max(begins[worker] + count * (other_ops + through[stage]), later)
            ready[stage] = max(ready[stage], later, begins[worker] + count * (other_ops + both[stage]))
            behind[worker] += through[stage]
    return ready


def all_summed(placement: Placement, stages: StageCosts, network: Network, ready: Sequence[float]) -> float:
    """Earliest time at which all gradients are summed; ``ready`` has the time when each stage's are
    computed.
    """
    summed = _summed(stage_holders(placement).stages, sync_seconds(stages, network), ready)
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
    # (4) A worker sums the gradients of one stage after the other: those that are ready last, and all that
    # are not ready earlier, come after the moment at which the first of these is.
    latest = 0.0
    for stages in together:
        lasts = 0.0
        for stage in sorted(stages, key=lambda s: -ready[s]):
            lasts += syncs[stage]
            latest = max(latest, ready[stage] + lasts)
    return latest
