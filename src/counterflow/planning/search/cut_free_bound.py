"""Lower bounds of an update however the layers are cut: of its work, and of a micro-batch's round trip.

They cost next to nothing, so most candidates are pruned by them before their layers are cut. Everything here
is summed over single layers: a stage takes the time of its layers and the overhead of an op, so it takes at
least the time of each layer in the fastest way, without overhead.

Invariant: no bound is above those of ``order_free_bounds.py`` for any cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from counterflow.schedule.modes import Recompute

from ..cost.device_placement import Network
from ..cost.stages import stage_costs
from ..inputs.model import Model
from ..inputs.profile import Profile
from .least_times import least_times
from .path_bounds import HopCosts
from .shape import WorkloadShape


@dataclass(frozen=True, slots=True)
class CutFreeBound:
    """Minimum times and sizes of a micro-batch, for any cuts of the layers.

    Attributes:
        work: seconds of its forwards and backwards on all stages.
        round_trip: seconds of the ops on its way from stage 0 to the last and back; of its shortest slice, if
            it is sliced.
        up: bytes of an output on this way.
        down: bytes of an input gradient on this way.
        gradients: bytes of the gradients of stage 0 that copies of it sum.
        position_sum: seconds in which the positions of its worker sum them before.
    """

    work: float
    round_trip: float
    up: float
    down: float
    gradients: float
    position_sum: float = 0.0

    @classmethod
    def of(
        cls, shape: WorkloadShape, model: Model, profile: Profile, samples: int, recompute: Recompute
    ) -> CutFreeBound:
        """The bounds of a micro-batch of ``samples`` samples in a schedule of this shape."""
        bare = replace(profile, op_overhead_seconds=0.0)
        layer_costs = stage_costs(model, bare, range(1, len(model.layers)), samples)
        times = least_times(shape, layer_costs, recompute)
        outputs = [profile.layer(kind).output_bytes for kind in model.layers[:-1]]
        size = model.message_share * samples * min(outputs, default=0.0)
        size *= min(shape.lengths) / sum(shape.lengths)
        return cls(
            work=sum(times.both),
            round_trip=sum(times.forward) + sum(times.backward_op),
            up=size,
            down=size / shape.parts,
            gradients=layer_costs.synced[0],
            position_sum=layer_costs.position_sums[0],
        )

    def seconds(
        self, shape: WorkloadShape, hops: HopCosts, network: Network, *, barrier: bool = True
    ) -> float:
        """Minimum seconds of an update.

        Args:
            shape: shape of its schedule.
            hops: costs of its messages along its pipes.
            network: costs of its all-reduces, and its devices.
            barrier: whether a step begins when the previous one has ended on all workers.
        """
        # Workers together run all ops; divided among workers that differ, in proportion to their speed.
        speeds = sum(1 / slow for slow in network.slowness) if network.slowness else shape.placement.workers
        least = self.work * sum(shape.passes) / speeds
        if shape.only_work_counts(barrier=barrier):
            return least
        # As (2c) of ``OrderFreeBounds.seconds``: a micro-batch goes to the last stage and back, then the
        # gradients of stage 0 are summed; and each k in flight follow the k before.
        after = self.position_sum
        if network.copies > 1 and self.gradients:
            after += network.allreduce[0].seconds(self.gradients)
        for count, (slowness, seconds, up, down) in zip(shape.passes, hops.round_trips, strict=True):
            if count:
                trip = slowness * self.round_trip + seconds + up * self.up + down * self.down
                turns = -(-count // shape.most_in_flight) if shape.most_in_flight is not None else 1
                least = max(least, turns * trip + after)
        return least
