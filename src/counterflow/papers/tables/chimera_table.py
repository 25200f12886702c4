"""Chimera's Table 2 with further schemes; each published value next to the measured one.

Values are exact fractions: the simulator's input times are small whole numbers, so its results are exact too.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from counterflow.schedule.ir import Schedule
from counterflow.schedule.schemes import (
    chimera,
    dapple,
    gems,
    gpipe,
    hanayo,
    mixpipe,
    pipedream,
    pipedream_2bw,
    wpipe,
)

from .. import closed_forms as forms
from ..closed_forms import Range
from .cases import EQUAL, TWICE, Case
from .layout_table import Relation, Row


def rows() -> Iterator[Row]:
    """Chimera's Table 2 at D = 8, with rows for further schemes."""
    for n in (8, 16):
        yield from _table_2_rows(8, n)


def _table_2_rows(depth: int, n: int) -> Iterator[Row]:
    yield from _flushed_rows(depth, n)
    yield from _gems_rows(depth, n)
    yield from _chimera_rows(depth, n)
    if n > depth:
        yield from _concatenated_rows(depth, n)
    yield from _asynchronous_rows(depth, n)
    yield from _mixpipe_rows(depth, n)
    yield from _hanayo_rows(depth, n)
    yield from _wpipe_rows(depth, n)


def _flushed_rows(depth: int, n: int) -> Iterator[Row]:
    one_to_d = forms.one_forward_one_backward_activations(depth)
    for schedule, formula, peak in (
        (gpipe(depth, n), "N", forms.gpipe_activations(n)),
        (dapple(depth, n), "1..D", one_to_d),
    ):
        case = Case(schedule.scheme, schedule, "Chimera Table 2", f"N={n}")
        ratio = forms.flushed_bubble_ratio(depth, n)
        for times in (EQUAL, TWICE):
            yield case.bubbles("(D−1)/(N+D−1)", ratio, times)
        yield case.weights("1", Range.of(1))
        yield case.activations(formula, peak)


def _gems_rows(depth: int, n: int) -> Iterator[Row]:
    case = Case("gems", gems(depth, n), "Chimera Table 2", f"N={n}")
    ratio, limit = forms.gems_bubble_ratio(depth), Relation.TENDS_TO
    for times in (EQUAL, TWICE):
        yield case.bubbles("(D−1)/(D+1/2)", ratio, times, "gems-limit", relation=limit)
    yield case.weights("2", Range.of(2))
    yield case.activations("1", Range.of(1))


def _chimera_rows(depth: int, n: int) -> Iterator[Row]:
    case = Case("chimera", chimera(depth, n), "Chimera Table 2", f"N={n}")
    ratio = forms.chimera_bubble_ratio(depth, n)
    yield case.bubbles("(D−2)/(2N+D−2)", ratio, EQUAL)
    yield case.bubbles("(D−2)/(2N+D−2)", ratio, TWICE, "middle-bubbles")
    yield case.weights("2", Range.of(2))
    yield case.activations("D/2+1..D", forms.chimera_activations(depth))
    notes = ("one-unit",) if n > depth else ()
    ratio = forms.chimera_middle_bubble_ratio(depth, n)
    case = Case("chimera", case.schedule, "Chimera section 2", f"N={n}")
    yield case.bubbles("(D−2)/(3N/2+D−2)", ratio, TWICE, *notes)
    pairs = 2
    case = Case(f"chimera f={pairs}", chimera(depth, n, pairs), "Chimera Table 3", f"N={n}")
    ratio = forms.chimera_bubble_ratio(depth, n, pairs)
    yield case.bubbles("(D−2f)/(2fN+D−2f)", ratio, EQUAL)
    yield case.bubbles("(D−2f)/(2fN+D−2f)", ratio, TWICE, "middle-bubbles")
    yield case.weights("2f", Range.of(forms.chimera_weights(pairs)))
    yield case.activations("D−D/(2f)+1..D", forms.chimera_activations(depth, pairs))


