"""Every scheme's small case, literally; the drawings in the docstrings; what each scheme refuses."""

from __future__ import annotations

import pickle
import re
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest

from counterflow import ConfigError, OpKind, Schedule, schemes
from counterflow.schedule.placement import bidirectional, linear, looped, wave
from counterflow.schedule.registry import SCHEMES, build, schedule_of, scheme
from counterflow.schedule.scheme import OptionType
from counterflow.schedule.schemes import (
    chimera,
    dapple,
    dualpipe,
    dualpipe_v,
    gems,
    gpipe,
    hanayo,
    interleaved,
    interleaved_zb,
    mixpipe,
    pipedream,
    pipedream_2bw,
    v_half,
    v_min,
    wpipe,
    zb_h1,
    zb_h2,
    zb_v,
)
from counterflow.schedule.schemes.chimera import Concat
from counterflow.simulation import simulate


def orders(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.orders]


def staircase(schedule: Schedule) -> list[str]:
    """One line a worker, one character a unit of time: digit forward, letter backward, ``.`` idle."""
    result = simulate(schedule)
    rows = [["."] * int(result.makespan) for _ in range(schedule.workers)]
    for span in result.timeline:
        (batch,) = span.op.micro_batches
        mark = str(batch) if span.op.kind is OpKind.FORWARD else chr(ord("a") + batch)
        for time in range(int(span.start), int(span.end)):
            rows[span.worker][time] = mark
    return [" ".join(row) for row in rows]


def micro_batches_of_pipes(schedule: Schedule) -> list[list[int]]:
    return [
        sorted({m for op in schedule.ops() if op.pipe == pipe for m in op.micro_batches})
        for pipe in range(schedule.pipes)
    ]


# --- One literal case a scheme --------------------------------------------------------------------------

