"""MixPipe's Table I, each published value beside the one the simulator measures.

Values are exact fractions: the times put in are small whole numbers, so what comes out of the simulator is
exact too.
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
from .chimera import NOTES
from .layout import COLUMNS, Relation, Row, Table

_NOTES = {
    "middle-bubbles": (
        "The published ratio counts D/2−1 bubbles of F + B, as in equal slots. With B = 2F the basic "
        "unit of D micro-batches also idles in its middle: 2(D−2)·F in all, (D−2)/(5D/2−2)."
    ),
    "gems-limit": NOTES["gems-limit"],
    "figure-3": "The paper's orders of Figure 3: the formula is exact for them.",
    "less-idle": (
        "For K ≥ D/2 there are orders with less idle time than 5D−3K−4−3Γ at the same peak of K+Γ; the "
        "exact simulation of the order that runs decides."
    ),
    "out-of-reach": (
        "For K < D/2 and D ≥ 6 no order reaches 5D−3K−4−3Γ with a peak of K+Γ: with K = 2 and Γ = 0 at "
        "least 26 instead of 20 idle at D = 6, and 51 instead of 30 at D = 8."
    ),
}


def mixpipe_table1() -> Table:
    """MixPipe's Table I, with rows for MixPipe itself."""
    return Table(
        name="mixpipe-table1",
        title="MixPipe, Table I, with MixPipe itself",
        setting="N = D micro-batches; D = 4 and 8 stages and workers",
        columns=COLUMNS,
        rows=(*_table_1_rows(4), *_table_1_rows(8)),
        notes=_NOTES,
    )


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
