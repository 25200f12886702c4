"""Tables and figures as ``counterflow reproduce --json`` prints them. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import BeforeValidator

from counterflow.common.json_models import Part, Result, describe, reads
from counterflow.planning.plan_report import PlanShown
from counterflow.planning.prediction import Parts
from counterflow.planning.search.search_result import Plan

from .closed_forms import Range
from .figures.published import TOLERANCE
from .figures.reproduction import Reproduction, total
from .step_times import planned_closed_form


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

    scheme: Annotated[str, describe("the scheme with the options that matter")]
    quantity: Annotated[str, describe("what is counted, with its unit")]
    setting: Annotated[str, describe("micro-batches, and the times where they matter")]
    source: Annotated[str, describe("source of the formula")]
    formula: Annotated[str, describe("formula as published")]
    relation: Annotated[str, describe("relation: =, ≤ or →", "relation.value")]
    value: Annotated[list[float] | None, _Ends, describe("value of the formula at the setting; null: none")]
    measured: Annotated[list[float], _Ends, describe("value by the simulator")]
    difference: Annotated[list[float] | None, _Ends, describe("measured minus value")]
    deviates: Annotated[bool, describe("whether the measured value differs; for a bound, exceeds it")]
    notes: Annotated[list[str], describe("keys of the table's notes that say why")]


class TableShown(Result):
    """`counterflow reproduce TABLE`."""

    name: str
    title: str
    setting: str
    columns: list[str]
    rows: list[RowShown]
    notes: Annotated[dict[str, str], BeforeValidator(dict)]


class ValueShown(Part):
    """A published value and the predicted one."""

    model_config = reads("row", "row.published")

    scheme: Annotated[str, describe("the competitor whose value it is", "row.published.label")]
    over: Annotated[str, describe("the competitor it is compared with; empty: none")]
    quantity: Annotated[str, describe("quantity that is compared", "row.published.quantity.value")]
    runs: Annotated[list[str], describe("runs of the value")]
    source: Annotated[str, describe("section of the paper")]
    configurations: Annotated[list[str], describe("planned configurations of each competitor, one text each")]
    stated: Annotated[str | None, _AsText, describe("configuration that the paper states of the first run")]
    published: Annotated[float | None, describe("null: an order or a configuration", "row.published.value")]
    order: Annotated[list[str], describe("published order; empty: none", "row.published.order")]
    predicted: Annotated[
        float | None, describe("with what the paper states; null: no number, or nothing fits")
    ]
    predicted_order: Annotated[str, describe("predicted order, for people", "row.order")]
    free: Annotated[float | None, describe("value with the configurations that the planner chooses itself")]
    difference: Annotated[
        float | None, describe("relative difference; of an efficiency, that of the lost shares")
    ]
    use: Annotated[str, describe("fit: a constant was fitted on it; test", "row.published.use.value")]
    verdict: Annotated[str, describe("hit; miss, cause shown; miss; without inputs", "row.verdict.value")]
    cause: Annotated[str, describe("cause of a miss, for people")]
    change: Annotated[str, describe("change of the description that shows the cause")]
    varied: Annotated[float | None, describe("predicted value with that change")]
    needs: Annotated[str, describe("what the paper does not say, but the prediction rests on")]


class MissingShown(Part):
    """A published value that is not predicted."""

    what: str
    value: Annotated[str, describe("what the paper publishes")]
    needs: Annotated[str, describe("what is unknown")]
    source: Annotated[str, describe("section of the paper")]


class FormShown(Part):
    """The papers' closed form of a step."""

    seconds: float
    source: Annotated[str, describe("source of the form")]
    difference: Annotated[float | None, describe("its seconds over the simulated ones, minus 1")]


class PlanOfFigure(PlanShown):
    """A plan of a figure."""

    closed_form: Annotated[FormShown | None, describe("the papers' closed form; null: none")]
    parts: Annotated[Parts, describe("parts of the step's seconds")]


class EntryShown(Part):
    """A scheme in one run."""

    scheme: Annotated[str, describe("name of the scheme in the paper")]
    run: str
    samples_per_second: Annotated[float | None, describe("null: nothing fits")]
    plan: Annotated[PlanOfFigure | None, describe("the best plan with what the paper states")]
    free: Annotated[PlanOfFigure | None, describe("the best plan in the paper's space")]


class FigureShown(Result):
    """`counterflow reproduce FIGURE`."""

    model_config = reads("figure")

    name: str
    title: str
    setting: str
    statements: Annotated[list[str], describe("what the paper says of the setting")]
    assumptions: list[str]
    tolerance: float
    rows: list[ValueShown]
    missing: Annotated[list[MissingShown], describe("published values without a prediction")]
    schemes: list[EntryShown]
    constants: Annotated[dict[str, str], BeforeValidator(dict), describe("origins of numbers")]
    summary: str


class PaperFigure(Part):
    """A figure of `counterflow reproduce PAPER`."""

    name: str
    title: str
    rows: list[ValueShown]
    missing: list[MissingShown]


class FiguresShown(Result):
    """`counterflow reproduce PAPER` and `counterflow reproduce all`."""

    figures: list[PaperFigure]
    summary: str


def figure_shown(reproduction: Reproduction) -> FigureShown:
    """A figure: every published value, and every scheme in every run."""
    figure = reproduction.figure
    entries = [
        EntryShown(
            scheme=entry.label,
            run=entry.run,
            samples_per_second=entry.throughput,
            plan=plan_shown(entry.plan),
            free=plan_shown(entry.free),
        )
        for entry in reproduction.entries
    ]
    return FigureShown.of(
        figure=figure,
        tolerance=TOLERANCE,
        rows=_rows(reproduction),
        missing=_missing(reproduction),
        schemes=entries,
        constants=reproduction.constants,
        summary=reproduction.summary(),
    )


def figures_shown(reproductions: Sequence[Reproduction]) -> FiguresShown:
    """The published values of several figures."""
    figures = [
        PaperFigure(name=part.figure.name, title=part.figure.title, rows=_rows(part), missing=_missing(part))
        for part in reproductions
    ]
    return FiguresShown(figures=figures, summary=total(reproductions))


def _rows(reproduction: Reproduction) -> list[ValueShown]:
    rows = []
    for row in reproduction.rows:
        value = row.published
        stated = reproduction.figure.competitor(value.label).statement(value.runs[0])
        cause = value.cause
        rows.append(
            ValueShown.of(
                row=row,
                stated=stated,
                cause="" if cause is None else cause.text,
                change="" if cause is None else cause.change,
            )
        )
    return rows


def _missing(reproduction: Reproduction) -> list[MissingShown]:
    return [MissingShown.model_validate(asdict(value)) for value in reproduction.figure.missing]


def plan_shown(plan: Plan | None) -> PlanOfFigure | None:
    """A plan with the papers' closed form."""
    if plan is None:
        return None
    form = planned_closed_form(plan.play)
    shown = form and FormShown(
        seconds=form.seconds, source=form.source, difference=form.difference(plan.seconds)
    )
    return PlanOfFigure.of(prediction=plan.prediction, closed_form=shown, parts=plan.play.parts())