LITERAL: dict[str, tuple[Schedule, list[str]]] = {
    "gpipe": (
        gpipe(stages=3, micro_batches=2),
        [
            "F0.0 F1.0 B1.0 B0.0",
            "F0.1 F1.1 B1.1 B0.1",
            "F0.2 F1.2 B1.2 B0.2",
        ],
    ),
    "gpipe in groups": (
        gpipe(stages=2, micro_batches=2, groups=2),
        [
            "F0.0 F1.0 F0.2 F1.2 B1.2 B0.2 B1.0 B0.0",
            "F0.1 F1.1 F0.3 F1.3 B1.3 B0.3 B1.1 B0.1",
        ],
    ),
    "dapple": (
        dapple(stages=3, micro_batches=4),
        [
            "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0",
            "F0.1 F1.1 B0.1 F2.1 B1.1 F3.1 B2.1 B3.1",
            "F0.2 B0.2 F1.2 B1.2 F2.2 B2.2 F3.2 B3.2",
        ],
    ),
    "dapple with few micro-batches": (
        dapple(stages=3, micro_batches=1),
        ["F0.0 B0.0", "F0.1 B0.1", "F0.2 B0.2"],
    ),
    "interleaved": (
        interleaved(workers=2, micro_batches=4, chunks=2),
        [
            "F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0",
            "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1",
        ],
    ),
    "gems": (
        gems(stages=2, micro_batches=3),
        [
            "F0.0 B0.0 F1.1p1 B1.1p1 F2.0 B2.0",
            "F0.1 B0.1 F1.0p1 B1.0p1 F2.1 B2.1",
        ],
    ),
    "chimera": (
        chimera(stages=4, micro_batches=4),
        [
            "F0.0 F1.0 F2.3p1 B2.3p1 F3.3p1 B3.3p1 B0.0 B1.0",
            "F0.1 F2.2p1 F1.1 F3.2p1 B2.2p1 B0.1 B3.2p1 B1.1",
            "F2.1p1 F0.2 F3.1p1 F1.2 B0.2 B2.1p1 B1.2 B3.1p1",
            "F2.0p1 F3.0p1 F0.3 B0.3 F1.3 B1.3 B2.0p1 B3.0p1",
        ],
    ),
    "chimera with fewer micro-batches than stages": (
        chimera(stages=4, micro_batches=3),
        [
            "F0.0 F1.0 F2.3p1 B2.3p1 B0.0 B1.0",
            "F0.1 F2.2p1 F1.1 B2.2p1 B0.1 B1.1",
            "F2.1p1 F0.2 F1.2 B0.2 B2.1p1 B1.2",
            "F2.0p1 F0.3 B0.3 F1.3 B1.3 B2.0p1",
        ],
    ),
    "chimera with two pairs": (
        chimera(stages=4, micro_batches=4, pairs=2),
        [
            "F0.0 F3.1p3 F1.2p1 F2.3p2 B2.3p2 B1.2p1 B3.1p3 B0.0",
            "F3.0p3 F0.1 F2.2p2 F1.3p1 B1.3p1 B2.2p2 B0.1 B3.0p3",
            "F1.0p1 F2.1p2 F0.2 F3.3p3 B3.3p3 B0.2 B2.1p2 B1.0p1",
            "F2.0p2 F1.1p1 F3.2p3 F0.3 B0.3 B3.2p3 B1.1p1 B2.0p2",
        ],
    ),
    "chimera forward-doubling": (
        chimera(stages=2, micro_batches=4, concat="forward-doubling"),
        [
            "F(0,1).0 F(2,3).1p1 B2.1p1 B0.0 B3.1p1 B1.0",
            "F(2,3).0p1 F(0,1).1 B0.1 B2.0p1 B1.1 B3.0p1",
        ],
    ),
    "chimera backward-halving": (
        chimera(stages=2, micro_batches=2, concat="backward-halving"),
        [
            "F0.0 F1.1p1 B1.1p1:0/2 B0.0:0/2 B1.1p1:1/2 B0.0:1/2",
            "F1.0p1 F0.1 B0.1:0/2 B1.0p1:0/2 B0.1:1/2 B1.0p1:1/2",
        ],
    ),
    "hanayo": (
        hanayo(workers=2, micro_batches=2, waves=2),
        [
            "F0.0 F1.0 F0.3 F0.4 F1.3 F1.4 F0.7 B0.7 F1.7 B1.7 B0.4 B0.3 B1.4 B1.3 B0.0 B1.0",
            "F0.1 F0.2 F1.1 F1.2 F0.5 F0.6 F1.5 F1.6 B0.6 B0.5 B1.6 B1.5 B0.2 B0.1 B1.2 B1.1",
        ],
    ),
    "pipedream": (
        pipedream(stages=3, periods=5),
        [
            "F0.0 F1.0 F2.0 B0.0 F3.0v1 B1.0 F4.0v2 B2.0 B3.0v1 B4.0v2",
            "F0.1 F1.1 B0.1 F2.1v1 B1.1 F3.1v2 B2.1v1 F4.1v3 B3.1v2 B4.1v3",
            "F0.2 B0.2 F1.2v1 B1.2v1 F2.2v2 B2.2v2 F3.2v3 B3.2v3 F4.2v4 B4.2v4",
        ],
    ),
    "pipedream-2bw": (
        pipedream_2bw(stages=2, micro_batches=2, periods=3),
        [
            "F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 F4.0v1 B3.0 F5.0v1 B4.0v1 B5.0v1",
            "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4.1v1 B4.1v1 F5.1v1 B5.1v1",
        ],
    ),
    "wpipe": (
        wpipe(workers=2, micro_batches=2, periods=2),
        [
            "F0.0 F1.0 F0.2 F1.2 B0.2 F2.0 B1.2 F3.0 B0.0 F2.2v1 B1.0 F3.2v1 B2.2v1 B3.2v1 B2.0 B3.0",
            "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3v1 B2.3v1 F3.3v1 B3.3v1 B2.1 B3.1",
        ],
    ),
    "dapple, split": (
        dapple(stages=3, micro_batches=3, split=True),
        [
            "F0.0 F1.0 F2.0 I0.0 W0.0 I1.0 W1.0 I2.0 W2.0",
            "F0.1 F1.1 I0.1 W0.1 F2.1 I1.1 W1.1 I2.1 W2.1",
            "F0.2 I0.2 W0.2 F1.2 I1.2 W1.2 F2.2 I2.2 W2.2",
        ],
    ),
    "chimera, split": (
        chimera(stages=4, micro_batches=4, split=True),
        [
            "F0.0 F1.0 F2.3p1 I2.3p1 W2.3p1 F3.3p1 I3.3p1 I0.0 W3.3p1 I1.0 W0.0 W1.0",
            "F0.1 F2.2p1 F1.1 F3.2p1 I2.2p1 I0.1 W2.2p1 I3.2p1 I1.1 W0.1 W3.2p1 W1.1",
            "F2.1p1 F0.2 F3.1p1 F1.2 I0.2 I2.1p1 W0.2 I1.2 I3.1p1 W2.1p1 W1.2 W3.1p1",
            "F2.0p1 F3.0p1 F0.3 I0.3 W0.3 F1.3 I1.3 I2.0p1 W1.3 I3.0p1 W2.0p1 W3.0p1",
        ],
    ),
    "zb-h1": (
        zb_h1(stages=3, micro_batches=4),
        [
            "F0.0 F1.0 F2.0 I0.0 W0.0 F3.0 I1.0 W1.0 I2.0 W2.0 I3.0 W3.0",
            "F0.1 F1.1 I0.1 F2.1 I1.1 W0.1 F3.1 I2.1 W1.1 I3.1 W2.1 W3.1",
            "F0.2 I0.2 F1.2 I1.2 F2.2 I2.2 W0.2 F3.2 I3.2 W1.2 W2.2 W3.2",
        ],
    ),
    "zb-h2": (
        zb_h2(stages=2, micro_batches=4),
        [
            "F0.0 F1.0 F2.0 I0.0 W0.0 F3.0 I1.0 W1.0 I2.0 W2.0 I3.0 W3.0",
            "F0.1 I0.1 F1.1 I1.1 F2.1 I2.1 W0.1 F3.1 I3.1 W1.1 W2.1 W3.1",
        ],
    ),
    "zb-h2 with few micro-batches": (
        zb_h2(stages=3, micro_batches=3),
        [
            "F0.0 F1.0 F2.0 I0.0 W0.0 I1.0 W1.0 I2.0 W2.0",
            "F0.1 F1.1 F2.1 I0.1 W0.1 I1.1 W1.1 I2.1 W2.1",
            "F0.2 I0.2 F1.2 I1.2 F2.2 I2.2 W0.2 W1.2 W2.2",
        ],
    ),
    "zb-v": (
        zb_v(workers=2, micro_batches=3),
        [
            "F0.0 F1.0 F2.0 F0.3 I0.3 W0.3 F1.3 I1.3 W1.3 I0.0 W0.0 F2.3 I2.3 W2.3 I1.0 W1.0 I2.0 W2.0",
            "F0.1 F0.2 F1.1 F1.2 I0.2 W0.2 F2.1 I0.1 W0.1 F2.2 I1.2 W1.2 I1.1 I2.2 I2.1 W1.1 W2.2 W2.1",
        ],
    ),
    "v-half": (
        v_half(workers=3, micro_batches=2),
        [
            "F0.0 F1.0 F0.5 I0.5 F1.5 I1.5 W0.5 W1.5 I0.0 W0.0 I1.0 W1.0",
            "F0.1 F1.1 F0.4 F1.4 I0.4 W0.4 I1.4 I0.1 W1.4 I1.1 W0.1 W1.1",
            "F0.2 F0.3 F1.2 F1.3 I0.3 I0.2 I1.3 I1.2 W0.3 W0.2 W1.3 W1.2",
        ],
    ),
    "v-min": (
        v_min(workers=3, micro_batches=2),
        [
            "F0.0 F1.0 F0.5 I0.5 F1.5 I1.5 W0.5 W1.5 I0.0 W0.0 I1.0 W1.0",
            "F0.1 F1.1 F0.4 F1.4 I0.4 W0.4 I0.1 I1.4 W0.1 W1.4 I1.1 W1.1",
            "F0.2 F0.3 F1.2 F1.3 I0.3 I0.2 W0.3 W0.2 I1.3 I1.2 W1.3 W1.2",
        ],
    ),
    "interleaved-zb": (
        interleaved_zb(workers=2, micro_batches=2),
        [
            "F0.0 F1.0 F0.2 F1.2 I0.2 W0.2 I1.2 W1.2 I0.0 W0.0 I1.0 W1.0",
            "F0.1 F1.1 F0.3 I0.3 F1.3 I1.3 W0.3 I0.1 W1.3 I1.1 W0.1 W1.1",
        ],
    ),
    "dualpipe": (
        dualpipe(stages=4, micro_batches=8),
        [
            "F0.0 F1.0 F2.0 F4.3p1 I4.3p1 W4.3p1 F5.3p1 F3.0 B5.3p1 "
            "F6.3p1 B0.0 B6.3p1 F7.3p1 B1.0 B7.3p1 I2.0 W2.0 I3.0 W3.0",
            "F0.1 F4.2p1 F1.1 F5.2p1 F2.1 B4.2p1 F6.2p1 B0.1 F3.1 "
            "B5.2p1 F7.2p1 B1.1 B6.2p1 B2.1 I7.2p1 I3.1 W7.2p1 W3.1",
            "F4.1p1 F0.2 F5.1p1 F1.2 F6.1p1 B0.2 F2.2 B4.1p1 F7.1p1 "
            "B1.2 F3.2 B5.1p1 B2.2 B6.1p1 I3.2 I7.1p1 W3.2 W7.1p1",
            "F4.0p1 F5.0p1 F6.0p1 F0.3 I0.3 W0.3 F1.3 F7.0p1 B1.3 "
            "F2.3 B4.0p1 B2.3 F3.3 B5.0p1 B3.3 I6.0p1 W6.0p1 I7.0p1 W7.0p1",
        ],
    ),
    "dualpipe-v": (
        dualpipe_v(workers=2, micro_batches=4),
        [
            "F0.0 F1.0 F2.0 F0.3 I0.3 W0.3 F1.3 F3.0 B1.3 F2.3 B0.0 B2.3 F3.3 B1.0 B3.3 I2.0 W2.0 I3.0 W3.0",
            "F0.1 F0.2 F1.1 F1.2 F2.1 B0.2 F2.2 B0.1 F3.1 B1.2 F3.2 B1.1 B2.2 B2.1 I3.2 I3.1 W3.2 W3.1",
        ],
    ),
}


