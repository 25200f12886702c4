"""The papers' tables, each published value beside the one the simulator measures.

``counterflow reproduce NAME`` prints them. Values are exact fractions: the times put in are small whole
numbers, so what comes out of the simulator is exact too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from counterflow.schedule.graph import OpGraph
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
from counterflow.simulate import ByteCosts, Costs, Simulation, simulate

from .. import closed_forms as forms
from ..closed_forms import Range
from .layout import COLUMNS, Relation, Row, Table
from .zero_bubble import zb_table5

_BUBBLE_RATIO = "bubble ratio"
_WEIGHTS = "weights, in stages"
_ACTIVATIONS = "peak activations, in stages × micro-batches"
"""A stage is 1/D of the model in both, also for schemes that cut it into smaller ones."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of a forward and a backward, with their name in a table."""

    label: str
    costs: Costs


_EQUAL = _Times("B=F", Costs(forward=1.0, backward=1.0))
_TWICE = _Times("B=2F", Costs(forward=1.0, backward=2.0))


@dataclass(frozen=True, slots=True)
class _Case:
    """A schedule whose published figures are set beside measured ones.

    ``share`` is the size of one of its stages: 1 where each worker holds one stage of a pipe, and less
    where a worker's part of the model is cut into several.
    """

    scheme: str
    schedule: Schedule
    source: str
    setting: str
    share: Fraction = Fraction(1)

    def bubbles(
        self,
        formula: str,
        value: Fraction | int,
        times: _Times,
        *notes: str,
        relation: Relation = Relation.EXACTLY,
    ) -> Row:
        """The bubble ratio with these times."""
        measured = Range.of(_bubble_ratio(simulate(self.schedule, times.costs)))
        return Row(
            self.scheme,
            _BUBBLE_RATIO,
            f"{self.setting}, {times.label}",
            self.source,
            formula,
            Range.of(value),
            measured,
            relation,
            notes,
        )

    def weights(self, formula: str, value: Range, *notes: str) -> Row:
        """What a worker holds of the weights, every copy and version counted."""
        copies = simulate(self.schedule).weight_copies
        measured = Range.of(self.share * min(copies), self.share * max(copies))
        return Row(
            self.scheme,
            _WEIGHTS,
            self.setting,
            self.source,
            formula,
            value,
            measured,
            notes=notes,
        )

    def activations(
        self, formula: str, value: Range, *notes: str, relation: Relation = Relation.EXACTLY
    ) -> Row:
        """The most forwards a worker stashes at once."""
        peaks = [Fraction(peak) for peak in simulate(self.schedule).peak_activations]
        measured = Range.of(self.share * min(peaks), self.share * max(peaks))
        return Row(
            self.scheme,
            _ACTIVATIONS,
            self.setting,
            self.source,
            formula,
            value,
            measured,
            relation,
            notes,
        )


def _bubble_ratio(result: Simulation) -> Fraction:
    """Idle over makespan, exact; of the steady period where the schedule has one."""
    if result.schedule.steady is None:
        whole = Fraction(result.makespan) * result.schedule.workers
        return 1 - sum(map(Fraction, result.busy)) / whole
    spans = iter(result.timeline)
    busy = total = Fraction(0)
    for order, (begin, stop) in zip(result.schedule.orders, result.schedule.steady, strict=True):
        steady = [next(spans) for _ in order][begin:stop]
        total += Fraction(steady[-1].end) - Fraction(steady[0].start)
        busy += sum(Fraction(span.end) - Fraction(span.start) for span in steady)
    return 1 - busy / total


# --- Chimera, Table 2 ----------------------------------------------------------------------------------

