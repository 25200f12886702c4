"""Lower bounds of a candidate, computed without building or simulating its schedule.

The search simulates candidates by rising bound and stops when no bound is below the best plans; so the bounds
decide which candidates are never simulated, and have to be true. Each is proved where it is computed. They
use the placement of a schedule's workload and the number of micro-batches through each pipe
(``WorkloadShape``); about the order they use only what the scheme promises. If backwards are split, a
micro-batch's way back is that of its input gradients; weight gradients may be computed at any time after
these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import Saved

from ..cost.device_placement import Network
from ..cost.memory import counted_twice, message_buffers
from ..cost.sharded_state import ShardedState
from ..cost.stages import StageCosts
from ..inputs.cluster import Cluster
from .order_free_bounds import OrderFreeBounds, order_free_bounds
from .path_bounds import Floats, Ints, stage_holders
from .shape import WorkloadShape


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
        order_free: bounds in any memory.
        states: memory of workers by ``zero_stage``.
    """

    order_free: OrderFreeBounds
    states: tuple[_WorkerState, ...]

    def bounds(
        self, most_stashed: int | None, zero_stage: int = 0, most_in_flight: int | None = None
    ) -> Bounds:
        """The bounds if no worker stashes more than ``most_stashed`` micro-batches (of a stage), and no pipe
        has more than ``most_in_flight`` in flight; None: unknown.
        """
        state = self.states[zero_stage]
        at_all = self.order_free.seconds(most_stashed, most_in_flight) + state.update
        stored = state.stored + self.order_free.after + state.update
        return Bounds(max(at_all, stored), at_all, state.least_bytes, state.fullest, state.too_many_bytes)


@dataclass(frozen=True, slots=True)
class _WorkerState:
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
        cls, update: float, fixed: Floats, stash: Floats, usable: Floats, stashes: _Stashes
    ) -> _WorkerState:
        """The state of workers with this fixed memory, and at least one stash of their largest stage."""
        needed, over = fixed + stash, fixed + stash - usable
        fullest = int(over.argmax())
        which, around, occupied = stashes
        room = (usable - fixed)[which]
        some = room > 0
        stored = (around[some] + occupied[some] / room[some]).max(initial=0.0)
        return cls(update, float(stored), float(needed[fullest]), fullest, float(over[fullest]))


class _Stashes(NamedTuple):
    """Workers, the seconds before the first op of each and after its last, and the byte-seconds of its
    stashes.
    """

    which: Ints
    around: Floats
    occupied: Floats


def common(
    shape: WorkloadShape,
    stages: StageCosts,
    network: Network,
    cluster: Cluster,
    recompute: Recompute,
    *,
    update_seconds_per_byte: float = 0.0,
    step_overhead_seconds: float = 0.0,
    barrier: bool = True,
    sharded: ShardedState | None = None,
    order_free: OrderFreeBounds | None = None,
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
        order_free: its bounds in any memory, if they are known.
    """
    if order_free is None:
        order_free = order_free_bounds(shape, stages, network, recompute, barrier=barrier)
    holders, memory, slowness = stage_holders(shape.placement), stages.table(recompute), network.slowness
    pipes, passes = shape.placement.pipes, np.array(shape.passes)[:, np.newaxis]

    def of_workers(by_stage: Sequence[float]) -> Floats:
        return holders.summed(np.array([by_stage] * pipes))

    fixed = of_workers([stage.fixed + stage.weights for stage in memory])
    activations = np.array([stage.tensors[Saved.ACTIVATIONS] for stage in memory])
    if stages.ties:
        fixed -= counted_twice(shape.placement, stages)
    if not stages.measured:  # otherwise there may be no messages at a worker's peak
        largest = max(shape.lengths) / sum(shape.lengths)
        fixed += message_buffers(shape.placement, max(shape.together) * largest, stages)
    # Minimum memory: what exists throughout, and one stash of the worker's largest stage.
    together = np.array(shape.together)[:, np.newaxis]
    stash = holders.most(np.where(passes > 0, together * activations, 0.0))
    usable = np.array(network.usable_bytes or (cluster.usable_bytes,) * holders.workers)
    # (2) Memory over time. A stash stays from the start of its forward to the end of its backward, and
    # between these the micro-batch goes up to the last stage and back: ``stay``. None is there before the
    # worker's first op and after its last. What all stashes occupy, in byte-seconds, has to find place in
    # the free memory between these two.
    which, around = order_free.workers.which, order_free.workers.around
    stashes = _Stashes(
        which,
        around,
        holders.summed(passes * activations * order_free.stay)[which],
    )

    def state(updated: Floats, fixed: Floats, sent: float = 0.0) -> _WorkerState:
        if slowness:
            updated = updated * np.array(slowness)
        update = update_seconds_per_byte * float(updated.max()) + step_overhead_seconds + sent
        return _WorkerState.of(update, fixed, stash, usable, stashes)

    states = [state(of_workers(stages.trained), fixed)]
    if sharded is not None:  # owners are known to the byte, and so are their messages, in any order
        states.append(state(np.array(sharded.most), fixed - sharded.spared, sharded.seconds))
    return Common(order_free, tuple(states))
