"""Where messages stand in the lists."""

from __future__ import annotations

from itertools import pairwise

import pytest

from counterflow.errors import ConfigError, ScheduleError
from counterflow.program import lowering, rules
from counterflow.program.actions import (
    Action,
    CallHooks,
    Clip,
    ClipStage,
    Compute,
    DropNonFinite,
    Matching,
    Program,
    Receive,
    Send,
    StartGather,
    StartSync,
    Summed,
    Update,
    WaitGather,
    WaitSync,
)
from counterflow.program.lowering import (
    AHEAD,
    Ends,
    Shared,
    freeing,
    lower,
    lower_evaluation,
    messages,
    statistics_sums,
    unit_times,
)
from counterflow.program.rules import CheckSubject, Rule
from counterflow.schedule import schemes
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Schedule
from counterflow.schedule.placement import bidirectional
from counterflow.schedule.workload import plain


@pytest.mark.parametrize(
    "schedule",
    [schemes.dapple(4, 8), schemes.chimera(4, 8), schemes.zb_v(4, 8), schemes.interleaved(4, 8, chunks=2)],
    ids=str,
)
def test_matched_by_tag_every_receive_is_posted_ops_ahead(schedule: Schedule) -> None:
    # Over Gloo a message leaves when its receiver has said that it has a place for it, a way before.
    rows = lower(schedule, matching=Matching.TAG).actions
    for row in rows:
        ran = 0
        posted: dict[object, int] = {}
        for action in row:
            if isinstance(action, Receive):
                posted[action.output] = ran
            elif isinstance(action, Compute):
                takes = [output for output in posted if output in schedule.workload.needs(action.op)]
                assert all(posted.pop(output) <= max(0, ran - AHEAD) for output in takes)
                ran += 1
        assert not posted


def test_a_send_follows_its_op_at_once() -> None:
    for matching in Matching:
        for row in lower(schemes.dapple(4, 4), matching=matching).actions:
            for one, other in pairwise([a for a in row if not isinstance(a, Receive)]):
                if isinstance(other, Send):
                    assert isinstance(one, Compute)
                    assert one.op == other.output


def short(action: Action) -> str:
    """An action in a word: ``F0.0``, sent ``F0.0>1``, received ``F0.0<0``, summed ``+1.0`` until ``=1.0``.

    A stage is clipped in ``C1.0``. A gather is ``?`` until ``!``, of loss, norm and copies of some periods.
    """
    found = "clip"
    match action:
        case Compute(op):
            found = str(op)
        case Send(output, peer):
            found = f"{output}>{peer}"
        case Receive(output, peer):
            found = f"{output}<{peer}"
        case StartSync(stage, period, _, what) | WaitSync(stage, period, _, what):
            kind = {Summed.GRADIENTS: "", Summed.TIED: "tied", Summed.STATISTICS: "stat"}[what]
            found = f"{'+' if isinstance(action, StartSync) else '='}{kind}{stage}.{period}"
        case StartGather() | WaitGather():
            named = zip("lnc", action.periods, strict=True)
            kind = "?" if isinstance(action, StartGather) else "!"
            found = kind + "".join(f"{what}{period}" for what, period in named if period is not None)
        case ClipStage(stage, period):
            found = f"C{stage}.{period}"
        case DropNonFinite() | CallHooks():
            found = "drop" if isinstance(action, DropNonFinite) else "hooks"
        case Update(stage, version, frees):
            found = f"U{stage}v{version}" + "".join(f"-{one}" for one in frees)
        case _:
            assert isinstance(action, Clip)
    return found


NORM = "?l0n0 !l0n0 clip"
"""How loss and norm are gathered with a barrier."""


def rows(program: Program) -> list[str]:
    """A program's lists in words."""
    return [" ".join(map(short, row)) for row in program.actions]


