"""Tables and figures as ``counterflow reproduce --json`` prints them. Nothing is printed here."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from counterflow.planning.prediction import Parts
from counterflow.planning.report import PlanShown
from counterflow.planning.search.found import Plan
from counterflow.shown import Part, Result, reads, said

from .closed_forms import Range
from .figures.published import TOLERANCE
from .figures.reproduction import Reproduction
from .step_times import beside


def _ends(value: Range | None) -> list[float] | None:
    return None if value is None else [float(value.least), float(value.most)]


_Ends = BeforeValidator(_ends)
_AsText = BeforeValidator(lambda stated: None if stated is None else str(stated))


class Reproducible(Result):
    """`counterflow reproduce --list`."""

    tables: list[str]
    figures: list[str]


class RowShown(Part):
    """One quantity of one scheme; numbers are the minimum and the maximum over the workers."""

    scheme: Annotated[str, said("the scheme with the options that matter")]
    quantity: Annotated[str, said("what is counted, with its unit")]
    setting: Annotated[str, said("micro-batches, and the times where they matter")]
    source: Annotated[str, said("source of the formula")]
    formula: Annotated[str, said("formula as published")]
    relation: Annotated[str, said("relation: =, ≤ or →", "relation.value")]
    value: Annotated[list[float] | None, _Ends, said("value of the formula at the setting; null: none")]
    measured: Annotated[list[float], _Ends, said("value by the simulator")]
    difference: Annotated[list[float] | None, _Ends, said("measured minus value")]
    deviates: Annotated[bool, said("whether the measured value differs; for a bound, exceeds it")]
    notes: Annotated[list[str], said("keys of the table's notes that say why")]


class TableShown(Result):
    """`counterflow reproduce TABLE`."""

    name: str
    title: str
    setting: str
    columns: list[str]
    rows: list[RowShown]
    notes: Annotated[dict[str, str], BeforeValidator(dict)]


class CheckedShown(Part):
    """A published value and the predicted one."""

    model_config = reads("checked", "checked.published")

    scheme: Annotated[str, said("name of the scheme in the paper", "checked.published.label")]
    quantity: Annotated[str, said("quantity that is compared", "checked.published.quantity.value")]
    runs: Annotated[list[str], said("runs of the value")]
    found: Annotated[list[str], said("the planner's configurations, one per run, without repetition")]
    stated: Annotated[str | None, _AsText, said("configuration that the paper states")]
    published: Annotated[float | None, said("null: a best configuration", "checked.published.value")]
    predicted: Annotated[float | None, said("value with the configurations found; null: nothing fits")]
    difference: Annotated[float | None, said("predicted over published, minus 1")]
    predicted_at_stated: Annotated[
        float | None, said("value with the configurations that the paper states", "checked.at_stated")
    ]
    difference_at_stated: Annotated[float | None, said("likewise", "checked.stated_difference")]
    use: Annotated[str, said("fit: a constant was fitted on it; test", "checked.published.use.value")]
    holds: Annotated[bool, said("whether it is within the tolerance, or the best configuration is found")]
    miss: Annotated[str, said("reason of a miss, for people")]


class FormShown(Part):
    """The papers' closed form of a step."""

    seconds: float
    source: Annotated[str, said("source of the form")]
    difference: Annotated[float | None, said("its seconds over the simulated ones, minus 1")]


class PlanOfFigure(PlanShown):
    """A plan of a figure."""

    closed_form: Annotated[FormShown | None, said("the papers' closed form; null: none")]
    parts: Annotated[Parts, said("parts of the step's seconds")]


class EntryShown(Part):
    """A scheme in one run."""

    scheme: Annotated[str, said("name of the scheme in the paper")]
    run: str
    samples_per_second: Annotated[float | None, said("null: nothing fits")]
    found: Annotated[PlanOfFigure | None, said("the best plan in the paper's space")]
    at_stated: Annotated[
        PlanOfFigure | None, said("the best plan with the configuration that the paper states")
    ]


class FigureShown(Result):
    """`counterflow reproduce FIGURE`."""

    model_config = reads("figure")

    name: str
    title: str
    setting: str
    assumptions: list[str]
    tolerance: float
    subject: Annotated[str, said("the scheme whose ratios over the others are shown")]
    rows: list[CheckedShown]
    schemes: list[EntryShown]
    constants: Annotated[dict[str, str], BeforeValidator(dict), said("origins of numbers")]
    summary: str


def figure_shown(found: Reproduction) -> FigureShown:
    """A figure: every published value, and every scheme in every run."""
    figure = found.figure
    rows = [
        CheckedShown.of(checked=row, stated=figure.competitor(row.published.label).stated)
        for row in found.rows
    ]
    entries = [
        EntryShown(
            scheme=entry.label,
            run=entry.run,
            samples_per_second=entry.throughput(),
            found=plan_shown(entry.found),
            at_stated=plan_shown(entry.stated),
        )
        for entry in found.entries
    ]
    return FigureShown.of(
        figure=figure,
        tolerance=TOLERANCE,
        rows=rows,
        schemes=entries,
        constants=found.constants,
        summary=found.summary(),
    )


def plan_shown(plan: Plan | None) -> PlanOfFigure | None:
    """A plan with the papers' closed form."""
    if plan is None:
        return None
    form = beside(plan.play)
    shown = form and FormShown(
        seconds=form.seconds, source=form.source, difference=form.difference(plan.seconds)
    )
    return PlanOfFigure.of(prediction=plan.prediction, closed_form=shown, parts=plan.play.parts())
