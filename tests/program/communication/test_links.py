"""Communicators of a plan: the fewest rounds, with a proof that the checker reads."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.program import rules
from counterflow.program.communication.communication_plan import communication_plan
from counterflow.program.communication.link_rounds import (
    Communicators,
    Link,
    at_once,
    fewest_rounds,
    greedy_rounds,
    links_of,
    search,
)
from counterflow.program.lowering import lower
from counterflow.program.rules import CheckSubject
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

PROGRAM = lower(schemes.interleaved(5, 5, chunks=2))
PLAN = communication_plan(PROGRAM)


def violations(communicators: Communicators) -> list[str]:
    subject = CheckSubject(PROGRAM.schedule, PROGRAM, plan=replace(PLAN, communicators=communicators))
    return rules.details(rules.COMMUNICATORS, subject).splitlines()


@pytest.mark.parametrize(
    ("schedule", "greedy", "fewest"),
    [
        (schemes.dapple(4, 4), 4, 4),
        (schemes.zb_v(8, 16), 4, 4),
        (schemes.chimera(8, 8), 4, 4),
        (schemes.interleaved(5, 5, chunks=2), 6, 5),  # a ring of five: two links at once, of ten
        (schemes.interleaved(7, 7, chunks=2), 6, 5),
        (schemes.interleaved(3, 3, chunks=2), 6, 6),
    ],
    ids=str,
)
def test_rounds_of_schemes(schedule: Schedule, greedy: int, fewest: int) -> None:
    links = links_of(lower(schedule))
    plan = fewest_rounds(links)
    assert plan.proved
    assert (len(greedy_rounds(links)), len(plan.rounds)) == (greedy, fewest)
    assert sorted(chain.from_iterable(plan.rounds)) == sorted(links)


def test_a_worker_without_messages_has_no_communicator() -> None:
    assert fewest_rounds(()) == Communicators((), (), proved=True)


@st.composite
def placements(draw: st.DrawFn) -> list[Link]:
    workers = draw(st.integers(2, 6))
    holders = draw(st.lists(st.integers(0, workers - 1), min_size=2, max_size=4 * workers))
    pairs = [(a, b) for a, b in pairwise(holders) if a != b]
    return [*dict.fromkeys(link for a, b in pairs for link in ((a, b), (b, a)))]


@settings(max_examples=60, deadline=None)
@given(placements())
def test_drawn_placements_never_need_more_rounds_than_greedy_matching(links: list[Link]) -> None:
    plan = fewest_rounds(links)
    assert plan.proved
    assert plan.bound <= len(plan.rounds) <= len(greedy_rounds(links))
    assert sorted(chain.from_iterable(plan.rounds)) == sorted(links)
    for row in plan.rounds:
        assert all({*a}.isdisjoint(b) for a, b in combinations(row, 2))
    if not plan.proof and len(plan.rounds) > 1:
        assert search(links, len(plan.rounds) - 1) == (None, True)


def test_a_bound_by_a_worker_and_one_by_an_odd_ring() -> None:
    assert at_once([(0, 1), (2, 0), (0, 3)]) == 1
    assert at_once([(0, 1), (1, 2), (2, 0)]) == 1  # three workers: one link at once
    assert len(PLAN.communicators.proof) == 10
    assert at_once(PLAN.communicators.proof) == 2


def test_the_rule_accepts_the_plan() -> None:
    assert not violations(PLAN.communicators)


def test_the_rule_refuses_a_worker_twice_in_a_round() -> None:
    first, second, *others = PLAN.communicators.rounds
    text = "\n".join(violations(replace(PLAN.communicators, rounds=(first + second, *others))))
    assert "at the same time as that of" in text


def test_the_rule_refuses_a_missing_communicator_a_foreign_one_and_one_made_twice() -> None:
    first, *others = PLAN.communicators.rounds
    (line,) = violations(replace(PLAN.communicators, rounds=(first[1:], *others)))
    assert line == f"no round makes the communicator from worker {first[0][0]} to {first[0][1]}"
    (line,) = violations(
        replace(
            PLAN.communicators,
            rounds=(
                *PLAN.communicators.rounds[:-1],
                ((0, 2),),
            ),
        )
    )[:1]
    assert "which no message uses" in line
    twice = violations(replace(PLAN.communicators, rounds=(*PLAN.communicators.rounds, first[:1])))
    assert any("exists since round 0" in line for line in twice)


def test_the_rule_refuses_more_rounds_than_the_proof_shows() -> None:
    rounds = tuple(map(tuple, greedy_rounds(links_of(PROGRAM))))
    assert violations(replace(PLAN.communicators, rounds=rounds)) == [
        "6 rounds, but the proof shows that only 5 are necessary"
    ]
    assert violations(Communicators(rounds, (), proved=True)) == ["6 rounds, but 5 suffice"]
    wrong = replace(PLAN.communicators, proof=((0, 1), (0, 1)))
    assert violations(wrong) == ["the proof counts links that do not exist, or one twice"]