def test_messages_and_sums_of_two_pipes() -> None:
    chimera = schemes.chimera(2, 2)
    ops = [
        "F0.0 F0.0>1 F1.0p1<1 F1.1p1 B1.1p1 B1.1p1>1 B0.1<1",
        "F0.0<0 F1.0p1 F1.0p1>0 F0.1 B1.1p1<0 B0.1 B0.1>0",
    ]
    last = ["B0.0", "B1.0p1"]
    for sync, between in (("eager", ("+1.0 ", " +0.0")), ("end", ("", " +1.0 +0.0"))):
        assert rows(lower(chimera, sync=sync)) == [
            f"{ops[w]} {between[0]}{last[w]}{between[1]} =1.0 =0.0 {NORM} U1v1-0 U0v1-0" for w in range(2)
        ]
    shared = Shared(ties=((0, 1),), statistics=(0,))
    assert rows(lower(chimera, sync="end", shared=shared)) == [
        f"{ops[w]} {last[w]} +1.0 +0.0 =1.0 =0.0 +tied0.0 =tied0.0 {NORM} U1v1-0 U0v1-0 +stat0.0 =stat0.0"
        for w in range(2)
    ]
    assert rows(lower(schemes.chimera(2, 1), ends=Ends(barrier=False))) == [
        "F0.0 F0.0>1 ?l0n-1c-1 B0.1<1 B0.0 +1.0 +0.0 =0.0 =1.0 !l0n-1c-1 drop U0v1-0 U1v1-0",
        "F0.0<0 F0.1 B0.1 B0.1>0 ?l0n-1c-1 +1.0 +0.0 =0.0 =1.0 !l0n-1c-1 drop U0v1-0 U1v1-0",
    ]


def test_how_a_step_ends() -> None:
    """Loss l, norm n and copies c are gathered of the step at hand, or of the one before."""

    def ending(ends: Ends) -> str:
        return " ".join(map(short, lower(schemes.dapple(1, 1), ends=ends).actions[0][2:]))

    assert ending(Ends()) == "?l0n0 !l0n0 clip U0v1-0"
    assert ending(Ends(hooks=True)) == "?l0 !l0 hooks ?n0 !n0 clip U0v1-0"
    assert ending(Ends(barrier=False, norm=True)) == "?l0n0c-1 !l0n0c-1 clip U0v1-0"
    assert ending(Ends(barrier=False)) == "?l0n-1c-1 !l0n-1c-1 drop U0v1-0"
    assert ending(Ends(barrier=False, hooks=True)) == "?l0n-1c-1 !l0n-1c-1 hooks drop U0v1-0"


def test_receives_by_order_and_by_tag() -> None:
    dapple = schemes.dapple(3, 2)
    ends = [f"{NORM} U{stage}v1-0" for stage in range(3)]
    assert rows(lower(dapple)) == [
        f"F0.0 F0.0>1 F1.0 F1.0>1 B0.1<1 B1.1<1 B0.0 B1.0 {ends[0]}",
        f"F0.0<0 F1.0<0 F0.1 F0.1>2 F1.1 F1.1>2 B0.2<2 B1.2<2 B0.1 B0.1>0 B1.1 B1.1>0 {ends[1]}",
        f"F0.1<1 F0.2 F1.1<1 B0.2 B0.2>1 F1.2 B1.2 B1.2>1 {ends[2]}",
    ]
    assert rows(lower(dapple, matching=Matching.TAG)) == [
        f"B0.1<1 B1.1<1 F0.0 F0.0>1 F1.0 F1.0>1 B0.0 B1.0 {ends[0]}",
        f"F0.0<0 F1.0<0 B0.2<2 B1.2<2 F0.1 F0.1>2 F1.1 F1.1>2 B0.1 B0.1>0 B1.1 B1.1>0 {ends[1]}",
        f"F0.1<1 F1.1<1 F0.2 B0.2 B0.2>1 F1.2 B1.2 B1.2>1 {ends[2]}",
    ]


def test_without_a_flush_an_update_follows_its_backward_or_its_sum() -> None:
    pipedream = schemes.pipedream(2, periods=2)
    assert rows(lower(pipedream)) == [
        "F0.0 F0.0>1 F1.0 F1.0>1 B0.1<1 B1.1v1<1 B0.0 C0.0 U0v1 B1.0 C0.1 U0v2-0-1",
        "F0.0<0 F0.1 F1.0<0 B0.1 B0.1>0 C1.0 U1v1-0 F1.1v1 B1.1v1 B1.1v1>0 C1.1 U1v2-1",
    ]
    assert rows(lower(pipedream, replicas=2)) == [
        "F0.0 F0.0>1 F1.0 F1.0>1 B0.1<1 B1.1v1<1 B0.0 +0.0 =0.0 C0.0 U0v1 B1.0 +0.1 =0.1 C0.1 U0v2-0-1",
        "F0.0<0 F0.1 F1.0<0 B0.1 B0.1>0 +1.0 =1.0 C1.0 U1v1-0 F1.1v1 B1.1v1 B1.1v1>0 +1.1 =1.1 C1.1 U1v2-1",
    ]


