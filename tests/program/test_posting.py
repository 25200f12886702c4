"""Where receives stand so that messages may hold their workers."""

from __future__ import annotations

from random import Random

import pytest

from counterflow.program.actions import Program
from counterflow.program.checker import inspect
from counterflow.program.lowering import Ends, lower, lower_evaluation
from counterflow.program.posting import Posting, settle
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Sync

RULES = (
    "no receive is posted before an op of its own worker that the message needs",
    "no deadlock with sends and receives that hold their worker",
)


def test_a_ring_in_which_all_post_first_has_one_that_sends_first() -> None:
    """Three workers, each with an op whose product it sends after posting a receive; then what goes on."""
    around = [Posting(w, (w + 1) % 3, sent=1, posted=0, turn=1) for w in range(3)]
    settle(around, 3)
    assert [message.posted for message in around] == [0, 0, 1]


def test_later_receives_of_the_same_sender_stay_behind_one_that_is_moved() -> None:
    # Worker 1 would post both before its op 0, from which all that worker 0 sends comes.
    there = Posting(1, 0, sent=1, posted=0, turn=0)
    first, second = (Posting(0, 1, sent=k, posted=0, turn=2 + k) for k in (1, 2))
    settle([there, first, second], 2)
    assert (first.posted, second.posted) == (3, 3)


def test_what_ends_stays_as_it_is() -> None:
    early = Posting(0, 1, sent=2, posted=0, turn=3)
    settle([early], 2)
    assert early.posted == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_wanted_early_all_ends(seed: int) -> None:
    """Messages drawn among five workers, an op of the sender each; some receives are wanted early."""
    draw = Random(seed)
    ops, found = [0] * 5, []
    latest: dict[tuple[int, int], int] = {}
    for _ in range(60):
        sender, receiver = draw.sample(range(5), 2)
        ops[sender] += 1
        turn = ops[receiver]
        posted = draw.randint(latest.get((sender, receiver), 0), turn)
        latest[sender, receiver] = posted
        found.append(Posting(sender, receiver, ops[sender], posted, turn))
    wanted = [message.posted for message in found]
    settle(found, 5)
    assert all(a <= m.posted <= m.turn for a, m in zip(wanted, found, strict=True))
    rows = [
        sorted(
            (m.sent if m.sender == w else m.posted, n)
            for n, m in enumerate(found)
            if w in (m.sender, m.receiver)
        )
        for w in range(5)
    ]
    while any(rows):
        heads = [row[0][1] if row else -1 for row in rows]
        both = next(n for n in heads if n >= 0 and heads.count(n) == 2)  # none: all are stuck
        for row in rows:
            if row and row[0][1] == both:
                row.pop(0)


@pytest.mark.parametrize(
    "schedule",
    [
        schemes.interleaved(4, 4, chunks=2),
        schemes.interleaved(4, 8, chunks=2),
        schemes.interleaved(8, 16, chunks=4),
        schemes.interleaved_zb(4, 8, chunks=2),
        schemes.gpipe(3, 1, groups=2),
        schemes.interleaved(3, 1, chunks=2),
    ],
    ids=str,
)
def test_rings_end_in_every_mode(schedule: Schedule) -> None:
    for sync in Sync:
        for barrier in (True, False):
            ends(schedule, lower(schedule, replicas=2, sync=sync, ends=Ends(barrier)))
    evaluation = lower_evaluation(schedule)
    ends(evaluation.schedule, evaluation)


def ends(schedule: Schedule, program: Program) -> None:
    found = {result.rule: result for result in inspect(schedule, program=program).results}
    assert all(found[rule].ok is not False for rule in RULES), [found[rule].detail for rule in RULES]


def test_only_one_worker_of_a_ring_posts_later() -> None:
    """What stands before a forward early, by tag, is early by order too but for worker 0."""
    schedule = schemes.interleaved(3, 3, chunks=2)
    row = [str(action) for action in lower(schedule).actions[0]]
    at = row.index("ReceiveActivation F0.2 from worker 2")
    assert row[at - 1 : at + 2] == [
        "SendActivation F2.0 to worker 1",
        "ReceiveActivation F0.2 from worker 2",
        "Forward F0.3",
    ]
    for worker in (1, 2):
        row = [str(action) for action in lower(schedule).actions[worker]]
        at = row.index(f"ReceiveActivation F0.{2 + worker} from worker {worker - 1}")
        assert row[at + 1] == f"Forward F2.{worker}"
