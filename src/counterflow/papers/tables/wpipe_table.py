"""WPipe's Table 1; each published value next to the measured one.

Values are exact fractions: the simulator's input times are small whole numbers, so its results are exact too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Schedule
from counterflow.schedule.schemes import (
    gpipe,
    pipedream,
    pipedream_2bw,
    wpipe,
)
from counterflow.simulation import ByteCosts, Costs, simulate

from .. import closed_forms as forms
from ..closed_forms import Range
from .cases import EQUAL, TWICE, Case
from .layout_table import Row


def rows() -> Iterator[Row]:
    """WPipe's Table 1, all workers together, with the messages of its section 3.4."""
    for m in (4, 8):
        yield from _wpipe_table_rows(4, m)


@dataclass(frozen=True, slots=True)
class _WPipeLine:
    """A line of WPipe's Table 1 as published: (formula, value) and the notes on each column."""

    schedule: Schedule
    bubbles: tuple[str, Fraction | int, tuple[str, ...]]
    buffers: tuple[str, Fraction, tuple[str, ...]]
    stashed: tuple[str, Fraction, tuple[str, ...]]
    recomputed: tuple[str, Fraction | None]


def _wpipe_lines(n: int, m: int) -> Iterator[_WPipeLine]:
    recomputed = forms.RECOMPUTED_ACTIVATIONS
    counted = ("(2M−N+1)/2", forms.pipedream_published_activations(n, m), ("m-for-n",))
    yield _WPipeLine(
        gpipe(n, m),
        ("(N−1)/(M+N−1)", forms.flushed_bubble_ratio(n, m), ()),
        ("0", forms.GPIPE_BUFFERS, ("in-use",)),
        ("M", Fraction(m), ()),
        ("1", recomputed["gpipe"]),
    )
    yield _WPipeLine(
        pipedream(n, periods=3 * n),
        ("0", 0, ("steady",)),
        ("(N+1)/2", forms.pipedream_buffers(n), ()),
        counted,
        ("none", None),
    )
    yield _WPipeLine(
        pipedream_2bw(n, m, periods=4),
        ("0", 0, ("steady",)),
        ("2", forms.PIPEDREAM_2BW_BUFFERS, ()),
        counted,
        ("1", recomputed["pipedream-2bw"]),
    )
    yield _WPipeLine(
        wpipe(n, m, periods=4),
        ("0", 0, ("steady",)),
        ("1", forms.WPIPE_BUFFERS, ("in-use",)),
        ("(4M−N+1)/4", forms.wpipe_published_activations(n, m), ("wpipe-stash",)),
        ("0.5", recomputed["wpipe"]),
    )


def _wpipe_table_rows(n: int, m: int) -> Iterator[Row]:
    for line in _wpipe_lines(n, m):
        case = Case(line.schedule.scheme, line.schedule, "WPipe Table 1", f"M={m}")
        formula, ratio, notes = line.bubbles
        for times in (EQUAL, TWICE):
            yield case.bubbles(formula, ratio, times, *notes)
        yield from _model_rows(case, line)
        yield _message_row(case, n)


def _model_rows(case: Case, line: _WPipeLine) -> Iterator[Row]:
    result, stages = simulate(case.schedule), case.schedule.stages

    def models(counts: Iterable[float]) -> Range:
        return Range.of(sum(map(Fraction, counts), Fraction(0)) / stages)

    formula, value, notes = line.buffers
    weights = models(result.weight_copies)
    yield case.row("all weight buffers, in models", formula, Range.of(value), weights, *notes)
    formula, value, notes = line.stashed
    stashed = models(result.peak_activations)
    yield case.row("activations, in models", formula, Range.of(value), stashed, *notes)
    formula, recomputed = line.recomputed
    working = models(use.peak for use in simulate(case.schedule, _RECOMPUTED).memory or ())
    expected = None if recomputed is None else Range.of(recomputed)
    notes = ("inputs",) if recomputed is not None else ("no-recomputation", "inputs")
    yield case.row("activations with recomputation, in models", formula, expected, working, *notes)


_RECOMPUTED = Costs(recompute="stage", memory=ByteCosts(activations=1.0, inputs=0.0))


def _message_row(case: Case, workers: int) -> Row:
    schedule = case.schedule
    partitions = schedule.stages // workers
    formula = "2(2N−1)" if partitions == 2 else "2(N−1)"
    count = Fraction(len(OpGraph(schedule).messages), schedule.total_micro_batches)
    published = Range.of(forms.messages(workers, partitions))
    case = replace(case, source="WPipe section 3.4")
    return case.row("messages of one micro-batch", formula, published, Range.of(count))