def test_an_update_without_a_sum_is_at_once_and_with_one_before_its_first_user() -> None:
    two = schemes.pipedream_2bw(2, 2, periods=3)
    assert rows(lower(two)) == [
        "F0.0 F0.0>1 F1.0 F1.0>1 B0.1<1 B0.0 F2.0 F2.0>1 B1.1<1 B1.0 C0.0 U0v1 F3.0 F3.0>1 B2.1<1 B2.0 "
        "F4.0v1 F4.0v1>1 B3.1<1 B3.0 C0.1 U0v2-0 F5.0v1 F5.0v1>1 B4.1v1<1 B5.1v1<1 B4.0v1 B5.0v1 C0.2 "
        "U0v3-1-2",
        "F0.0<0 F0.1 F1.0<0 B0.1 B0.1>0 F1.1 F2.0<0 B1.1 B1.1>0 C1.0 U1v1 F2.1 F3.0<0 B2.1 B2.1>0 F3.1 "
        "F4.0v1<0 B3.1 B3.1>0 C1.1 U1v2-0 F4.1v1 F5.0v1<0 B4.1v1 B4.1v1>0 F5.1v1 B5.1v1 B5.1v1>0 C1.2 "
        "U1v3-1-2",
    ]
    first, _ = rows(lower(two, replicas=2))
    assert first == (
        "F0.0 F0.0>1 F1.0 F1.0>1 B0.1<1 B0.0 F2.0 F2.0>1 B1.1<1 B1.0 +0.0 F3.0 F3.0>1 B2.1<1 =0.0 C0.0 U0v1 "
        "B2.0 F4.0v1 F4.0v1>1 B3.1<1 B3.0 +0.1 F5.0v1 F5.0v1>1 B4.1v1<1 B5.1v1<1 =0.1 C0.1 U0v2-0 "
        "B4.0v1 B5.0v1 +0.2 =0.2 C0.2 U0v3-1-2"
    )


def test_a_copy_that_no_micro_batch_passes_takes_part_at_the_end() -> None:
    workload = plain(bidirectional(2), 1, periods=1, version=lambda _, period: period)
    orders = tuple(tuple(op for op in workload.ops() if op.stage == stage) for stage in range(2))
    assert rows(lower(Schedule("mine", (), workload, orders))) == [
        "F0.0 F0.0>1 B0.1<1 B0.0 +0.0 +1.0 =0.0 C0.0 U0v1-0 =1.0 C1.0 U1v1-0",
        "F0.0<0 F0.1 B0.1 B0.1>0 +0.0 +1.0 =0.0 C0.0 U0v1-0 =1.0 C1.0 U1v1-0",
    ]


def test_sums_of_tied_weights_and_of_statistics_are_of_those_who_hold_them() -> None:
    dapple, shared = schemes.dapple(3, 1), Shared(ties=((0, 2),), statistics=(1,))
    ops = ["F0.0 F0.0>1 B0.1<1 B0.0", "F0.0<0 F0.1 F0.1>2 B0.2<2 B0.1 B0.1>0", "F0.1<1 F0.2 B0.2 B0.2>1"]
    tied = "+tied0.0 =tied0.0"
    assert rows(lower(dapple, shared=shared)) == [
        f"{ops[0]} {tied} {NORM} U0v1-0",
        f"{ops[1]} {NORM} U1v1-0",
        f"{ops[2]} {tied} {NORM} U2v1-0",
    ]
    assert rows(lower(dapple, replicas=2, shared=shared)) == [
        f"{ops[0]} +0.0 =0.0 {tied} {NORM} U0v1-0",
        f"{ops[1]} +1.0 =1.0 {NORM} U1v1-0 +stat1.0 =stat1.0",
        f"{ops[2]} +2.0 =2.0 {tied} {NORM} U2v1-0",
    ]
    last = lower(dapple, shared=shared).actions[2]
    assert last[4] == StartSync(0, 0, (0, 2), Summed.TIED, (2,))
    assert last[5] == WaitSync(0, 0, (0, 2), Summed.TIED, (2,))
    chimera = lower(schemes.chimera(2, 2))
    averages = [(0, 3, (0, 1), Summed.STATISTICS), (1, 3, (0, 1), Summed.STATISTICS)]
    assert statistics_sums(chimera, 1, Shared(statistics=(0, 1)), 3) == [
        *(StartSync(*one) for one in averages),
        *(WaitSync(*one) for one in averages),
    ]


