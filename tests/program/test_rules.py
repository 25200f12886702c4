"""The checker's rules one by one: what each says of a case that breaks it, word for word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from counterflow.errors import DeadlockError, ScheduleError
from counterflow.program import rules
from counterflow.program.actions import (
    Action,
    Clip,
    Compute,
    DropNonFinite,
    Matching,
    Program,
    Receive,
    StartGather,
    StartSync,
    Summed,
    Update,
    WaitGather,
    WaitSync,
)
from counterflow.program.lowering import Ends, Shared, lower
from counterflow.program.rules import CheckSubject, Rule
from counterflow.program.rules.traffic import _stuck
from counterflow.schedule import schemes
from counterflow.schedule.ir import Op, OpKind, Schedule, SkipLink
from counterflow.schedule.placement import bidirectional, linear
from counterflow.schedule.workload import Pass, Share, Workload, plain

from .test_checker import edited, rewritten


def said(
    rule: Rule, schedule: Schedule, program: Program | None = None, limit: float | None = None
) -> list[str]:
    """The lines that a rule says."""
    return rules.details(rule, CheckSubject(schedule, program, limit)).splitlines()


def op(text: str) -> Op:
    """An op by its text: kind, micro-batch, stage and, with a v, its version."""
    place, _, version = text.partition("v")
    batch, _, stage = place[1:].partition(".")
    return Op(OpKind(text[0]), int(stage), (int(batch),), version=int(version or 0))


def ordered(*texts: str, micro_batches: int = 2, split: bool = False) -> Schedule:
    """A schedule of a straight pipeline by the text of each worker's order."""
    orders = tuple(tuple(map(op, text.split())) for text in texts)
    work = plain(linear(len(texts)), micro_batches, split=split)
    return Schedule("mine", (), work, orders)


def at(actions: list[Action], text: str) -> int:
    """Where the action with this text stands."""
    return [str(action) for action in actions].index(text)


def moved(text: str, before: str | None) -> Callable[[list[Action]], None]:
    """Move an action before another one; None: to the end."""

    def change(actions: list[Action]) -> None:
        action = actions.pop(at(actions, text))
        actions.insert(len(actions) if before is None else at(actions, before), action)

    return change


def swapped(one: str, other: str) -> Callable[[list[Action]], None]:
    """Two actions in each other's place."""

    def change(actions: list[Action]) -> None:
        first, second = at(actions, one), at(actions, other)
        actions[first], actions[second] = actions[second], actions[first]

    return change


def without(text: str) -> Callable[[list[Action]], None]:
    return lambda actions: actions.remove(actions[at(actions, text)])


def doubled(text: str) -> Callable[[list[Action]], None]:
    return lambda actions: actions.insert(at(actions, text), actions[at(actions, text)])


def instead(text: str, action: Action) -> Callable[[list[Action]], None]:
    def change(actions: list[Action]) -> None:
        actions[at(actions, text)] = action

    return change


# -- every op exactly once

TWO_PIPES = Schedule("mine", (), plain(bidirectional(2), 2, pipe_of=(0, 1)), ((), ()))


@pytest.mark.parametrize(
    "stray",
    [
        Op(OpKind.FORWARD, 2, (0,)),
        Op(OpKind.FORWARD, -1, (0,)),
        Op(OpKind.FORWARD, 0, (2,)),
        Op(OpKind.FORWARD, 0, (-1,)),
        Op(OpKind.FORWARD, 0, (0,), pipe=2),
        Op(OpKind.FORWARD, 0, (0,), pipe=-1),
        Op(OpKind.FORWARD, 0, ()),
        Op(OpKind.BACKWARD, 0, (0,), part=2, parts=2),
        Op(OpKind.BACKWARD, 0, (0,), part=-1, parts=2),
        Op(OpKind.FORWARD, 0, (0,), parts=2),
    ],
    ids=str,
)
def test_an_op_outside_of_the_schedule(stray: Op) -> None:
    schedule = edited(schemes.chimera(2, 2), 1, lambda order: order.insert(1, stray))
    assert said(rules.COMPLETE, schedule) == [
        f"worker 1, op 1: {stray} is not one of 2 pipes, 2 stages, 2 micro-batches, groups within one update"
    ]


def test_the_last_stage_pipe_micro_batch_and_part_are_inside() -> None:
    schedule = edited(schemes.chimera(2, 2), 1, lambda order: order.clear())
    for last in (Op(OpKind.FORWARD, 1, (1,)), Op(OpKind.BACKWARD, 1, (0,), 1, part=1, parts=2)):
        (line,) = said(rules.COMPLETE, edited(schedule, 1, lambda order, op=last: order.append(op)))[:1]  # type: ignore[misc]
        shares = "which shares or splits this work in another way"
        assert line == f"worker 1, op 0: {last} is not an op of the workload, {shares}"


