"""Published figures beside what the planner predicts: each scheme's best plan, ratios, differences.

For every scheme and run the planner searches the paper's space; where the paper states a configuration, that
one is predicted too. Invariant: nothing here is published or fitted; both come from a ``Figure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from counterflow.errors import PlanError
from counterflow.planning.prediction import choices
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.found import Plan
from counterflow.planning.search.search import search
from counterflow.planning.task import Task
from counterflow.schedule.modes import Recompute

from .published import TOLERANCE, Competitor, Figure, Published, Quantity, Run, Stated, Use

Progress = Callable[[int, int, str], None]
"""Called with searches done, searches in all, and what is searched."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A scheme in one run.

    Attributes:
        label: the competitor's.
        run: the run's label.
        found: the planner's best plan in the paper's space; None if nothing fits.
        states: whether the paper states something of its configuration.
        stated: the best plan with what it states; None if that is nothing, or does not fit.
        devices: of the run.
        mini_batch: samples that the plans' seconds are of.
    """

    label: str
    run: str
    found: Plan | None
    states: bool
    stated: Plan | None
    devices: int
    mini_batch: int

    def throughput(self, *, at_stated: bool = False) -> float | None:
        """Samples a second; with ``at_stated`` of the stated configuration, if there is one.

        None if that does not fit.
        """
        plan = self.stated if at_stated and self.states else self.found
        return None if plan is None else self.mini_batch / plan.seconds


@dataclass(frozen=True, slots=True)
class Checked:
    """A published value and the predicted one.

    Attributes:
        published: the value, its use, and the reason of a miss.
        found: the planner's configurations, one a run, without repetition.
        predicted: with the configurations that the planner finds; None if nothing fits.
        at_stated: with those the paper states.
        same: for a best configuration: whether it is found; else None.
    """

    published: Published
    found: tuple[str, ...]
    predicted: float | None
    at_stated: float | None
    same: bool | None

    @property
    def difference(self) -> float | None:
        """Predicted over published, minus 1."""
        return _difference(self.predicted, self.published.value)

    @property
    def stated_difference(self) -> float | None:
        """The same with the stated configurations."""
        return _difference(self.at_stated, self.published.value)

    @property
    def holds(self) -> bool:
        """Whether the prediction is within ``TOLERANCE``, or the best configuration is found."""
        return bool(self.same) if self.same is not None else within(self.difference)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A figure, reproduced.

    Attributes:
        figure: its description.
        entries: every scheme in every run.
        rows: every published value.
        constants: where the devices' and clusters' numbers come from, by their name.
    """

    figure: Figure
    entries: tuple[Entry, ...]
    rows: tuple[Checked, ...]
    constants: Mapping[str, str]

    def entry(self, label: str, run: str) -> Entry:
        """A scheme in a run."""
        return next(each for each in self.entries if (each.label, each.run) == (label, run))

    def summary(self) -> str:
        """How many published values are met."""
        parts = []
        ratios = [r for r in self.rows if r.same is None]
        for use in Use:
            rows = [r for r in ratios if r.published.use is use]
            if rows:
                met, stated = sum(r.holds for r in rows), sum(within(r.stated_difference) for r in rows)
                parts.append(
                    f"{met} of {len(rows)} {use} ratios within {TOLERANCE:.0%} "
                    f"({stated} with the configurations that the paper states)"
                )
        best = [r for r in self.rows if r.same is not None]
        if best:
            parts.append(f"{sum(r.holds for r in best)} of {len(best)} best configurations found")
        return "; ".join(parts)


def reproduce(figure: Figure, progress: Progress | None = None) -> Reproduction:
    """Predict a figure.

    Args:
        figure: its description.
        progress: callback for the progress.
    """
    tell = progress or (lambda _done, _of, _what: None)
    entries: list[Entry] = []
    constants: dict[str, str] = {}
    total = len(figure.runs) * len(figure.competitors)
    for run in figure.runs:
        task = run.task()
        constants |= _constants(task)
        for competitor in figure.competitors:
            tell(len(entries), total, f"{competitor.label}, {run.label}")
            entries.append(_entry(competitor, run, task))
    tell(total, total, "")
    known = {(entry.label, entry.run): entry for entry in entries}
    rows = tuple(_row(figure, value, known) for value in figure.published)
    return Reproduction(figure, tuple(entries), rows, constants)


