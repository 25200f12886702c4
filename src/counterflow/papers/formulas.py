"""The papers' formulas that apply to a simulated schedule, each beside the simulated value.

A formula applies to a schedule if it has a value for the schedule's options. Whatever else it assumes is
listed with it where the schedule or its costs do not meet it; the value is then that of the formula all the
same. Costs of stages are those of the slowest worker, averaged over its stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose

from counterflow.simulation import Simulation

from .assumptions import CLOSE
from .formula_subject import Subject
from .formula_table import FORMULAS, Quantity

_SIMULATED: dict[Quantity, Callable[[Simulation], float | None]] = {
    Quantity.STEP: lambda result: result.makespan,
    Quantity.STEADY_STEP: lambda result: result.steady_step,
    Quantity.BUBBLE_RATIO: lambda result: result.bubble_ratio,
    Quantity.STEADY_BUBBLE_RATIO: lambda result: result.steady_bubble_ratio,
    Quantity.ACTIVATIONS: lambda result: float(max(result.peak_activations)),
    Quantity.ALL_ACTIVATIONS: lambda result: float(sum(result.peak_activations)) / result.schedule.stages,
    Quantity.WEIGHTS: lambda result: float(max(result.weight_copies)),
}


@dataclass(frozen=True, slots=True)
class FormulaValue:
    """A formula's value for a schedule and its costs, beside the simulated one.

    Attributes:
        source: paper, with the equation, table or section.
        quantity: what the value is.
        formula: the formula as published.
        value: value of the formula; times in the unit of the costs.
        simulated: value by the simulator; None: not known, for too few periods.
        unmet: what the formula assumes and the schedule or its costs do not meet, with what they are instead.
    """

    source: str
    quantity: str
    formula: str
    value: float
    simulated: float | None
    unmet: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """The formula's value over the simulated one, minus 1; None if that is 0 or not known, and the value
        is not 0.
        """
        if self.simulated is not None and isclose(self.value, self.simulated, rel_tol=CLOSE, abs_tol=1e-12):
            return 0.0
        return self.value / self.simulated - 1 if self.simulated else None


def formulas_of(result: Simulation) -> tuple[FormulaValue, ...]:
    """The formulas of Chimera, MixPipe, Hanayo and WPipe that apply to a simulated schedule.

    Args:
        result: a simulated schedule of a scheme.

    Returns:
        In the order of the papers; empty if none applies.

    >>> from counterflow import schemes, simulate
    >>> first, *_ = formulas_of(simulate(schemes.chimera(stages=4, micro_batches=4)))
    >>> print(first.source, first.quantity, first.value, first.simulated)
    Chimera, equation 1 makespan 16.0 16.0
    """
    subject = Subject.of(result)
    return tuple(
        FormulaValue(
            formula.source,
            formula.quantity.value,
            formula.text,
            float(value),
            _SIMULATED[formula.quantity](result),
            tuple(unmet for need in formula.needs if (unmet := need(subject)) is not None),
        )
        for formula in FORMULAS
        if subject.schedule.scheme in formula.schemes and (value := formula.value(subject)) is not None
    )