def test_a_group_of_two_updates_is_outside() -> None:
    group = Op(OpKind.FORWARD, 0, (1, 2))
    inside = Op(OpKind.FORWARD, 0, (2, 3))
    schedule = schemes.pipedream_2bw(2, 2, periods=2)
    (line,) = said(rules.COMPLETE, edited(schedule, 0, lambda order: order.append(group)))
    assert "op 8: F(1,2).0 is not one of 1 pipe, 2 stages, 4 micro-batches" in line
    (line,) = said(rules.COMPLETE, edited(schedule, 0, lambda order: order.append(inside)))
    assert "op 8: F(2,3).0 is not an op of the workload" in line


def test_an_op_that_is_there_three_times_is_told_once() -> None:
    schedule = ordered("F0.0 F0.0 B0.0 F0.0", micro_batches=1)
    assert said(rules.COMPLETE, schedule) == ["worker 0, op 1: F0.0 exists more than once"]


def test_missing_ops_are_told_by_pipe_then_micro_batch_then_stage() -> None:
    last = Op(OpKind.BACKWARD, 1, (1,), pipe=1)
    lines = list(rules.COMPLETE.violations(CheckSubject(replace(TWO_PIPES, orders=((last,), ())))))
    missing = [line.split()[0] for line in lines]
    # A forward and a backward of one stage may come in either order.
    assert [text[1:] for text in missing] == [*["0.0"] * 2, *["0.1"] * 2, *["1.0p1"] * 2, "1.1p1"]
    assert set(missing) == {"F0.0", "B0.0", "F0.1", "B0.1", "F1.0p1", "B1.0p1", "F1.1p1"}
    assert lines[-1] == "F1.1p1 is in no order, though other stages of pipe 1 have its micro-batch"


def test_two_ways_to_the_same_input_gradient() -> None:
    schedule = ordered("F0.0 I0.0 B0.0 W0.0", micro_batches=1, split=True)
    assert said(rules.COMPLETE, schedule) == [
        "worker 0, op 2: B0.0 is not an op of the workload, which shares or splits this work in another way",
        "worker 0, op 2: B0.0 makes an input gradient that I0.0 makes too",
    ]


def test_some_stages_of_a_backward_may_be_split() -> None:
    work = Workload(linear(2), 1, (Pass(0, (0,), (Share((0,), split=(0,)),)),))
    schedule = Schedule(
        "mine", (), work, (tuple(map(op, ("F0.0", "I0.0", "W0.0"))), (op("F0.1"), op("B0.1")))
    )
    assert said(rules.COMPLETE, schedule) == []


def test_an_edited_version_does_not_make_another_op() -> None:
    orders = tuple(tuple(o._replace(version=1) for o in order) for order in schemes.pipedream(2, 2).orders)
    assert said(rules.COMPLETE, replace(schemes.pipedream(2, 2), orders=orders)) == []


def test_more_than_five_violations_are_counted() -> None:
    lines = said(rules.COMPLETE, ordered("", micro_batches=4))
    assert len(lines) == 6
    assert lines[-1] == "… and 3 more"
    assert len(said(rules.COMPLETE, ordered("F0.0", micro_batches=3))) == 5


# -- the order of a worker


def test_the_place_of_an_op() -> None:
    schedule = replace(TWO_PIPES, orders=((op("F0.0"), op("F0.1")), (op("F0.1"),)))
    assert said(rules.PLACED, schedule) == ["worker 0, op 1: F0.1, but worker 1 holds stage 1 of pipe 0"]


def test_a_backward_follows_all_forwards_of_its_micro_batches() -> None:
    both = Op(OpKind.BACKWARD, 0, (0, 1))
    work = Workload(linear(1), 2, (Pass(0, (0,), ()), Pass(0, (1,), (Share((0, 1)),))))
    schedule = Schedule("mine", (), work, ((op("F0.0"), both, op("F1.0")),))
    assert said(rules.FORWARD_FIRST, schedule) == ["worker 0, op 1: B(0,1).0 comes before its forward"]
    assert said(rules.FORWARD_FIRST, replace(schedule, orders=((op("F0.0"), op("F1.0"), both),))) == []


def test_the_forward_of_another_stage_pipe_or_micro_batch_is_not_its_forward() -> None:
    back = Op(OpKind.INPUT_GRADIENT, 0, (0,))
    for other in (
        Op(OpKind.FORWARD, 1, (0,)),
        Op(OpKind.FORWARD, 0, (0,), pipe=1),
        Op(OpKind.FORWARD, 0, (1,)),
    ):
        assert said(rules.FORWARD_FIRST, replace(TWO_PIPES, orders=((), (other, back)))) == [
            "worker 1, op 1: I0.0 comes before its forward"
        ]


def test_weight_gradients_follow_their_own_input_gradient() -> None:
    schedule = ordered("F0.0 F1.0 I0.0 W0.0 W1.0 I1.0", split=True)
    assert said(rules.FORWARD_FIRST, schedule) == []
    assert said(rules.INPUT_GRADIENT_FIRST, schedule) == [
        "worker 0, op 4: W1.0 comes before its input gradient"
    ]


# -- weight versions


