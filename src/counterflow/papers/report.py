"""Tables and figures as ``counterflow reproduce --json`` prints them. What it does not do: print."""

from __future__ import annotations

from typing import Annotated, Any

from counterflow.shown import Result, said


class Reproducible(Result):
    """`counterflow reproduce --list`."""

    tables: list[str]
    figures: list[str]


class TableShown(Result):
    """`counterflow reproduce TABLE`."""

    name: str
    title: str
    setting: str
    columns: list[str]
    rows: Annotated[list[dict[str, Any]], said("formula, value, measured (least and most over the workers)")]
    notes: dict[str, str]


class FigureShown(Result):
    """`counterflow reproduce FIGURE`."""

    name: str
    title: str
    setting: str
    assumptions: list[str]
    tolerance: float
    subject: Annotated[str, said("the scheme whose ratios over the others are shown")]
    rows: Annotated[list[dict[str, Any]], said("published, predicted, difference")]
    schemes: Annotated[
        list[dict[str, Any]], said("by scheme and run: the best plan found, and the one stated")
    ]
    constants: dict[str, str]
    summary: str
