"""The picture of a reproduced figure as plain values: bars by run and scheme, and the published marks.

Invariant: it is drawn from a ``Reproduction`` alone. The papers' own throughputs are not available, so a
published ratio is marked as the subject's predicted throughput divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.planning.prediction import choices
from counterflow.schedule.modes import Recompute

from .published import Quantity
from .reproduction import Entry, Reproduction


@dataclass(frozen=True, slots=True)
class SchemeBars:
    """A scheme's bars, one per run.

    Attributes:
        label: name of the scheme in the paper.
        throughputs: samples per second; None if nothing fits.
        published: the subject's throughput divided by the published ratio; None without one.
        texts: the configuration of each bar, in lines.
    """

    label: str
    throughputs: tuple[float | None, ...]
    published: tuple[float | None, ...]
    texts: tuple[str, ...]


def scheme_bars(found: Reproduction) -> tuple[SchemeBars, ...]:
    """The bars of every scheme of a figure, in its order."""
    figure = found.figure
    runs = [run.label for run in figure.runs]
    return tuple(
        SchemeBars(
            each.label,
            tuple(found.entry(each.label, run).throughput() for run in runs),
            tuple(_published(found, each.label, run) for run in runs),
            tuple(_text(found.entry(each.label, run)) for run in runs),
        )
        for each in figure.competitors
    )


def _published(found: Reproduction, label: str, run: str) -> float | None:
    subject = found.entry(found.figure.subject, run).throughput()
    for value in found.figure.published:
        if (value.quantity, value.label) == (Quantity.SPEEDUP, label) and run in value.runs:
            return None if subject is None or value.value is None else subject / value.value
    return None


_SHORT = 8
"""Maximum characters of an option in a bar: ``waves=2``, not ``concat=forward-doubling``."""


def _text(entry: Entry) -> str:
    if entry.found is None:
        return "does\nnot fit"
    play = entry.found.play
    again = "" if play.configuration.recompute is Recompute.NONE else "\nR"
    short = "".join(f"\n{text}" for text in choices(play.configuration).split() if len(text) <= _SHORT)
    return f"D={play.schedule.workers}\nB={play.configuration.samples}{short}{again}"