def test_a_version_newer_than_promised_is_refused() -> None:
    schedule = schemes.pipedream(2, periods=4)
    newer = edited(schedule, 0, lambda order: order.__setitem__(1, op("F1.0v1")))
    assert said(rules.PROMISED, newer) == [
        "worker 0, op 1: F1.0v1 uses version 1, pipedream promises 0",
        "worker 0, op 4: B1.0 uses version 0, its forward used 1",
    ]
    late = edited(schedule, 1, lambda order: order.__setitem__(1, op("B0.1v1")))
    assert said(rules.PROMISED, late) == [
        "worker 1, op 1: B0.1v1 uses version 1, pipedream promises 0",
        "worker 1, op 1: B0.1v1 uses version 1, its forward used 0",
    ]


def test_where_nothing_is_promised_a_backward_uses_its_forwards_version() -> None:
    schedule = schemes.pipedream(1, periods=2)
    free = replace(schedule, workload=replace(schedule.workload, versions=None))
    assert said(rules.PROMISED, free) == []
    orders = (tuple(map(op, ["F0.0v3", "B0.0v3", "F1.0v3", "B1.0v2"])),)
    assert said(rules.PROMISED, replace(free, orders=orders)) == [
        "worker 0, op 3: B1.0v2 uses version 2, its forward used 3"
    ]


PIPEDREAM = schemes.pipedream(2, periods=4)
SUMMED = lower(PIPEDREAM, replicas=2)
"""In asynchronous schemes, on two pipeline groups."""
ALONE = lower(PIPEDREAM)


def test_a_version_that_is_not_there() -> None:
    # Worker 0: F0 F1 B0 U1 F2v1 B1 U2 F3v2 B2v1 U3 B3v2 U4.
    late = rewritten(ALONE, 0, moved("Update stage 0 to version 1", "Backward B1.0"))
    place = late.actions[0].index(Compute(op("F2.0v1")))
    assert said(rules.VERSIONS, PIPEDREAM, late) == [
        f"worker 0, action {place}: Forward F2.0v1: version 1 of stage 0 is not held, only 0"
    ]
    unknown = rewritten(ALONE, 0, instead("Update stage 0 to version 1", Update(0, version=1, frees=())))
    unknown = rewritten(unknown, 0, instead("Forward F2.0v1", Compute(op("F2.0v7"))))
    (line, *_) = said(rules.VERSIONS, PIPEDREAM, unknown)
    assert line.endswith("Forward F2.0v7: version 7 of stage 0 is not held, only 0, 1")
    early = rewritten(ALONE, 0, instead("Update stage 0 to version 2", Update(0, version=2, frees=(0, 1))))
    place = early.actions[0].index(Compute(op("B2.0v1")))
    assert said(rules.VERSIONS, PIPEDREAM, early) == [
        f"worker 0, action {place}: Backward B2.0v1: version 1 of stage 0 is not held, only 2",
        f"worker 0, action {place + 2}: Update stage 0 to version 3: frees (1,), of which some are not held",
    ]


def test_an_update_before_the_last_backward_of_its_period() -> None:
    early = rewritten(ALONE, 0, moved("Update stage 0 to version 4", "Backward B3.0v2"))
    place = at(list(early.actions[0]), "Update stage 0 to version 4")
    assert said(rules.VERSIONS, PIPEDREAM, early)[:1] == [
        f"worker 0, action {place}: Update stage 0 to version 4: 1 backwards of its period follow later"
    ]


def test_updates_follow_each_other_and_each_is_made_once() -> None:
    schedule = schemes.pipedream(1, periods=2)
    program = lower(schedule)
    assert [str(a) for a in program.actions[0]] == [
        "Forward F0.0",
        "Backward B0.0",
        "Clip stage 0, period 0",
        "Update stage 0 to version 1",
        "Forward F1.0v1",
        "Backward B1.0v1",
        "Clip stage 0, period 1",
        "Update stage 0 to version 2",
    ]
    skipped = rewritten(program, 0, instead("Update stage 0 to version 2", Update(0, 3, (1,))))
    assert said(rules.VERSIONS, schedule, skipped) == [
        "worker 0, action 7: Update stage 0 to version 3: expected an update of version 1"
    ]
    again = rewritten(program, 0, instead("Update stage 0 to version 2", Update(0, 1, ())))
    assert said(rules.VERSIONS, schedule, again) == [
        "worker 0, action 7: Update stage 0 to version 1: expected an update of version 1"
    ]
    kept = rewritten(program, 0, instead("Update stage 0 to version 1", Update(0, 1, ())))
    remade = rewritten(kept, 0, instead("Update stage 0 to version 2", Update(0, 1, ())))
    assert said(rules.VERSIONS, schedule, remade) == [
        "worker 0, action 7: Update stage 0 to version 1: expected an update of version 1"
    ]
    more = rewritten(program, 0, lambda actions: actions.append(Update(0, 3, (2,))))
    assert said(rules.VERSIONS, schedule, more) == ["worker 0: 3 updates of stage 0, expected 2"]
    absent = rewritten(program, 0, instead("Update stage 0 to version 2", Update(0, 2, (0, 1))))
    assert said(rules.VERSIONS, schedule, absent) == [
        "worker 0, action 7: Update stage 0 to version 2: frees (0, 1), of which some are not held"
    ]


