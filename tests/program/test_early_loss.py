"""Lists whose updates wait for the loss alone, one after another as steps without a barrier run them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterflow.program.actions import (
    Action,
    Clip,
    Compute,
    DropNonFinite,
    Matching,
    Program,
    Send,
    StartGather,
    WaitGather,
)
from counterflow.program.lowering import Ends, Shared, lower
from counterflow.program.rules import AGREED, RULES, CheckSubject, details, require
from counterflow.program.segments import steps
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

SCHEDULES = [
    schemes.gpipe(1, 1),
    schemes.gpipe(4, 4),
    schemes.dapple(4, 2),
    schemes.dapple(8, 16),
    schemes.interleaved(4, 8, chunks=2),
    schemes.gems(4, 4),
    schemes.chimera(4, 1),
    schemes.chimera(8, 8),
    schemes.chimera(4, 8, concat="forward-doubling"),
    schemes.chimera(4, 8, concat="backward-halving"),
    schemes.chimera(8, 8, pairs=2),
    schemes.mixpipe(4, 8, injected="max"),
    schemes.hanayo(4, 4, waves=2),
    schemes.zb_h1(4, 8),
    schemes.zb_h2(4, 8),
    schemes.zb_v(4, 8),
    schemes.chimera(4, 8, split=True),
    schemes.dualpipe(4, 8),
    schemes.dualpipe_v(4, 8),
]


def repeated(program: Program, ends: Ends, count: int) -> Program:
    """The lists of so many steps, one after another: each op of step k on version k."""
    schedule = program.schedule
    versions = tuple((0,) for _ in range(schedule.stages))
    once = replace(schedule, workload=replace(schedule.workload, synchronous=False, versions=versions))
    return steps(replace(program, schedule=once), ends).program(count)


@pytest.mark.table
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("matching", Matching)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_steps_one_after_another_break_no_rule(schedule: Schedule, matching: Matching, norm: bool) -> None:
    for replicas in (1, 2):
        shared = Shared(ties=((0, schedule.stages - 1),) if schedule.stages > 1 else (), statistics=(0,))
        ends = Ends(barrier=False, norm=norm)
        program = lower(schedule, replicas=replicas, matching=matching, shared=shared, ends=ends)
        whole = repeated(program, ends, 3)
        assert len(whole.actions[0]) == 3 * len(program.actions[0]) + 2  # what is left after the last step
        require(CheckSubject(whole.schedule, whole), RULES)


EARLY = StartGather(0, -1, -1)
GATHERS = StartGather | WaitGather | Clip | DropNonFinite


def test_only_the_gather_differs() -> None:
    for schedule in SCHEDULES:
        late, early = lower(schedule), lower(schedule, ends=Ends(barrier=False))
        for one, other in zip(late.actions, early.actions, strict=True):
            assert EARLY in other
            mine, theirs = ([a for a in row if not isinstance(a, GATHERS)] for row in (one, other))
            assert mine == theirs


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        (schemes.dapple(2, 2), "F0.0", "F0.1 B0.1 F1.1 B1.1"),
        (schemes.gpipe(2, 2), "F0.0", "F0.1 F1.1 B1.1"),
        (schemes.zb_h1(2, 2), "F0.0", "F0.1 I0.1 F1.1 I1.1"),
        (schemes.chimera(2, 2), "F0.0 F1.1p1 B1.1p1", "F1.0p1 F0.1 B0.1"),
        # After their last forwards both wait for a gradient of the other one.
        (schemes.dualpipe(2, 4), "F0.0 F2.1p1 F1.0 B2.1p1 F3.1p1", "F2.0p1 F0.1 F3.0p1 B0.1 F1.1"),
    ],
    ids=str,
)
def test_the_loss_is_reported_an_op_after_it_is_made(schedule: Schedule, first: str, last: str) -> None:
    """So that a device has something to run; but not after an op that may wait."""
    program = lower(schedule, ends=Ends(barrier=False))
    for own, expected in zip(program.actions, (first, last), strict=True):
        told = own.index(EARLY)
        assert not isinstance(own[told + 1], Send)
        assert [str(a.op) for a in own[:told] if isinstance(a, Compute)] == expected.split()


def _broken(program: Program, worker: int, actions: list[Action]) -> str:
    rows = list(program.actions)
    rows[worker] = tuple(actions)
    return details(AGREED, CheckSubject(program.schedule, replace(program, actions=tuple(rows))))


def test_a_loss_that_is_reported_too_early_too_late_or_twice_is_found() -> None:
    program = lower(schemes.dapple(2, 2), ends=Ends(barrier=False))
    own = list(program.actions[1])
    rest: list[Action] = [action for action in own if action != EARLY]
    assert "Forward F0.1 comes after the worker reported its loss" in _broken(program, 1, [EARLY, *rest])
    assert "is not for the gather that is next" in _broken(program, 1, [*rest, EARLY])
    assert "gather 0 is none on worker 1, StartGather loss of period 0" in _broken(program, 1, rest)
    assert f"{EARLY} is never waited for" in _broken(program, 1, [*own, EARLY])
