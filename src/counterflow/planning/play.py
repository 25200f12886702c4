"""A simulated configuration: its times, and the memory that its workers need.

The schedule's real order is simulated with each stage's seconds at the given micro-batch size, messages by
their link and bytes, all-reduces (Rabenseifner) on a lane in parallel with compute. Memory is weights · (1 +
gradients + optimiser states) of every copy and version held, the simulated peak of stashed activations,
message buffers, and the cluster's reserve.

Schedules are built and layers cut in ``predict.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from counterflow.common.plurals import plural
from counterflow.program.actions import Matching
from counterflow.program.communicators import communicators
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync
from counterflow.schedule.op import OpKind
from counterflow.simulation import Costs, Simulation
from counterflow.simulation.op_costs import StageOps
from counterflow.simulation.shared_cores import SharedCores

from .cost.device_placement import Network, mesh, shared_cores, sum_over
from .cost.memory import (
    WorkerMemory,
    allowed,
    counted_twice,
    message_buffers,
    skips_in_flight,
    together,
    walked,
)
from .cost.positions import Inputs
from .cost.sharded_state import ShardedState, ShardedStates
from .cost.stages import StageCosts
from .inputs.profile import Profile
from .inputs.reliability import unreliable
from .prediction import Configuration, Parts, Prediction
from .timing import Timing


@dataclass(frozen=True)
class Play:
    """A configuration and its simulation.

    Attributes:
        inputs: model, profile and cluster.
        sharded_states: sharded optimiser states of the model.
        configuration: the configuration.
        schedule: its schedule, with its recomputations.
        stages: costs of its stages.
        network: costs of its messages and all-reduces.
        mini_batch: samples of a step; None: those of an update.
        simulated: a play from which the times are taken if they are equal.
        p2p_scale: factor of the cost of messages.
        allreduce_scale: factor of the cost of all-reduces.
    """

    inputs: Inputs
    sharded_states: ShardedStates
    configuration: Configuration
    schedule: Schedule
    stages: StageCosts
    network: Network
    mini_batch: int | None = None
    simulated: Play | None = field(default=None, kw_only=True, repr=False)
    p2p_scale: float = field(default=1.0, kw_only=True)
    allreduce_scale: float = field(default=1.0, kw_only=True)

    @cached_property
    def costs(self) -> Costs:
        """Costs for the simulator."""
        sync = tuple(self.allreduce_scale * x for x in sync_seconds(self.stages, self.network))
        return self._costs(sync, sync_crossings(self.stages, self.network, self.allreduce_scale))

    @property
    def costs_without_sums(self) -> Costs:
        """The same if stages' sums take no time."""
        return self._costs(0.0, None)

    def _costs(
        self,
        sync: tuple[float, ...] | float,
        crossings: tuple[tuple[tuple[int, ...], float], ...] | None,
    ) -> Costs:
        cluster, network_, scale = self.inputs.cluster, self.network, self.p2p_scale
        recompute = self.configuration.recompute
        memory = self.stages.table(recompute)
        return Costs(
            ops=StageOps(self.stages.layers, self.stages.samples, recompute, memory, network_.slowness),
            p2p=_scaled(network_.latency_seconds, scale),
            p2p_per_byte=_scaled(network_.seconds_per_byte, scale),
            message_bytes=self.stages.message_bytes,
            skip_bytes=self.stages.skip_bytes or 0.0,
            overlap=cluster.overlap,
            ways=network_.ways,
            sync=sync,
            sync_crossings=crossings,
            sync_mode=self.configuration.sync,
            ties=tuple((stages, self.allreduce_scale * seconds) for stages, seconds in self._ties),
            sync_slowdown=cluster.sync_slowdown,
            recompute_ahead=self.schedule.workload.recomputes,
            replicas=self.configuration.replicas * self.inputs.degrees.shards,
            recompute=recompute,
            memory=memory,
        )

    @property
    def _ties(self) -> list[tuple[tuple[int, ...], float]]:
        """For weights that stages share: the stages, and the seconds of their sum over all holders."""
        inputs, configuration = self.inputs, self.configuration
        place = inputs.cluster, self.schedule.placement, configuration.replicas, configuration.arrangement
        sums = [sum_over(*place, tie.stages, nodes=configuration.nodes) for tie in self.stages.ties]
        share = inputs.model.gradient_share
        return [
            (tie.stages, summed.seconds(share * tie.gradient_bytes))
            for tie, summed in zip(self.stages.ties, sums, strict=True)
            if tie.gradient_bytes
        ]

    @cached_property
    def timing(self) -> Timing:
        """Simulated times."""
        if self.simulated is not None and self._has_times_of(self.simulated):
            return self.simulated.timing
        return Timing(self.schedule, self.costs, self.inputs.model, self._cores)

    def _has_times_of(self, play: Play) -> bool:
        zero_stage = play.configuration.zero_stage  # times do not depend on where optimiser state is stored
        return (
            all(getattr(self, name) is getattr(play, name) for name in ("schedule", "stages", "network"))
            and replace(self.configuration, zero_stage=zero_stage) == play.configuration
            and (self.p2p_scale, self.allreduce_scale) == (play.p2p_scale, play.allreduce_scale)
        )

    @property
    def simulation(self) -> Simulation:
        """The simulated schedule."""
        return self.timing.simulation

    def with_sync(self, sync: Sync) -> Play:
        """A copy with another sync mode."""
        return replace(self, configuration=replace(self.configuration, sync=sync))

    def with_zero_stage(self, zero_stage: int) -> Play:
        """A copy with optimiser state sharded, or not; it is not simulated again."""
        return replace(self, configuration=replace(self.configuration, zero_stage=zero_stage), simulated=self)

    @cached_property
    def sharded(self) -> ShardedState | None:
        """Owners of optimiser state; None: each worker holds the state of all its weights."""
        plan = self.configuration
        if not plan.zero_stage:
            return None
        where = self.schedule.placement, plan.replicas, plan.arrangement, plan.nodes
        return self.sharded_states.state(self.stages, *where)

    @property
    def update_samples(self) -> int:
        """Samples of all replicas between two updates."""
        chosen = self.configuration
        return chosen.replicas * chosen.degrees.dp_shard * self.schedule.micro_batches * chosen.samples

    @cached_property
    def updates(self) -> float:
        """Updates in a step."""
        return 1.0 if self.mini_batch is None else self.mini_batch / self.update_samples

    @cached_property
    def seconds(self) -> float:
        """Seconds of one step, with or without a barrier as the model's config says."""
        return self.step_seconds(self.timing.update + self.timing.core_wait)

    @cached_property
    def range_seconds(self) -> tuple[float, float] | None:
        """Seconds of one step with the low and the high quantile of every layer's seconds.

        The same order is simulated with ``Profile.bounds``: all layers are low, or high, at once. So it is
        the range of a machine whose speed varies; if layers vary independently a step varies less. Links,
        overheads and updates are as profiled. None: the profile has no quantiles.
        """
        bounds = self.inputs.undivided.bounds()
        if bounds is None:
            return None
        low, high = (self._with_profile(profile).seconds for profile in bounds)
        return min(low, self.seconds), max(high, self.seconds)

    def _with_profile(self, profile: Profile) -> Play:
        known = self.inputs
        inputs = Inputs.at(known.whole_model, profile, known.devices, known.degrees)
        stages = replace(self.stages, model=inputs.model, profile=inputs.profile)
        return replace(self, inputs=inputs, stages=stages, simulated=None)

    @property
    def steady_seconds(self) -> float:
        """Seconds of one step if steps follow each other without a barrier."""
        return self.step_seconds(self.timing.steady + self.timing.core_wait)

    def step_seconds(self, update_seconds: float) -> float:
        """Minimum seconds of one step whose ops, messages and sums take ``update_seconds`` in each update."""
        return (max(update_seconds, self.timing.core_work) + self._update) * self.updates

    def update_limit(self, step_seconds: float) -> float:
        """Maximum seconds of an update's ops, messages and sums in a step of ``step_seconds``."""
        return step_seconds / self.updates - self._update

    @cached_property
    def _cores(self) -> SharedCores | None:
        carried, chosen = self.inputs.profile.message_core_seconds, self.configuration
        nodes = [node for node, _ in self.inputs.devices.kinds_of_nodes()]
        if not any(node.fills_cores if carried else node.shares_cores for node in nodes):
            return None
        place = self.inputs.cluster, self.schedule.placement, chosen.replicas, chosen.arrangement
        cores = shared_cores(*place, chosen.degrees.positions, nodes=chosen.nodes)
        return replace(cores, message_seconds=carried)

    @cached_property
    def _update(self) -> float:
        seconds, cores = self._optimizer_seconds, self._cores
        shared = 0.0
        if cores is not None:
            carried = [cores.message_seconds * count for count in self._messages_of_sums()]
            shared = cores.seconds([a + b for a, b in zip(seconds, carried, strict=True)])
        return max(shared, *seconds) + self.broadcast_seconds

    def _messages_of_sums(self) -> list[float]:
        # A ring of n holders sends 2 (n - 1) messages of each.
        replicas = self.configuration.replicas * self.inputs.degrees.shards
        placement = self.schedule.placement
        holders = [replicas * len(placement.copies(stage)) for stage in range(self.schedule.stages)]
        return placement.summed([2.0 * (count - 1) for count in holders])

    @cached_property
    def _optimizer_seconds(self) -> list[float]:
        profile = self.inputs.profile
        updated = (
            self.schedule.placement.summed(self.stages.trained)
            if self.sharded is None
            else [*self.sharded.most]
        )
        if self.network.slowness:
            updated = [size * slow for size, slow in zip(updated, self.network.slowness, strict=True)]
        around = profile.step_overhead_seconds
        return [profile.update_seconds_per_byte * size + around for size in updated]

    @property
    def broadcast_seconds(self) -> float:
        """Seconds to send updated weights from their owners to all holders."""
        return 0.0 if self.sharded is None else self.sharded.seconds

    @cached_property
    def memory(self) -> tuple[WorkerMemory, ...]:
        """Each worker's memory at its peak."""
        stages, placement, changes = self.stages, self.schedule.placement, self.timing.changes
        spared = (0.0,) * placement.workers if self.sharded is None else self.sharded.spared
        rows = zip(changes.base, spared, counted_twice(placement, stages), strict=True)
        bases = [base - less - twice for base, less, twice in rows]
        gradients, optimizer, casts = map(
            placement.summed, (stages.gradients, stages.optimizer, stages.casts)
        )
        if self.sharded is not None:
            optimizer = [self.inputs.model.optimizer_states * owned for owned in self.sharded.most]
        if stages.measured:
            by_tag = self.inputs.cluster.cores is not None  # workers are processes of a machine, over Gloo
            peaks = walked(
                *(self.schedule, stages, self.configuration.recompute),
                versions=changes.versions.tolist(),
                updating=self._updating(),
                matching=Matching.TAG if by_tag else Matching.ORDER,
            )
        else:
            peaks = allowed(self.schedule, stages, changes)
            gradients = optimizer = casts = [0.0] * placement.workers  # optimiser state is one amount
        skips, shared = skips_in_flight(self.schedule, stages), self.communicators
        noted = [0.0] * placement.workers
        repeated = self.configuration.recompute.recomputes
        if repeated or placement.pipes > 1 or self.configuration.replicas > 1:
            noted = placement.summed(stages.noted_buffers)
        return tuple(
            replace(
                peak,
                weights=base + peak.weights,
                activations=peak.activations + noted[worker],
                buffers=peak.buffers + skips[worker],
                gradients=gradients[worker],
                optimizer=optimizer[worker],
                casts=casts[worker],
                communicators=shared[worker],
            )
            for worker, (base, peak) in enumerate(zip(bases, peaks, strict=True))
        )

    def _updating(self) -> list[float]:
        """Bytes that each worker needs for the gradient norm, or for the update, of its largest stage."""
        profile, placement = self.inputs.profile, self.schedule.placement
        norms = [
            min(profile.norm_bytes_per_byte * gradient_bytes, profile.norm_peak_bytes)
            for gradient_bytes in self.stages.gradients
        ]
        of_worker = [
            [stage for _, stage in placement.stages_on(worker)] for worker in range(placement.workers)
        ]
        if self.sharded is not None:
            rows = zip(of_worker, self.sharded.updating, strict=True)
            return [max(update, *(norms[stage] for stage in stages)) for stages, update in rows]
        peaks = list(map(max, norms, self.stages.update_peaks))
        return [max(peaks[stage] for stage in stages) for stages in of_worker]

    @cached_property
    def communicators(self) -> tuple[float, ...]:
        """Memory of each worker's communicators."""
        communicator_bytes = self.inputs.cluster.communicator_bytes
        if not communicator_bytes:
            return (0.0,) * self.schedule.workers
        ties = [tie.stages for tie in self.stages.ties if tie.gradient_bytes]
        return tuple(
            communicator_bytes * count
            for count in communicators(self.schedule, self.configuration.replicas, ties)
        )

    @property
    def order_independent_bytes(self) -> tuple[float, ...]:
        """Memory of each worker in addition to weights and activations, for any order: messages, skip
        connections, communicators.
        """
        schedule, stages = self.schedule, self.stages
        buffers = message_buffers(schedule.placement, together(schedule), stages)
        rows = zip(buffers, skips_in_flight(schedule, stages), self.communicators, strict=True)
        return tuple(buffer + skips + shared for buffer, skips, shared in rows)

    @property
    def usable_bytes(self) -> tuple[float, ...]:
        """Memory that each worker can use."""
        return self.network.usable_bytes or (self.inputs.cluster.usable_bytes,) * self.schedule.workers

    @cached_property
    def fits(self) -> bool:
        """True if every worker's memory suffices."""
        rows = zip(self.memory, self.usable_bytes, strict=True)
        return all(worker.total <= usable for worker, usable in rows)

    def prediction(self) -> Prediction:
        """The prediction as a record."""
        work, seconds = self.timing.work, self.seconds
        idle = 1 - sum(work) / len(work) / (seconds / self.updates) if seconds else 0.0
        return Prediction(
            configuration=replace(self.configuration, cuts=self.stages.cuts),
            schedule=str(self.schedule),
            workers=self.schedule.workers,
            micro_batches=self.schedule.micro_batches,
            step_seconds=seconds,
            steady_step_seconds=self.steady_seconds,
            mini_batch=self.update_samples if self.mini_batch is None else self.mini_batch,
            updates=round(self.updates),
            bubble_ratio=max(0.0, idle),
            memory=self.memory,
            usable_bytes=self.inputs.cluster.usable_bytes,
            notes=tuple(self._notes()),
            usable_by_worker=self.network.usable_bytes,
            mesh=self._mesh(),
            step_range_seconds=self.range_seconds,
        )

    def _mesh(self) -> list[list[list[int]]] | None:
        """Devices by replica, worker and position; None if a worker has one."""
        chosen = self.configuration
        positions = chosen.degrees.positions
        if positions == 1:
            return None
        where = self.schedule.placement, chosen.replicas, chosen.arrangement, positions
        device_mesh = mesh(*where, cluster=self.inputs.cluster, nodes=chosen.nodes)
        return [list(map(list, replica)) for replica in device_mesh]

    def parts(self) -> Parts:
        """Parts of the step's seconds: the savings if messages, then syncs, cost nothing."""
        played, slowed = self.timing, self.inputs.cluster.sync_slowdown != 0
        quiet = replace(self, allreduce_scale=0.0)
        still = replace(quiet, p2p_scale=0.0)
        work = quiet.timing.work if slowed else played.work
        mean, most = sum(work) / len(work), max(work)
        without_sums, without_messages = quiet.timing.update, still.timing.update
        waits = max(played.core_wait, played.core_work - played.update)
        alone, n = max(self._optimizer_seconds), self.updates
        return Parts(
            compute=mean * n,
            imbalance=(most - mean) * n,
            bubbles=(without_messages - most) * n,
            messages=(without_sums - without_messages) * n,
            allreduce=(played.update - without_sums) * n,
            update=alone * n,
            shared_cores=(waits + self._update - self.broadcast_seconds - alone) * n,
            broadcasts=self.broadcast_seconds * n,
        )

    def _notes(self) -> list[str]:
        sharing = [node for node, _ in self.inputs.devices.kinds_of_nodes() if node.shares_cores]
        limit = "; messages and sums are predicted as if they had cores of their own"
        if self.inputs.profile.message_core_seconds:
            limit = ""
        notes = [
            f"{node.devices} workers of a node share {plural(node.cores or 0, 'core')}, "
            f"in equal shares{limit}"
            for node in dict.fromkeys(sharing)
        ]
        layers = self.inputs.profile.layers
        largest = {kind: layers[kind].samples[-1] for kind in dict.fromkeys(self.inputs.model.layers)}
        beyond = [
            kind
            for kind, most in largest.items()
            if self.configuration.samples > most and layers[kind].seconds(OpKind.FORWARD, most) > 0
        ]
        if beyond:
            notes.append(
                f"micro-batches of {plural(self.configuration.samples, 'sample')} exceed the profile of "
                f"{', '.join(beyond)} (at most {largest[beyond[0]]:g}): their times are extrapolated linearly"
            )
        if (reason := unreliable(self.inputs.undivided)) is not None:
            notes.append(f"the profile is {reason}")
        return notes


def _scaled(table: tuple[tuple[float, ...], ...], scale: float) -> tuple[tuple[float, ...], ...]:
    return table if scale == 1 else tuple(tuple(scale * x for x in row) for row in table)


def sync_seconds(stages: StageCosts, links: Network) -> tuple[float, ...]:
    """Seconds of each stage's all-reduce alone, after the sum over the positions of a worker."""
    return tuple(
        (summed.seconds(size) if links.copies > 1 and size else 0.0) + of_positions
        for summed, size, of_positions in zip(
            links.allreduce, stages.synced, stages.position_sums, strict=True
        )
    )


def sync_crossings(
    stages: StageCosts, links: Network, scale: float = 1.0
) -> tuple[tuple[tuple[int, ...], float], ...] | None:
    """For each stage's all-reduce the ways out of nodes that it shares, and its seconds there.

    None if nothing is shared.
    """
    if not any(links.crossed) or links.copies == 1:
        return None
    rows = zip(links.crossed, links.allreduce, stages.synced, strict=True)
    return tuple((ways, scale * summed.crossing_seconds_per_byte * size) for ways, summed, size in rows)