def test_backwards_count_for_their_own_stage_and_period() -> None:
    # One worker with two stages: the update of one does not wait for the other's backward.
    schedule = schemes.interleaved(1, 1, chunks=2)
    program = lower(schedule)
    early = rewritten(program, 0, moved("Update stage 1 to version 1", "Backward B0.0"))
    assert said(rules.VERSIONS, schedule, early) == []
    early = rewritten(program, 0, moved("Update stage 0 to version 1", "Backward B0.0"))
    line, _ = said(rules.VERSIONS, schedule, early)
    assert "Update stage 0 to version 1: 1 backwards of its period follow later" in line


# -- gradient syncs


def test_syncs_that_two_workers_share_begin_in_one_order() -> None:
    schedule = schemes.chimera(4, 4)
    program = lower(schedule, sync="end")
    assert said(rules.SYNCS, schedule, program) == []
    first, second = (f"StartSync gradients of stage {stage}, period 0" for stage in (3, 0))
    crossed = rewritten(program, 0, swapped(first, second))
    assert said(rules.SYNCS, schedule, crossed) == [
        "workers 0 and 3 start their gradient syncs in different orders: [(0, 0), (3, 0)], [(3, 0), (0, 0)]"
    ]
    both = rewritten(crossed, 3, swapped(first, second))
    assert said(rules.SYNCS, schedule, both) == []


def test_an_update_follows_the_wait_for_its_sync() -> None:
    wait, update = "WaitSync gradients of stage 0, period 0", "Update stage 0 to version 1"
    early = rewritten(SUMMED, 0, swapped(wait, update))
    place = at(list(early.actions[0]), update)
    assert said(rules.SYNCS, PIPEDREAM, early) == [
        f"worker 0, action {place}: {update} comes before the wait for its gradient sync"
    ]


def test_a_sync_is_started_once_after_the_last_backward_and_before_its_wait() -> None:
    start, wait = "StartSync gradients of stage 0, period 3", "WaitSync gradients of stage 0, period 3"
    early = rewritten(SUMMED, 0, moved(start, "Backward B3.0v2"))
    place = at(list(early.actions[0]), "Backward B3.0v2")
    assert said(rules.SYNCS, PIPEDREAM, early) == [
        f"worker 0, action {place}: Backward B3.0v2 comes after the start of the gradient sync of its stage"
    ]
    twice = rewritten(SUMMED, 0, doubled(start))
    place = at(list(SUMMED.actions[0]), start)
    assert said(rules.SYNCS, PIPEDREAM, twice) == [
        f"worker 0, action {place + 1}: {start} exists more than once"
    ]
    crossed = rewritten(SUMMED, 0, swapped(start, wait))
    assert said(rules.SYNCS, PIPEDREAM, crossed) == [
        f"worker 0, action {place}: {wait} comes before its start"
    ]


def test_gradients_in_a_sum_are_not_added_to() -> None:
    wait = "WaitSync gradients of stage 0, period 0"
    late = rewritten(SUMMED, 0, moved(wait, "StartSync gradients of stage 0, period 1"))
    place = at(list(late.actions[0]), "Backward B1.0")
    lines = said(rules.SYNCS, PIPEDREAM, late)
    assert f"worker 0, action {place}: Backward B1.0 needs gradients whose sync is still in flight" in lines
    # A forward does not touch them.
    wait = "WaitSync gradients of stage 0, period 1"
    later = rewritten(SUMMED, 0, moved(wait, "SendActivation F3.0v2 to worker 1"))
    update = "Update stage 0 to version 2"
    later = rewritten(later, 0, moved(update, "SendActivation F3.0v2 to worker 1"))
    assert said(rules.SYNCS, PIPEDREAM, later) == []


def test_a_sync_is_over_all_copies_of_the_stage_and_period() -> None:
    schedule = schemes.chimera(2, 2)
    program = lower(schedule, sync="end")
    start = "StartSync gradients of stage 1, period 0"
    place = at(list(program.actions[1]), start)
    few = rewritten(program, 1, instead(start, StartSync(1, 0, (1,))))
    assert said(rules.SYNCS, schedule, few) == [
        f"worker 1, action {place}: {start}: over workers (1,), copies are on (0, 1)"
    ]
    extra = rewritten(program, 1, lambda actions: actions.insert(place, StartSync(1, 1, (0, 1))))
    assert said(rules.SYNCS, schedule, extra) == [
        f"worker 1, action {place}: StartSync gradients of stage 1, period 1: over workers (0, 1), "
        "copies are on ()"
    ]
    wait = "WaitSync gradients of stage 1, period 0"
    none = rewritten(rewritten(program, 1, without(start)), 1, without(wait))
    assert said(rules.SYNCS, schedule, none) == [
        f"worker 1, action {at(list(none.actions[1]), 'Update stage 1 to version 1')}: "
        "Update stage 1 to version 1 comes before the wait for its gradient sync",
        "worker 1: no gradient sync of its copy of stage 1, period 0 (copies on workers 0, 1)",
    ]