@pytest.mark.parametrize("case", LITERAL)
def test_literal_orders(case: str) -> None:
    schedule, expected = LITERAL[case]
    assert orders(schedule) == expected


def test_literal_orders_of_mixpipe() -> None:
    assert orders(mixpipe(stages=4, micro_batches=4, injected=2)) == [
        "F0.0 F1.3p1 B1.3p1 F2.0 B0.0 F3.3p1 B3.3p1 B2.0",
        "F0.1 F1.2p1 B1.2p1 F2.1 B0.1 F3.2p1 B3.2p1 B2.1",
        "F1.1p1 F0.2 B0.2 F3.1p1 B1.1p1 F2.2 B2.2 B3.1p1",
        "F1.0p1 F0.3 B0.3 F3.0p1 B1.0p1 F2.3 B2.3 B3.0p1",
    ]


# --- The drawings in the docstrings ---------------------------------------------------------------------

DRAWN_IN_TIME = {
    "gpipe": gpipe(stages=4, micro_batches=4),
    "dapple": dapple(stages=4, micro_batches=4),
    "gems": gems(stages=4, micro_batches=2),
    "chimera": chimera(stages=4, micro_batches=4),
    "pipedream": pipedream(stages=3, periods=6),
    "pipedream_2bw": pipedream_2bw(stages=2, micro_batches=2, periods=3),
}
DRAWN_AS_ORDERS = {
    "hanayo": hanayo(workers=4, micro_batches=4, waves=1),
    "interleaved": interleaved(workers=2, micro_batches=2, chunks=2),
}


