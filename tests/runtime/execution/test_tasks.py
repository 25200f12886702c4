"""A worker's list as it is run: as lowered; where tags match, receives are posted one op ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import counterflow as cf
from counterflow.program.actions import Action, Compute, Matching, Program, Receive
from counterflow.program.checker import checked_program
from counterflow.program.lowering import AHEAD, lower
from counterflow.program.segments import segments
from counterflow.runtime.execution.addresses import Addresses
from counterflow.runtime.execution.interpreter import Interpreter
from counterflow.runtime.execution.routes import MessageRoute
from counterflow.runtime.execution.tasks import Tasks

S = cf.schemes

SYNCHRONOUS = [
    S.gpipe(4, 8, groups=2),
    S.dapple(4, 8),
    S.dapple(8, 3),
    S.interleaved(4, 8, chunks=2),
    S.gems(4, 4),
    S.chimera(4, 8),
    S.chimera(8, 8, pairs=2, concat="backward-halving"),
    S.chimera(4, 8, concat="forward-doubling"),
    S.mixpipe(4, 8, injected="max"),
    S.hanayo(4, 8, waves=2),
]
WITHOUT_FLUSH = [S.pipedream(4), S.pipedream_2bw(4, 8), S.wpipe(4, 4)]


def numbered(program: Program, worker: int) -> Addresses:
    messages: Any = SimpleNamespace(transport=SimpleNamespace(reserve_tags=lambda _: 0))
    schedule = program.schedule
    ranks = range(schedule.workers)
    return Addresses(schedule, slots=9, worker=worker, ranks=ranks, messages=messages)


def listed(program: Program, worker: int) -> list[str]:
    return [str(action) for action in program.actions[worker]]


def test_where_tags_match_a_receive_is_posted_three_ops_before_the_one_that_needs_it() -> None:
    assert listed(lower(S.dapple(3, 4)), 1)[9:15] == [
        "SendGradient B0.1 to worker 0",
        "Forward F2.1",
        "SendActivation F2.1 to worker 2",
        "ReceiveGradient B1.2 from worker 2",
        "ReceiveActivation F3.0 from worker 0",
        "Backward B1.1",
    ]
    assert listed(lower(S.dapple(3, 4), matching=Matching.TAG), 1)[6:17] == [
        "ReceiveGradient B1.2 from worker 2",
        "Forward F1.1",
        "SendActivation F1.1 to worker 2",
        "ReceiveActivation F3.0 from worker 0",
        "Backward B0.1",
        "SendGradient B0.1 to worker 0",
        "ReceiveGradient B2.2 from worker 2",
        "Forward F2.1",
        "SendActivation F2.1 to worker 2",
        "ReceiveGradient B3.2 from worker 2",
        "Backward B1.1",
    ]


def programs(matching: Matching) -> list[tuple[str, Program]]:
    found = [(str(schedule), lower(schedule, matching=matching)) for schedule in SYNCHRONOUS]
    for schedule in WITHOUT_FLUSH:
        cut = segments(schedule, matching=matching)
        found += [(f"{schedule}, segment {k}", program) for k, program in enumerate(cut.steady)]
        found += [(f"{schedule}, drain {k}", program) for k, program in enumerate(cut.drains)]
    return found


BOTH = [
    (name, one, other)
    for (name, one), (_, other) in zip(programs(Matching.ORDER), programs(Matching.TAG), strict=True)
]


@pytest.mark.parametrize(("ordered", "tagged"), [p[1:] for p in BOTH], ids=[p[0] for p in BOTH])
def test_posting_ahead_moves_receives_only_and_no_farther_than_it_says(
    ordered: Program, tagged: Program
) -> None:
    for worker, actions in enumerate(tagged.actions):
        as_ordered = ordered.actions[worker]
        others = [a for a in actions if not isinstance(a, Receive)]
        assert others == [a for a in as_ordered if not isinstance(a, Receive)]

        addresses = numbered(tagged, worker)
        sources = [addresses.source(a.op, 0) for a in actions if isinstance(a, Compute)]
        takers = {its.number: i for i, its in enumerate(sources) if isinstance(its, MessageRoute)}
        posted = {a: _computes_before(as_ordered, a) for a in as_ordered if isinstance(a, Receive)}
        for action in actions:
            if not isinstance(action, Receive):
                continue
            before = _computes_before(actions, action)
            taken = takers.get(addresses.envelope(action, 0)[0].number)
            if taken is None:  # by a later list; if by one of its first ops, before this one's last
                assert posted[action] - AHEAD <= before <= posted[action]
            else:
                assert before == min(posted[action], max(taken - AHEAD, 0)), action


def _computes_before(actions: Sequence[Action], stop: Action) -> int:
    return sum(isinstance(action, Compute) for action in actions[: list(actions).index(stop)])


@pytest.mark.parametrize(
    "schedule", [S.chimera(4, 4), S.hanayo(4, 4, waves=2), S.interleaved(4, 8, chunks=4)], ids=str
)
def test_eager_opt_goes_by_the_users_costs_where_these_are_given(schedule: cf.Schedule) -> None:
    """Unequal stages have other bubbles than F = 1 and B = 2; messages have none, however long they take.

    Workers of Chimera's middle stages wait for each other's ops of one stage, so they never have a bubble.
    """
    plainly = checked_program(schedule, replicas=2, matching=Matching.TAG)
    for p2p in (0.05, 1.0):
        costs = cf.Costs(p2p=p2p, sync=6.0, replicas=2)
        assert cf.lower(schedule, costs, matching=Matching.TAG) == plainly
    unequal = [2.0 + stage % 3 for stage in range(schedule.stages)]
    costs = replace(costs, backward=unequal, p2p=0.05)
    by_costs = cf.lower(schedule, costs, matching=Matching.TAG)
    times = cf.simulate(schedule, costs).op_times
    asked = checked_program(schedule, replicas=2, times=times, matching=Matching.TAG)
    assert asked == by_costs
    assert (asked == plainly) is (schedule.scheme == "chimera")


@pytest.mark.parametrize("schedule", [S.dapple(2, 2), S.chimera(2, 2), S.zb_v(2, 4), S.pipedream(2)])
def test_the_list_is_run_as_it_stands(schedule: cf.Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task an action, in the order of the worker's list, with a barrier and without."""
    prepare, seen = Interpreter.prepare, list[bool]()

    def prepared(its: Interpreter, program: Program, *rest: Any) -> Tasks:
        tasks = prepare(its, program, *rest)
        seen.append(tuple(task.action for task in tasks) == program.actions[its.worker])
        return tasks

    def work(barrier: bool) -> None:
        layers = [nn.Linear(2, 2) for _ in range(schedule.stages)]
        sgd = partial(torch.optim.SGD, lr=0.1)
        with cf.Pipeline(
            layers, nn.functional.mse_loss, schedule, optimizer=sgd, barrier=barrier
        ) as pipeline:
            for _ in range(3):
                pipeline.step(torch.ones(8, 2), torch.ones(8, 2))
            pipeline.flush()

    monkeypatch.setattr(Interpreter, "prepare", prepared)
    for barrier in (True, False):
        cf.launch(work, barrier, workers=2, transport="local")
    assert len(seen) >= 4
    assert all(seen)