def test_sums_of_other_things_are_no_gradient_syncs() -> None:
    schedule = schemes.chimera(2, 2)
    program = lower(schedule, shared=Shared(ties=((0, 1),), statistics=(0,)))
    assert said(rules.SYNCS, schedule, program) == []
    # Nothing is summed on one group of one pipe.
    assert said(rules.SYNCS, schemes.dapple(2, 2), lower(schemes.dapple(2, 2))) == []


# -- the agreement


START, WAIT, CLIP = (
    "StartGather loss and norm of period 0",
    "WaitGather loss and norm of period 0",
    "Clip of period 0",
)
EARLY = Ends(barrier=False)
REPORT, KNOW = (f"{what}Gather loss of period 0, norm and copies of period -1" for what in ("Start", "Wait"))


def test_nothing_of_the_gradients_comes_after_the_gather() -> None:
    schedule = schemes.chimera(2, 2)
    program = lower(schedule, sync="end", shared=Shared(statistics=(0,)))
    assert said(rules.AGREED, schedule, program) == []  # statistics may
    for text in ("WaitSync gradients of stage 0, period 0", "Backward B0.0"):
        for place in ("Update stage 1 to version 1", WAIT):
            late = rewritten(program, 0, moved(text, place))
            assert said(rules.AGREED, schedule, late) == [
                f"worker 0, action {at(list(late.actions[0]), text)}: {text} "
                "comes after the worker reported its norm"
            ]
        early = lower(schedule, sync="end", ends=EARLY)
        late = rewritten(early, 0, moved(text, "Update stage 1 to version 1"))
        assert said(rules.AGREED, schedule, late) == [
            f"worker 0, action {at(list(late.actions[0]), text)}: {text} comes after the gather of the loss"
        ]
    tied = lower(schedule, shared=Shared(ties=((0, 1),)))
    assert said(rules.AGREED, schedule, tied) == []


def test_updates_come_after_clipping_and_that_after_all_gathers() -> None:
    schedule = schemes.dapple(2, 2)
    update = "Update stage 0 to version 1"
    hasty = rewritten(lower(schedule), 0, moved(update, CLIP))
    place = at(list(hasty.actions[0]), update)
    assert said(rules.AGREED, schedule, hasty) == [
        f"worker 0, action {place}: {update} comes before the gradients are clipped"
    ]
    early = rewritten(lower(schedule), 0, moved(CLIP, WAIT))
    assert said(rules.AGREED, schedule, early) == [
        f"worker 0, action {at(list(early.actions[0]), WAIT)}: {WAIT} comes after the gradients are clipped"
    ]


def test_the_loss_is_gathered_and_gradients_are_clipped_once() -> None:
    schedule = schemes.dapple(2, 2)

    def twice(actions: list[Action]) -> None:
        actions[at(actions, CLIP) : at(actions, CLIP)] = [StartGather(0, 0), WaitGather(0, 0)]

    program = rewritten(rewritten(lower(schedule), 0, twice), 1, twice)
    assert said(rules.AGREED, schedule, program) == [
        f"worker {worker}: gathers the loss 2 times, the norm 2 times and clips 1 times, expected 1, 1 and 1"
        for worker in range(2)
    ]
    uncut = rewritten(lower(schedule), 1, without(CLIP))
    assert said(rules.AGREED, schedule, uncut) == [
        "worker 1: gathers the loss 1 times, the norm 1 times and clips 0 times, expected 1, 0 and 1"
    ]
    assert said(rules.AGREED, PIPEDREAM, ALONE) == []  # there is no such end in asynchronous schemes


def test_who_clips_by_the_norm_has_gathered_it() -> None:
    schedule = schemes.dapple(1, 1)
    program = lower(schedule)

    def instead(action: Action) -> Callable[[list[Action]], None]:
        def change(actions: list[Action]) -> None:
            actions[at(actions, CLIP)] = action

        return change

    dropped = rewritten(program, 0, instead(DropNonFinite(0)))
    assert said(rules.AGREED, schedule, dropped) == [
        "worker 0: gathers the loss 1 times, the norm 1 times and clips 1 times, expected 1, 0 and 1"
    ]
    early = lower(schedule, ends=EARLY)
    clipped = rewritten(early, 0, lambda actions: actions.__setitem__(-2, Clip(0)))
    assert said(rules.AGREED, schedule, clipped) == [
        "worker 0: gathers the loss 1 times, the norm 0 times and clips 1 times, expected 1, 1 and 1"
    ]
    assert said(rules.AGREED, schedule, lower(schedule, ends=Ends(hooks=True))) == []


def test_all_workers_gather_the_same_in_one_order() -> None:
    schedule = schemes.dapple(2, 2)
    silent = rewritten(rewritten(lower(schedule), 1, without(START)), 1, without(WAIT))
    assert said(rules.AGREED, schedule, silent)[0] == f"gather 0 is none on worker 1, {START} on worker 0"
    other = rewritten(lower(schedule), 0, lambda actions: actions.insert(0, StartGather(copies=-1)))
    assert said(rules.AGREED, schedule, other) == [
        f"worker 0, action {at(list(other.actions[0]), WAIT)}: {WAIT} is not for the gather that is next",
        f"worker 0: {START} is never waited for",
        f"gather 0 is {START} on worker 1, StartGather copies of period -1 on worker 0",
    ]