def docstring(module: str) -> str:
    text = import_module(f"counterflow.schedule.schemes.{module}").__doc__
    assert text is not None
    return text


@pytest.mark.parametrize("module", DRAWN_IN_TIME)
def test_docstring_shows_the_staircase(module: str) -> None:
    """Lines ``P0  0 1 . a a``; a remark may follow after three spaces."""
    text = docstring(module)
    drawn = re.findall(r"^ +P\d  (\S(?: ?\S)*)", text, flags=re.MULTILINE)
    assert drawn == staircase(DRAWN_IN_TIME[module])


@pytest.mark.parametrize("module", DRAWN_AS_ORDERS)
def test_docstring_shows_the_orders(module: str) -> None:
    text = docstring(module)
    drawn = re.findall(r"^ +P\d: (.*)$", text, flags=re.MULTILINE)
    assert drawn == orders(DRAWN_AS_ORDERS[module])


def test_docstring_of_wpipe_shows_the_start_of_its_orders() -> None:
    """``P0: F.0 F.0 | F.2 …``: stages only, bars anywhere, up to the dots."""
    text = docstring("wpipe")
    drawn = re.findall(r"^ +P\d: (.*?) *…?$", text, flags=re.MULTILINE)
    assert len(drawn) == 2
    for line, order in zip(drawn, wpipe(2, 2, periods=4).orders, strict=True):
        shown = line.replace("|", " ").split()
        assert shown == [f"{op.kind.value}.{op.stage}" for op in order[: len(shown)]]


