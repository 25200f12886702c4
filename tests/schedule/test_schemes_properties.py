"""Properties of every scheme over depth, micro-batches and options, against an independent player."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow import Costs, Op, OpKind, Schedule
from counterflow.schedule.ir import Product
from counterflow.schedule.recompute_ops import with_recomputations
from counterflow.schedule.registry import SCHEMES, build
from counterflow.schedule.schemes import chimera, dapple, mixpipe
from counterflow.schedule.schemes.chimera import Concat
from counterflow.schedule.workload import passes_of
from counterflow.simulation import simulate

from ..tables import examples

moderate = settings(max_examples=examples(20), deadline=None, derandomize=bool(os.environ.get("CI")))

# --- Every scheme with every option ---------------------------------------------------------------------

Draw = Callable[[st.SearchStrategy[Any]], Any]
Options = dict[str, int | str]

DEPTHS = st.integers(2, 12)
EVEN_DEPTHS = st.integers(1, 6).map(lambda half: 2 * half)
DEEP = st.one_of(DEPTHS, st.integers(13, 24))


def _micro_batches(draw: Draw, depth: int, least: int = 1) -> int:
    """Up to four rounds; where pipelines are deep, some more than one: ops grow with the square."""
    return int(draw(st.integers(least, 4 * depth if depth <= 12 else depth + 8)))


def _with_depth(name: str, depths: st.SearchStrategy[int], **more: Any) -> Callable[[Draw], Options]:
    def drawn(draw: Draw) -> Options:
        depth = draw(depths)
        options: Options = {name: depth, "micro_batches": _micro_batches(draw, depth)}
        return options | {option: draw(legal) for option, legal in more.items()}

    return drawn


def _chimera(draw: Draw) -> Options:
    depth = draw(EVEN_DEPTHS)
    divisors = [f for f in range(1, depth // 2 + 1) if (depth // 2) % f == 0]
    return {
        "stages": depth,
        "micro_batches": _micro_batches(draw, depth),
        "pairs": draw(st.sampled_from(divisors)),
        "concat": draw(st.sampled_from([concat.value for concat in Concat])),
        "split": draw(st.booleans()),
    }


def _mixpipe(draw: Draw) -> Options:
    depth = draw(EVEN_DEPTHS)
    options: Options = {"stages": depth, "micro_batches": _micro_batches(draw, depth)}
    options["split"] = draw(st.booleans())
    if depth in (6, 8, 10, 12) and draw(st.booleans()):
        units = draw(st.integers(1, 3))
        peak = {"injected": 2, "early_forwards": 1, "asymmetric": True}
        return options | {"micro_batches": units * depth} | peak
    if draw(st.booleans()):
        injected = 2 * draw(st.integers(1, depth // 2))
        early = draw(st.integers(0, (depth - injected) // 2))
        return options | {"injected": injected, "early_forwards": early}
    return options | {"injected": "max"}


def _pipedream(draw: Draw) -> Options:
    return {"stages": draw(DEPTHS), "periods": draw(st.integers(1, 24))}


def _pipedream_2bw(draw: Draw) -> Options:
    depth = draw(DEPTHS)
    n = _micro_batches(draw, depth, least=depth)
    return {"stages": depth, "micro_batches": n, "periods": draw(st.integers(1, 4))}


def _wpipe(draw: Draw) -> Options:
    workers = draw(st.integers(1, 8))
    groups = draw(st.integers(2, 4))
    m = _micro_batches(draw, workers, least=workers) if groups == 2 else workers * draw(st.integers(3, 5))
    return {"workers": workers, "micro_batches": m, "periods": draw(st.integers(1, 4)), "groups": groups}


def _dualpipe(draw: Draw) -> Options:
    depth = draw(EVEN_DEPTHS)
    return {"stages": depth, "micro_batches": 2 * draw(st.integers(depth, 2 * depth + 2))}


def _dualpipe_v(draw: Draw) -> Options:
    workers = draw(DEPTHS)
    return {"workers": workers, "micro_batches": _micro_batches(draw, workers, least=2 * workers)}


DRAWN: dict[str, Callable[[Draw], Options]] = {
    "gpipe": _with_depth("stages", DEPTHS, groups=st.integers(1, 4)),
    "dapple": _with_depth("stages", DEPTHS, split=st.booleans()),
    "interleaved": _with_depth("workers", DEPTHS, chunks=st.integers(1, 4), split=st.booleans()),
    "gems": _with_depth("stages", EVEN_DEPTHS, split=st.booleans()),
    "chimera": _chimera,
    "mixpipe": _mixpipe,
    "hanayo": _with_depth("workers", st.integers(1, 10), waves=st.integers(1, 3), split=st.booleans()),
    "pipedream": _pipedream,
    "pipedream-2bw": _pipedream_2bw,
    "wpipe": _wpipe,
    "zb-h1": _with_depth("stages", DEEP),
    "zb-h2": _with_depth("stages", DEEP),
    "zb-v": _with_depth("workers", DEEP),
    "v-half": _with_depth("workers", DEEP),
    "v-min": _with_depth("workers", DEEP),
    "interleaved-zb": _with_depth("workers", DEPTHS, chunks=st.integers(1, 4)),
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}

every_scheme = pytest.mark.parametrize("name", SCHEMES)


@st.composite
def schedules(draw: Any, name: str) -> Schedule:
    return build(name, DRAWN[name](draw))


def test_every_option_of_every_scheme_is_drawn() -> None:
    assert DRAWN.keys() == SCHEMES.keys()


# --- Which ops there are ---------------------------------------------------------------------------------


@every_scheme
@moderate
@given(data=st.data())
def test_every_op_is_there_exactly_once(name: str, data: st.DataObject) -> None:
    """Counted in shares of a micro-batch, stage by stage, without the graph or the checker."""
    schedule = data.draw(schedules(name))
    forwards: Counter[tuple[int, int, int]] = Counter()
    gradients: Counter[tuple[str, int, int, int, Fraction]] = Counter()
    pipe_of: dict[int, set[int]] = {m: set() for m in range(schedule.total_micro_batches)}
    for op in schedule.ops():
        for m in op.micro_batches:
            pipe_of[m].add(op.pipe)
            if op.kind is OpKind.FORWARD:
                assert op.parts == 1
                forwards[op.pipe, op.stage, m] += 1
            else:
                assert 0 <= op.part < op.parts
                # A part is the piece of the micro-batch from part/parts on; pieces of one size.
                for made in {OpKind.BACKWARD: "IW"}.get(op.kind, op.kind.value):
                    gradients[made, op.pipe, op.stage, m, Fraction(op.part, op.parts)] += 1
    expected = {
        (pipe, stage, m) for m, pipes in pipe_of.items() for pipe in pipes for stage in range(schedule.stages)
    }
    assert all(len(pipes) == 1 for pipes in pipe_of.values())
    assert forwards == Counter(expected)
    assert max(gradients.values()) == 1
    for makes in (OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENTS):
        shares = dict.fromkeys(expected, Fraction(0))
        for op in schedule.ops():
            if op.kind in (OpKind.BACKWARD, makes):
                for m in op.micro_batches:
                    shares[op.pipe, op.stage, m] += Fraction(1, op.parts)
        assert set(shares.values()) == {Fraction(1)}


@every_scheme
@moderate
@given(data=st.data())
def test_every_op_is_where_its_stage_is_and_backwards_follow(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    assert len(schedule.orders) == schedule.workers
    for pipe in range(schedule.pipes):
        assert len(schedule.placement.pipes_stages[pipe]) == schedule.stages
    for worker, order in enumerate(schedule.orders):
        stashed: set[tuple[int, int, int]] = set()
        waiting: set[Op] = set()
        for op in order:
            assert schedule.placement.pipes_stages[op.pipe][op.stage] == worker
            done = {(op.pipe, op.stage, m) for m in op.micro_batches}
            if op.kind is OpKind.FORWARD:
                stashed |= done
            else:
                assert done <= stashed
            if op.kind is OpKind.INPUT_GRADIENT:
                waiting.add(op._replace(kind=OpKind.WEIGHT_GRADIENTS))
            elif op.kind is OpKind.WEIGHT_GRADIENTS:
                waiting.remove(op)
        assert not waiting


# --- When they run ----------------------------------------------------------------------------------------


ALONE = OpKind.WEIGHT_GRADIENTS, OpKind.RECOMPUTATION
"""Kinds of op that take nothing of other stages, and make nothing for them."""

Seconds = dict[OpKind, list[int]]
"""Of each kind of op, by stage."""


def play(schedule: Schedule, seconds: Seconds) -> dict[tuple[int, int], tuple[Fraction, Fraction]]:
    """(worker, index) -> (start, end), by trying every worker's next op until nothing is left.

    Takes nothing from the product but the schedule's data. Fails on a deadlock.
    """
    ended: Ended = {}
    times: dict[tuple[int, int], tuple[Fraction, Fraction]] = {}
    at = [0] * schedule.workers
    free = [Fraction(0)] * schedule.workers
    moved = True
    while moved:
        moved = False
        for worker, order in enumerate(schedule.orders):
            while at[worker] < len(order):
                op = order[at[worker]]
                ready = _input_ready(op, schedule.stages, ended)
                if ready is None:
                    break
                start = max(free[worker], ready)
                load = Fraction(len(op.micro_batches), op.parts)
                end = start + seconds[op.kind][op.stage] * load
                if op.kind not in ALONE:  # nobody takes what these make
                    forward = op.kind is OpKind.FORWARD
                    ended[forward, op.pipe, op.stage, op.micro_batches, op.part] = end
                times[worker, at[worker]] = (start, end)
                free[worker] = end
                at[worker] += 1
                moved = True
    assert at == [len(order) for order in schedule.orders], "deadlock"
    return times


Ended = dict[tuple[bool, int, int, tuple[int, ...], int], Fraction]
"""(forward, pipe, stage, micro-batches, part) -> when an output or an input gradient was there."""


def _input_ready(op: Op, stages: int, ended: Ended) -> Fraction | None:
    """When an op's input is there; None if it is not computed yet."""
    if op.kind is OpKind.FORWARD:
        if op.stage == 0:
            return Fraction(0)
        return ended.get((True, op.pipe, op.stage - 1, op.micro_batches, 0))
    if op.kind not in ALONE and op.stage < stages - 1:
        return ended.get((False, op.pipe, op.stage + 1, op.micro_batches, op.part))
    return Fraction(0)  # the last stage's backward follows its forward on the same worker


