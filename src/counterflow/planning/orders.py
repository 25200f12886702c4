"""Computed orders for the best plans: the best order of each plan's ops that the search finds, and cuts to
match.

The best plan of each scheme fixes placement, replicas and micro-batches. For the first few that differ in
placement or replicas, orders of the same micro-batches are computed, backwards whole and split, with each
kind of recomputation, for the plan's costs and within the memory that its devices have left. If the planner
is free to cut, order and cuts are improved alternately: layers move between neighbouring stages while the
order is fixed, then an order is computed for these stages.

Invariant: a computed order is a ``Play`` like any other, and only its simulated seconds are reported. Orders
that a bound proves not to be faster than the best plan are not computed, but reported (``Omission``). Not
considered: other placements, widths and micro-batches than those of the best plans, and asynchronous plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from counterflow.common.parallel_degrees import Degrees
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.schedule.orders.split import split_backwards
from counterflow.schedule.recompute_ops import without_recomputations
from counterflow.schedule.scheme import SPLIT
from counterflow.schedule.workload import Workload, plain
from counterflow.simulation import Costs
from counterflow.synthesis import Objective, Synthesis, lower_bound, problem_of, synthesize
from counterflow.synthesis.compute import START, one_by_one

from .cost.device_placement import network
from .cost.stages import Cutting
from .play import Play
from .predict import Predictor
from .prediction import Configuration, Prediction
from .search.constraints import Constraints
from .search.recut import LESS, recut
from .search.search_result import Plan, SearchResult
from .search.space import Omission

Progress = Callable[[float, float, str], None]
"""Called with the best step's seconds, the lower bound of the current ops, and the current activity."""

SYNTHESIZED = "synthesized"
"""Stands for a scheme's name if an order is computed."""

_PLANS = 4
"""Number of best plans that are considered ..."""

_JOBS = 6
"""... and number of orders computed for them, those with the lowest bounds."""

_TURNS = 3
"""Maximum orders computed for stages that are cut anew."""

_FIRST = 0.7
"""Share of time for the first order, if stages may be cut anew after it."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A computed order for a plan.

    Attributes:
        named: the plan whose placement, replicas and micro-batches it has.
        play: the simulated order; its cuts may differ from the plan's.
        synthesis: the order, its bound, and the method that found it.
        method: method that found the order.
    """

    named: Plan
    play: Play
    synthesis: Synthesis
    method: str

    @property
    def prediction(self) -> Prediction:
        """The prediction as a record."""
        return self.play.prediction()

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.play.seconds

    @property
    def bound_seconds(self) -> float:
        """Lower bound of the step over all orders of these ops within the memory."""
        return min(self.play.step_seconds(self.synthesis.lower_bound), self.seconds)

    @property
    def gap(self) -> float:
        """Maximum share of its step that a better order of these ops could save."""
        return 1 - self.bound_seconds / self.seconds if self.seconds else 0.0

    @property
    def split(self) -> bool:
        """True if its backwards are split."""
        return _is_split(self.play.schedule.workload)

    @property
    def recut(self) -> bool:
        """True if its stages differ from those of the rule for cuts."""
        return isinstance(self.play.configuration.cuts, tuple) and (
            self.play.configuration.cuts != self.named.play.configuration.cuts
        )


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders computed for the best plans.

    Attributes:
        named: the best plan before.
        computed: the orders, best first.
        omissions: orders that were not computed, and why.
        stopped: True if the search was interrupted.
    """

    named: Plan
    computed: tuple[Computed, ...]
    omissions: tuple[Omission, ...]
    stopped: bool

    @property
    def best(self) -> Computed | None:
        """The best order, if it is faster than the best named plan."""
        order = self.computed[0] if self.computed else None
        return order if order is not None and order.seconds < self.named.seconds * LESS else None

    @property
    def gain(self) -> float:
        """Share of the best named plan's step that the best order saves."""
        return 0.0 if self.best is None else 1 - self.best.seconds / self.named.seconds


def compute_orders(
    result: SearchResult,
    constraints: Constraints,
    *,
    seconds: float = 30.0,
    moves: int | None = None,
    progress: Progress | None = None,
) -> Orders:
    """Compute orders for the best plans of a search; Ctrl-C ends it with the results so far.

    Args:
        result: result of the search.
        constraints: constraints on a plan.
        seconds: approximate total time.
        moves: search budget of each order in moves instead of ``seconds``; the result is then the same on
            every machine.
        progress: called with the progress.
    """
    return _OrderSearch(
        result, constraints, seconds, moves, progress or (lambda _best, _bound, _what: None)
    ).run()