# --- Placements and the numbering of micro-batches over pipes ------------------------------------------


def test_placements() -> None:
    assert gpipe(3, 1).placement == dapple(3, 1).placement == linear(3)
    assert pipedream(3).placement == pipedream_2bw(3, 3).placement == linear(3)
    assert gpipe(3, 1, groups=2).placement == interleaved(3, 1).placement == looped(3, 2)
    assert wpipe(3, 3).placement == looped(3, 2)
    assert gems(4, 1).placement == chimera(4, 1).placement == bidirectional(4)
    assert chimera(8, 1, pairs=2).placement == bidirectional(8, pairs=2)
    assert hanayo(3, 1, waves=2).placement == wave(3, 2)


@pytest.mark.parametrize("concat", Concat)
@pytest.mark.parametrize("micro_batches", range(1, 18))
def test_chimera_numbers_micro_batches_pipe_by_pipe(concat: Concat, micro_batches: int) -> None:
    """Down pipes first, each in the order it runs them."""
    for pairs in (1, 2):
        schedule = chimera(4, micro_batches, pairs, concat)
        shares = micro_batches_of_pipes(schedule)
        assert [m for share in shares for m in share] == list(range(micro_batches))
        for pipe, workers in enumerate(schedule.placement.pipes_stages):
            injected = [
                m
                for op in schedule.orders[workers[0]]
                if op.kind is OpKind.FORWARD and (op.pipe, op.stage) == (pipe, 0)
                for m in op.micro_batches
            ]
            assert injected == shares[pipe]


def test_chimera_spreads_what_is_left_over_down_and_up_in_turn() -> None:
    shares = {n: micro_batches_of_pipes(chimera(8, n, pairs=2)) for n in (1, 2, 3, 5, 6, 8)}
    assert shares == {
        1: [[0], [], [], []],
        2: [[0], [], [1], []],
        3: [[0], [1], [2], []],
        5: [[0, 1], [2], [3], [4]],
        6: [[0, 1], [2], [3, 4], [5]],
        8: [[0, 1], [2, 3], [4, 5], [6, 7]],
    }


def test_gems_alternates_the_direction() -> None:
    assert micro_batches_of_pipes(gems(4, 5)) == [[0, 2, 4], [1, 3]]


def test_mixpipe_alternates_the_direction() -> None:
    assert micro_batches_of_pipes(mixpipe(4, 5)) == [[0, 2, 4], [1, 3]]


# --- What a schedule says about itself -----------------------------------------------------------------


def test_a_schedule_shows_its_options() -> None:
    assert str(chimera(4, 4)) == "chimera(stages=4, micro_batches=4, pairs=1, concat=direct)"
    assert str(wpipe(2, 3, periods=4)) == "wpipe(workers=2, micro_batches=3, periods=4, groups=2)"