@every_scheme
@moderate
@given(data=st.data())
def test_simulated_times_are_those_of_an_independent_player(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    seconds = st.lists(st.integers(1, 9), min_size=schedule.stages, max_size=schedule.stages)
    forward, backward, inputs, weights = (data.draw(seconds) for _ in range(4))
    costs = Costs(forward=forward, backward=backward, input_gradient=inputs, weight_gradients=weights)
    if data.draw(st.booleans()):
        schedule = with_recomputations(schedule)
    result = simulate(schedule, costs)
    of_kind = dict(zip(OpKind, (forward, backward, inputs, weights, forward), strict=True))
    expected = play(schedule, of_kind)
    index = [0] * schedule.workers
    for span in result.timeline:
        start, end = expected[span.worker, index[span.worker]]
        index[span.worker] += 1
        assert (Fraction(span.start), Fraction(span.end)) == (start, end)
    assert result.makespan == max(end for _, end in expected.values())


@every_scheme
@moderate
@given(data=st.data(), forward=st.integers(1, 4), backward=st.integers(1, 8))
def test_makespan_is_at_least_the_work_and_the_critical_path(
    name: str, data: st.DataObject, forward: int, backward: int
) -> None:
    schedule = data.draw(schedules(name))
    result = simulate(schedule, Costs(forward=float(forward), backward=float(backward)))
    work = (forward + backward) * schedule.total_micro_batches * schedule.stages
    # Uniform work is spread evenly: every worker holds as many stages of every pipe.
    assert set(result.busy) == {work / schedule.workers}
    assert result.makespan >= work / schedule.workers
    for op in schedule.ops():
        if op.kind.gives is Product.INPUT_GRADIENT and op.stage == 0:
            # Unsaid, an input gradient takes half of the backward.
            least = backward if op.kind is OpKind.BACKWARD and "dualpipe" not in name else backward / 2
            assert result.makespan >= schedule.stages * (forward + least / op.parts)
    assert all(idle >= 0 for idle in result.idle)
    assert 0 <= result.bubble_ratio < 1


# --- What stays in memory ---------------------------------------------------------------------------------


def peaks(schedule: Schedule) -> list[Fraction]:
    """Counted here, not by the product: most forwards stashed at once on each worker."""
    found = []
    for order in schedule.orders:
        stashed = most = Fraction(0)
        for op in order:
            load = Fraction(len(op.micro_batches), op.parts)
            sign = {OpKind.FORWARD: 1, OpKind.INPUT_GRADIENT: 0}.get(op.kind, -1)
            stashed += sign * load
            most = max(most, stashed)
        assert stashed == 0
        found.append(most)
    return found


def most_stashed(schedule: Schedule) -> int | None:
    """What the scheme promises for every number of micro-batches; None where it promises nothing."""
    options = dict(schedule.options)
    depth, n = schedule.stages, schedule.micro_batches
    doubled = options.get("concat") == Concat.FORWARD_DOUBLING.value
    injected, early = options.get("injected"), options.get("early_forwards", 0)
    if schedule.scheme == "mixpipe":
        if injected == "max":
            return max(2, 3 * depth // 2 - 1)
        assert isinstance(injected, int)
        assert isinstance(early, int)
        return injected + early
    workers = schedule.workers
    largest_round = -(-n // max(1, n // workers))
    promised = {
        "gpipe": n * depth // schedule.workers,
        "dapple": min(depth, n),
        "gems": 1,
        "chimera": 2 * depth if doubled else depth,
        "hanayo": depth,
        "pipedream": depth,
        "pipedream-2bw": depth,
        "wpipe": n + depth - schedule.workers,
        "zb-h1": depth,
        "zb-h2": 2 * depth - 1,
        "zb-v": depth,
        "v-half": workers + 2 - workers % 2,
        "v-min": 2 * ((workers + 4) // 3),
        "interleaved": (depth // workers - 1) * largest_round + 2 * workers - 1,
        "interleaved-zb": (depth // workers - 1) * largest_round + workers,
        "dualpipe": depth + 1,
        "dualpipe-v": depth + 1,
    }
    return promised.get(schedule.scheme)


@every_scheme
@moderate
@given(data=st.data())
def test_peak_activations(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    counted = peaks(schedule)
    assert [Fraction(peak) for peak in simulate(schedule).peak_activations] == counted
    promised = most_stashed(schedule)
    if promised is not None:
        assert max(counted) <= promised


@pytest.mark.parametrize("name", [n for n, known in SCHEMES.items() if known.most_in_flight])
@moderate
@given(data=st.data())
def test_no_more_of_a_pipe_are_in_flight_than_the_scheme_promises(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    promised = SCHEMES[name].most_in_flight
    assert promised is not None
    most = promised(**dict(schedule.options)) or 0
    for order in schedule.orders:
        parts_left: Counter[tuple[int, int]] = Counter()
        for op in order:
            for m in op.micro_batches if op.stage == 0 else ():
                if op.kind is OpKind.FORWARD:
                    shares = [one.shares for one in schedule.workload.passes if m in one.micro_batches]
                    parts_left[op.pipe, m] = sum(m in share.micro_batches for share in shares[0])
                elif op.kind.takes is not None:
                    parts_left[op.pipe, m] -= 1
            in_flight = Counter(pipe for (pipe, _), left in parts_left.items() if left)
            assert max(in_flight.values(), default=0) <= most


@pytest.mark.parametrize("name", [n for n, known in SCHEMES.items() if known.synchronous])
@moderate
@given(data=st.data())
def test_synchronous_schemes_use_one_version(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    assert all(op.version == 0 for op in schedule.ops())
    copies = simulate(schedule).weight_copies
    assert copies == tuple(len(list(schedule.placement.stages_on(w))) for w in range(schedule.workers))


@pytest.mark.parametrize("name", [n for n, known in SCHEMES.items() if not known.synchronous])
@moderate
@given(data=st.data())
def test_asynchronous_schemes_use_the_versions_they_promise(name: str, data: st.DataObject) -> None:
    """The rule's version, the same forward and backward, made in time, and never too many at once."""
    schedule = data.draw(schedules(name))
    rule = SCHEMES[name].version_rule(dict(schedule.options))
    assert rule is not None
    for order in schedule.orders:
        backwards: Counter[int] = Counter()
        used: dict[tuple[int, int], int] = {}
        for op in order:
            (m,) = op.micro_batches
            period = m // schedule.micro_batches
            assert op.version == rule(schedule.stages, op.stage, period)
            assert used.setdefault((op.stage, m), op.version) == op.version
            updates = backwards[op.stage] // schedule.micro_batches
            late = {
                "pipedream": schedule.stages - 1 - op.stage,
                "pipedream-2bw": 1,
                "wpipe": 1 if op.stage < schedule.workers else 0,
            }[name]
            assert updates - late <= op.version <= updates
            assert op.version == max(0, period - late)
            backwards[op.stage] += op.kind is OpKind.BACKWARD
    groups = schedule.stages // schedule.workers
    held = simulate(schedule).weight_copies
    for worker, copies in enumerate(held):
        most = {"pipedream": schedule.stages - worker, "pipedream-2bw": 2, "wpipe": groups + 1}[name]
        assert copies <= most


# --- Symmetry ---------------------------------------------------------------------------------------------


def mirrored(schedule: Schedule, pairs: int) -> Schedule:
    """The schedule read from the other end: worker w as D−1−w, down pipe i as up pipe (f−i) mod f."""
    partner = {i: pairs + (pairs - i) % pairs for i in range(pairs)}
    partner |= {up: down for down, up in partner.items()}
    batches = {
        pipe: sorted({m for op in schedule.ops() if op.pipe == pipe for m in op.micro_batches})
        for pipe in range(2 * pairs)
    }
    other = {m: batches[partner[pipe]][j] for pipe, own in batches.items() for j, m in enumerate(own)}
    orders = tuple(
        tuple(
            Op(
                op.kind,
                op.stage,
                tuple(other[m] for m in op.micro_batches),
                partner[op.pipe],
                op.part,
                op.parts,
            )
            for op in order
        )
        for order in reversed(schedule.orders)
    )
    workload = replace(schedule.workload, passes=passes_of(op for order in orders for op in order))
    return Schedule(schedule.scheme, schedule.options, workload, orders)


@moderate
@given(depth=EVEN_DEPTHS, half=st.integers(1, 24), concat=st.sampled_from(Concat))
def test_chimera_is_symmetric_for_an_even_number_of_micro_batches(
    depth: int, half: int, concat: Concat
) -> None:
    schedule = chimera(depth, 2 * half, concat=concat)
    assert mirrored(schedule, pairs=1) == schedule


@moderate
@given(data=st.data(), depth=EVEN_DEPTHS, each=st.integers(1, 6))
def test_chimera_with_more_pairs_is_symmetric_for_even_shares(
    data: st.DataObject, depth: int, each: int
) -> None:
    divisors = [f for f in range(1, depth // 2 + 1) if (depth // 2) % f == 0]
    pairs = data.draw(st.sampled_from(divisors))
    schedule = chimera(depth, 2 * pairs * each, pairs)
    assert mirrored(schedule, pairs) == schedule


@moderate
@given(data=st.data(), depth=EVEN_DEPTHS, half=st.integers(1, 12))
def test_mixpipe_is_symmetric_for_an_even_number_of_micro_batches(
    data: st.DataObject, depth: int, half: int
) -> None:
    injected = 2 * data.draw(st.integers(1, depth // 2))
    early = data.draw(st.integers(0, (depth - injected) // 2))
    schedule = mixpipe(depth, 2 * half, injected, early)
    assert mirrored(schedule, pairs=1) == schedule


# --- Schemes that are one another's special case --------------------------------------------------------


@moderate
@given(depth=DEPTHS, n=st.integers(1, 48))
def test_one_chunk_interleaved_is_dapple(depth: int, n: int) -> None:
    one = build("interleaved", {"workers": depth, "micro_batches": n, "chunks": 1})
    assert one.orders == dapple(depth, n).orders


@moderate
@given(depth=DEPTHS, n=st.integers(1, 24), periods=st.integers(1, 4))
def test_2bw_runs_the_ops_of_dapple_without_the_flush(depth: int, n: int, periods: int) -> None:
    options = {"stages": depth, "micro_batches": max(n, depth), "periods": periods}
    schedule = build("pipedream-2bw", options)
    flushed = dapple(depth, schedule.total_micro_batches)
    for async_order, order in zip(schedule.orders, flushed.orders, strict=True):
        assert [(o.kind, o.micro_batches) for o in async_order] == [(o.kind, o.micro_batches) for o in order]


@moderate
@given(depth=EVEN_DEPTHS, n=st.integers(1, 48))
def test_full_pairs_of_chimera_are_data_parallelism(depth: int, n: int) -> None:
    """f = D/2: with whole units no worker ever waits, because each starts a pipe of its own."""
    schedule = chimera(depth, depth * n, pairs=depth // 2)
    assert set(simulate(schedule).idle) == {0}