_CHIMERA_NOTES = {
    "gems-limit": (
        "The published ratio is the limit for N → ∞ with B = 2F, reached from above: the exact makespan "
        "is D·F + N·D·B + (N−1)·F. With B = F the limit is (D−1)/(D+1)."
    ),
    "middle-bubbles": (
        "The published ratio counts equal slots. With B = 2F each basic unit of D micro-batches also "
        "idles in its middle, because a backward takes the time of two forwards: (N/D+1)·(D/f−2)·F "
        "idle in all. At N = D and f = 1 that is the paper's other ratio, (D−2)/(3N/2+D−2)."
    ),
    "one-unit": (
        "Exact at N = D. With direct concatenation every further unit brings its own D−2 idle forwards "
        "in the middle; the formula has those of one unit."
    ),
    "doubled-slots": (
        "No middle bubbles: D−2 idle slots, each as long as a doubled forward or a backward (2F, the "
        "backward without recomputation). A mini-batch has N/2 + N such slots, so the ratio is "
        "(D−2)/(3N/2+D−2); the published one counts 2N."
    ),
    "halved-slots": (
        "No middle bubbles: D−2 idle slots, each as long as a forward or half a backward (F). A "
        "mini-batch has N + 2N such slots, so the ratio is (D−2)/(3N+D−2); the published one counts 2N."
    ),
    "steady": "Of the steady period. Warm-up and drain come once in a training, not once an update.",
    "mixpipe-idle": (
        "The published idle time is 5D−3K−4−3Γ. The exact one decides: for K ≥ D/2 there are orders "
        "with less, and for K < D/2 at D ≥ 6 none reaches it with a peak of K+Γ."
    ),
    "hanayo-denominator": (
        "The published ratio has the exact idle time above the line and only half of it in the makespan "
        "below: exact at N = P is 2(P−1)/(3PW+2(P−1)), the row beneath."
    ),
    "hanayo-units": (
        "The formula is for N = P. With N = K·P a worker idles 2(K+1)(P−1) stage times in K times the "
        "work: the further units add only middle bubbles."
    ),
    "hanayo-equal": (
        "The formula is for B = 2F. In equal slots there are no middle bubbles: 2(P−1) stage times idle, "
        "a ratio of (P−1)/(2WN+P−1)."
    ),
    "share": (
        "The stages of Hanayo are 1/(2·waves) as large as those of the other schemes, the partitions of "
        "WPipe half as large; counted here by their size. WPipe holds G0 in two versions and G1 in one."
    ),
}


def chimera_table2() -> Table:
    """Chimera's Table 2 at D = 8, with rows for the schemes it does not have."""
    return Table(
        name="chimera-table2",
        title="Chimera (SC'21), Table 2, with further schemes",
        setting="D = 8 stages and workers (Hanayo and WPipe: 8 workers); N = 8 and 16 micro-batches",
        columns=COLUMNS,
        rows=(*_table_2_rows(8, 8), *_table_2_rows(8, 16)),
        notes=_CHIMERA_NOTES,
    )


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
        case = _Case(schedule.scheme, schedule, "Chimera Table 2", f"N={n}")
        ratio = forms.flushed_bubble_ratio(depth, n)
        for times in (_EQUAL, _TWICE):
            yield case.bubbles("(D−1)/(N+D−1)", ratio, times)
        yield case.weights("1", Range.of(1))
        yield case.activations(formula, peak)


def _gems_rows(depth: int, n: int) -> Iterator[Row]:
    case = _Case("gems", gems(depth, n), "Chimera Table 2", f"N={n}")
    ratio, limit = forms.gems_bubble_ratio(depth), Relation.TENDS_TO
    for times in (_EQUAL, _TWICE):
        yield case.bubbles("(D−1)/(D+1/2)", ratio, times, "gems-limit", relation=limit)
    yield case.weights("2", Range.of(2))
    yield case.activations("1", Range.of(1))