@pytest.mark.parametrize("name", SCHEMES)
def test_options_build_the_same_schedule_again(name: str) -> None:
    known = SCHEMES[name]
    required = [option.name for option in known.options if option.required]
    given: dict[str, int | str] = {each: 8 if each == "micro_batches" else 4 for each in required}
    schedule = build(name, given)
    again = build(name, dict(schedule.options))
    assert again == schedule
    assert schedule.scheme == name
    assert schedule.synchronous == known.synchronous
    # A flag is said where it is set.
    flags = {o.name for o in known.options if o.kind is OptionType.FLAG}
    assert {option for option, _ in schedule.options} == {o.name for o in known.options} - flags
    for flag in flags:
        if flag == "asymmetric":
            given |= {"stages": 6, "micro_batches": 6, "injected": 2, "early_forwards": 1}
        schedule = build(name, {**given, flag: True})
        assert build(name, dict(schedule.options)) == schedule
        assert dict(schedule.options)[flag] is True


@pytest.mark.parametrize("periods", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "name",
    ["pipedream", "pipedream-2bw", "wpipe"],
)
def test_steady_slices_are_whole_periods(name: str, periods: int) -> None:
    options = {
        "pipedream": {"stages": 3},
        "pipedream-2bw": {"stages": 3, "micro_batches": 4},
        "wpipe": {"workers": 3, "micro_batches": 4},
    }[name]
    schedule = build(name, {**options, "periods": periods})
    if schedule.steady is None:
        assert periods <= 3
        return
    stages_held = schedule.stages // schedule.workers
    for order, (begin, stop) in zip(schedule.orders, schedule.steady, strict=True):
        assert 0 <= begin < stop <= len(order)
        assert (stop - begin) % (2 * stages_held * schedule.micro_batches) == 0
        kinds = [op.kind for op in order[begin:stop]]
        assert kinds.count(OpKind.FORWARD) == kinds.count(OpKind.BACKWARD)


def test_synchronous_schedules_are_one_period() -> None:
    for schedule in (gpipe(2, 3), dapple(2, 3), gems(2, 3), chimera(2, 3), hanayo(2, 3)):
        assert schedule.synchronous
        assert schedule.periods == 1
        assert schedule.steady is None
        assert schedule.total_micro_batches == schedule.micro_batches == 3


def test_asynchronous_schedules_have_periods() -> None:
    schedule = wpipe(2, 3, periods=4)
    assert not schedule.synchronous
    assert (schedule.periods, schedule.micro_batches, schedule.total_micro_batches) == (4, 3, 12)
    for order in schedule.orders:
        batches = [op.micro_batches[0] for op in order if op.kind is OpKind.FORWARD]
        first_group = [op.micro_batches[0] for op in order if op.kind is OpKind.FORWARD and op.stage < 2]
        assert sorted(batches) == sorted([*range(12)] * 2)
        assert all(a < b for a, b in pairwise(first_group))


