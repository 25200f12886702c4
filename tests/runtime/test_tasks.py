"""A worker's list as it is run: on transports that match by tag, receives are posted one op ahead."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

import counterflow as cf
from counterflow.runtime.tasks import Preparation, Task
from counterflow.schedule.actions import Compute, Program, Receive
from counterflow.schedule.lowering import lower
from counterflow.schedule.segments import segments

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


def prepared(program: Program, worker: int, *, keeps_order: bool) -> list[Task]:
    def nothing(task: Task) -> None:
        del task

    anybody: Any = defaultdict(lambda: None)
    handlers: Any = defaultdict(lambda: nothing)
    schedule = program.schedule
    ranks = range(schedule.workers)
    preparation = Preparation(
        schedule, slots=9, worker=worker, ranks=ranks, stages=anybody, keeps_order=keeps_order
    )
    return list(preparation.tasks(program, 0, handlers, nothing))


def listed(tasks: list[Task]) -> list[str]:
    return [str(single.action) for task in tasks for single in task.both or (task,)]


def test_where_tags_match_a_receive_is_posted_before_the_op_ahead_of_the_one_that_needs_it() -> None:
    program = lower(S.dapple(3, 4))
    assert listed(prepared(program, 1, keeps_order=True))[9:15] == [
        "SendGradient B0.1 to worker 0",
        "Forward F2.1",
        "SendActivation F2.1 to worker 2",
        "ReceiveGradient B1.2 from worker 2",
        "ReceiveActivation F3.0 from worker 0",
        "Backward B1.1",
    ]
    assert listed(prepared(program, 1, keeps_order=False))[9:15] == [
        "SendGradient B0.1 to worker 0",
        "ReceiveGradient B1.2 from worker 2",
        "Forward F2.1",
        "SendActivation F2.1 to worker 2",
        "ReceiveActivation F3.0 from worker 0",
        "Backward B1.1",
    ]


def programs() -> list[tuple[str, Program]]:
    found = [(str(schedule), lower(schedule)) for schedule in SYNCHRONOUS]
    for schedule in WITHOUT_FLUSH:
        cut = segments(schedule)
        found += [(f"{schedule}, segment {k}", program) for k, program in enumerate(cut.steady)]
        found += [(f"{schedule}, drain {k}", program) for k, program in enumerate(cut.drains)]
    return found


@pytest.mark.parametrize("program", [p for _, p in programs()], ids=[name for name, _ in programs()])
def test_posting_ahead_moves_receives_only_and_no_farther_than_one_op(program: Program) -> None:
    for worker, actions in enumerate(program.actions):
        as_listed = prepared(program, worker, keeps_order=True)
        tasks = prepared(program, worker, keeps_order=False)
        assert listed(as_listed) == [str(action) for action in actions]
        assert sorted(task.place for task in tasks) == list(range(len(actions)))
        others = [task.place for task in tasks if not isinstance(task.action, Receive)]
        assert others == sorted(others)

        computes = [task for task in tasks if isinstance(task.action, Compute)]
        takers = {task.number: i for i, task in enumerate(computes) if task.number >= 0}
        before = 0
        for task in tasks:
            if isinstance(task.action, Compute):
                before += 1
            elif isinstance(task.action, Receive):
                listed_after = sum(isinstance(a, Compute) for a in actions[: task.place])
                taken = takers.get(task.number, len(computes))
                assert before == min(listed_after, max(taken - 1, 0)), task.action
