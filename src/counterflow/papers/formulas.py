"""The papers' formulas that apply to a simulated schedule, each beside the simulated value.

A formula applies to a schedule if it has a value for the schedule's options. Whatever else it assumes is
listed with it where the schedule or its costs do not meet it; the value is then that of the formula all the
same. Costs of stages are those of the slowest worker, averaged over its stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import isclose
from typing import NamedTuple

from counterflow.schedule.ir import OpKind, OptionValue, Schedule
from counterflow.schedule.modes import Sync
from counterflow.simulation import Simulation
from counterflow.simulation.op_costs import Piece, per_stage

from . import closed_forms as forms
from .performance_models import hanayo_equation_1
from .step_times import StageTimes, closed_form, seconds_of_slowest

CLOSE = 1e-9
"""Relative difference of two times that are taken to be equal."""


class Quantity(Enum):
    """Quantity that a formula gives, in words."""

    STEP = "makespan"
    STEADY_STEP = "steady step"
    BUBBLE_RATIO = "bubble ratio"
    STEADY_BUBBLE_RATIO = "steady bubble ratio"
    ACTIVATIONS = "most activations of a worker"
    ALL_ACTIVATIONS = "activations of all workers, in whole models"
    WEIGHTS = "most stages held by a worker"


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
    subject = _Subject.of(result)
    return tuple(
        FormulaValue(
            formula.source,
            formula.quantity.value,
            formula.text,
            float(value),
            _SIMULATED[formula.quantity](result),
            tuple(unmet for need in formula.needs if (unmet := need(subject)) is not None),
        )
        for formula in _FORMULAS
        if subject.schedule.scheme in formula.schemes and (value := formula.value(subject)) is not None
    )


class _Subject(NamedTuple):
    result: Simulation
    schedule: Schedule
    options: dict[str, OptionValue]
    times: StageTimes
    forwards: list[float]
    backwards: list[float]

    @classmethod
    def of(cls, result: Simulation) -> _Subject:
        schedule, costs = result.schedule, result.costs
        ops, workers = costs.of_ops(schedule.stages), schedule.placement.pipes_stages[0]

        def seconds(kind: OpKind) -> list[float]:
            return [ops.seconds(Piece(kind, stage, workers[stage])) for stage in range(schedule.stages)]

        forwards, backwards = seconds(OpKind.FORWARD), seconds(OpKind.BACKWARD)
        summed = costs.replicas > 1 or schedule.pipes > 1
        sums = tuple(per_stage("sync", costs.sync, schedule.stages)) if summed else 0.0
        times = StageTimes(
            seconds_of_slowest(schedule, forwards),
            seconds_of_slowest(schedule, backwards),
            _longest_message(result),
            sums,
            Sync(costs.sync_mode),
        )
        return cls(result, schedule, dict(schedule.options), times, forwards, backwards)

    @property
    def depth(self) -> int:
        """Workers."""
        return self.schedule.workers

    @property
    def n(self) -> int:
        """Micro-batches of an update."""
        return self.schedule.micro_batches

    @property
    def chunks(self) -> int:
        """Stages of a worker in one pipe."""
        return self.schedule.stages // self.schedule.workers

    def number(self, name: str) -> int:
        """An option whose value is a number; 0 if it is another."""
        value = self.options.get(name, 0)
        return value if isinstance(value, int) else 0


def _longest_message(result: Simulation) -> float:
    return max((message.end - message.start for message in result.messages), default=0.0)


# --- What formulas assume ------------------------------------------------------------------------------

_Need = Callable[[_Subject], str | None]
"""Function that returns what is not met, with what there is instead; None if it is met."""


def _equal_stages(subject: _Subject) -> str | None:
    for name, seconds in (("forwards", subject.forwards), ("backwards", subject.backwards)):
        least, most = min(seconds), max(seconds)
        if most - least > CLOSE * most:
            return f"stages take equally long; here {name} take {least:g} to {most:g}"
    return None


def _ratio(low: float, high: float, text: str) -> _Need:
    def need(subject: _Subject) -> str | None:
        ratio = subject.times.backward / subject.times.forward if subject.times.forward else 0.0
        if low - CLOSE <= ratio <= high + CLOSE:
            return None
        return f"a backward takes {text} a forward; here {ratio:g} times as long"

    return need


_double_backward = _ratio(2.0, 2.0, "twice as long as")
_equal_slots = _ratio(1.0, 1.0, "as long as")
_long_backward = _ratio(1.0, float("inf"), "as long as, or longer than,")


def _free_messages(subject: _Subject) -> str | None:
    message = subject.times.message
    return f"messages take no time; here up to {message:g}" if message else None


def _free_sums(subject: _Subject) -> str | None:
    sums = subject.times.allreduce
    most = max(sums) if isinstance(sums, tuple) else sums
    return f"gradients are summed in no time; here in up to {most:g}" if most else None


def _whole_backwards(subject: _Subject) -> str | None:
    if any(op.kind.rest is not None for op in subject.schedule.ops()):
        return "backwards are whole; here some are split"
    if subject.schedule.workload.slices > 1:
        return f"micro-batches are whole; here each is cut into {subject.schedule.workload.slices} slices"
    return None


def _no_other_costs(subject: _Subject) -> str | None:
    costs = subject.result.costs
    names = [
        *(["the agreement"] if costs.agreement else []),
        *(["the sum of tied weights"] if costs.ties else []),
        *(["ops, which all-reduces slow down,"] if costs.sync_slowdown and _free_sums(subject) else []),
        *(["messages, which stop compute,"] if not costs.overlap and subject.times.message else []),
    ]
    return (
        f"only stages, messages and all-reduces take time; here {' and '.join(names)} too" if names else None
    )


def _one_unit(subject: _Subject) -> str | None:
    return None if subject.n == subject.depth else f"N = D; here N = {subject.n} and D = {subject.depth}"


def _enough_micro_batches(subject: _Subject) -> str | None:
    return None if subject.n >= subject.depth else f"N ≥ D; here N = {subject.n} and D = {subject.depth}"


def _enough_periods(subject: _Subject) -> str | None:
    least, periods = 2 * subject.depth - 2, subject.schedule.periods
    return None if periods >= least else f"there are 2D − 2 = {least} updates or more; here {periods}"


def _two_periods(subject: _Subject) -> str | None:
    return "there are two updates or more; here one" if subject.schedule.periods < 2 else None


def _many_micro_batches(subject: _Subject) -> str | None:
    return f"N is large; here {subject.n}"


def _symmetric_order(subject: _Subject) -> str | None:
    asymmetric = subject.options.get("asymmetric")
    return "both directions do the same; here the order is asymmetric" if asymmetric else None


# --- The formulas --------------------------------------------------------------------------------------


class _Formula(NamedTuple):
    """A formula.

    Attributes:
        source: paper, with the equation, table or section.
        quantity: what the value is.
        text: the formula as published.
        schemes: names of the schemes it is about.
        value: function of a subject; None if the formula has no value for its options.
        needs: what else it assumes.
    """

    source: str
    quantity: Quantity
    text: str
    schemes: tuple[str, ...]
    value: Callable[[_Subject], float | None]
    needs: tuple[_Need, ...] = ()


def _step(subject: _Subject) -> float | None:
    form = closed_form(subject.schedule, subject.times)
    return None if form is None else form.seconds


def _one_stage_each(subject: _Subject) -> bool:
    return subject.schedule.stages == subject.depth


def _direct(subject: _Subject) -> bool:
    return subject.options.get("concat") == "direct" and subject.n % subject.depth == 0


def _mixpipe(value: Callable[[int, int, int], float]) -> Callable[[_Subject], float | None]:
    def of(subject: _Subject) -> float | None:
        injected = subject.number("injected")
        if not injected or subject.n != subject.depth:
            return None
        return value(subject.depth, injected, subject.number("early_forwards"))

    return of


def _hanayo(subject: _Subject) -> float | None:
    if subject.n != subject.depth or subject.depth < 2:
        return None
    chunks, times = subject.chunks, subject.times
    forward, backward = chunks * times.forward, chunks * times.backward
    return float(hanayo_equation_1(subject.depth, chunks // 2, forward, backward, times.message))


def _max_step(subject: _Subject) -> float | None:
    if subject.options.get("injected") != "max" or subject.n < 2 * subject.depth or subject.n % 2:
        return None
    slots = subject.n + subject.depth // 2 - 1
    return slots * (subject.times.forward + subject.times.backward)


_STAGES = (_equal_stages, _whole_backwards, _no_other_costs)
_RATIO = (_equal_stages, _free_messages, _free_sums, _whole_backwards, _no_other_costs)
_FLUSHED = ("gpipe", "dapple")

_FORMULAS: tuple[_Formula, ...] = (
    _Formula(
        "Chimera, equation 1",
        Quantity.STEP,
        "(F + C)·C_f + (B + C)·C_b + max Comm_unoverlapped",
        ("chimera",),
        _step,
        (*_STAGES, _long_backward),
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.STEP,
        "(N + D − 1)(F + B) + 2(D − 1)·C + max Comm_unoverlapped",
        _FLUSHED,
        _step,
        _STAGES,
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.BUBBLE_RATIO,
        "(D − 1)/(N + D − 1)",
        _FLUSHED,
        lambda s: float(forms.flushed_bubble_ratio(s.depth, s.n)) if _one_stage_each(s) else None,
        _RATIO,
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.BUBBLE_RATIO,
        "(D − 1)/(D + 1/2)",
        ("gems",),
        lambda s: float(forms.gems_bubble_ratio(s.depth)),
        (*_RATIO, _double_backward, _many_micro_batches),
    ),
    _Formula(
        "Chimera, section 2",
        Quantity.BUBBLE_RATIO,
        "(D − 2)/(3N/2 + D − 2)",
        ("chimera",),
        lambda s: (
            float(forms.chimera_middle_bubble_ratio(s.depth, s.n))
            if s.number("pairs") == 1 and _direct(s)
            else None
        ),
        (*_RATIO, _double_backward, _one_unit),
    ),
    _Formula(
        "Chimera, Table 3",
        Quantity.BUBBLE_RATIO,
        "(D − 2f)/(2fN + D − 2f)",
        ("chimera",),
        lambda s: float(forms.chimera_bubble_ratio(s.depth, s.n, s.number("pairs"))) if _direct(s) else None,
        (*_RATIO, _equal_slots),
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.STEADY_STEP,
        "N(F + B)",
        ("pipedream", "pipedream-2bw"),
        _step,
        _RATIO,
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.STEADY_BUBBLE_RATIO,
        "0",
        ("pipedream", "pipedream-2bw"),
        lambda _: 0.0,
        _RATIO,
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.ACTIVATIONS,
        "N",
        ("gpipe",),
        lambda s: float(s.n) if _one_stage_each(s) else None,
        (_whole_backwards,),
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.ACTIVATIONS,
        "D",
        ("dapple", "pipedream-2bw"),
        lambda s: float(s.depth),
        (_whole_backwards, _enough_micro_batches),
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.ACTIVATIONS,
        "D",
        ("pipedream",),
        lambda s: float(s.depth),
        (_enough_periods,),
    ),
    _Formula(
        "Chimera, Table 3",
        Quantity.ACTIVATIONS,
        "D",
        ("chimera",),
        lambda s: float(s.depth) if _direct(s) else None,
        (_whole_backwards,),
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.WEIGHTS,
        "2f",
        ("chimera", "gems", "mixpipe"),
        lambda s: float(2 * max(1, s.number("pairs"))),
    ),
    _Formula(
        "Chimera, Table 2",
        Quantity.WEIGHTS,
        "D",
        ("pipedream",),
        lambda s: float(s.depth),
        (_enough_periods,),
    ),
    _Formula("Chimera, Table 2", Quantity.WEIGHTS, "2", ("pipedream-2bw",), lambda _: 2.0),
    _Formula(
        "MixPipe, equations 1 and 6",
        Quantity.STEP,
        "(D + N_bubbles)(F + B) + max Comm_unoverlapped, N_bubbles = (5D − 3K − 4)/3 − Γ",
        ("mixpipe",),
        _step,
        (*_STAGES, _free_messages, _double_backward, _symmetric_order),
    ),
    _Formula(
        "MixPipe, equation 1",
        Quantity.BUBBLE_RATIO,
        "N_bubbles/(D + N_bubbles)",
        ("mixpipe",),
        _mixpipe(lambda *setting: float(forms.mixpipe_bubble_ratio(*setting))),
        (*_RATIO, _double_backward, _symmetric_order),
    ),
    _Formula(
        "MixPipe, section III-A",
        Quantity.ACTIVATIONS,
        "K + Γ",
        ("mixpipe",),
        lambda s: float(s.number("injected") + s.number("early_forwards")) if s.number("injected") else None,
        (_whole_backwards, _enough_micro_batches),
    ),
    _Formula(
        "MixPipe, section III-C",
        Quantity.STEP,
        "(N + D/2 − 1)(F + B)",
        ("mixpipe",),
        _max_step,
        (*_RATIO, _double_backward),
    ),
    _Formula(
        "MixPipe, section III-C",
        Quantity.ACTIVATIONS,
        "3D/2 − 1",
        ("mixpipe",),
        lambda s: 3 * s.depth / 2 - 1 if _max_step(s) is not None else None,
        (_whole_backwards,),
    ),
    _Formula(
        "Hanayo, equation 1",
        Quantity.BUBBLE_RATIO,
        "(T_B/W + (1 + 2W + 2/P + (P−2)/3)·T_C) / "
        "(P/(P−1)·T_F + (1/(2W) + P/(P−1))·T_B + ((P−2)/2 + 4W)·T_C)",
        ("hanayo",),
        _hanayo,
        (_equal_stages, _free_sums, _whole_backwards, _no_other_costs),
    ),
    _Formula(
        "Hanayo, section 3.4",
        Quantity.STEP,
        "P(T_F + T_B) + (P − 1)·T_B/W + max Comm_unoverlapped",
        ("hanayo",),
        _step,
        (*_STAGES, _free_messages),
    ),
    _Formula(
        "WPipe, appendix A.4",
        Quantity.BUBBLE_RATIO,
        "(D − 1)/(gN + D − 1)",
        ("gpipe",),
        lambda s: (s.depth - 1) / (s.chunks * s.n + s.depth - 1) if s.chunks > 1 else None,
        (*_RATIO, _enough_micro_batches),
    ),
    _Formula(
        "WPipe, Table 1",
        Quantity.STEADY_STEP,
        "M(F + B) of all groups",
        ("wpipe",),
        _step,
        _RATIO,
    ),
    _Formula(
        "WPipe, Table 1",
        Quantity.STEADY_BUBBLE_RATIO,
        "0",
        ("wpipe",),
        lambda _: 0.0,
        _RATIO,
    ),
    _Formula(
        "WPipe, section 3.3",
        Quantity.WEIGHTS,
        "3: two versions of G0, one of G1",
        ("wpipe",),
        lambda s: 3.0 if s.number("groups") == 2 else None,
        (_two_periods,),
    ),
    _Formula(
        "WPipe, equation 2",
        Quantity.ALL_ACTIVATIONS,
        "(4M − N + 1)/4",
        ("wpipe",),
        lambda s: float(forms.wpipe_published_activations(s.depth, s.n)) if s.number("groups") == 2 else None,
        (_whole_backwards, _one_unit),
    ),
)