# --- Illegal options ------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # an odd depth, with the legal ones beside it
    ("chimera", {"stages": 5, "micro_batches": 4}, r"stages=5.*even.*use 4 or 6"),
    ("gems", {"stages": 3, "micro_batches": 4}, r"stages=3.*even.*use 2 or 4"),
    ("mixpipe", {"stages": 7, "micro_batches": 4}, r"stages=7.*even.*use 6 or 8"),
    # pairs that do not divide D/2
    ("chimera", {"stages": 8, "micro_batches": 8, "pairs": 3}, r"pairs=3.*stages/2 = 4.*1, 2, 4"),
    ("chimera", {"stages": 12, "micro_batches": 8, "pairs": 12}, r"pairs=12.*1, 2, 3, 6"),
    ("chimera", {"stages": 4, "micro_batches": 4, "pairs": 0}, r"pairs=0.*1 or more"),
    # concat
    (
        "chimera",
        {"stages": 4, "micro_batches": 4, "concat": "tripling"},
        r"concat='tripling'.*direct, forward-doubling, backward-halving",
    ),
    # too few micro-batches between updates
    ("wpipe", {"workers": 4, "micro_batches": 3}, r"micro_batches=3.*use 4 or more"),
    ("pipedream-2bw", {"stages": 4, "micro_batches": 3}, r"micro_batches=3.*4 or more.*depth 4"),
    # mixpipe's K and Γ
    ("mixpipe", {"stages": 8, "micro_batches": 8, "injected": 3}, r"injected=3.*even"),
    ("mixpipe", {"stages": 8, "micro_batches": 8, "injected": 10}, r"injected=10"),
    ("mixpipe", {"stages": 8, "micro_batches": 8, "injected": 0}, r"injected=0"),
    ("mixpipe", {"stages": 8, "micro_batches": 8, "injected": "most"}, r"injected='most'.*max"),
    (
        "mixpipe",
        {"stages": 8, "micro_batches": 8, "injected": 4, "early_forwards": 3},
        r"early_forwards=3.*2",
    ),
    ("mixpipe", {"stages": 8, "micro_batches": 8, "early_forwards": -1}, r"early_forwards=-1"),
    (
        "mixpipe",
        {"stages": 8, "micro_batches": 8, "injected": 4, "asymmetric": True},
        r"stages=8, injected=4 .* legal: stages=6 or 8 or 10 or 12 .* = 3; stages=10 or 12 .* = 5",
    ),
    (
        "mixpipe",
        {"stages": 6, "micro_batches": 9, "injected": 2, "early_forwards": 1, "asymmetric": True},
        r"micro_batches=9: .* use a multiple of 6",
    ),
    # more
    ("hanayo", {"workers": 4, "micro_batches": 4, "waves": 0}, r"waves=0.*1 or more"),
    ("interleaved", {"workers": 4, "micro_batches": 4, "chunks": 0}, r"chunks=0.*1 or more"),
    ("interleaved-zb", {"workers": 4, "micro_batches": 4, "chunks": 0}, r"chunks=0.*1 or more"),
    ("dualpipe", {"stages": 3, "micro_batches": 8}, r"stages=3.*even.*use 2 or 4"),
    ("dualpipe", {"stages": 4, "micro_batches": 7}, r"micro_batches=7: must be 8 or more: twice the stages"),
    ("dualpipe", {"stages": 4, "micro_batches": 9}, r"micro_batches=9: must be even.*; use 8 or 10"),
    ("dualpipe-v", {"workers": 4, "micro_batches": 7}, r"micro_batches=7: must be 8 or more: twice the work"),
    ("dapple", {"stages": 4, "micro_batches": 4, "split": 1}, r"split=1: must be true or false"),
    ("gpipe", {"stages": 4, "micro_batches": 4, "groups": 0}, r"groups=0.*1 or more"),
    ("pipedream", {"stages": 4, "periods": 0}, r"periods=0.*1 or more"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_illegal_options_are_refused_with_the_legal_ones(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, options)


WRONG_NUMBERS: list[Any] = [0, -1, -8, 2.0, 1.5, True, None]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
def test_every_number_of_every_scheme_must_be_a_positive_whole_one(name: str, wrong: Any) -> None:
    known = SCHEMES[name]
    required = [option.name for option in known.options if option.required]
    optional = [
        option.name
        for option in known.options
        if option.kind is OptionType.NUMBER and option.default is not None and name != "mixpipe"
    ]
    for option in (*required, *optional):
        options = {**dict.fromkeys(required, 4), option: wrong}
        with pytest.raises(ConfigError, match=rf"{option}={re.escape(repr(wrong))}.* or more"):
            known.build(**options)


# --- The registry ---------------------------------------------------------------------------------------


def test_registry_names() -> None:
    assert list(SCHEMES) == [
        "chimera",
        "dapple",
        "dualpipe",
        "dualpipe-v",
        "gems",
        "gpipe",
        "hanayo",
        "interleaved",
        "interleaved-zb",
        "mixpipe",
        "pipedream",
        "pipedream-2bw",
        "v-half",
        "v-min",
        "wpipe",
        "zb-h1",
        "zb-h2",
        "zb-v",
    ]
    assert {name for name, known in SCHEMES.items() if not known.synchronous} == {
        "pipedream",
        "pipedream-2bw",
        "wpipe",
    }


def test_1f1b_is_dapple() -> None:
    assert scheme("1f1b") is scheme("dapple")
    assert scheme("dapple").title == "1F1B (dapple)"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("1F1B", "dapple"),
        ("DAPPLE", "dapple"),
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved"),
        ("interleaved-1f1b", "interleaved"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("ZB-V", "zb-v"),
        ("ZBV", "zb-v"),
        ("zb_v", "zb-v"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("ZB-H1", "zb-h1"),
        ("V-Half", "v-half"),
        ("DualPipeV", "dualpipe-v"),
        ("DualPipe", "dualpipe"),
        ("PipeDream-2BW", "pipedream-2bw"),
    ],
)
def test_names_as_papers_and_torch_write_them(spelling: str, name: str) -> None:
    assert scheme(spelling).name == name


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("chimra", "chimera"), ("Hanaio", "hanayo"), ("GPipes", "gpipe"), ("DualPipe-W", "dualpipe-v")],
)
def test_unknown_scheme_gets_a_suggestion(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown scheme '{wrong}'.*did you mean '{near}'") as info:
        build(wrong, {})
    for known in SCHEMES:
        assert known in str(info.value)


def test_unknown_scheme_without_a_near_one_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme 'zzz'.* Known: chimera, 1F1B \(dapple\), dualp"):
        scheme("zzz")


def test_missing_options_are_named_with_what_is_legal() -> None:
    with pytest.raises(ConfigError, match=r"chimera needs stages .*even, 2 or more.*micro_batches"):
        build("chimera", {})
    with pytest.raises(ConfigError, match=r"wpipe needs micro_batches .*workers or more"):
        build("wpipe", {"workers": 2})


def test_unknown_options_are_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"dapple has no option 'pairs'.*stages, micro_batches"):
        build("dapple", {"stages": 2, "micro_batches": 2, "pairs": 1})


