"""Where messages stand in the lists."""

from __future__ import annotations

from itertools import pairwise

import pytest

from counterflow.errors import ConfigError, ScheduleError
from counterflow.program.actions import (
    Action,
    Agree,
    Compute,
    Matching,
    Program,
    Receive,
    Send,
    StartSync,
    Summed,
    TellLoss,
    Update,
    WaitSync,
)
from counterflow.program.lowering import (
    AHEAD,
    Shared,
    freeing,
    lower,
    lower_evaluation,
    messages,
    unit_times,
)
from counterflow.schedule import schemes
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Schedule


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
    """An action in a word: ``F0.0``, sent ``F0.0>1``, received ``F0.0<0``, summed ``+1.0`` until ``=1.0``."""
    found = "tell"
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
        case Agree(_, norm):
            found = "norm" if norm else "loss"
        case Update(stage, version, frees):
            found = f"U{stage}v{version}" + "".join(f"-{one}" for one in frees)
        case _:
            assert isinstance(action, TellLoss)
    return found


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
            f"{ops[w]} {between[0]}{last[w]}{between[1]} =1.0 =0.0 norm U1v1-0 U0v1-0" for w in range(2)
        ]
    shared = Shared(ties=((0, 1),), statistics=(0,))
    assert rows(lower(chimera, sync="end", shared=shared)) == [
        f"{ops[w]} {last[w]} +1.0 +0.0 =1.0 =0.0 +tied0.0 =tied0.0 norm U1v1-0 U0v1-0 +stat0.0 =stat0.0"
        for w in range(2)
    ]
    assert rows(lower(schemes.chimera(2, 1), norm=False)) == [
        "F0.0 F0.0>1 tell B0.1<1 B0.0 +1.0 +0.0 =0.0 =1.0 loss U0v1-0 U1v1-0",
        "F0.0<0 F0.1 B0.1 B0.1>0 tell +1.0 +0.0 =0.0 =1.0 loss U0v1-0 U1v1-0",
    ]


def test_receives_by_order_and_by_tag() -> None:
    dapple = schemes.dapple(3, 2)
    ends = [f"norm U{stage}v1-0" for stage in range(3)]
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
        "F0.0 F0.0>1 F1.0 F1.0>1 B0.1<1 B1.1v1<1 B0.0 U0v1 B1.0 U0v2-0-1",
        "F0.0<0 F0.1 F1.0<0 B0.1 B0.1>0 U1v1-0 F1.1v1 B1.1v1 B1.1v1>0 U1v2-1",
    ]
    assert rows(lower(pipedream, replicas=2)) == [
        "F0.0 F0.0>1 F1.0 F1.0>1 B0.1<1 B1.1v1<1 B0.0 +0.0 =0.0 U0v1 B1.0 +0.1 =0.1 U0v2-0-1",
        "F0.0<0 F0.1 F1.0<0 B0.1 B0.1>0 +1.0 =1.0 U1v1-0 F1.1v1 B1.1v1 B1.1v1>0 +1.1 =1.1 U1v2-1",
    ]


def test_the_forwards_of_one_period_alone() -> None:
    assert rows(lower_evaluation(schemes.chimera(2, 2))) == [
        "F0.0 F0.0>1 F1.0p1<1 F1.1p1",
        "F0.0<0 F1.0p1 F1.0p1>0 F0.1",
    ]
    for matching in Matching:
        program = lower_evaluation(schemes.pipedream_2bw(2, 2, periods=3), matching=matching)
        assert program.matching is matching
        assert rows(program) == ["F0.0 F0.0>1 F1.0 F1.0>1", "F0.0<0 F1.0<0 F0.1 F1.1"]
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
    with pytest.raises(
        ScheduleError, match=r"worker 1, op 1: F1\.1 comes before the mini-batch that worker 0"
    ):
        list(messages(graph, ends, [(0, 1, 4), (0, 3, 4)], Matching.ORDER))


def test_what_cannot_be_lowered_is_refused() -> None:
    with pytest.raises(ConfigError, match="replicas=0: must be 1 or more"):
        lower(schemes.dapple(2, 2), replicas=0)
    with pytest.raises(ConfigError, match="sync"):
        lower(schemes.dapple(2, 2), sync="never")
    program = lower(schemes.dapple(2, 2), replicas=3, sync="eager", matching=Matching.TAG)
    assert (program.replicas, program.sync.value, program.matching) == (3, "eager", Matching.TAG)
