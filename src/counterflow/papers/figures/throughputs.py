"""The picture of a reproduced figure as plain values: bars by run and scheme, and the published marks.

Invariant: it is drawn from a ``Reproduction`` alone. The papers' own throughputs are not available, so a
published ratio is marked at the predicted throughput of the scheme that is ahead, divided by it. Figures of
memory have the largest peak of a worker as bars.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.planning.prediction import choices
from counterflow.schedule.modes import Recompute

from .figure_entries import FigureEntry
from .published import Quantity
from .reproduction import Reproduction


@dataclass(frozen=True, slots=True)
class SchemeBars:
    """A scheme's bars, one per run.

    Attributes:
        label: name of the scheme in the paper.
        values: samples per second, or GiB of a figure of memory; None if nothing fits.
        published: the value that the published ratio would give; None without one.
        texts: the configuration of each bar, in lines.
    """

    label: str
    values: tuple[float | None, ...]
    published: tuple[float | None, ...]
    texts: tuple[str, ...]


def scheme_bars(reproduction: Reproduction) -> tuple[SchemeBars, ...]:
    """The bars of every scheme of a figure, in its order."""
    figure = reproduction.figure
    runs = [run.label for run in figure.runs]
    return tuple(
        SchemeBars(
            competitor.label,
            tuple(_value(reproduction, competitor.label, run) for run in runs),
            tuple(_published(reproduction, competitor.label, run) for run in runs),
            tuple(_text(reproduction.entry(competitor.label, run)) for run in runs),
        )
        for competitor in figure.competitors
    )


def _value(reproduction: Reproduction, label: str, run: str) -> float | None:
    entry = reproduction.entry(label, run)
    if not reproduction.figure.unlimited:
        return entry.throughput
    return None if entry.peak_bytes is None else entry.peak_bytes / 2**30


def _published(reproduction: Reproduction, label: str, run: str) -> float | None:
    for value in reproduction.figure.published:
        if value.quantity is Quantity.SPEEDUP and value.over == label and run in value.runs:
            ahead = reproduction.entry(value.label, run).throughput
            return None if ahead is None or value.value is None else ahead / value.value
    return None


_SHORT = 8
"""Maximum characters of an option in a bar: ``waves=2``, not ``concat=forward-doubling``."""


def _text(entry: FigureEntry) -> str:
    if entry.plan is None:
        return "does\nnot fit"
    play = entry.plan.play
    recomputation = "" if play.configuration.recompute is Recompute.NONE else "\nR"
    short = "".join(f"\n{text}" for text in choices(play.configuration).split() if len(text) <= _SHORT)
    return f"D={play.schedule.workers}\nB={play.configuration.samples}{short}{recomputation}"
