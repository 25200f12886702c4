"""Rows of reproduced figures as text, for the terminal and for the page of all papers.

Invariant: every line comes from a ``Row`` or from published data, so a page made of lines repeats what was
predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from .published import Missing, Published, Quantity
from .reproduction import Reproduction, ReproductionVerdict, Row


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A published value for people.

    Attributes:
        what: the quantity and its schemes.
        runs: the runs of the value.
        published: the paper's value.
        predicted: the planner's value with what the paper states.
        difference: difference of the two; empty without numbers.
        verdict: hit or miss.
        cause: cause of a miss, the change that shows it, and the value with that change.
        source: the paper's section.
        use: whether a constant was fitted on it.
    """

    what: str
    runs: str
    published: str
    predicted: str
    difference: str
    verdict: str
    cause: str = ""
    source: str = ""
    use: str = ""


def lines_of(reproduction: Reproduction) -> list[ReportLine]:
    """All published values of a figure for people, those without a prediction last."""
    figure, lines = reproduction.figure, []
    for row in reproduction.rows:
        value = row.published
        statements = (figure.competitor(value.label).statement(run) for run in value.runs)
        texts = dict.fromkeys(short(str(stated)) for stated in statements if stated is not None)
        lines.append(_line(row, " / ".join(texts)))
    return lines + [_line_of_missing(value) for value in figure.missing]


def _line(row: Row, stated: str) -> ReportLine:
    value = row.published
    return ReportLine(
        what=_what(value),
        runs=_runs(value),
        published=stated if value.quantity is Quantity.BEST else _published(value),
        predicted=_predicted(row),
        difference=_difference(row),
        verdict=str(row.verdict),
        cause="" if row.verdict is ReproductionVerdict.HIT else _cause(row),
        source=value.source,
        use=str(value.use),
    )


def _line_of_missing(value: Missing) -> ReportLine:
    return ReportLine(
        what=value.what,
        runs="",
        published=value.value,
        predicted="",
        difference="",
        verdict=str(ReproductionVerdict.UNKNOWN),
        cause=f"needs {value.needs}",
        source=value.source,
    )


def short(configuration: str) -> str:
    """A configuration with ``R`` for recomputed stages."""
    return configuration.replace("recompute stage", "R").replace("recompute", "R")


def _what(value: Published) -> str:
    if value.order:
        return str(value.quantity)
    if value.over:
        suffix = "" if value.quantity is Quantity.SPEEDUP else f", {value.quantity}"
        return f"{value.label} over {value.over}{suffix}"
    return f"{value.label}, {value.quantity}"


def _runs(value: Published) -> str:
    if len(value.runs) == 1:
        return value.runs[0]
    if value.quantity in (Quantity.UNFIT, Quantity.BELOW):
        return ", ".join(value.runs)
    joint = {Quantity.SPEEDUP: "mean of ", Quantity.VARIANCE: "mean of "}.get(value.quantity, "")
    return f"{joint}{value.runs[0]} to {value.runs[-1]}"


def _published(value: Published) -> str:
    return " > ".join(value.order) if value.order else _number(value, value.value)


def _predicted(row: Row) -> str:
    if row.published.quantity is Quantity.BEST:
        return short(row.configurations[0])
    return row.order or _number(row.published, row.predicted)


def _number(value: Published, number: float | None) -> str:
    if number is None:
        return "nothing fits"
    if value.quantity is Quantity.FITS:
        return "fits" if number else "out of memory"
    if value.quantity in (Quantity.UNFIT, Quantity.BELOW):
        return f"{number:.0f} of {len(value.runs)}"
    if value.quantity in (Quantity.EFFICIENCY, Quantity.SAVING):
        return f"{number:.1%}"
    return f"{number:.3f}"


def _difference(row: Row) -> str:
    if row.same is not None or row.difference is None:
        return ""
    points = row.published.quantity is Quantity.EFFICIENCY
    return f"{100 * row.difference:+.1f} points" if points else f"{row.difference:+.1%}"


def _cause(row: Row) -> str:
    value = row.published
    parts = [f"needs {value.needs}"] if value.needs else []
    if value.cause is not None:
        parts.append(value.cause.text)
        if value.cause.change:
            parts.append(f"{value.cause.change}: {_varied(row)}")
    return "; ".join(parts)


def _varied(row: Row) -> str:
    if row.varied_same is not None:
        return "as published" if row.varied_same else "still not"
    return _number(row.published, row.varied)
