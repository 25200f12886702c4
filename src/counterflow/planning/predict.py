"""The cost of one configuration: its schedule is built, its layers are cut, and it is simulated
(``play.py``).

Schedules, cuts and stage costs are cached, because a search predicts many configurations of one model and
cluster. Not predicted: reading data, the loss's own kernels beyond the profile's layers, and start-up.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache, partial
from typing import Any

from counterflow.common.parallel_degrees import Degrees, text_of
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.program.player import accelerated
from counterflow.program.sync import needs_sync
from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.placement import Placement
from counterflow.simulation.periods import whole_periods

from .cost.device_placement import Network, network
from .cost.positions import Inputs
from .cost.sharded_state import ShardedStates
from .cost.stages import Cuts, Cutting, StageCosts, cut, stage_costs
from .inputs.cluster import Cluster
from .inputs.model import Model
from .inputs.profile import Profile
from .play import Play
from .prediction import Configuration, Prediction
from .search.worker_cuts import Balance

STEADY_PERIODS = 4
"""Whole periods in the steady state of an asynchronous schedule: two equal ones, and those that they wait
for.
"""

_KEPT_SCHEDULES = 8

_ONE_POSITION = Degrees()


def predict(
    model: Model,
    profile: Profile,
    cluster: Cluster,
    configuration: Configuration,
    *,
    mini_batch: int | None = None,
) -> Prediction:
    """The cost of one configuration.

    Args:
        model: what is trained.
        profile: costs of its layers on a device.
        cluster: the devices and their links.
        configuration: how it is trained.
        mini_batch: samples of one mini-batch; None: those of one update.

    Raises:
        ConfigError: the scheme cannot be built with these options, the model has too few layers, the cluster
            too few devices.

    >>> from counterflow.planning import Cluster, LayerProfile, Link, Model, Profile
    >>> layer = LayerProfile((1.0,), (0.5,), (1.0,), (10.0,), weights_bytes=100.0, output_bytes=0.0)
    >>> profile = Profile("p", "some device", "2026-01-01", {"block": layer})
    >>> cluster = Cluster("c", 4, 1, memory_bytes=2000.0, inside=Link(0, 0), between=Link(0, 0))
    >>> model = Model("eight blocks", ("block",) * 8)
    >>> dapple = Configuration.of("dapple", {"stages": 4, "micro_batches": 4}, replicas=1, samples=1)
    >>> found = predict(model, profile, cluster, dapple)
    >>> found.step_seconds, found.peak_bytes  # 2 blocks a stage: F = 1, B = 2
    (21.0, (880.0, 860.0, 840.0, 820.0))
    """
    return Predictor(model, profile, cluster).predict(configuration, mini_batch=mini_batch)


class Predictor:
    """Predicts many configurations of one model on one cluster; schedules and stage costs are cached."""

    def __init__(
        self, model: Model, profile: Profile, cluster: Cluster, *, degrees: Degrees = _ONE_POSITION
    ) -> None:
        inputs = self.inputs = Inputs.at(model, profile, cluster, degrees)
        self._by_degrees = {degrees: self}
        self.model, self.profile, self.cluster = inputs.model, inputs.profile, inputs.cluster
        self._sums: dict[tuple[int, bool, bool], Any] = {}
        self.schedule = lru_cache(maxsize=_KEPT_SCHEDULES)(partial(_build, far=bool(model.skips)))
        """Schedule of a scheme and its options; an asynchronous one is long enough to reach its steady state.
        """
        self.network = cache(partial(network, self.cluster, summed=degrees.shards))
        """Cost of messages and all-reduces; see the function ``network``."""
        self.sharded_states = ShardedStates(self.model, profile, self.cluster)
        self._stage_costs = cache(partial(stage_costs, self.model, self.profile))
        self._cut, self._balanced = cache(partial(cut, self.model, self.profile)), cache(self._balanced_cuts)
        self._cuts = cache(self._cuts_of)

    def predict(self, configuration: Configuration, *, mini_batch: int | None = None) -> Prediction:
        """Predict a configuration; see the function of this name."""
        return self.play(configuration, mini_batch).prediction()

    def at(self, degrees: Degrees) -> Predictor:
        """The predictor of one of a worker's positions: its ``cluster`` consists of places, its ``profile``
        of divided layers.

        Raises:
            ConfigError: the degrees do not divide the layers or the devices.
        """
        if degrees not in self._by_degrees:
            inputs = self.inputs
            predictor = Predictor(inputs.whole_model, inputs.undivided, inputs.devices, degrees=degrees)
            self._by_degrees[degrees] = predictor
            predictor._by_degrees = self._by_degrees
        return self._by_degrees[degrees]

    @property
    def degrees(self) -> Degrees:
        """Degrees of a worker's positions."""
        return self.inputs.degrees

    def play(self, configuration: Configuration, mini_batch: int | None = None) -> Play:
        """The simulated configuration."""
        _require_samples(configuration)
        return self.play_order(
            configuration, self.schedule(configuration.scheme, configuration.options), mini_batch
        )

    def play_order(
        self, configuration: Configuration, schedule: Schedule, mini_batch: int | None = None
    ) -> Play:
        """The configuration, simulated with this schedule instead of its scheme's."""
        if configuration.degrees != self.degrees:
            return self.at(configuration.degrees).play_order(configuration, schedule, mini_batch)
        needed = schedule.workers * configuration.replicas
        if needed > self.cluster.size:
            degree = self.degrees.positions
            of = "of tensor parallelism" if degree == self.degrees.tp else "of a worker"
            positions = f" · {degree} positions {of}" if degree > 1 else ""
            raise ConfigError(
                f"{plural(schedule.workers, 'worker')} · "
                f"{plural(configuration.replicas, 'replica')}{positions} need "
                f"{needed * degree} devices, but cluster {self.cluster.name} has {self.inputs.devices.size}"
            )
        _require_flush(configuration, schedule, barrier=self.model.barrier)
        _require_whole_updates(configuration, schedule)
        where = configuration.replicas, configuration.arrangement
        links = self.network(schedule.placement, *where, nodes=configuration.nodes)
        stages = self.stages(
            configuration.cuts,
            schedule.placement,
            configuration.samples,
            configuration.recompute,
            passes=-(-schedule.micro_batches // schedule.pipes),
            synchronous=schedule.synchronous,
            on=links,
        )
        if self.model.gradient_share < 1 and needs_sync(schedule, configuration.replicas):
            stages = self._stage_costs(stages.cuts, stages.samples, residuals=True)
        skips = [link for link, _ in stages.skips]
        if skips or schedule.workload.skips:
            schedule = schedule.with_skips(skips)
            links = self.network(schedule.placement, *where, tuple(skips), nodes=configuration.nodes)
        schedule = self.inputs.recomputed(schedule, configuration.recompute)
        return Play(self.inputs, self.sharded_states, configuration, schedule, stages, links, mini_batch)

    def stages(
        self,
        cuts: Cuts,
        placement: Placement,
        samples: int,
        recompute: Recompute,
        *,
        passes: int,
        synchronous: bool,
        on: Network | None = None,
    ) -> StageCosts:
        """The costs of a placement's stages.

        Args:
            cuts: a rule, or the cuts themselves.
            placement: which worker holds which stage.
            samples: samples of a micro-batch.
            recompute: what a backward computes again.
            passes: number of micro-batches of an update through each pipe.
            synchronous: True if updates flush the pipeline.
            on: devices of its workers; cuts depend on them only if devices differ.
        """
        of = placement, samples, recompute
        layer_cuts, *_ = self.cuts(cuts, *of, passes=passes, synchronous=synchronous, on=on)
        return self._stage_costs(layer_cuts, samples)

    def cuts(
        self,
        cuts: Cuts,
        placement: Placement,
        samples: int,
        recompute: Recompute,
        *,
        passes: int,
        synchronous: bool,
        on: Network | None = None,
    ) -> tuple[tuple[int, ...], ...]:
        """The layers at which a placement's stages begin; see ``stages``.

        Balanced cuts that were moved because their estimated memory does not fit are followed by those that
        were not: a schedule may need less than the estimate.
        """
        slowness, usable = (on.slowness, on.usable_bytes) if on is not None else ((), ())
        of = placement, passes, samples, recompute
        return self._cuts(cuts, of, usable, slowness, synchronous=synchronous)

    def _cuts_of(
        self,
        cuts: Cuts,
        of: tuple[Placement, int, int, Recompute],
        usable: tuple[float, ...],
        slowness: tuple[float, ...],
        *,
        synchronous: bool,
    ) -> tuple[tuple[int, ...], ...]:
        placement, passes, samples, recompute = of
        if cuts is not Cutting.BALANCED:
            return (self._cut(cuts, placement.stages, samples),)
        recomputes = recompute.recomputes
        room = usable or self.cluster.usable_bytes
        balance = Balance(self.model, self.profile, *of, room, self._sums, slowness, synchronous)
        balanced = self._balanced(placement, passes, samples, recomputes, slowness, synchronous=synchronous)
        fitting = balance.fitting(balanced)
        return (fitting,) if fitting == balanced else (fitting, balanced)

    def _balanced_cuts(
        self,
        placement: Placement,
        passes: int,
        samples: int,
        recomputes: bool,
        slowness: tuple[float, ...],
        *,
        synchronous: bool,
    ) -> tuple[int, ...]:
        recompute = Recompute.STAGE if recomputes else Recompute.NONE
        judged = placement, passes, samples, recompute, math.inf
        balance = Balance(self.model, self.profile, *judged, self._sums, slowness, synchronous)
        return balance.balanced(self._cut(Cutting.BALANCED, placement.stages, samples))


def _require_samples(configuration: Configuration) -> None:
    if configuration.replicas < 1 or configuration.samples < 1:
        raise ConfigError(
            f"replicas={configuration.replicas}, samples={configuration.samples}: both must be 1 or more"
        )


def _require_flush(configuration: Configuration, schedule: Schedule, *, barrier: bool) -> None:
    zero_stage = configuration.zero_stage
    if zero_stage not in (0, 1):
        raise ConfigError(f"zero_stage={zero_stage}: give 1 to shard optimiser state, or 0")
    if zero_stage and configuration.degrees.positions > 1:
        raise ConfigError(
            f"zero_stage=1 cannot be combined with {text_of(configuration.degrees)}; give only one of them"
        )
    if zero_stage and not (schedule.synchronous and barrier):
        why = "no barrier" if schedule.synchronous else f"no flush in {schedule.scheme}"
        raise ConfigError(
            "zero_stage=1: updated weights are sent when a step ends on all workers, which does not happen "
            f"with {why}; "
            "give 0"
        )


def _require_whole_updates(configuration: Configuration, schedule: Schedule) -> None:
    if configuration.degrees.shards == 1:
        return
    if not schedule.synchronous:
        raise ConfigError(
            f"{schedule.scheme} with {text_of(configuration.degrees)}: positions that share sequences, "
            "experts or weights would meet other versions of them; choose a synchronous scheme"
        )
    if schedule.workload.slices > 1:
        raise ConfigError(
            f"{text_of(configuration.degrees)}: plans with them have whole sequences; give slices=1"
        )


def _build(scheme: str, options_given: tuple[tuple[str, OptionValue], ...], *, far: bool) -> Schedule:
    """The schedule; an asynchronous one with enough whole periods in its steady state.

    With ``far`` an op may wait, through a skip connection, for one that is as many periods earlier as there
    are stages.
    """
    known, options = registry.scheme(scheme), dict(options_given)
    if known.synchronous:
        return registry.build(scheme, options, accelerated)
    single = registry.build(scheme, options | {"periods": 1})
    # Until the first micro-batch is through, others follow it into the pipeline, and the same at its end.
    periods_needed = STEADY_PERIODS + (math.ceil(single.stages / single.micro_batches) if far else 0)
    fewest = periods_needed + math.ceil(single.workers / single.micro_batches)
    for periods in range(fewest, fewest + 2 * single.stages + 2):
        schedule = registry.build(scheme, options | {"periods": periods}, accelerated)
        if whole_periods(schedule) >= periods_needed:
            return schedule
    raise ConfigError(
        f"{schedule}: an asynchronous scheme is timed by its steady part, but this one has none of "
        f"{periods_needed} periods; its builder has to set Schedule.steady"
    )
