"""Table of the papers' formulas: source, text, schemes, value, and what each assumes beside its schemes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from . import assumptions
from . import closed_forms as forms
from .formula_subject import Subject
from .performance_models import hanayo_equation_1
from .step_times import closed_form


class Quantity(Enum):
    """Quantity that a formula gives, in words."""

    STEP = "makespan"
    STEADY_STEP = "steady step"
    BUBBLE_RATIO = "bubble ratio"
    STEADY_BUBBLE_RATIO = "steady bubble ratio"
    ACTIVATIONS = "most activations of a worker"
    ALL_ACTIVATIONS = "activations of all workers, in whole models"
    WEIGHTS = "most stages held by a worker"


class Formula(NamedTuple):
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
    value: Callable[[Subject], float | None]
    needs: tuple[assumptions.Need, ...] = ()


def _step(subject: Subject) -> float | None:
    form = closed_form(subject.schedule, subject.times)
    return None if form is None else form.seconds


def _one_stage_each(subject: Subject) -> bool:
    return subject.schedule.stages == subject.depth


def _direct(subject: Subject) -> bool:
    return subject.options.get("concat") == "direct" and subject.n % subject.depth == 0


def _mixpipe(value: Callable[[int, int, int], float]) -> Callable[[Subject], float | None]:
    def of(subject: Subject) -> float | None:
        injected = subject.number("injected")
        if not injected or subject.n != subject.depth:
            return None
        return value(subject.depth, injected, subject.number("early_forwards"))

    return of


def _hanayo(subject: Subject) -> float | None:
    if subject.n != subject.depth or subject.depth < 2:
        return None
    chunks, times = subject.chunks, subject.times
    forward, backward = chunks * times.forward, chunks * times.backward
    return float(hanayo_equation_1(subject.depth, chunks // 2, forward, backward, times.message))


def _max_step(subject: Subject) -> float | None:
    if subject.options.get("injected") != "max" or subject.n < 2 * subject.depth or subject.n % 2:
        return None
    slots = subject.n + subject.depth // 2 - 1
    return slots * (subject.times.forward + subject.times.backward)


_STAGES = (assumptions.equal_stages, assumptions.whole_backwards, assumptions.no_other_costs)
_RATIO = (
    assumptions.equal_stages,
    assumptions.free_messages,
    assumptions.free_sums,
    assumptions.whole_backwards,
    assumptions.no_other_costs,
)
_FLUSHED = ("gpipe", "dapple")

FORMULAS: tuple[Formula, ...] = (
    Formula(
        "Chimera, equation 1",
        Quantity.STEP,
        "(F + C)·C_f + (B + C)·C_b + max Comm_unoverlapped",
        ("chimera",),
        _step,
        (*_STAGES, assumptions.long_backward),
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.STEP,
        "(N + D − 1)(F + B) + 2(D − 1)·C + max Comm_unoverlapped",
        _FLUSHED,
        _step,
        _STAGES,
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.BUBBLE_RATIO,
        "(D − 1)/(N + D − 1)",
        _FLUSHED,
        lambda s: float(forms.flushed_bubble_ratio(s.depth, s.n)) if _one_stage_each(s) else None,
        _RATIO,
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.BUBBLE_RATIO,
        "(D − 1)/(D + 1/2)",
        ("gems",),
        lambda s: float(forms.gems_bubble_ratio(s.depth)),
        (*_RATIO, assumptions.double_backward, assumptions.many_micro_batches),
    ),
    Formula(
        "Chimera, section 2",
        Quantity.BUBBLE_RATIO,
        "(D − 2)/(3N/2 + D − 2)",
        ("chimera",),
        lambda s: (
            float(forms.chimera_middle_bubble_ratio(s.depth, s.n))
            if s.number("pairs") == 1 and _direct(s)
            else None
        ),
        (*_RATIO, assumptions.double_backward, assumptions.one_unit),
    ),
    Formula(
        "Chimera, Table 3",
        Quantity.BUBBLE_RATIO,
        "(D − 2f)/(2fN + D − 2f)",
        ("chimera",),
        lambda s: float(forms.chimera_bubble_ratio(s.depth, s.n, s.number("pairs"))) if _direct(s) else None,
        (*_RATIO, assumptions.equal_slots),
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.STEADY_STEP,
        "N(F + B)",
        ("pipedream", "pipedream-2bw"),
        _step,
        _RATIO,
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.STEADY_BUBBLE_RATIO,
        "0",
        ("pipedream", "pipedream-2bw"),
        lambda _: 0.0,
        _RATIO,
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.ACTIVATIONS,
        "N",
        ("gpipe",),
        lambda s: float(s.n) if _one_stage_each(s) else None,
        (assumptions.whole_backwards,),
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.ACTIVATIONS,
        "D",
        ("dapple", "pipedream-2bw"),
        lambda s: float(s.depth),
        (assumptions.whole_backwards, assumptions.enough_micro_batches),
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.ACTIVATIONS,
        "D",
        ("pipedream",),
        lambda s: float(s.depth),
        (assumptions.enough_periods,),
    ),
    Formula(
        "Chimera, Table 3",
        Quantity.ACTIVATIONS,
        "D",
        ("chimera",),
        lambda s: float(s.depth) if _direct(s) else None,
        (assumptions.whole_backwards,),
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.WEIGHTS,
        "2f",
        ("chimera", "gems", "mixpipe"),
        lambda s: float(2 * max(1, s.number("pairs"))),
    ),
    Formula(
        "Chimera, Table 2",
        Quantity.WEIGHTS,
        "D",
        ("pipedream",),
        lambda s: float(s.depth),
        (assumptions.enough_periods,),
    ),
    Formula("Chimera, Table 2", Quantity.WEIGHTS, "2", ("pipedream-2bw",), lambda _: 2.0),
    Formula(
        "MixPipe, equations 1 and 6",
        Quantity.STEP,
        "(D + N_bubbles)(F + B) + max Comm_unoverlapped, N_bubbles = (5D − 3K − 4)/3 − Γ",
        ("mixpipe",),
        _step,
        (*_STAGES, assumptions.free_messages, assumptions.double_backward, assumptions.symmetric_order),
    ),
    Formula(
        "MixPipe, equation 1",
        Quantity.BUBBLE_RATIO,
        "N_bubbles/(D + N_bubbles)",
        ("mixpipe",),
        _mixpipe(lambda *setting: float(forms.mixpipe_bubble_ratio(*setting))),
        (*_RATIO, assumptions.double_backward, assumptions.symmetric_order),
    ),
    Formula(
        "MixPipe, section III-A",
        Quantity.ACTIVATIONS,
        "K + Γ",
        ("mixpipe",),
        lambda s: float(s.number("injected") + s.number("early_forwards")) if s.number("injected") else None,
        (assumptions.whole_backwards, assumptions.enough_micro_batches),
    ),
    Formula(
        "MixPipe, section III-C",
        Quantity.STEP,
        "(N + D/2 − 1)(F + B)",
        ("mixpipe",),
        _max_step,
        (*_RATIO, assumptions.double_backward),
    ),
    Formula(
        "MixPipe, section III-C",
        Quantity.ACTIVATIONS,
        "3D/2 − 1",
        ("mixpipe",),
        lambda s: 3 * s.depth / 2 - 1 if _max_step(s) is not None else None,
        (assumptions.whole_backwards,),
    ),
    Formula(
        "Hanayo, equation 1",
        Quantity.BUBBLE_RATIO,
        "(T_B/W + (1 + 2W + 2/P + (P−2)/3)·T_C) / "
        "(P/(P−1)·T_F + (1/(2W) + P/(P−1))·T_B + ((P−2)/2 + 4W)·T_C)",
        ("hanayo",),
        _hanayo,
        (
            assumptions.equal_stages,
            assumptions.free_sums,
            assumptions.whole_backwards,
            assumptions.no_other_costs,
        ),
    ),
    Formula(
        "Hanayo, section 3.4",
        Quantity.STEP,
        "P(T_F + T_B) + (P − 1)·T_B/W + max Comm_unoverlapped",
        ("hanayo",),
        _step,
        (*_STAGES, assumptions.free_messages),
    ),
    Formula(
        "WPipe, appendix A.4",
        Quantity.BUBBLE_RATIO,
        "(D − 1)/(gN + D − 1)",
        ("gpipe",),
        lambda s: (s.depth - 1) / (s.chunks * s.n + s.depth - 1) if s.chunks > 1 else None,
        (*_RATIO, assumptions.enough_micro_batches),
    ),
    Formula(
        "WPipe, Table 1",
        Quantity.STEADY_STEP,
        "M(F + B) of all groups",
        ("wpipe",),
        _step,
        _RATIO,
    ),
    Formula(
        "WPipe, Table 1",
        Quantity.STEADY_BUBBLE_RATIO,
        "0",
        ("wpipe",),
        lambda _: 0.0,
        _RATIO,
    ),
    Formula(
        "WPipe, section 3.3",
        Quantity.WEIGHTS,
        "3: two versions of G0, one of G1",
        ("wpipe",),
        lambda s: 3.0 if s.number("groups") == 2 else None,
        (assumptions.two_periods,),
    ),
    Formula(
        "WPipe, equation 2",
        Quantity.ALL_ACTIVATIONS,
        "(4M − N + 1)/4",
        ("wpipe",),
        lambda s: float(forms.wpipe_published_activations(s.depth, s.n)) if s.number("groups") == 2 else None,
        (assumptions.whole_backwards, assumptions.one_unit),
    ),
)