def _chimera_rows(depth: int, n: int) -> Iterator[Row]:
    case = _Case("chimera", chimera(depth, n), "Chimera Table 2", f"N={n}")
    ratio = forms.chimera_bubble_ratio(depth, n)
    yield case.bubbles("(D−2)/(2N+D−2)", ratio, _EQUAL)
    yield case.bubbles("(D−2)/(2N+D−2)", ratio, _TWICE, "middle-bubbles")
    yield case.weights("2", Range.of(2))
    yield case.activations("D/2+1..D", forms.chimera_activations(depth))
    notes = ("one-unit",) if n > depth else ()
    ratio = forms.chimera_middle_bubble_ratio(depth, n)
    case = _Case("chimera", case.schedule, "Chimera section 2", f"N={n}")
    yield case.bubbles("(D−2)/(3N/2+D−2)", ratio, _TWICE, *notes)
    pairs = 2
    case = _Case(f"chimera f={pairs}", chimera(depth, n, pairs), "Chimera Table 3", f"N={n}")
    ratio = forms.chimera_bubble_ratio(depth, n, pairs)
    yield case.bubbles("(D−2f)/(2fN+D−2f)", ratio, _EQUAL)
    yield case.bubbles("(D−2f)/(2fN+D−2f)", ratio, _TWICE, "middle-bubbles")
    yield case.weights("2f", Range.of(forms.chimera_weights(pairs)))
    yield case.activations("D−D/(2f)+1..D", forms.chimera_activations(depth, pairs))


def _concatenated_rows(depth: int, n: int) -> Iterator[Row]:
    ratio = forms.chimera_bubble_ratio(depth, n)
    for concat, note, formula, peak in (
        ("forward-doubling", "doubled-slots", "2D", 2 * depth),
        ("backward-halving", "halved-slots", "D", depth),
    ):
        schedule = chimera(depth, n, concat=concat)
        case = _Case(f"chimera {concat}", schedule, "Chimera section 3.5", f"N={n}")
        yield case.bubbles("(D−2)/(2N+D−2)", ratio, _TWICE, note)
        yield case.activations(formula, Range.of(peak), relation=Relation.AT_MOST)


def _asynchronous_rows(depth: int, n: int) -> Iterator[Row]:
    if n == depth:  # PipeDream updates after every micro-batch, whatever N is
        versions = forms.pipedream_weights(depth)
        yield from _pipedream_rows(pipedream(depth, 3 * depth), "N=1", "1..D versions", versions)
    yield from _pipedream_rows(pipedream_2bw(depth, n, 4), f"N={n}", "2 versions", Range.of(2))


def _pipedream_rows(schedule: Schedule, setting: str, formula: str, weights: Range) -> Iterator[Row]:
    case = _Case(schedule.scheme, schedule, "Chimera Table 2", setting)
    for times in (_EQUAL, _TWICE):
        yield case.bubbles("0", 0, times, "steady")
    yield case.weights(formula, weights)
    one_to_d = forms.one_forward_one_backward_activations(schedule.stages)
    yield case.activations("1..D", one_to_d)


