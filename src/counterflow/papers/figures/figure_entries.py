"""Plans of the schemes of a figure: each scheme's best one in a run, with and without what the paper states.

Invariant: a plan is the planner's; a description only restricts its space.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from counterflow.errors import PlanError
from counterflow.planning.prediction import choices
from counterflow.planning.search.constraints import Constraints, value_of
from counterflow.planning.search.search import search
from counterflow.planning.search.search_result import Plan
from counterflow.planning.task import PlanningTask
from counterflow.schedule import registry
from counterflow.schedule.modes import Recompute

from .figure_changes import changed_task
from .published import Competitor, Figure, Run, Stated

_UNLIMITED_BYTES = 1e18


@dataclass(frozen=True, slots=True)
class FigureEntry:
    """A scheme in one run.

    Attributes:
        label: the competitor's.
        run: the run's label.
        plan: the best plan with what the paper states; None if nothing fits.
        free: the best plan in the paper's space, whatever is stated; None if nothing fits.
        stated: what the paper states of its configuration.
        devices: number of devices of the run.
        usable_bytes: memory of a device without the reserve.
        too_large: whether memory alone is the reason that there is no plan.
    """

    label: str
    run: str
    plan: Plan | None
    free: Plan | None
    stated: Stated | None
    devices: int
    usable_bytes: float
    too_large: bool = False

    @property
    def throughput(self) -> float | None:
        """Samples per second with what the paper states; None if nothing fits."""
        return None if self.plan is None else _throughput(self.plan)

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of the fullest worker, without the reserve."""
        return None if self.plan is None else max(self.plan.prediction.peak_bytes)

    @property
    def mean_peak_bytes(self) -> float | None:
        """Peak memory averaged over workers."""
        return None if self.plan is None else fmean(self.plan.prediction.peak_bytes)


def best_plan(
    competitor: Competitor, run: Run, task: PlanningTask, stated: Stated | None = None
) -> Plan | None:
    """The planner's best plan in the paper's space.

    Args:
        competitor: the scheme, and what it may choose.
        run: the run, which may fix the number of micro-batches.
        task: the run's task.
        stated: what the paper states of its configuration; None: nothing.
    """
    wanted = competitor.constraints(stated)
    depths = wanted.depths if run.depth is None else (run.depth,)
    legal = tuple(d for d in depths or () if task.cluster.size % d == 0)
    sizes = (run.samples,) if run.samples is not None else tuple(sorted(wanted.samples or (), reverse=True))
    tries = [(legal, sizes)]
    if competitor.largest or run.micro_batches is not None:
        # The largest size that fits, and a mini-batch of N micro-batches, need a search for each of both.
        tries = [((depth,), (size,)) for depth in legal for size in sizes]
    elif competitor.by_depth:
        tries = [((depth,), sizes) for depth in legal]
    best: Plan | None = None
    settled: set[tuple[int, ...]] = set()
    for depths, samples in tries:
        if depths in settled:
            continue
        mini_batch = _mini_batch(competitor, run, task, depths, samples)
        here = competitor.at_depth(depths[0]).constraints(stated) if competitor.by_depth else wanted
        plan = _search(task, mini_batch, replace(here, depths=depths, samples=samples))
        if plan is None:
            continue
        if competitor.largest:
            settled.add(depths)
        if best is None or _throughput(plan) > _throughput(best):
            best = plan
    return best


def _mini_batch(
    competitor: Competitor, run: Run, task: PlanningTask, depths: tuple[int, ...], samples: tuple[int, ...]
) -> int:
    if run.micro_batches is not None:
        return run.micro_batches * samples[0] * task.cluster.size // depths[0]
    # PipeDream has no mini-batch; its 48 samples divide three of them.
    return task.mini_batch * (3 if any(size % 3 == 0 for size in competitor.samples) else 1)


def _search(task: PlanningTask, mini_batch: int, wanted: Constraints) -> Plan | None:
    try:
        results = search(task.model, task.profile, task.cluster, mini_batch, wanted, count=1)
    except PlanError:
        return None
    return results.best[0]


def _throughput(plan: Plan) -> float:
    return plan.prediction.samples_per_second


def entry_of(
    figure: Figure, competitor: Competitor, run: Run, task: PlanningTask, *, free: bool = True
) -> FigureEntry:
    """A scheme in a run; without ``free`` the whole space is searched only if nothing is stated."""
    usable = task.cluster.usable_bytes
    if competitor.change:
        task = changed_task(task, competitor.change)
    if figure.unlimited:
        task = _unlimited(task)
    stated = competitor.statement(run.label)
    plan = best_plan(competitor, run, task, stated)
    chosen = best_plan(competitor, run, task) if free and stated is not None else plan
    large = plan is None and best_plan(competitor, run, _unlimited(task), stated) is not None
    return FigureEntry(competitor.label, run.label, plan, chosen, stated, task.cluster.size, usable, large)


def _unlimited(task: PlanningTask) -> PlanningTask:
    return replace(task, cluster=replace(task.cluster, memory_bytes=_UNLIMITED_BYTES))


def is_stated(plan: Plan | None, stated: Stated | None) -> bool:
    """True if a plan is the stated configuration, as far as it is stated."""
    if plan is None or stated is None:
        return False
    chosen = plan.play.configuration
    scheme = registry.scheme(chosen.scheme)
    pairs = (
        (plan.play.schedule.workers, stated.depth),
        (chosen.replicas, stated.replicas),
        (chosen.samples, stated.samples),
        (chosen.recompute is not Recompute.NONE, stated.recompute),
        *((value_of(scheme, name, chosen.options), value) for name, value in stated.options),
    )
    return all(statement is None or chosen == statement for chosen, statement in pairs)


def configuration(plan: Plan | None) -> str:
    """A plan's configuration for people."""
    if plan is None:
        return "nothing fits"
    chosen = plan.play.configuration
    recomputation = f"recompute {chosen.recompute.value}" if chosen.recompute is not Recompute.NONE else ""
    parts = (
        f"D={plan.play.schedule.workers} W={chosen.replicas} B={chosen.samples}",
        choices(chosen),
        recomputation,
    )
    return " ".join(filter(None, parts))
