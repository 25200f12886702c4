"""Published figures beside what the planner predicts: plans, values, differences, and causes of misses.

For every scheme and run the planner searches the paper's space, restricted to what the paper states of the
configuration, and again without that restriction. A miss is predicted once more with its cause changed.
Invariant: nothing here is published or fitted; both come from a ``Figure``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, pvariance

from counterflow.errors import PlanError
from counterflow.planning.prediction import choices
from counterflow.planning.search.constraints import Constraints, value_of
from counterflow.planning.search.found import Plan
from counterflow.planning.search.search import search
from counterflow.planning.task import Task
from counterflow.schedule import registry
from counterflow.schedule.modes import Recompute

from .changes import changed_task
from .published import RATIOS, TOLERANCE, Competitor, Figure, Published, Quantity, Run, Stated

Progress = Callable[[int, int, str], None]
"""Called with searches done, searches in all, and what is searched."""

_UNLIMITED_BYTES = 1e18


class Verdict(StrEnum):
    """The result of a comparison with a published value."""

    HIT = "hit"
    EXPLAINED = "miss, cause shown"
    """With the cause changed the prediction is a hit."""
    MISS = "miss"
    UNKNOWN = "without inputs"
    """The prediction rests on something that the paper does not say, and is no hit."""


@dataclass(frozen=True, slots=True)
class Entry:
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


@dataclass(frozen=True, slots=True)
class Row:
    """A published value and the predicted one.

    Attributes:
        published: the value, its use, and the cause of a miss.
        configurations: the planned configurations of each label, by run, without repetition.
        predicted: with what the paper states of the configurations; None if something does not fit.
        free: with the configurations that the planner chooses itself.
        order: the predicted order, for people: labels with ``>`` and ``=``.
        same: for a best configuration and an order: whether it is the published one; otherwise None.
        varied: predicted with the cause of a miss changed; None without a change.
        varied_same: the same as ``same`` with the cause changed.
    """

    published: Published
    configurations: tuple[str, ...]
    predicted: float | None
    free: float | None
    order: str = ""
    same: bool | None = None
    varied: float | None = None
    varied_same: bool | None = None

    @property
    def difference(self) -> float | None:
        """Predicted over published, minus 1; of an efficiency the difference of what is lost, in shares."""
        return difference(self.published, self.predicted)

    @property
    def varied_difference(self) -> float | None:
        """The same with the cause of the miss changed."""
        return difference(self.published, self.varied)

    @property
    def verdict(self) -> Verdict:
        """Whether the published value is predicted, or the cause of the miss is shown."""
        if _hit(self.published, self.predicted, self.same):
            return Verdict.HIT
        if _hit(self.published, self.varied, self.varied_same):
            return Verdict.EXPLAINED
        return Verdict.UNKNOWN if self.published.needs else Verdict.MISS


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
    rows: tuple[Row, ...]
    constants: Mapping[str, str]

    def entry(self, label: str, run: str) -> Entry:
        """A scheme in a run."""
        return next(entry for entry in self.entries if (entry.label, entry.run) == (label, run))

    def summary(self) -> str:
        """Number of published values by verdict."""
        counts = Counter(row.verdict for row in self.rows)
        counts[Verdict.UNKNOWN] += len(self.figure.missing)
        parts = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
        return f"{len(self.rows) + len(self.figure.missing)} published values: {'; '.join(parts)}"


def total(reproductions: Iterable[Reproduction]) -> str:
    """Numbers of published values of several figures by verdict, for people."""
    figures = list(reproductions)
    rows = [row for figure in figures for row in figure.rows]
    ratios = [row for row in rows if row.published.quantity in RATIOS]
    counts = Counter(row.verdict for row in rows)
    counts[Verdict.UNKNOWN] += sum(len(figure.figure.missing) for figure in figures)
    hits = sum(row.verdict is Verdict.HIT for row in ratios)
    parts = "; ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    return (
        f"{sum(counts.values())} published values: {parts}. "
        f"{hits} of {len(ratios)} ratios are within {TOLERANCE:.0%}."
    )


def reproduce(figure: Figure, progress: Progress | None = None) -> Reproduction:
    """Predict a figure, and every miss again with its cause changed.

    Args:
        figure: its description.
        progress: callback for the progress.
    """
    report = progress or (lambda _done, _total, _what: None)
    entries: dict[tuple[str, str], Entry] = {}
    constants: dict[str, str] = {}
    total = len(figure.runs) * len(figure.competitors)
    for run in figure.runs:
        task = run.task()
        constants |= _constants(task)
        for competitor in figure.competitors:
            report(len(entries), total, f"{competitor.label}, {run.label}")
            entries[competitor.label, run.label] = _entry(figure, competitor, run, task)
    rows = tuple(_row(value, entries) for value in figure.published)
    rows = tuple(_varied(row, lambda label: report(total, total, f"cause of {label}")) for row in rows)
    report(total, total, "")
    return Reproduction(figure, tuple(entries.values()), rows, constants)


def predict_row(figure: Figure, published: Published) -> Row:
    """Predict one published value of a figure."""
    entries = {}
    for label in published.runs:
        run = figure.run(label)
        task = run.task()
        for name in published.labels:
            competitor = figure.competitor(name)
            entries[name, label] = _entry(figure, competitor, run, task, free=published.quantity)
    return _row(published, entries)


def _varied(row: Row, report: Callable[[str], None]) -> Row:
    """The row with its value predicted with the cause of the miss changed."""
    cause = row.published.cause
    if row.verdict is Verdict.HIT or cause is None or cause.figure is None:
        return row
    report(row.published.label)
    variation = predict_row(cause.figure(), row.published)
    return replace(row, varied=variation.predicted, varied_same=variation.same)


def best_plan(competitor: Competitor, run: Run, task: Task, stated: Stated | None = None) -> Plan | None:
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
    competitor: Competitor, run: Run, task: Task, depths: tuple[int, ...], samples: tuple[int, ...]
) -> int:
    if run.micro_batches is not None:
        return run.micro_batches * samples[0] * task.cluster.size // depths[0]
    # PipeDream has no mini-batch; its 48 samples divide three of them.
    return task.mini_batch * (3 if any(size % 3 == 0 for size in competitor.samples) else 1)


def _search(task: Task, mini_batch: int, wanted: Constraints) -> Plan | None:
    try:
        results = search(task.model, task.profile, task.cluster, mini_batch, wanted, count=1)
    except PlanError:
        return None
    return results.best[0]


def _throughput(plan: Plan) -> float:
    return plan.prediction.samples_per_second


def _entry(
    figure: Figure, competitor: Competitor, run: Run, task: Task, free: Quantity = Quantity.BEST
) -> Entry:
    """A scheme in a run; only a best configuration needs the plan in the whole space."""
    usable = task.cluster.usable_bytes
    if competitor.change:
        task = changed_task(task, competitor.change)
    if figure.unlimited:
        task = _unlimited(task)
    stated = competitor.statement(run.label)
    plan = None if free is Quantity.BEST and stated is None else best_plan(competitor, run, task, stated)
    chosen = best_plan(competitor, run, task) if free is Quantity.BEST else plan
    if stated is None:
        plan = chosen
    large = plan is None and best_plan(competitor, run, _unlimited(task), stated) is not None
    return Entry(competitor.label, run.label, plan, chosen, stated, task.cluster.size, usable, large)


def _unlimited(task: Task) -> Task:
    return replace(task, cluster=replace(task.cluster, memory_bytes=_UNLIMITED_BYTES))


def _row(published: Published, entries: Mapping[tuple[str, str], Entry]) -> Row:
    table = {label: [entries[label, run] for run in published.runs] for label in published.labels}
    shown = tuple(
        " / ".join(dict.fromkeys(_configuration(entry.plan) for entry in table[label])) for label in table
    )
    first = table[published.labels[0]]
    if published.quantity is Quantity.BEST:
        best = " / ".join(dict.fromkeys(_configuration(entry.free) for entry in first))
        return Row(published, (best,), None, None, same=all(_is(e.free, e.stated) for e in first))
    if published.quantity in (Quantity.FASTER, Quantity.LARGER):
        orders = [_order(published.quantity, [table[label][i] for label in table]) for i in range(len(first))]
        wanted = " > ".join(published.order)
        order = next((text for text in orders if text != wanted), wanted)
        return Row(published, shown, None, None, order=order, same=order == wanted)
    value = _VALUES[published.quantity]
    free = {label: [replace(entry, plan=entry.free) for entry in row] for label, row in table.items()}
    return Row(published, shown, value(published, table), value(published, free))


_Table = Mapping[str, list[Entry]]


def _speedup(published: Published, table: _Table) -> float | None:
    pairs = zip(table[published.label], table[published.over], strict=True)
    ratios = [_ratio(first.throughput, second.throughput) for first, second in pairs]
    return None if None in ratios else fmean(ratio for ratio in ratios if ratio is not None)


def _efficiency(published: Published, table: _Table) -> float | None:
    row = table[published.label]
    ratio = _ratio(row[-1].throughput, row[0].throughput)
    return None if ratio is None else ratio * row[0].devices / row[-1].devices


def _scaling(published: Published, table: _Table) -> float | None:
    row = table[published.label]
    return _ratio(row[-1].throughput, row[0].throughput)


def _saving(published: Published, table: _Table) -> float | None:
    remainder = _ratio(table[published.label][0].mean_peak_bytes, table[published.over][0].mean_peak_bytes)
    return None if remainder is None else 1 - remainder


def _variance(published: Published, table: _Table) -> float | None:
    plans = [entry.plan for entry in table[published.label]]
    if None in plans:
        return None
    peaks = [plan.prediction.peak_bytes for plan in plans if plan is not None]
    return fmean(pvariance([peak / 1e9 for peak in workers]) for workers in peaks)


def _batch(published: Published, table: _Table) -> float | None:
    plans = [table[label][0].plan for label in (published.label, published.over)]
    sizes = [None if plan is None else float(plan.play.configuration.samples) for plan in plans]
    return _ratio(*sizes)


def _fits(published: Published, table: _Table) -> float | None:
    results = [_entry_fits(entry) for entry in table[published.label]]
    return None if None in results else float(all(results))


def _unfit(published: Published, table: _Table) -> float | None:
    results = [_entry_fits(entry) for entry in table[published.label]]
    return None if None in results else float(results.count(False))


def _below(published: Published, table: _Table) -> float | None:
    pairs = zip(table[published.label], table[published.over], strict=True)
    ratios = [_ratio(first.peak_bytes, second.peak_bytes) for first, second in pairs]
    return None if None in ratios else float(sum(ratio is not None and ratio < 1 for ratio in ratios))


def _entry_fits(entry: Entry) -> bool | None:
    """Whether the plan fits into the devices; None if there is no plan for another reason than memory."""
    peak = entry.peak_bytes
    if peak is not None:
        return peak <= entry.usable_bytes
    return False if entry.too_large else None


_VALUES: Mapping[Quantity, Callable[[Published, _Table], float | None]] = {
    Quantity.SPEEDUP: _speedup,
    Quantity.EFFICIENCY: _efficiency,
    Quantity.SCALING: _scaling,
    Quantity.SAVING: _saving,
    Quantity.VARIANCE: _variance,
    Quantity.BATCH: _batch,
    Quantity.FITS: _fits,
    Quantity.UNFIT: _unfit,
    Quantity.BELOW: _below,
}


_EQUAL = 1e-3
"""Relative difference below which two values of an order are equal."""


def _order(quantity: Quantity, entries: list[Entry]) -> str:
    """Labels in falling order, for people; those that do not fit are in no order."""

    def value(entry: Entry) -> float | None:
        return entry.throughput if quantity is Quantity.FASTER else entry.peak_bytes

    pairs = [(entry.label, number) for entry in entries if (number := value(entry)) is not None]
    pairs.sort(key=lambda pair: pair[1], reverse=True)
    text = pairs[0][0] if pairs else ""
    for (_, larger), (label, smaller) in pairwise(pairs):
        text += f" {'=' if larger - smaller <= _EQUAL * larger else '>'} {label}"
    absent = [f"{entry.label} does not fit" for entry in entries if value(entry) is None]
    return "; ".join(filter(None, [text, *absent]))


def _ratio(dividend: float | None, divisor: float | None) -> float | None:
    return None if dividend is None or divisor is None else dividend / divisor


def _is(plan: Plan | None, stated: Stated | None) -> bool:
    """Whether a plan is the stated configuration, as far as it is stated."""
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


def _configuration(plan: Plan | None) -> str:
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


def _constants(task: Task) -> dict[str, str]:
    """Where the cluster's numbers and the block's come from."""
    cluster = {name: f"{text}" for name, text in task.cluster.sources.items()}
    block = task.profile.layer(task.model.layers[len(task.model.layers) // 2]).sources
    names = ("forward_seconds", "saved_bytes", "weights_bytes")
    return cluster | {f"block {name}": block[name] for name in names if name in block}


_LOST = 0.01
"""Maximum difference of the lost shares of two efficiencies, if 10 % of the published loss are less."""


def difference(published: Published, predicted: float | None) -> float | None:
    """Relative difference of a predicted value; None if there is nothing to compare.

    Of an efficiency it is the difference of what is lost, as a share of the ideal; of saved memory the
    relative difference of what is left.

    >>> runs = ("512 nodes", "2,048 nodes")
    >>> efficiency = Published("Chimera", Quantity.EFFICIENCY, runs, 0.914)
    >>> round(difference(efficiency, 0.998), 3)
    0.084
    """
    value = published.value
    if predicted is None or value is None:
        return None
    if published.quantity is Quantity.EFFICIENCY:
        return predicted - value
    if published.quantity is Quantity.SAVING:
        return (1 - predicted) / (1 - value) - 1
    return predicted / value - 1 if published.quantity in RATIOS else None


def _hit(published: Published, predicted: float | None, same: bool | None) -> bool:
    if same is not None:
        return same
    if published.quantity in (Quantity.FITS, Quantity.UNFIT, Quantity.BELOW):
        return predicted == published.value
    off = difference(published, predicted)
    if off is None or predicted is None or published.value is None:
        return False
    if published.quantity is Quantity.SPEEDUP and (predicted - 1) * (published.value - 1) < 0:
        return False  # another scheme is ahead than the published one
    if published.quantity is Quantity.EFFICIENCY:
        return abs(off) <= max(_LOST, TOLERANCE * abs(1 - published.value))
    return abs(off) <= TOLERANCE
