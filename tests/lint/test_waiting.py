"""Verdicts of the linter beside those of the strict NCCL fabric and of the checker."""

from __future__ import annotations

from random import Random

import pytest

from counterflow.lint.calls import CallLists, CallSide, CallStep, CommunicatorScope, Part
from counterflow.lint.changes import ListChange, changes_for
from counterflow.lint.pairing import is_crossed, pairing_faults
from counterflow.lint.program_lists import program_lists
from counterflow.lint.verdicts import lint
from counterflow.lint.waiting import Happening, TransportRule, play
from counterflow.program.action_lists import circle
from counterflow.program.actions import Action, Matching, Program, Receive, Send
from counterflow.program.lowering import lower
from counterflow.schedule import schemes
from counterflow.schedule.graph import OpGraph
from counterflow.testing.strict_nccl.fabric import RECEIVE, SEND, Fabric, Launch, RankOperation

from .drawn import drawn_lists


def fabric_ends(lists: CallLists) -> bool:
    """True if all launches run on the fabric with NCCL's rules."""
    fabric = Fabric(len(lists.ranks), lambda _: None)
    for rank, row in enumerate(lists.ranks):
        launches: dict[int, Launch] = {}
        pending: tuple[Launch, ...] = ()
        for step in row:
            pending += tuple(launches[need] for need in step.needs if need in launches)
            if step.parts:
                parts = tuple(
                    RankOperation(
                        SEND if part.side is CallSide.SEND else RECEIVE,
                        rank,
                        part.communicator,
                        "",
                        part.peer,
                    )
                    for part in step.parts
                )
                launches[step.number] = Launch(rank, step.stream, parts, pending)
                fabric.launch(launches[step.number])
    return not fabric.unfinished()


def test_nccl_order_is_that_of_the_strict_fabric() -> None:
    verdicts = set()
    for seed in range(200):
        lists = drawn_lists(seed)
        ends = play(lists, TransportRule.NCCL).ok
        assert ends is fabric_ends(lists), seed
        verdicts.add(ends)
    assert verdicts == {True, False}


def test_rules_are_those_of_the_checker() -> None:
    schedule = schemes.interleaved(workers=3, chunks=2, micro_batches=6)
    graph, program = OpGraph(schedule), lower(schedule)
    verdicts = set()
    for seed in range(30):
        draw = Random(seed)
        actions = tuple(tuple(_with_receives_elsewhere(draw, row)) for row in program.actions)
        changed = Program(schedule, actions, matching=Matching.ORDER)
        lists = program_lists(changed, graph)
        assert play(lists, TransportRule.EAGER).ok is (circle(changed, graph, rendezvous=False) is None)
        rendezvous = play(lists, TransportRule.RENDEZVOUS).ok
        assert rendezvous is (circle(changed, graph, rendezvous=True) is None)
        if not any(pairing_faults(lists)):
            blocking = play(lists, TransportRule.BLOCKING).ok
            assert blocking is (circle(changed, graph, rendezvous=True, holding=True) is None)
            verdicts.add(blocking)
    assert verdicts == {True, False}


def test_a_hardware_queue_waits_less_than_blocked_launches() -> None:
    """Lists that end if launches block end with one hardware queue, and those with any number of them."""
    verdicts = set()
    for seed in range(300):
        lists = drawn_lists(seed)
        rules = (TransportRule.BLOCKING, TransportRule.ONE_QUEUE, TransportRule.NCCL)
        ends = tuple(play(lists, rule).ok for rule in rules)
        assert sorted(ends) == list(ends), seed
        verdicts.add(ends)
    assert {(False, False, True), (False, True, True), (True, True, True)} <= verdicts


def test_one_hardware_queue_holds_what_is_launched_behind_a_stream() -> None:
    """Rank 0 launches its answer behind three receives; rank 1 sends only one message before the answer."""
    answer, *receives = (
        ("send", "0→1", "answer"),
        *(("receive", "1→0", f"m{number}") for number in range(3)),
    )
    sends = [("send", "1→0", f"m{number}") for number in range(3)]
    rank_1 = _row([sends[0], ("receive", "0→1", "answer"), *sends[1:]], peer=0, needs={2: (1,)})
    behind = CallLists((_row([*receives, answer], peer=1), rank_1), "drawn")
    assert play(behind, TransportRule.NCCL).ok
    stuck = play(behind, TransportRule.ONE_QUEUE)
    assert stuck.closed
    assert any(wait.rank == 0 and wait.event is Happening.DISPATCHED for wait in stuck.waits)
    before = CallLists((_row([*receives[:2], answer, receives[2]], peer=1), rank_1), "drawn")
    assert play(before, TransportRule.ONE_QUEUE).ok  # the second receive has begun, and waits in its stream
    assert not play(before, TransportRule.BLOCKING).ok


def _row(
    calls: list[tuple[str, str, str]], *, peer: int, needs: dict[int, tuple[int, ...]] | None = None
) -> tuple[CallStep, ...]:
    return tuple(
        CallStep(n, name, (Part(CallSide(side), peer, name, communicator),), (needs or {}).get(n, ()))
        for n, (side, communicator, name) in enumerate(calls)
    )


def _with_receives_elsewhere(draw: Random, actions: tuple[Action, ...]) -> list[Action]:
    row = list(actions)
    for _ in range(draw.randint(0, 3)):
        at = draw.choice([index for index, action in enumerate(row) if isinstance(action, Receive)])
        receive = row.pop(at)
        if draw.random() < 0.5:
            row.insert(max(0, at - draw.randint(0, 4)), receive)
        else:  # not behind the op that needs it
            while at < len(row) and isinstance(row[at], Receive | Send) and draw.random() < 0.8:
                at += 1
            row.insert(at, receive)
    return row


@pytest.mark.parametrize("communicators", list(CommunicatorScope))
def test_own_programs_end(communicators: CommunicatorScope) -> None:
    schedule = schemes.chimera(stages=4, micro_batches=8)
    lists = program_lists(lower(schedule), OpGraph(schedule), communicators)
    wanted = [rule for rule in TransportRule if rule is not TransportRule.NCCL]
    assert lint(lists, wanted).ok
    assert play(lists, TransportRule.NCCL).ok


def test_changes_are_proved_and_the_fewest() -> None:
    """Each fix ends the lists by the fabric too; a fix of several changes has none of a single change."""
    fixes = 0
    for seed in range(40):
        lists = drawn_lists(seed)
        verdict = lint(lists)
        if verdict.fix is None:
            continue
        fixes += 1
        assert all(play(verdict.fix.lists, rule).ok for rule in verdict.fix.rules), seed
        assert fabric_ends(verdict.fix.lists), seed
        assert not any(map(is_crossed, pairing_faults(verdict.fix.lists))), seed
        if len(verdict.fix.changes) > 1:
            assert not any(lint(change.lists, mend=False).ok for change in _single_changes(lists)), seed
    assert fixes > 8


def _single_changes(lists: CallLists) -> list[ListChange]:
    stuck = play(lists, TransportRule.NCCL)
    return changes_for(lists, stuck) if stuck.closed else []