def test_a_wait_for_a_sum_that_is_never_started() -> None:
    schedule = schemes.chimera(2, 2)
    wait = WaitSync(0, 0, (0, 1), Summed.STATISTICS)
    program = rewritten(lower(schedule), 1, lambda actions: actions.append(wait))
    place = len(program.actions[1]) - 1
    assert said(rules.AGREED, schedule, program) == [
        f"worker 1, action {place}: {wait} waits for a sum that it never starts"
    ]


def test_the_loss_is_reported_when_all_of_it_is_there() -> None:
    schedule = schemes.dapple(2, 2)
    early = lower(schedule, ends=EARLY)
    assert said(rules.AGREED, schedule, early) == []
    hasty = rewritten(early, 1, moved(REPORT, "Forward F1.1"))
    place = at(list(hasty.actions[1]), "Forward F1.1")
    assert said(rules.AGREED, schedule, hasty) == [
        f"worker 1, action {place}: Forward F1.1 comes after the worker reported its loss"
    ]
    # Forwards of other stages make no loss.
    assert said(rules.AGREED, schedule, rewritten(early, 0, moved(REPORT, "Forward F0.0"))) == []
    slow = rewritten(early, 1, swapped(REPORT, KNOW))
    place = at(list(slow.actions[1]), KNOW)
    lines = said(rules.AGREED, schedule, slow)
    assert lines[0] == f"worker 1, action {place}: {KNOW} is not for the gather that is next"


# -- messages


def test_messages_that_do_not_fit() -> None:
    schedule = schemes.dapple(2, 2)
    program = lower(schedule)
    lost = rewritten(program, 0, without("ReceiveGradient B1.1 from worker 1"))
    place = at(list(program.actions[1]), "SendGradient B1.1 to worker 0")
    assert said(rules.MESSAGES, schedule, lost) == [
        "workers 0 and 1: message 3 between them is none on worker 0, "
        f"but B1.1 from 1 to 0 (action {place}) on worker 1",
        "worker 0: no receive of B1.1 from worker 1, which B1.0 needs",
    ]
    unsent = rewritten(program, 1, without("SendGradient B1.1 to worker 0"))
    place = at(list(program.actions[0]), "ReceiveGradient B1.1 from worker 1")
    assert said(rules.MESSAGES, schedule, unsent) == [
        f"workers 0 and 1: message 3 between them is B1.1 from 1 to 0 (action {place}) on worker 0, "
        "but none on worker 1"
    ]


def test_messages_by_order_match_one_by_one_and_by_tag_in_any_order() -> None:
    schedule = schemes.gpipe(2, 2)
    one, other = (f"ReceiveActivation F{m}.0 from worker 0" for m in (0, 1))
    for matching, expected in (
        (
            Matching.ORDER,
            [
                "workers 0 and 1: message 0 between them is F0.0 from 0 to 1 (action 1) on worker 0, "
                "but F1.0 from 0 to 1 (action 0) on worker 1"
            ],
        ),
        (Matching.TAG, []),
    ):
        crossed = rewritten(lower(schedule, matching=matching), 1, swapped(one, other))
        assert said(rules.MESSAGES, schedule, crossed) == expected


def test_a_send_follows_its_op_and_a_receive_comes_before_the_op_that_needs_it() -> None:
    schedule = schemes.dapple(2, 2)
    program = lower(schedule)
    hasty = rewritten(program, 0, swapped("Forward F0.0", "SendActivation F0.0 to worker 1"))
    assert said(rules.MESSAGES, schedule, hasty) == [
        "worker 0, action 0: SendActivation F0.0 to worker 1 comes before F0.0 is computed"
    ]
    late = rewritten(program, 0, moved("ReceiveGradient B1.1 from worker 1", START))
    place = at(list(late.actions[0]), "ReceiveGradient B1.1 from worker 1")
    assert said(rules.MESSAGES, schedule, late) == [
        f"worker 0, action {place}: ReceiveGradient B1.1 from worker 1 is after B1.0, which needs it"
    ]


def test_messages_of_an_op_that_is_never_computed() -> None:
    schedule = schemes.dapple(2, 1)
    program = rewritten(lower(schedule), 0, without("Forward F0.0"))
    program = rewritten(program, 1, without("Forward F0.1"))
    assert said(rules.MESSAGES, schedule, program) == [
        "worker 0, action 0: SendActivation F0.0 to worker 1 comes before F0.0 is computed"
    ]


def test_receives_that_nobody_needs_or_that_are_there_twice() -> None:
    schedule = schemes.gpipe(2, 1)
    program = lower(schedule, matching=Matching.TAG)
    twice = rewritten(program, 1, doubled("ReceiveActivation F0.0 from worker 0"))
    assert "worker 1, action 1: ReceiveActivation F0.0 from worker 0 exists more than once" in said(
        rules.MESSAGES, schedule, twice
    )
    needless = rewritten(program, 1, lambda actions: actions.insert(0, Receive(op("F5.0"), 0)))
    assert said(rules.MESSAGES, schedule, needless)[1:] == [
        "worker 1, action 0: ReceiveActivation F5.0 from worker 0, which no op here needs"
    ]


