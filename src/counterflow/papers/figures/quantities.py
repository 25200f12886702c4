"""Values of published quantities by the plans of a figure, and their comparison with the published ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import fmean, pvariance

from .figure_entries import FigureEntry
from .published import RATIOS, TOLERANCE, Published, Quantity

Table = Mapping[str, list[FigureEntry]]
"""By competitor, its plans in the runs of a published value."""


def _speedup(published: Published, table: Table) -> float | None:
    pairs = zip(table[published.label], table[published.over], strict=True)
    ratios = [_ratio(first.throughput, second.throughput) for first, second in pairs]
    return None if None in ratios else fmean(ratio for ratio in ratios if ratio is not None)


def _efficiency(published: Published, table: Table) -> float | None:
    row = table[published.label]
    ratio = _ratio(row[-1].throughput, row[0].throughput)
    return None if ratio is None else ratio * row[0].devices / row[-1].devices


def _scaling(published: Published, table: Table) -> float | None:
    row = table[published.label]
    return _ratio(row[-1].throughput, row[0].throughput)


def _saving(published: Published, table: Table) -> float | None:
    remainder = _ratio(table[published.label][0].mean_peak_bytes, table[published.over][0].mean_peak_bytes)
    return None if remainder is None else 1 - remainder


def _variance(published: Published, table: Table) -> float | None:
    plans = [entry.plan for entry in table[published.label]]
    if None in plans:
        return None
    peaks = [plan.prediction.peak_bytes for plan in plans if plan is not None]
    return fmean(pvariance([peak / 1e9 for peak in workers]) for workers in peaks)


def _batch(published: Published, table: Table) -> float | None:
    plans = [table[label][0].plan for label in (published.label, published.over)]
    sizes = [None if plan is None else float(plan.play.configuration.samples) for plan in plans]
    return _ratio(*sizes)


def _fits(published: Published, table: Table) -> float | None:
    results = [_entry_fits(entry) for entry in table[published.label]]
    return None if None in results else float(all(results))


def _unfit(published: Published, table: Table) -> float | None:
    results = [_entry_fits(entry) for entry in table[published.label]]
    return None if None in results else float(results.count(False))


def _below(published: Published, table: Table) -> float | None:
    pairs = zip(table[published.label], table[published.over], strict=True)
    ratios = [_ratio(first.peak_bytes, second.peak_bytes) for first, second in pairs]
    return None if None in ratios else float(sum(ratio is not None and ratio < 1 for ratio in ratios))


def _entry_fits(entry: FigureEntry) -> bool | None:
    peak = entry.peak_bytes
    if peak is not None:
        return peak <= entry.usable_bytes
    return False if entry.too_large else None  # None: refused for another reason than memory


VALUES: Mapping[Quantity, Callable[[Published, Table], float | None]] = {
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
"""Functions of quantities that are numbers; None if something does not fit."""


_EQUAL = 1e-3
"""Relative difference below which two values of an order are equal."""


def order_of(quantity: Quantity, entries: list[FigureEntry]) -> str:
    """Labels in falling order, for people; those that do not fit are in no order."""

    def value(entry: FigureEntry) -> float | None:
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


def hit(published: Published, predicted: float | None, same: bool | None) -> bool:
    """Compare a published value with the predicted one.

    Args:
        published: the value.
        predicted: the predicted number; None if something does not fit.
        same: for an order or a configuration: whether it is the published one; otherwise None.
    """
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