def test_every_scheme_understands_workers_and_stages() -> None:
    for known in SCHEMES.values():
        name = known.build.__name__
        sizes = {"micro_batches": 8}
        own = {option.name: sizes.get(option.name, 4) for option in known.options if option.required}
        expected = build(known.name, own)
        for depth, count in (("workers", expected.workers), ("stages", expected.stages)):
            given = {key: value for key, value in own.items() if key != known.depth} | {depth: count}
            assert build(known.name, given) == expected
            assert getattr(schemes, name)(**given) == expected
        assert pickle.loads(pickle.dumps(getattr(schemes, name))) is getattr(schemes, name)
    assert (
        str(schemes.hanayo(micro_batches=2, stages=8, waves=2))
        == "hanayo(workers=2, micro_batches=2, waves=2)"
    )
    with pytest.raises(ConfigError, match="stages=3: hanayo has 2 stages on each of its workers"):
        schemes.hanayo(stages=3, micro_batches=2)


def test_a_text_is_a_scheme_with_its_sizes() -> None:
    for text in ("zb-v(workers=2, micro_batches=4)", "mixpipe(stages=2, micro_batches=4, injected=max)"):
        assert schedule_of(text, {}) == schedule_of(schedule_of(text, {}), {})
    assert schedule_of("dapple(stages=2,split=True)", {"micro_batches": 4}).options[-1] == ("split", True)
    for text, sizes, message in (
        ("dapple(2, 4)", {}, r"not a scheme with its sizes; write it like zb-v\(workers=4"),
        ("zb-v(workers=4", {}, "not a scheme with its sizes"),
        ("zb-v(workers=4)", {"workers": 4}, "workers is given twice"),
        ("zb-w", {}, "did you mean 'zb-v'"),
    ):
        with pytest.raises(ConfigError, match=message):
            schedule_of(text, sizes)
    with pytest.raises(ConfigError, match="has its own sizes; leave these out"):
        schedule_of(schemes.dapple(2, 2), {"stages": 4})
    with pytest.raises(ConfigError, match=r"3 is not a schedule; give one of cf\.schemes"):
        schedule_of(3, {})  # type: ignore[arg-type]


def test_words_where_numbers_belong_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages='four': must be a whole number"):
        build("dapple", {"stages": "four", "micro_batches": 2})
