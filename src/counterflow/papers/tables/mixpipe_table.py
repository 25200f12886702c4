"""MixPipe's Table I; each published value next to the measured one.

Values are exact fractions: the simulator's input times are small whole numbers, so its results are exact too.
"""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.schedule.schemes import (
    chimera,
    gems,
    mixpipe,
)

from .. import closed_forms as forms
from ..closed_forms import Range
from .cases import EQUAL, TWICE, Case
from .layout_table import Relation, Row


def rows() -> Iterator[Row]:
    """MixPipe's Table I, with rows for MixPipe itself."""
    for depth in (4, 8):
        yield from _table_1_rows(depth)


def _table_1_rows(depth: int) -> Iterator[Row]:
    setting, source = f"D={depth}, N={depth}", "MixPipe Table I"
    case = Case(f"chimera K={depth}", chimera(depth, depth), source, setting)
    ratio = forms.mixpipe_chimera_bubble_ratio(depth)
    yield case.bubbles("(D−2)/(3D−2)", ratio, EQUAL)
    yield case.bubbles("(D−2)/(3D−2)", ratio, TWICE, "middle-bubbles")
    yield case.weights("2", Range.of(2))
    yield case.activations("D/2+1..D", forms.chimera_activations(depth))
    case = Case("gems K=1", gems(depth, depth), source, setting)
    ratio, limit = forms.gems_bubble_ratio(depth), Relation.TENDS_TO
    yield case.bubbles("(D−1)/(D+1/2)", ratio, TWICE, "gems-limit", relation=limit)
    yield case.weights("2", Range.of(2))
    yield case.activations("1", Range.of(1))
    for injected in range(2, depth + 1, 2):
        for early in range((depth - injected) // 2 + 1):
            yield from _mixpipe_setting(depth, injected, early)


def _mixpipe_setting(depth: int, injected: int, early: int) -> Iterator[Row]:
    scheme, setting = f"mixpipe K={injected} Γ={early}", f"D={depth}, N={depth}"
    schedule = mixpipe(depth, depth, injected, early)
    note = "less-idle" if 2 * injected >= depth else "out-of-reach"
    note = "figure-3" if depth == 4 else note
    case = Case(scheme, schedule, "MixPipe section III-A", setting)
    ratio = forms.mixpipe_bubble_ratio(depth, injected, early)
    yield case.bubbles("5D−3K−4−3Γ idle", ratio, TWICE, note)
    yield case.weights("2", Range.of(2))
    peak = forms.mixpipe_activations(injected, early)
    yield case.activations("K+Γ", peak, relation=Relation.AT_MOST)
