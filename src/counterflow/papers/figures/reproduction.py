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

from counterflow.planning.task import PlanningTask

from .figure_entries import FigureEntry, configuration, entry_of, is_stated
from .published import RATIOS, TOLERANCE, Figure, Published, Quantity
from .quantities import VALUES, difference, hit, order_of

Progress = Callable[[int, int, str], None]
"""Called with searches done, searches in all, and what is searched."""


class ReproductionVerdict(StrEnum):
    """The result of a comparison with a published value."""

    HIT = "hit"
    EXPLAINED = "miss, cause shown"
    """With the cause changed the prediction is a hit."""
    MISS = "miss"
    UNKNOWN = "without inputs"
    """The prediction rests on something that the paper does not say, and is no hit."""


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
    def verdict(self) -> ReproductionVerdict:
        """Outcome of the comparison: a hit, a miss, or a miss whose cause is shown."""
        if hit(self.published, self.predicted, self.same):
            return ReproductionVerdict.HIT
        if hit(self.published, self.varied, self.varied_same):
            return ReproductionVerdict.EXPLAINED
        return ReproductionVerdict.UNKNOWN if self.published.needs else ReproductionVerdict.MISS


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
    entries: tuple[FigureEntry, ...]
    rows: tuple[Row, ...]
    constants: Mapping[str, str]

    def entry(self, label: str, run: str) -> FigureEntry:
        """A scheme in a run."""
        return next(entry for entry in self.entries if (entry.label, entry.run) == (label, run))

    def summary(self) -> str:
        """Number of published values by verdict."""
        counts = Counter(row.verdict for row in self.rows)
        counts[ReproductionVerdict.UNKNOWN] += len(self.figure.missing)
        parts = [f"{counts[verdict]} {verdict}" for verdict in ReproductionVerdict if counts[verdict]]
        return f"{len(self.rows) + len(self.figure.missing)} published values: {'; '.join(parts)}"


def total(reproductions: Iterable[Reproduction]) -> str:
    """Numbers of published values of several figures by verdict, for people."""
    figures = list(reproductions)
    rows = [row for figure in figures for row in figure.rows]
    ratios = [row for row in rows if row.published.quantity in RATIOS]
    counts = Counter(row.verdict for row in rows)
    counts[ReproductionVerdict.UNKNOWN] += sum(len(figure.figure.missing) for figure in figures)
    hits = sum(row.verdict is ReproductionVerdict.HIT for row in ratios)
    parts = "; ".join(f"{counts[verdict]} {verdict}" for verdict in ReproductionVerdict)
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
    entries: dict[tuple[str, str], FigureEntry] = {}
    constants: dict[str, str] = {}
    total = len(figure.runs) * len(figure.competitors)
    for run in figure.runs:
        task = run.task()
        constants |= _constants(task)
        for competitor in figure.competitors:
            report(len(entries), total, f"{competitor.label}, {run.label}")
            entries[competitor.label, run.label] = entry_of(figure, competitor, run, task)
    rows = tuple(_row(value, entries) for value in figure.published)
    rows = tuple(_varied(row, lambda label: report(total, total, f"cause of {label}")) for row in rows)
    report(total, total, "")
    return Reproduction(figure, tuple(entries.values()), rows, constants)


def predict_row(figure: Figure, published: Published) -> Row:
    """Predict one published value of a figure."""
    entries, free = {}, published.quantity is Quantity.BEST
    for label in published.runs:
        run = figure.run(label)
        task = run.task()
        for name in published.labels:
            competitor = figure.competitor(name)
            entries[name, label] = entry_of(figure, competitor, run, task, free=free)
    return _row(published, entries)


def _varied(row: Row, report: Callable[[str], None]) -> Row:
    cause = row.published.cause
    if row.verdict is ReproductionVerdict.HIT or cause is None or cause.figure is None:
        return row
    report(row.published.label)
    variation = predict_row(cause.figure(), row.published)
    return replace(row, varied=variation.predicted, varied_same=variation.same)


def _row(published: Published, entries: Mapping[tuple[str, str], FigureEntry]) -> Row:
    table = {label: [entries[label, run] for run in published.runs] for label in published.labels}
    shown = tuple(
        " / ".join(dict.fromkeys(configuration(entry.plan) for entry in table[label])) for label in table
    )
    first = table[published.labels[0]]
    if published.quantity is Quantity.BEST:
        best = " / ".join(dict.fromkeys(configuration(entry.free) for entry in first))
        return Row(published, (best,), None, None, same=all(is_stated(e.free, e.stated) for e in first))
    if published.quantity in (Quantity.FASTER, Quantity.LARGER):
        orders = [
            order_of(published.quantity, [table[label][i] for label in table]) for i in range(len(first))
        ]
        wanted = " > ".join(published.order)
        order = next((text for text in orders if text != wanted), wanted)
        return Row(published, shown, None, None, order=order, same=order == wanted)
    value = VALUES[published.quantity]
    free = {label: [replace(entry, plan=entry.free) for entry in row] for label, row in table.items()}
    return Row(published, shown, value(published, table), value(published, free))


def _constants(task: PlanningTask) -> dict[str, str]:
    cluster = {name: f"{text}" for name, text in task.cluster.sources.items()}
    block = task.profile.layer(task.model.layers[len(task.model.layers) // 2]).sources
    names = ("forward_seconds", "saved_bytes", "weights_bytes")
    return cluster | {f"block {name}": block[name] for name in names if name in block}