def _concatenated_rows(depth: int, n: int) -> Iterator[Row]:
    ratio = forms.chimera_bubble_ratio(depth, n)
    for concat, note, formula, peak in (
        ("forward-doubling", "doubled-slots", "2D", 2 * depth),
        ("backward-halving", "halved-slots", "D", depth),
    ):
        schedule = chimera(depth, n, concat=concat)
        case = Case(f"chimera {concat}", schedule, "Chimera section 3.5", f"N={n}")
        yield case.bubbles("(D−2)/(2N+D−2)", ratio, TWICE, note)
        yield case.activations(formula, Range.of(peak), relation=Relation.AT_MOST)


def _asynchronous_rows(depth: int, n: int) -> Iterator[Row]:
    if n == depth:  # PipeDream updates after every micro-batch, for any N
        versions = forms.pipedream_weights(depth)
        yield from _pipedream_rows(pipedream(depth, 3 * depth), "N=1", "1..D versions", versions)
    yield from _pipedream_rows(pipedream_2bw(depth, n, 4), f"N={n}", "2 versions", Range.of(2))


def _pipedream_rows(schedule: Schedule, setting: str, formula: str, weights: Range) -> Iterator[Row]:
    case = Case(schedule.scheme, schedule, "Chimera Table 2", setting)
    for times in (EQUAL, TWICE):
        yield case.bubbles("0", 0, times, "steady")
    yield case.weights(formula, weights)
    one_to_d = forms.one_forward_one_backward_activations(schedule.stages)
    yield case.activations("1..D", one_to_d)


def _mixpipe_rows(depth: int, n: int) -> Iterator[Row]:
    bound = Relation.AT_MOST
    if n > depth:
        idle = forms.mixpipe_max_idle(depth)
        schedule = mixpipe(depth, n, injected="max")
        case = Case("mixpipe K=max", schedule, "MixPipe section III-C", f"N={n}")
        yield case.bubbles("(D/2−1)(F+B) idle", idle / (3 * n + idle), TWICE)
        yield case.weights("2", Range.of(2))
        peak = forms.mixpipe_max_activations(depth)
        yield case.activations("3D/2−1", peak, relation=bound)
        return
    half = depth // 2
    for injected, early in ((depth, 0), (half, 0), (half, (depth - half) // 2)):
        schedule = mixpipe(depth, n, injected, early)
        scheme = f"mixpipe K={injected} Γ={early}"
        case = Case(scheme, schedule, "MixPipe section III-A", f"N={n}")
        ratio = forms.mixpipe_bubble_ratio(depth, injected, early)
        yield case.bubbles("5D−3K−4−3Γ idle", ratio, TWICE, "mixpipe-idle")
        yield case.weights("2", Range.of(2))
        peak = forms.mixpipe_activations(injected, early)
        yield case.activations("K+Γ", peak, relation=bound)


def _hanayo_rows(workers: int, n: int) -> Iterator[Row]:
    units = ("hanayo-units",) if n > workers else ()
    for waves in (1, 2):
        share = Fraction(1, 2 * waves)
        scheme = f"hanayo waves={waves}"
        case = Case(scheme, hanayo(workers, n, waves), "Hanayo section 3.4", f"N={n}", share)
        ratio = forms.hanayo_published_bubble_ratio(workers, waves)
        yield case.bubbles("(2P−2)/(3PW+P−1)", ratio, TWICE, "hanayo-denominator", *units)
        case = Case(scheme, case.schedule, "Counterflow", f"N={n}", share)
        formula, ratio = "2(P−1)/(3PW+2(P−1))", forms.hanayo_bubble_ratio(workers, waves)
        yield case.bubbles(formula, ratio, TWICE, *units)
        yield case.bubbles(formula, ratio, EQUAL, "hanayo-equal")
        yield case.weights("2W stages of 1/(2W)", Range.of(1), "share")
        bound = Relation.AT_MOST
        yield case.activations("P", Range.of(workers), "share", relation=bound)


def _wpipe_rows(workers: int, m: int) -> Iterator[Row]:
    schedule, half = wpipe(workers, m, periods=4), Fraction(1, 2)
    case = Case("wpipe", schedule, "WPipe Table 1", f"M={m}", half)
    for times in (EQUAL, TWICE):
        yield case.bubbles("0", 0, times, "steady")
    case = Case("wpipe", schedule, "Counterflow", f"M={m}", half)
    yield case.weights("1.5", Range.of(Fraction(3, 2)), "share")
    peak = Range.of(half * (m + 1), half * (m + workers))
    yield case.activations("(M+1)/2..(M+N)/2", peak, "share")