def _mixpipe_rows(depth: int, n: int) -> Iterator[Row]:
    bound = Relation.AT_MOST
    if n > depth:
        idle = forms.mixpipe_max_idle(depth)
        schedule = mixpipe(depth, n, injected="max")
        case = _Case("mixpipe K=max", schedule, "MixPipe section III-C", f"N={n}")
        yield case.bubbles("(D/2−1)(F+B) idle", idle / (3 * n + idle), _TWICE)
        yield case.weights("2", Range.of(2))
        peak = forms.mixpipe_max_activations(depth)
        yield case.activations("3D/2−1", peak, relation=bound)
        return
    half = depth // 2
    for injected, early in ((depth, 0), (half, 0), (half, (depth - half) // 2)):
        schedule = mixpipe(depth, n, injected, early)
        scheme = f"mixpipe K={injected} Γ={early}"
        case = _Case(scheme, schedule, "MixPipe section III-A", f"N={n}")
        ratio = forms.mixpipe_bubble_ratio(depth, injected, early)
        yield case.bubbles("5D−3K−4−3Γ idle", ratio, _TWICE, "mixpipe-idle")
        yield case.weights("2", Range.of(2))
        peak = forms.mixpipe_activations(injected, early)
        yield case.activations("K+Γ", peak, relation=bound)


def _hanayo_rows(workers: int, n: int) -> Iterator[Row]:
    units = ("hanayo-units",) if n > workers else ()
    for waves in (1, 2):
        share = Fraction(1, 2 * waves)
        scheme = f"hanayo waves={waves}"
        case = _Case(scheme, hanayo(workers, n, waves), "Hanayo section 3.4", f"N={n}", share)
        ratio = forms.hanayo_published_bubble_ratio(workers, waves)
        yield case.bubbles("(2P−2)/(3PW+P−1)", ratio, _TWICE, "hanayo-denominator", *units)
        case = _Case(scheme, case.schedule, "Counterflow", f"N={n}", share)
        formula, ratio = "2(P−1)/(3PW+2(P−1))", forms.hanayo_bubble_ratio(workers, waves)
        yield case.bubbles(formula, ratio, _TWICE, *units)
        yield case.bubbles(formula, ratio, _EQUAL, "hanayo-equal")
        yield case.weights("2W stages of 1/(2W)", Range.of(1), "share")
        bound = Relation.AT_MOST
        yield case.activations("P", Range.of(workers), "share", relation=bound)


def _wpipe_rows(workers: int, m: int) -> Iterator[Row]:
    schedule, half = wpipe(workers, m, periods=4), Fraction(1, 2)
    case = _Case("wpipe", schedule, "WPipe Table 1", f"M={m}", half)
    for times in (_EQUAL, _TWICE):
        yield case.bubbles("0", 0, times, "steady")
    case = _Case("wpipe", schedule, "Counterflow", f"M={m}", half)
    yield case.weights("1.5", Range.of(Fraction(3, 2)), "share")
    peak = Range.of(half * (m + 1), half * (m + workers))
    yield case.activations("(M+1)/2..(M+N)/2", peak, "share")


# --- MixPipe, Table I ----------------------------------------------------------------------------------

_MIXPIPE_NOTES = {
    "middle-bubbles": (
        "The published ratio counts D/2−1 bubbles of F + B, as in equal slots. With B = 2F the basic "
        "unit of D micro-batches also idles in its middle: 2(D−2)·F in all, (D−2)/(5D/2−2)."
    ),
    "gems-limit": _CHIMERA_NOTES["gems-limit"],
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
        notes=_MIXPIPE_NOTES,
    )


def _table_1_rows(depth: int) -> Iterator[Row]:
    setting, source = f"D={depth}, N={depth}", "MixPipe Table I"
    case = _Case(f"chimera K={depth}", chimera(depth, depth), source, setting)
    ratio = forms.mixpipe_chimera_bubble_ratio(depth)
    yield case.bubbles("(D−2)/(3D−2)", ratio, _EQUAL)
    yield case.bubbles("(D−2)/(3D−2)", ratio, _TWICE, "middle-bubbles")
    yield case.weights("2", Range.of(2))
    yield case.activations("D/2+1..D", forms.chimera_activations(depth))
    case = _Case("gems K=1", gems(depth, depth), source, setting)
    ratio, limit = forms.gems_bubble_ratio(depth), Relation.TENDS_TO
    yield case.bubbles("(D−1)/(D+1/2)", ratio, _TWICE, "gems-limit", relation=limit)
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
    case = _Case(scheme, schedule, "MixPipe section III-A", setting)
    ratio = forms.mixpipe_bubble_ratio(depth, injected, early)
    yield case.bubbles("5D−3K−4−3Γ idle", ratio, _TWICE, note)
    yield case.weights("2", Range.of(2))
    peak = forms.mixpipe_activations(injected, early)
    yield case.activations("K+Γ", peak, relation=Relation.AT_MOST)


# --- WPipe, Table 1 ------------------------------------------------------------------------------------

_WPIPE_NOTES = {
    "in-use": (
        "Versions held, with the one in use. The published size leaves out what is never buffered: "
        "GPipe's only version (1 model) and WPipe's G1 (half a model)."
    ),
    "m-for-n": (
        "The published figure counts M−w stashed forwards on worker w. 1F1B stashes N−w, however many "
        "micro-batches a period has: the same at M = N."
    ),
    "wpipe-stash": (
        "The published figure counts M (G0) and M−w (G1) partitions on worker w. G0 in fact reaches "
        "M+N−w, when N−w forwards of the next period have joined a whole one, and G1 N−w at another "
        "time, because its backwards follow at once; together never more than M+N−w, which sums to "
        "(2M+N+1)/4: the published figure at M = N, (M−N)/2 less above."
    ),
    "no-recomputation": "The paper has no figure here; recomputation would leave one model, as for 2BW.",
    "steady": _CHIMERA_NOTES["steady"],
    "inputs": (
        "Stage inputs left out, as in the paper: what is left is one stage at a time on every worker."
    ),
}


def wpipe_table1() -> Table:
    """WPipe's Table 1, all workers together, with the messages of its section 3.4."""
    return Table(
        name="wpipe-table1",
        title="WPipe (ICLR 2022), Table 1, and the messages of section 3.4",
        setting="N = 4 workers; M = 4 and 8 micro-batches; sizes in models, all workers together",
        columns=COLUMNS,
        rows=(*_wpipe_table_rows(4, 4), *_wpipe_table_rows(4, 8)),
        notes=_WPIPE_NOTES,
    )


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
        case = _Case(line.schedule.scheme, line.schedule, "WPipe Table 1", f"M={m}")
        formula, ratio, notes = line.bubbles
        for times in (_EQUAL, _TWICE):
            yield case.bubbles(formula, ratio, times, *notes)
        yield from _model_rows(case, line)
        yield _message_row(case, n)


def _model_rows(case: _Case, line: _WPipeLine) -> Iterator[Row]:
    """Sizes in models: the sum over the workers, a stage being 1/stages of the model."""
    result, stages = simulate(case.schedule), case.schedule.stages

    def row(quantity: str, formula: str, value: Fraction | None, total: Fraction, *notes: str) -> Row:
        expected = None if value is None else Range.of(value)
        measured = Range.of(total / stages)
        return Row(
            case.scheme,
            quantity,
            case.setting,
            case.source,
            formula,
            expected,
            measured,
            notes=notes,
        )

    formula, value, notes = line.buffers
    held = Fraction(sum(result.weight_copies))
    yield row("all weight buffers, in models", formula, value, held, *notes)
    formula, value, notes = line.stashed
    stashed = sum(map(Fraction, result.peak_activations), Fraction(0))
    yield row("activations, in models", formula, value, stashed, *notes)
    formula, recomputed = line.recomputed
    memory = simulate(case.schedule, _RECOMPUTED).memory
    assert memory is not None
    working = sum((Fraction(use.peak) for use in memory), Fraction(0))
    notes = ("inputs",) if recomputed is not None else ("no-recomputation", "inputs")
    yield row("activations with recomputation, in models", formula, recomputed, working, *notes)


_RECOMPUTED = Costs(recompute="stage", memory=ByteCosts(activations=1.0, inputs=0.0))


def _message_row(case: _Case, workers: int) -> Row:
    schedule = case.schedule
    partitions = schedule.stages // workers
    formula = "2(2N−1)" if partitions == 2 else "2(N−1)"
    count = Fraction(len(OpGraph(schedule).messages), schedule.total_micro_batches)
    return Row(
        case.scheme,
        "messages of one micro-batch",
        case.setting,
        "WPipe section 3.4",
        formula,
        Range.of(forms.messages(workers, partitions)),
        Range.of(count),
    )


TABLES: dict[str, Callable[[], Table]] = {
    "chimera-table2": chimera_table2,
    "mixpipe-table1": mixpipe_table1,
    "wpipe-table1": wpipe_table1,
    "zb-table5": zb_table5,
}
"""What ``counterflow reproduce`` knows, by name."""
