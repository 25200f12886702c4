"""A configuration, played: what the simulator makes of it, and the memory that its workers need.

The schedule's real order is played with each stage's seconds at the micro-batch size at hand, messages by
their link and bytes, all-reduces (Rabenseifner) on a lane beside compute. Memory is weights · (1 + gradients
+ optimiser states) of every copy and version held, the simulated peak of stashed activations, message
buffers, and the cluster's reserve.

What it does not do: build the schedule and cut the layers (``predict.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from counterflow.errors import ConfigError
from counterflow.program.actions import Matching
from counterflow.program.communicators import communicators
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.placement import Placement
from counterflow.simulation import Costs, Simulation, peak_bytes, simulate
from counterflow.simulation.op_costs import per_stage, stage_bytes
from counterflow.simulation.timed_schedule import timed

from .cost.device_placement import Network, mesh, sum_over
from .cost.memory import walked
from .cost.sharded_state import ShardedState
from .cost.stages import PlannedOps, StageCosts
from .prediction import Configuration, Parts, Prediction, WorkerMemory

if TYPE_CHECKING:
    from .predict import Predictor

_WITHOUT_STATE = "costs", "simulation", "updates", "_played", "_steady", "_core_seconds", "_work", "_peaks"
"""What of a play optimiser state has no part in, wherever it is kept."""


@dataclass(frozen=True)
class Play:
    """A configuration and what the simulator makes of it."""

    predictor: Predictor
    configuration: Configuration
    schedule: Schedule
    stages: StageCosts
    network: Network
    mini_batch: int | None = None
    p2p_scale: float = field(default=1.0, kw_only=True)
    """What messages are multiplied by."""
    allreduce_scale: float = field(default=1.0, kw_only=True)
    """What all-reduces are multiplied by."""

    @cached_property
    def costs(self) -> Costs:
        """What the simulator is fed with."""
        cluster, network_, scale = self.predictor.cluster, self.network, self.p2p_scale
        return Costs(
            ops=PlannedOps(self.stages, self.configuration.recompute, network_.slowness),
            p2p=tuple(tuple(scale * x for x in row) for row in network_.latency_seconds),
            p2p_per_byte=tuple(tuple(scale * x for x in row) for row in network_.seconds_per_byte),
            message_bytes=self.stages.message_bytes,
            skip_bytes=tuple(self.stages.message_share * size for _, size in self.stages.skips) or 0.0,
            overlap=cluster.overlap,
            ways=network_.ways,
            sync=tuple(self.allreduce_scale * x for x in sync_seconds(self.stages, network_)),
            sync_crossings=sync_crossings(self.stages, network_, self.allreduce_scale),
            sync_mode=self.configuration.sync,
            ties=tuple((stages, self.allreduce_scale * seconds) for stages, seconds in self._ties),
            sync_slowdown=cluster.sync_slowdown,
            replicas=self.configuration.replicas,
            recompute=self.configuration.recompute,
            memory=self.stages.bytes,
        )

    @property
    def _ties(self) -> list[tuple[tuple[int, ...], float]]:
        """Of what stages share, these and the seconds of its sum over all who hold it."""
        predictor, configuration = self.predictor, self.configuration
        place = predictor.cluster, self.schedule.placement, configuration.replicas, configuration.arrangement
        return [
            (tie.stages, sum_over(*place, tie.stages, nodes=configuration.nodes).seconds(tie.gradient_bytes))
            for tie in self.stages.ties
            if tie.gradient_bytes
        ]

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule played."""
        return simulate(self.schedule, self.costs)

    def with_sync(self, sync: Sync) -> Play:
        """The same in another sync mode."""
        return replace(self, configuration=replace(self.configuration, sync=sync))

    def with_zero_stage(self, zero_stage: int) -> Play:
        """The same with optimiser state sharded, or not; what that has no part in is not played again."""
        found = replace(self, configuration=replace(self.configuration, zero_stage=zero_stage))
        vars(found).update({name: vars(self)[name] for name in _WITHOUT_STATE if name in vars(self)})
        return found

    @cached_property
    def sharded(self) -> ShardedState | None:
        """Who owns what; None: each worker keeps the optimiser state of all that it holds."""
        plan = self.configuration
        if not plan.zero_stage:
            return None
        return self.predictor.sharded_state(
            self.stages, self.schedule.placement, plan.replicas, plan.arrangement, plan.nodes
        )

    @property
    def _spared(self) -> tuple[float, ...]:
        """Bytes of optimiser state that others keep for each worker."""
        return (0.0,) * self.schedule.workers if self.sharded is None else self.sharded.spared

    @property
    def update_samples(self) -> int:
        """Samples of all replicas between two updates."""
        return self.configuration.replicas * self.schedule.micro_batches * self.configuration.samples

    @cached_property
    def updates(self) -> float:
        """Updates in a step."""
        return 1.0 if self.mini_batch is None else self.mini_batch / self.update_samples

    @cached_property
    def seconds(self) -> float:
        """One step, with or without a barrier as the model's config says."""
        return self.step_seconds(self._played)

    @cached_property
    def steady_seconds(self) -> float:
        """One step, where steps follow each other without a barrier."""
        return self.step_seconds(self._steady)

    def step_seconds(self, update_seconds: float) -> float:
        """One step, if an update's ops, messages and sums take so long where no worker waits for a core."""
        return (max(update_seconds, self._core_seconds) + self._update) * self.updates

    def update_limit(self, step_seconds: float) -> float:
        """The most that an update's ops, messages and sums may take in a step of so many seconds."""
        return step_seconds / self.updates - self._update

    @cached_property
    def _steady(self) -> float:
        seconds = self.simulation.steady_step
        if seconds is None:
            raise ConfigError(
                f"{self.schedule}: an asynchronous scheme is timed by the periods of its steady part, and "
                "these are not alike or too few; its builder has to say where they are (Schedule.steady)"
            )
        return seconds

    @cached_property
    def _played(self) -> float:
        """One update, as simulated."""
        if not self.schedule.synchronous:
            return self._steady
        model, simulation = self.predictor.model, self.simulation
        if model.barrier:
            return simulation.makespan
        seconds = simulation.steady_step_clipped if model.clips else simulation.steady_step
        assert seconds is not None  # it has a flush
        return seconds

    @cached_property
    def _waiting(self) -> float:
        """Seconds of an update that workers wait for cores which they share."""
        return max(0.0, self._core_seconds - self._played)

    @cached_property
    def _core_seconds(self) -> float:
        """What an update takes at least where workers share cores.

        However they take turns, all cores together have the work of all workers to do; where nodes differ,
        those of each node.
        """
        cluster = self.predictor.cluster
        if not self.predictor.shares_cores:
            return 0.0
        if self.network.cores:
            work = self._work
            each = self.predictor.tensor_parallel
            return max(each * sum(work[w] for w in on) / cores for on, cores in self.network.cores)
        assert cluster.cores is not None
        devices = self.configuration.replicas * self.predictor.tensor_parallel
        return sum(self._work) * devices / (cluster.cores * cluster.nodes)

    @cached_property
    def _update(self) -> float:
        """What follows an update's ops, syncs and messages."""
        return self._optimizer + self.broadcast_seconds

    @cached_property
    def _optimizer(self) -> float:
        profile = self.predictor.profile
        updated = (
            self.schedule.placement.summed(self.stages.trained) if self.sharded is None else self.sharded.most
        )
        if self.network.slowness:
            updated = [size * slow for size, slow in zip(updated, self.network.slowness, strict=True)]
        return profile.update_seconds_per_byte * max(updated) + profile.step_overhead_seconds

    @property
    def broadcast_seconds(self) -> float:
        """To send updated weights from their owners to all who hold them."""
        return 0.0 if self.sharded is None else self.sharded.seconds

    @cached_property
    def _work(self) -> tuple[float, ...]:
        """Seconds of ops of each worker in an update."""
        if self.schedule.synchronous:
            return self.simulation.busy
        return tuple(busy / self.schedule.periods for busy in self.simulation.busy)

    @cached_property
    def memory(self) -> tuple[WorkerMemory, ...]:
        """Each worker's memory at its peak, with messages as its list has them."""
        if self.stages.bytes.workspace is None:
            return self._memory_without_peaks
        schedule, stages, recompute = self.schedule, self.stages, self.configuration.recompute
        held = stages.bytes
        each = stage_bytes(held, recompute, schedule.stages)
        gradients, optimizer, casts = (
            schedule.placement.summed(per_stage("bytes", of, schedule.stages))
            for of in (held.gradients or 0.0, held.optimizer, held.casts)
        )
        if self.sharded is not None:
            optimizer = [self.predictor.model.optimizer_states * own for own in self.sharded.most]
        once = timed(schedule).changes(self.costs)
        bases = self._without_ties(tuple(b - less for b, less in zip(once.base, self._spared, strict=True)))
        by_tag = self.predictor.cluster.cores is not None  # workers are processes of this machine, over Gloo
        peaks = walked(
            *(schedule, stages, each, recompute),
            versions=once.versions.tolist(),
            updating=self._updating(gradients),
            matching=Matching.TAG if by_tag else Matching.ORDER,
        )
        skips = self._skips
        return tuple(
            WorkerMemory(
                weights=base + peak.versions,
                activations=peak.activations,
                buffers=peak.buffers + skip,
                workspace=peak.workspace,
                gradients=gradient,
                optimizer=states,
                casts=cast,
                communicators=shared,
            )
            for base, peak, skip, gradient, states, cast, shared in zip(
                bases, peaks, skips, gradients, optimizer, casts, self.communicators, strict=True
            )
        )

    @cached_property
    def _memory_without_peaks(self) -> tuple[WorkerMemory, ...]:
        """The same by a profile that has no peaks of ops: for messages there is an allowance."""
        peaks = tuple(peak - less for peak, less in zip(self._peaks, self._spared, strict=True))
        held = self.stages.bytes
        each = stage_bytes(held, Recompute.NONE, self.schedule.stages)
        fixed = self.schedule.placement.summed(
            [w + rest for w, rest in zip(each.weights, each.fixed, strict=True)]
        )
        less = map(sum, zip(self._counted_twice, self._spared, strict=True))
        fixed = [f - not_there for f, not_there in zip(fixed, less, strict=True)]
        versions = self._further_versions(fixed, peaks)
        return tuple(
            WorkerMemory(fixed_ + more, peak - fixed_ - more, buffer, communicators=shared)
            for fixed_, more, peak, buffer, shared in zip(
                fixed, versions, peaks, self.buffers, self.communicators, strict=True
            )
        )

    def _further_versions(self, fixed: list[float], peaks: tuple[float, ...]) -> list[float]:
        """Bytes of each worker's further weight versions, in which activations have no part."""
        if self.schedule.synchronous:
            return [0.0] * len(fixed)
        none = (0.0,) * self.schedule.stages
        idle = replace(
            self.stages.bytes, activations=none, inputs=none, layer_inputs=none, largest_layer=none
        )
        bare = self._without_ties(peak_bytes(self.schedule, Costs(memory=idle)))
        return [min(b - f, p - f) for b, f, p in zip(bare, fixed, peaks, strict=True)]

    def _updating(self, gradients: Sequence[float]) -> list[float]:
        """Bytes that each worker needs for the gradient norm, or for its largest stage's update."""
        profile, placement = self.predictor.profile, self.schedule.placement
        norms = (min(profile.norm_bytes_per_byte * mine, profile.norm_peak_bytes) for mine in gradients)
        if self.sharded is not None:
            return list(map(max, norms, self.sharded.updating))
        peaks = self.stages.update_peaks
        return [
            max(norm, *(peaks[stage] for _, stage in placement.held(worker)))
            for worker, norm in enumerate(norms)
        ]

    @cached_property
    def buffers(self) -> tuple[float, ...]:
        """Of each worker's largest message, once to send and once to receive; and skips on their way."""
        placed = self.schedule.placement.pipes_stages
        together = max(len(one.micro_batches) for one in self.schedule.workload.passes)
        buffers = message_buffers(placed, together, self.stages)
        return tuple(map(sum, zip(buffers, self._skips, strict=True)))

    @cached_property
    def communicators(self) -> tuple[float, ...]:
        """Of each worker's communicators."""
        each = self.predictor.cluster.communicator_bytes
        if not each:
            return (0.0,) * self.schedule.workers
        ties = [tie.stages for tie in self.stages.ties if tie.gradient_bytes]
        return tuple(
            each * count for count in communicators(self.schedule, self.configuration.replicas, ties)
        )

    @property
    def beside(self) -> tuple[float, ...]:
        """What each worker has beside weights and activations: message buffers and communicators."""
        return tuple(map(sum, zip(self.buffers, self.communicators, strict=True)))

    @cached_property
    def _skips(self) -> list[float]:
        """Of skips on their way."""
        placed = self.schedule.placement.pipes_stages
        if not self.stages.skips:
            return [0.0] * self.schedule.workers
        together = max(len(one.micro_batches) for one in self.schedule.workload.passes)
        return skips_on_their_way(placed, together, self.schedule.micro_batches, self.stages)

    @cached_property
    def fits(self) -> bool:
        """Whether every worker's memory is there."""
        usable = self.usable_bytes
        if self.stages.bytes.workspace is None:
            rows = zip(self._peaks, self.beside, self._spared, strict=True)
            needed = [peak + buffer - less for peak, buffer, less in rows]
        else:
            needed = [worker.total for worker in self.memory]
        return all(bytes_ <= there for bytes_, there in zip(needed, usable, strict=True))

    @property
    def usable_bytes(self) -> tuple[float, ...]:
        """What each worker has for it."""
        return self.network.usable_bytes or (self.predictor.cluster.usable_bytes,) * self.schedule.workers

    @cached_property
    def _peaks(self) -> tuple[float, ...]:
        """Bytes of each worker at its peak, without buffers."""
        return self._without_ties(peak_bytes(self.schedule, self.costs))

    def _without_ties(self, peaks: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(peak - twice for peak, twice in zip(peaks, self._counted_twice, strict=True))

    @cached_property
    def _counted_twice(self) -> list[float]:
        return counted_twice(self.schedule.placement, self.stages)

    def prediction(self) -> Prediction:
        """All of it as a record."""
        idle = 1 - sum(self._work) / len(self._work) / (self.seconds / self.updates) if self.seconds else 0.0
        return Prediction(
            configuration=replace(self.configuration, cuts=self.stages.cuts),
            schedule=str(self.schedule),
            workers=self.schedule.workers,
            micro_batches=self.schedule.micro_batches,
            step_seconds=self.seconds,
            steady_step_seconds=self.steady_seconds,
            mini_batch=self.update_samples if self.mini_batch is None else self.mini_batch,
            updates=round(self.updates),
            bubble_ratio=max(0.0, idle),
            memory=self.memory,
            usable_bytes=self.predictor.cluster.usable_bytes,
            notes=tuple(self._notes()),
            usable_by_worker=self.network.usable_bytes,
            mesh=self._mesh(),
        )

    def _mesh(self) -> list[list[list[int]]] | None:
        """Devices by replica, worker and position; None without tensor parallelism."""
        chosen = self.configuration
        if chosen.tensor_parallel == 1:
            return None
        where = self.schedule.placement, chosen.replicas, chosen.arrangement, chosen.tensor_parallel
        found = mesh(*where, cluster=self.predictor.cluster, nodes=chosen.nodes)
        return [list(map(list, replica)) for replica in found]

    def parts(self) -> Parts:
        """Where the step's seconds go: what is left out when messages, then syncs, cost nothing."""
        quiet = replace(self, allreduce_scale=0.0)
        still = replace(quiet, p2p_scale=0.0)
        work = self._work if self.predictor.cluster.sync_slowdown == 0 else quiet._work  # noqa: SLF001
        mean, most = sum(work) / len(work), max(work)
        n = self.updates
        return Parts(
            compute=mean * n,
            imbalance=(most - mean) * n,
            bubbles=(still._played - most) * n,  # noqa: SLF001
            messages=(quiet._played - still._played) * n,  # noqa: SLF001
            allreduce=(self._played - quiet._played) * n,  # noqa: SLF001
            update=self._optimizer * n,
            shared_cores=self._waiting * n,
            broadcasts=self.broadcast_seconds * n,
        )

    def _notes(self) -> list[str]:
        sharing = [node for node, _ in self.predictor.whole[1].kinds_of_nodes() if node.shares_cores]
        notes = [
            f"{node.devices} workers of a node share {node.cores} "
            f"core{'s' if node.cores != 1 else ''}: a step takes at least the work of all workers "
            "over the cores, and who waits for whom is not foreseen"
            for node in dict.fromkeys(sharing)
        ]
        layers = self.predictor.profile.layers
        largest = {kind: layers[kind].samples[-1] for kind in dict.fromkeys(self.predictor.model.layers)}
        beyond = [
            kind
            for kind, most in largest.items()
            if self.configuration.samples > most and layers[kind].forward(most) > 0
        ]
        if beyond:
            notes.append(
                f"micro-batches of {self.configuration.samples} samples are beyond what the profile has of "
                f"{', '.join(beyond)} (at most {largest[beyond[0]]:g}): their times go on in a straight line"
            )
        return notes


def sync_seconds(stages: StageCosts, links: Network) -> tuple[float, ...]:
    """Seconds of each stage's all-reduce alone."""
    return tuple(
        summed.seconds(size) if links.copies > 1 and size else 0.0
        for summed, size in zip(links.allreduce, stages.synced, strict=True)
    )


def sync_crossings(
    stages: StageCosts, links: Network, scale: float = 1.0
) -> tuple[tuple[tuple[int, ...], float], ...] | None:
    """Of each stage's all-reduce the ways out of nodes that it shares, and its seconds there.

    None: nothing is shared.
    """
    if not any(links.crossed) or links.copies == 1:
        return None
    rows = zip(links.crossed, links.allreduce, stages.synced, strict=True)
    return tuple((ways, scale * summed.crossing_seconds_per_byte * size) for ways, summed, size in rows)


def message_buffers(
    pipes: tuple[tuple[int, ...], ...], together: int, stages: StageCosts
) -> tuple[float, ...]:
    """Bytes of each worker's largest message, once to send and once to receive.

    Args:
        pipes: a placement's ``pipes_stages``.
        together: the most micro-batches that a forward sends at once.
        stages: the stages' costs.
    """
    largest = [0.0] * (max(map(max, pipes)) + 1)
    for holders in pipes:
        for stage, (one, other) in enumerate(pairwise(holders)):
            if one != other:
                for worker in (one, other):
                    largest[worker] = max(largest[worker], stages.output_bytes[stage])
    return tuple(2 * together * size for size in largest)


def skips_on_their_way(
    pipes: tuple[tuple[int, ...], ...], together: int, micro_batches: int, stages: StageCosts
) -> list[float]:
    """Bytes that each worker keeps of skips until their users take them, and receives of one.

    A sender is at most as many forwards ahead of a user as there are stages between them.
    """
    found = [0.0] * (max(map(max, pipes)) + 1)
    for holders in pipes:
        for link, size in stages.skips:
            sender, user = holders[link.source], holders[link.target]
            if sender != user:
                ahead = 1 if link.once else min(link.target - link.source, micro_batches)
                found[sender] += size * together * ahead
                found[user] += size * together
    return found


def counted_twice(placement: Placement, stages: StageCosts) -> list[float]:
    """Bytes of each worker that several of its stages have, of which there is one copy."""
    found = [0.0] * placement.workers
    for tie in stages.ties:
        for worker in range(placement.workers):
            shared = len({s for _, s in placement.held(worker)} & {*tie.stages})
            found[worker] += max(0, shared - 1) * tie.held_bytes
    return found