def with_orders(result: SearchResult, orders: Orders) -> SearchResult:
    """The search's result, with the best computed order at its head if it wins."""
    if orders.best is None:
        return result
    winner = Plan(orders.best.seconds, -1, orders.best.play)
    larger = result.in_more_memory
    return replace(
        result,
        best=(winner, *result.best)[: len(result.best)],
        of_schemes=(winner, *result.of_schemes),
        in_more_memory=larger if larger and larger.seconds < winner.seconds else None,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """Ops to order: ``play`` has their costs, but no order yet."""

    named: Plan
    play: Play
    bound_seconds: float

    def __str__(self) -> str:
        plan, schedule = self.play.configuration, self.play.schedule
        return (
            f"{self.named.play.configuration.scheme}'s placement (D={schedule.workers}, W={plan.replicas}, "
            f"B={plan.samples}, N={schedule.micro_batches}), backwards "
            f"{'split' if _is_split(schedule.workload) else 'whole'}, recompute {plan.recompute.value}"
        )


class _OrderSearch:
    def __init__(
        self,
        result: SearchResult,
        constraints: Constraints,
        seconds: float,
        moves: int | None,
        progress: Progress,
    ) -> None:
        self._result, self._constraints = result, constraints
        self._until = time.monotonic() + seconds
        self._moves, self._progress = moves, progress
        self._best = result.best[0]
        self._computed: list[Computed] = []
        self._predictors: dict[Degrees, Predictor] = {}
        self._omissions: list[Omission] = []

    def run(self) -> Orders:
        stopped = False
        try:
            jobs = self._jobs()
            for job in jobs[_JOBS:]:
                self._omit(job, f"{_JOBS} others have lower bounds")
            jobs = jobs[:_JOBS]
            for number, job in enumerate(jobs):
                if not job.bound_seconds < self._best_seconds * LESS:
                    self._omit(job, self._too_slow(job.bound_seconds))
                    continue
                share = (self._until - time.monotonic()) / (len(jobs) - number)
                if self._order(job, max(share, 0.0)):
                    stopped = True
                    break
        except KeyboardInterrupt:
            stopped = True
        computed = tuple(sorted(self._computed, key=attrgetter("seconds")))
        return Orders(self._best, computed, tuple(self._omissions), stopped)

    @property
    def _best_seconds(self) -> float:
        return min([self._best.seconds, *(order.seconds for order in self._computed)])

    def _jobs(self) -> list[_Job]:
        """Ops to order for the best plans, by rising bound, without those that cannot win.

        Jobs with the same micro-batches are adjacent, whole backwards first, whose order is where split ones
        begin.
        """
        groups = []
        for plan in self._plans():
            for recompute in self._constraints.recompute:
                candidates = [self._job(plan, recompute, split=split) for split in self._splits()]
                if jobs := [job for job in candidates if job is not None]:
                    groups.append(jobs)
        groups.sort(key=lambda jobs: min(job.bound_seconds for job in jobs))
        return [job for jobs in groups for job in jobs]

    def _plans(self) -> list[Plan]:
        plans: dict[object, Plan] = {}
        for plan in self._result.of_schemes:
            schedule, width = plan.play.schedule, plan.play.configuration.replicas
            if schedule.synchronous:
                plans.setdefault((schedule.placement, width), plan)
        return list(plans.values())[:_PLANS]

    def _splits(self) -> tuple[bool, ...]:
        wanted = dict(self._constraints.options).get(SPLIT.name)
        return tuple(split for split in (False, True) if wanted is None or split in wanted)

    def _job(self, plan: Plan, recompute: Recompute, *, split: bool) -> _Job | None:
        before = plan.play
        configuration = replace(before.configuration, scheme=SYNTHESIZED, options=(), recompute=recompute)
        schedule = Schedule(SYNTHESIZED, (), _workload(before.schedule.workload, split=split), ())
        play = self._predictor(before).play_order(configuration, schedule, before.mini_batch)
        job = _Job(plan, play, 0.0)
        try:
            bound = lower_bound(
                problem_of(
                    play.schedule.workload,
                    play.costs,
                    memory_bytes=_memory(play),
                    objective=_objective(play),
                )
            )
        except ConfigError as error:
            self._omit(job, str(error))
            return None
        seconds = play.step_seconds(bound.seconds)
        if not seconds < self._best.seconds * LESS:
            self._omit(job, self._too_slow(seconds))
            return None
        return replace(job, bound_seconds=seconds)

    def _predictor(self, play: Play) -> Predictor:
        inputs = play.inputs
        degrees = inputs.degrees
        if degrees not in self._predictors:
            self._predictors[degrees] = Predictor(
                inputs.whole_model, inputs.undivided, inputs.devices, degrees=degrees
            )
        return self._predictors[degrees]

    def _omit(self, job: _Job, reason: str) -> None:
        self._omissions.append(Omission(str(job), reason))

    def _too_slow(self, bound_seconds: float) -> str:
        least, best = f"{bound_seconds:.4g} s", f"{self._best_seconds:.4g} s"
        return f"no order of it takes less than {least}, but the best plan takes {best}"

    def _order(self, job: _Job, seconds: float) -> bool:
        until = time.monotonic() + seconds
        free = self._constraints.cuts is Cutting.BALANCED
        result = self._synthesize(job, self._warm_started(job), seconds * (_FIRST if free else 1.0), None)
        self._computed.append(result)
        for _ in range(_TURNS if free else 0):
            if result.synthesis.stopped or (self._moves is None and time.monotonic() >= until):
                break
            play = recut(
                self._predictor(result.play),
                result.play,
                lambda: self._moves is None and time.monotonic() >= until,
            )
            if play is result.play:
                break
            recomputed = self._synthesize(job, play, max(until - time.monotonic(), 0.0), result)
            if not recomputed.seconds < result.seconds * LESS:
                break
            self._computed[-1] = result = recomputed
        return result.synthesis.stopped

    def _warm_started(self, job: _Job) -> Play:
        plan = job.play.configuration
        if not _is_split(job.play.schedule.workload):
            return job.play
        for known in self._computed:
            like = known.play.configuration
            if known.named is job.named and like.recompute is plan.recompute and not known.split:
                orders = split_backwards(without_recomputations(known.play.schedule)).orders
                return self._predictor(job.play).play_order(
                    replace(plan, cuts=like.cuts),
                    replace(without_recomputations(job.play.schedule), orders=orders),
                    job.play.mini_batch,
                )
        return job.play

    def _synthesize(self, job: _Job, play: Play, seconds: float, before: Computed | None) -> Computed:
        best = self._best_seconds

        def report(value: float, bound: float, doing: str) -> None:
            self._progress(min(best, play.step_seconds(value)), play.step_seconds(bound), f"{job}: {doing}")

        synthesis = synthesize(
            play.schedule.workload,
            play.costs,
            memory_bytes=_memory(play),
            objective=_objective(play),
            seconds=seconds,
            moves=self._moves,
            start=play.schedule if any(play.schedule.orders) else None,
            report=report,
        )
        method = before.method if before is not None and synthesis.method == START else synthesis.method
        size = ("workers", synthesis.schedule.workers), ("micro_batches", synthesis.schedule.micro_batches)
        return Computed(
            job.named, replace(play, schedule=replace(synthesis.schedule, options=size)), synthesis, method
        )


def _workload(workload: Workload, *, split: bool) -> Workload:
    """The same micro-batches through the same pipes, one by one, with all backwards whole or all split."""
    pipe_of = {m: batch.pipe for batch in workload.passes for m in batch.micro_batches}
    same = plain(
        workload.placement, workload.micro_batches, pipe_of=[pipe_of[m] for m in sorted(pipe_of)], split=split
    )
    return replace(same, skips=workload.skips)


def _is_split(workload: Workload) -> bool:
    return any(share.split for batch in workload.passes for share in batch.shares)


def _memory(play: Play) -> tuple[float, ...]:
    """Memory of each worker without messages and communicators, less the search's tolerance of a limit."""
    rows = zip(play.usable_bytes, play.order_independent_bytes, strict=True)
    return tuple((usable - room) * (1 - 1e-8) for usable, room in rows)


def _objective(play: Play) -> Objective:
    return Objective.MAKESPAN if play.inputs.model.barrier else Objective.STEADY


def play_one_by_one(
    predictor: Predictor, workload: Workload, *, replicas: int, samples: int, recompute: Recompute
) -> Play:
    """A workload on a cluster, its ops one after the other: their costs, before an order is computed.

    Args:
        predictor: predictor of the model on the cluster; its layers are cut into balanced stages.
        workload: the ops.
        replicas: W, copies of the whole pipeline group.
        samples: B, samples of a micro-batch.
        recompute: what is computed again in a backward.

    Raises:
        ConfigError: a micro-batch has no samples, or there are more workers than devices.
    """
    if samples < 1:
        raise ConfigError(f"micro_batch={samples}: must be 1 or more")
    placement = workload.placement
    if placement.workers * replicas > predictor.cluster.size:
        raise ConfigError(
            f"{plural(placement.workers, 'worker')} · {plural(replicas, 'replica')} need "
            f"{placement.workers * replicas} devices, "
            f"but cluster {predictor.cluster.name} has {predictor.cluster.size}"
        )
    problem = problem_of(workload, Costs())
    configuration = Configuration.of(SYNTHESIZED, {}, replicas=replicas, samples=samples, recompute=recompute)
    links = network(predictor.cluster, placement, replicas, configuration.arrangement)
    stages = predictor.stages(
        Cutting.BALANCED,
        placement,
        samples,
        recompute,
        passes=-(-workload.micro_batches // placement.pipes),
        synchronous=workload.synchronous,
        on=links,
    )
    schedule = predictor.inputs.recomputed(problem.schedule(one_by_one(problem)), recompute)
    return Play(predictor.inputs, predictor.sharded_states, configuration, schedule, stages, links)