@pytest.mark.parametrize(
    "schedule",
    [schemes.hanayo(3, 2, waves=1), schemes.chimera(4, 3), schemes.zb_v(3, 2), schemes.v_min(2, 4)],
    ids=str,
)
def test_two_workers_have_their_messages_in_one_order(schedule: Schedule) -> None:
    found = lower(schedule, recheck=False).actions
    for one in range(schedule.workers):
        for other in range(one):
            orders = [
                [a.output for a in found[me] if isinstance(a, Send | Receive) and a.peer == peer]
                for me, peer in ((one, other), (other, one))
            ]
            assert orders[0] == orders[1]


def test_a_receive_is_posted_right_after_the_message_before() -> None:
    """F1.3 comes after F1.1 is sent to the same worker: at once then, before F0.4 and F1.4."""
    assert rows(lower(schemes.hanayo(3, 2, waves=1)))[1].startswith(
        "F0.0<0 F1.0<0 F0.1 F0.1>2 F1.1 F1.1>2 F0.3<2 F1.3<2 F0.4 F0.4>0 F1.4 F1.4>0"
    )


def test_receives_where_some_are_early_enough_already() -> None:
    """By tag: F3.0 is received in its turn of the messages, before I1.1 is sent."""
    assert rows(lower(schemes.v_min(2, 4), matching=Matching.TAG))[1] == (
        "F0.0<0 F1.0<0 F0.1 I0.3<0 F0.2 F2.0<0 F0.2>0 F1.1 F1.2 F1.2>0 I0.2 I1.3<0 I0.1 I0.1>0 W0.2 F2.1 "
        "I1.2 I1.1 F3.0<0 I1.1>0 W0.1 I2.3<0 F2.2 F2.2>0 W1.2 F3.1 I2.2 I2.1 I2.1>0 W1.1 I3.3<0 F3.2 F3.2>0 "
        "W2.2 W2.1 I3.2 I3.1 I3.1>0 W3.2 W3.1 ?l0n0 !l0n0 clip U2v1-0 U1v1-0"
    )


def test_every_pass_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, int, list[str]]] = []

    def require(subject: CheckSubject, asked: tuple[Rule, ...]) -> None:
        done = () if subject.program is None else subject.program.actions[0]
        checked.append((subject.schedule.scheme, len(done), [rule.name for rule in asked]))

    monkeypatch.setattr(lowering, "require", require)
    traffic = [
        rule.name
        for rule in (
            rules.COMPUTES,
            rules.COMPUTES_PAIRS,
            rules.MESSAGES,
            rules.DEADLOCK_RENDEZVOUS,
            rules.POSTED,
            rules.DEADLOCK_HOLDING,
        )
    ]
    updated = [rule.name for rule in (rules.VERSIONS, rules.SYNCS, rules.SUMS, rules.AGREED)]
    lower(schemes.chimera(2, 1), ends=Ends(barrier=False))
    assert checked == [
        ("chimera", 0, [rules.PLACED.name]),
        ("chimera", 4, traffic),  # F0.0, its send, a receive and B0.0
        ("chimera", 6, traffic),  # and two sums
        ("chimera", 13, [*traffic, *updated]),  # two waits, a gather, clipping and two updates
        ("chimera", 13, [*traffic, rules.AGREED.name]),  # the gather starts earlier
    ]
    checked.clear()
    lower(schemes.chimera(2, 1), recheck=False)
    assert not checked
    lower_evaluation(schemes.chimera(2, 1))
    assert checked == [("chimera", 2, traffic[2:])]


def test_the_forwards_of_one_period_alone() -> None:
    assert rows(lower_evaluation(schemes.chimera(2, 2))) == [
        "F0.0 F0.0>1 F1.0p1<1 F1.1p1",
        "F0.0<0 F1.0p1 F1.0p1>0 F0.1",
    ]
    for matching in Matching:
        program = lower_evaluation(schemes.pipedream_2bw(2, 2, periods=3), matching=matching)
        assert program.matching is matching
        assert rows(program) == ["F0.0 F0.0>1 F1.0 F1.0>1", "F0.0<0 F1.0<0 F0.1 F1.1"]
        assert program.schedule.workload == schemes.pipedream_2bw(2, 2).workload.evaluation()
        assert program.schedule.steady is None
        assert {
            action.op.version for row in program.actions for action in row if isinstance(action, Compute)
        } == {0}
    # The weights are those at hand.
    assert rows(lower_evaluation(schemes.pipedream(1, periods=2))) == ["F0.0"]