def test_messages_of_skips_are_told_by_their_skip() -> None:
    schedule = schemes.dapple(3, 1).with_skips([SkipLink(0, 2)])
    program = lower(schedule, matching=Matching.TAG)
    lost = rewritten(program, 2, without("ReceiveActivation F0.0 for stage 2 from worker 0"))
    assert said(rules.MESSAGES, schedule, lost)[1:] == [
        "worker 2: no receive of F0.0 for stage 2 from worker 0, which F0.2 needs"
    ]


# -- computes, deadlocks, the peak


def test_each_worker_computes_its_order() -> None:
    schedule = ordered("F0.0 F1.0 B0.0 B1.0")
    program = lower(schedule)
    crossed = rewritten(program, 0, swapped("Forward F0.0", "Forward F1.0"))
    assert said(rules.COMPUTES, schedule, crossed) == [
        "worker 0, action 0: computes F1.0, its order has F0.0"
    ]
    fewer = rewritten(program, 0, without("Backward B1.0"))
    assert said(rules.COMPUTES, schedule, fewer) == ["worker 0: op 3 of its order, B1.0, is not computed"]
    more = rewritten(program, 0, lambda actions: actions.append(Compute(op("B1.0"))))
    place = len(more.actions[0]) - 1
    assert said(rules.COMPUTES, schedule, more) == [
        f"worker 0, action {place}: computes B1.0, its order has nothing more"
    ]


def test_each_worker_is_told_that_does_not_compute_its_order() -> None:
    schedule = schemes.gpipe(2, 2)
    program = lower(schedule)
    for worker in range(2):
        program = rewritten(program, worker, swapped(f"Forward F0.{worker}", f"Forward F1.{worker}"))
    assert [line.split(",")[0] for line in said(rules.COMPUTES, schedule, program)] == [
        "worker 0",
        "worker 1",
    ]
    program = lower(schedule)
    for worker in range(2):
        program = rewritten(program, worker, lambda actions: actions.clear())
    assert [line.split(":")[0] for line in said(rules.COMPUTES, schedule, program)] == [
        "worker 0",
        "worker 1",
    ]
    assert [line.split(",")[0] for line in said(rules.PEAK, schedule, limit=1)] == ["worker 0", "worker 1"]


def test_a_circle_in_the_orders_and_one_in_the_lists() -> None:
    orders = "F0.0 B0.0 F1.0 B1.0", "F0.1 F1.1 B0.1 B1.1"
    assert said(rules.DEADLOCK, ordered(*orders)) == [
        "deadlock, the workers wait in a circle:",
        "  worker 0, op 1: B0.0 waits for B0.1 (worker 1, op 2)",
        "  worker 1, op 1: F1.1 waits for F1.0 (worker 0, op 2)",
    ]
    schedule = schemes.dapple(2, 1)
    assert said(rules.DEADLOCK, schedule) == []
    lost = rewritten(lower(schedule), 0, without("SendActivation F0.0 to worker 1"))
    lines = said(rules.DEADLOCK, schedule, lost)
    assert any("Forward F0.1 waits for worker 0 to send F0.0" in line for line in lines)
    # Where sends wait for their receive, but not where they are buffered.
    late = rewritten(lower(schedule), 1, moved("ReceiveActivation F0.0 from worker 0", "Forward F0.1"))
    assert said(rules.DEADLOCK_RENDEZVOUS, schedule, late) == []
    never = rewritten(lower(schedule), 1, without("ReceiveActivation F0.0 from worker 0"))
    assert said(rules.DEADLOCK, schedule, never) == []
    lines = said(rules.DEADLOCK_RENDEZVOUS, schedule, never)
    assert any("waits for worker 1 to post the receive of F0.0" in line for line in lines)


def test_what_comes_by_a_skip_is_waited_for() -> None:
    schedule = schemes.dapple(3, 1).with_skips([SkipLink(0, 2)])
    lost = rewritten(
        lower(schedule, matching=Matching.TAG), 0, without("SendActivation F0.0 for stage 2 to worker 2")
    )
    lines = said(rules.DEADLOCK, schedule, lost)
    assert any(
        "Forward F0.2 waits for worker 0 to send F0.0 by the skip connection 0 to 2" in line for line in lines
    )


def test_a_receive_before_an_op_that_its_message_needs() -> None:
    schedule = schemes.dapple(2, 1)
    receive = "ReceiveGradient B0.1 from worker 1"
    for matching, expected in (
        (Matching.ORDER, [f"worker 0, action 0: {receive} is posted before F0.0, which it needs"]),
        (Matching.TAG, []),
    ):
        early = rewritten(lower(schedule, matching=matching), 0, moved(receive, "Forward F0.0"))
        assert said(rules.POSTED, schedule, early) == expected
        # The receive holds the forward that it waits for, where messages wait on a device.
        lines = said(rules.DEADLOCK_HOLDING, schedule, early)
        assert any(f"action 0: {receive} waits for worker 1 to send B0.1" in line for line in lines) == (
            matching is Matching.ORDER
        )
    # After that op it is right, whatever else is still to run; the next one needs two.
    schedule = schemes.dapple(2, 2)
    other = "ReceiveGradient B1.1 from worker 1"
    early = rewritten(lower(schedule), 0, moved(other, "Forward F1.0"))
    (line,) = said(rules.POSTED, schedule, early)
    assert line.endswith(f"{other} is posted before F1.0, which it needs")
    early = rewritten(lower(schedule), 0, moved(receive, "SendActivation F0.0 to worker 1"))
    assert said(rules.POSTED, schedule, early) == []