def best_plan(competitor: Competitor, task: Task, *, at_stated: bool = False) -> tuple[Plan | None, int]:
    """The planner's best plan in the paper's space, and the samples that its seconds are of.

    Args:
        competitor: the scheme, and what it may choose.
        task: the run.
        at_stated: restrict it to what the paper states of its configuration.
    """
    wanted = competitor.constraints(at_stated=at_stated)
    # PipeDream has no mini-batch; its 48 samples divide three of them.
    mini_batch = task.mini_batch * (3 if any(size % 3 == 0 for size in competitor.samples) else 1)
    legal = tuple(d for d in wanted.depths or () if task.cluster.size % d == 0)
    sizes = sorted(wanted.samples or (), reverse=True)
    # With ``largest`` the planner is asked one depth and size at a time.
    tries = [((d,), (b,)) for d in legal for b in sizes] if competitor.largest else [(legal, tuple(sizes))]
    best: Plan | None = None
    settled: set[tuple[int, ...]] = set()
    for depths, samples in tries:
        if depths in settled:
            continue
        plan = _search(task, mini_batch, replace(wanted, depths=depths, samples=samples))
        if plan is None:
            continue
        settled.add(depths)
        if best is None or plan.seconds < best.seconds:
            best = plan
    return best, mini_batch


def _search(task: Task, mini_batch: int, wanted: Constraints) -> Plan | None:
    try:
        found = search(task.model, task.profile, task.cluster, mini_batch, wanted, count=1)
    except PlanError:
        return None
    return found.best[0]


def _entry(competitor: Competitor, run: Run, task: Task) -> Entry:
    found, mini_batch = best_plan(competitor, task)
    states = competitor.stated is not None
    stated = best_plan(competitor, task, at_stated=True)[0] if states else None
    return Entry(competitor.label, run.label, found, states, stated, task.cluster.size, mini_batch)


def _row(figure: Figure, published: Published, entries: Mapping[tuple[str, str], Entry]) -> Checked:
    mine = [entries[published.label, run] for run in published.runs]
    subject = [entries[figure.subject, run] for run in published.runs]
    found = tuple(dict.fromkeys(_configuration(entry.found) for entry in mine))
    if published.quantity is Quantity.BEST:
        stated = figure.competitor(published.label).stated
        assert stated is not None
        return Checked(published, found, None, None, all(_is(entry.found, stated) for entry in mine))
    of = _speedup if published.quantity is Quantity.SPEEDUP else _efficiency
    return Checked(published, found, of(subject, mine, False), of(subject, mine, True), None)


def _speedup(subject: list[Entry], other: list[Entry], at_stated: bool) -> float | None:
    ratios = []
    for one, two in zip(subject, other, strict=True):
        first, second = one.throughput(at_stated=at_stated), two.throughput(at_stated=at_stated)
        if first is None or second is None:
            return None
        ratios.append(first / second)
    return fmean(ratios)


def _efficiency(_subject: list[Entry], mine: list[Entry], at_stated: bool) -> float | None:
    each = [entry.throughput(at_stated=at_stated) for entry in (mine[0], mine[-1])]
    first, last = each
    if first is None or last is None:
        return None
    return (last / mine[-1].devices) / (first / mine[0].devices)


def _is(plan: Plan | None, stated: Stated) -> bool:
    """Whether a plan is the stated configuration, as far as it is stated."""
    if plan is None:
        return False
    chosen = plan.play.configuration
    mine = (
        plan.play.schedule.workers,
        chosen.replicas,
        chosen.samples,
        chosen.recompute is not Recompute.NONE,
    )
    theirs = (stated.depth, stated.replicas, stated.samples, stated.recompute)
    return all(b is None or a == b for a, b in zip(mine, theirs, strict=True))


def _configuration(plan: Plan | None) -> str:
    """A plan's configuration for people."""
    if plan is None:
        return "nothing fits"
    chosen = plan.play.configuration
    again = f"recompute {chosen.recompute.value}" if chosen.recompute is not Recompute.NONE else ""
    parts = (
        f"D={plan.play.schedule.workers} W={chosen.replicas} B={chosen.samples}",
        choices(chosen),
        again,
    )
    return " ".join(filter(None, parts))


def _constants(task: Task) -> dict[str, str]:
    """Where the cluster's numbers and the block's come from."""
    cluster = {name: f"{text}" for name, text in task.cluster.sources.items()}
    block = task.profile.layer("block").sources
    kept = ("forward_seconds", "saved_bytes", "weights_bytes")
    return cluster | {f"block {name}": block[name] for name in kept if name in block}


def within(difference: float | None) -> bool:
    """Whether a difference is within ``TOLERANCE``."""
    return difference is not None and abs(difference) <= TOLERANCE


def _difference(predicted: float | None, published: float | None) -> float | None:
    return None if predicted is None or published is None else predicted / published - 1
