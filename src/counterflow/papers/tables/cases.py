"""A schedule whose published figures are compared with measured ones: the rows that several tables share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs, Simulation, simulate

from ..closed_forms import Range
from .layout_table import Relation, Row

_BUBBLE_RATIO = "bubble ratio"
_WEIGHTS = "weights, in stages"
_ACTIVATIONS = "peak activations, in stages × micro-batches"
"""A stage is 1/D of the model in both, also for schemes that cut the model into smaller ones."""


@dataclass(frozen=True, slots=True)
class CaseTimes:
    """Times of a forward and a backward, with their name in a table."""

    label: str
    costs: Costs


EQUAL = CaseTimes("B=F", Costs(forward=1.0, backward=1.0))
TWICE = CaseTimes("B=2F", Costs(forward=1.0, backward=2.0))


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule whose published figures are compared with measured ones.

    ``share`` is the size of one of its stages: 1 if each worker holds one stage of a pipe, and less if a
    worker's part of the model is cut into several.
    """

    scheme: str
    schedule: Schedule
    source: str
    setting: str
    share: Fraction = Fraction(1)

    def row(
        self,
        quantity: str,
        formula: str,
        value: Range | None,
        measured: Range,
        *notes: str,
        relation: Relation = Relation.EXACTLY,
    ) -> Row:
        """A published figure and the measured one."""
        named = self.scheme, quantity, self.setting, self.source
        return Row(*named, formula, value, measured, relation, notes)

    def bubbles(
        self,
        formula: str,
        value: Fraction | int,
        times: CaseTimes,
        *notes: str,
        relation: Relation = Relation.EXACTLY,
    ) -> Row:
        """The bubble ratio with these times."""
        measured = Range.of(_bubble_ratio(simulate(self.schedule, times.costs)))
        timed = replace(self, setting=f"{self.setting}, {times.label}")
        return timed.row(_BUBBLE_RATIO, formula, Range.of(value), measured, *notes, relation=relation)

    def weights(self, formula: str, value: Range, *notes: str) -> Row:
        """Weights that a worker holds, every copy and version counted."""
        copies = simulate(self.schedule).weight_copies
        return self.row(_WEIGHTS, formula, value, self._sized(copies), *notes)

    def activations(
        self, formula: str, value: Range, *notes: str, relation: Relation = Relation.EXACTLY
    ) -> Row:
        """Maximum forwards that a worker stashes at once."""
        peaks = simulate(self.schedule).peak_activations
        return self.row(_ACTIVATIONS, formula, value, self._sized(peaks), *notes, relation=relation)

    def _sized(self, counts: Sequence[float]) -> Range:
        return Range.of(self.share * Fraction(min(counts)), self.share * Fraction(max(counts)))


def _bubble_ratio(result: Simulation) -> Fraction:
    if result.schedule.steady is None:
        total_time = Fraction(result.makespan) * result.schedule.workers
        return 1 - sum(map(Fraction, result.busy)) / total_time
    spans = iter(result.timeline)
    busy = total = Fraction(0)
    for order, (begin, stop) in zip(result.schedule.orders, result.schedule.steady, strict=True):
        steady = [next(spans) for _ in order][begin:stop]
        total += Fraction(steady[-1].end) - Fraction(steady[0].start)
        busy += sum(Fraction(span.end) - Fraction(span.start) for span in steady)
    return 1 - busy / total