def test_a_circle_of_a_send_that_holds_and_receives_that_hold() -> None:
    """Worker 1 sends to 2, then 0; 2 receives from 0, then 1; 0 receives from 1, then sends to 2.

    It ends where sends alone hold their worker, and where receives alone do: one rule sees both.
    """
    orders = "F0.0 F1.0 B0.0 B1.0", "F0.1 F1.1 B0.1 B1.1", "F0.2 B0.2 F1.2 B1.2"
    schedule = ordered(*orders).with_skips([SkipLink(0, 2)])
    program = lower(schedule)
    for worker, action, before in (
        (0, "SendActivation F1.0 for stage 2 to worker 2", "Backward B0.0"),
        (0, "ReceiveGradient B1.2 for stage 0 from worker 2", "Backward B1.0"),
        (0, "ReceiveGradient B1.1 from worker 1", "Backward B1.0"),
        (1, "SendActivation F1.1 to worker 2", "SendGradient B0.1 to worker 0"),
        (1, "ReceiveGradient B1.2 from worker 2", "Backward B1.1"),
        (2, "ReceiveActivation F1.0 for stage 2 from worker 0", "Forward F1.2"),
        (2, "ReceiveActivation F1.1 from worker 1", "Forward F1.2"),
    ):
        program = rewritten(program, worker, moved(action, before))
    subject = CheckSubject(schedule, program)
    assert list(_stuck(subject, program, rendezvous=True)) == []
    assert list(_stuck(subject, program, rendezvous=False, holding=True)) == []
    assert [rule for rule in rules.RULES if rules.details(rule, subject)] == [rules.DEADLOCK_HOLDING]
    assert said(rules.DEADLOCK_HOLDING, schedule, program) == [
        "deadlock, the workers wait in a circle:",
        "  worker 0, action 6: ReceiveGradient B0.1 from worker 1 waits for worker 1 to send B0.1",
        "  worker 1, action 7: SendActivation F1.1 to worker 2 waits for worker 2 to post the receive of "
        "F1.1",
        "  worker 2, action 6: ReceiveActivation F1.0 for stage 2 from worker 0 waits for worker 0 to send "
        "F1.0 by the skip connection 0 to 2",
    ]


def test_half_a_stash_above_the_limit_is_too_much() -> None:
    whole = ordered("F0.0 F1.0 B0.0 B1.0")
    half = Op(OpKind.BACKWARD, 0, (0,), part=0, parts=2)
    other = half._replace(part=1)
    orders = ((op("F0.0"), half, op("F1.0"), other, op("B1.0")),)
    uneven = replace(whole, orders=orders)
    assert said(rules.PEAK, uneven, limit=1.5) == []
    assert said(rules.PEAK, uneven, limit=1.0) == [
        "worker 0, op 2: F1.0 makes 1.5 stashed forwards, the limit is 1"
    ]
    assert said(rules.PEAK, uneven) == []
    assert said(rules.PEAK, whole, limit=0) == [
        "worker 0, op 0: F0.0 makes 1 stashed forwards, the limit is 0"
    ]


# -- all of them


def test_the_first_rule_that_is_broken_is_raised_with_its_error() -> None:
    stuck = ordered("F0.0 B0.0 F1.0 B1.0", "F0.1 F1.1 B0.1 B1.1")
    with pytest.raises(
        DeadlockError, match=r"mine\(\) breaks the rule 'no deadlock with buffered sends':\ndead"
    ):
        rules.require(CheckSubject(stuck), (rules.COMPLETE, rules.DEADLOCK))
    with pytest.raises(ScheduleError, match=r"breaks the rule 'peak within the limit':\nworker 0, op 0"):
        rules.require(CheckSubject(stuck, peak_limit=0), (rules.COMPLETE, rules.PEAK, rules.DEADLOCK))
    rules.require(CheckSubject(stuck), (rules.COMPLETE, rules.PLACED))


def test_every_rule_is_in_the_table_after_those_it_builds_on() -> None:
    every = {value.name for value in vars(rules).values() if isinstance(value, Rule)}
    names = [rule.name for rule in rules.RULES]
    assert set(names) == every
    assert len(names) == len(every)
    for number, rule in enumerate(rules.RULES):
        assert set(rule.after) <= set(names[:number])
        assert rule.lowered == (rules.DEADLOCK.name in rule.after)  # lists are made of what has no deadlock
        assert rule.error is (DeadlockError if "deadlock" in rule.name else ScheduleError)