def test_unit_times_of_halves_and_of_ops_of_two() -> None:
    """A forward takes 1, a backward 2, each half of one 1: in halves where there are some."""
    assert unit_times(OpGraph(schemes.zb_h1(2, 1))) == ([0, 3, 4, 1, 2, 3], [1, 4, 5, 2, 3, 4])
    assert unit_times(OpGraph(schemes.dapple(1, 1))) == ([0, 1], [1, 3])
    halves = schemes.chimera(2, 2, concat="backward-halving")
    assert unit_times(OpGraph(halves)) == ([0, 2, 4, 6, 8, 10] * 2, [2, 4, 6, 8, 10, 12] * 2)
    doubled = schemes.chimera(2, 4, concat="forward-doubling")
    assert unit_times(OpGraph(doubled)) == ([0, 2, 4, 6, 8, 10] * 2, [2, 4, 6, 8, 10, 12] * 2)


def test_updates_free_what_nothing_later_uses() -> None:
    order = schemes.pipedream(1, periods=3).orders[0]
    forward = order[0]

    def freed(before: list[Action], row: list[Action]) -> list[str]:
        return [short(action) for action in freeing(before, row)]

    first, second = Update(0, 1, ()), Update(0, 2, ())
    uses = [Compute(forward._replace(version=version)) for version in range(3)]
    assert freed([], [first, uses[0], second, uses[2]]) == ["U0v1", "F0.0", "U0v2-0-1", "F0.0v2"]
    assert freed([], [uses[0], first, uses[1], second]) == ["F0.0", "U0v1-0", "F0.0v1", "U0v2-1"]
    assert freed([first], [second, uses[1]]) == ["U0v2-0", "F0.0v1"]
    assert freed([Update(0, 1, (0,))], [second]) == ["U0v2-1"]
    # Ops of another stage use none of its versions.
    other = Compute(forward._replace(stage=1))
    assert freed([], [first, other]) == ["U0v1-0", "F0.1"]


def test_messages_of_one_segment_after_the_other() -> None:
    """Worker 0's F1 may be sent, and received, only in the second segment."""
    graph = OpGraph(schemes.gpipe(2, 2))
    _, ends = unit_times(graph)
    for matching, expected in (
        (Matching.ORDER, [("F0.0", 0, 0), ("F1.0", 1, 1), ("B1.1", 2, 1), ("B0.1", 2, 1)]),
        (Matching.TAG, [("F0.0", 0, 0), ("F1.0", 1, 1), ("B1.1", 1, 1), ("B0.1", 1, 1)]),
    ):
        found = list(messages(graph, ends, [(0, 1, 4), (0, 1, 4)], matching))
        sent = [(str(a.output), before, number) for _, before, number, a in found if isinstance(a, Send)]
        assert sent == [("F0.0", 1, 0), ("F1.0", 2, 1), ("B1.1", 3, 1), ("B0.1", 4, 1)]
        received = [(str(a.output), at, number) for _, at, number, a in found if isinstance(a, Receive)]
        assert received == expected
    with pytest.raises(ScheduleError) as refused:
        list(messages(graph, ends, [(0, 1, 4), (0, 3, 4)], Matching.ORDER))
    assert str(refused.value) == (
        "worker 1, op 1: F1.1 comes before the mini-batch that worker 0, op 1: F1.0 needs; the schedule "
        "cannot be run mini-batch by mini-batch"
    )


def test_what_cannot_be_lowered_is_refused() -> None:
    with pytest.raises(ConfigError, match="replicas=0: must be 1 or more"):
        lower(schemes.dapple(2, 2), replicas=0)
    with pytest.raises(ConfigError, match=r"^sync='never': unknown"):
        lower(schemes.dapple(2, 2), sync="never")
    program = lower(schemes.dapple(2, 2), replicas=3, sync="eager", matching=Matching.TAG)
    assert (program.replicas, program.sync.value, program.matching) == (3, "eager", Matching.TAG)
