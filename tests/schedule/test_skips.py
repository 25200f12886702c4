"""What goes by skips: proved in every scheme, in the files, in the lists; each way to break it is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from counterflow.errors import ConfigError, ScheduleError
from counterflow.program.actions import Action, Matching, Program, Receive, Send
from counterflow.program.checker import check, inspect
from counterflow.program.lowering import lower, lower_evaluation
from counterflow.program.segments import segments
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.ir import Schedule, SkipLink

from ..program.test_checker import every_scheme

NEXT = SkipLink(0, 1, once=True)
LAST = SkipLink(0, 3, once=True)


def skipping(schedule: Schedule) -> Schedule:
    last = schedule.stages - 1
    pairs = {SkipLink(0, 2), SkipLink(0, last), SkipLink(last - 2, last), SkipLink(0, last, once=True)}
    return schedule.with_skips(pairs)


@pytest.mark.parametrize("depth", [3, 4])
def test_every_scheme_with_skips_passes(depth: int) -> None:
    for schedule in every_scheme(depth, 4, 4):
        if schedule.stages < 3:
            continue
        found = skipping(schedule)
        assert inspect(found).ok, found
        for matching in Matching:
            lower(found, matching=matching)
            lower_evaluation(found, matching=matching)
        if not found.synchronous:
            segments(found)
        assert loads(dumps(found), "x.json") == found


def test_skips_go_straight_from_worker_to_worker() -> None:
    program = lower(schemes.dapple(4, 2).with_skips([SkipLink(0, 3), NEXT]), matching=Matching.TAG)
    first = [a for a in program.actions[0] if not isinstance(a, Receive)]
    assert list(map(str, first[:4])) == [
        "Forward F0.0",
        "SendActivation F0.0 to worker 1",
        "SendActivation F0.0 for stage 1 once to worker 1",
        "SendActivation F0.0 for stage 3 to worker 3",
    ]
    last = [str(a) for a in program.actions[3]]
    assert "ReceiveActivation F0.0 for stage 3 from worker 0" in last
    place = last.index("Backward B0.3")
    assert last[place + 1 : place + 3] == [
        "SendGradient B0.3 to worker 2",
        "SendGradient B0.3 for stage 0 to worker 0",
    ]
    by_skip = [
        [str(a) for a in row if isinstance(a, Send | Receive) and a.skip is not None]
        for row in program.actions
    ]
    assert by_skip[1:3] == [["ReceiveActivation F0.0 for stage 1 once from worker 0"], []]


def test_stages_of_one_worker_need_no_message() -> None:
    """In a wave of two workers stages 0 and 3 are on worker 0."""
    wave = schemes.hanayo(2, 2, waves=1)
    assert wave.placement.worker(0, 0) == wave.placement.worker(0, 3)
    assert OpGraph(wave.with_skips([SkipLink(0, 3), LAST])).messages == OpGraph(wave).messages


def test_what_is_made_once_is_sent_once_a_period_and_pipe() -> None:
    for schedule, expected in (
        (schemes.dapple(4, 6), {0: 1}),
        (schemes.chimera(4, 8), {0: 1, 1: 1}),
        (schemes.pipedream_2bw(4, 4, periods=6), {0: 6}),
    ):
        graph = OpGraph(schedule.with_skips([LAST]))
        sent = Counter(graph.ops[source].pipe for source, _, skip in graph.messages if skip == LAST)
        assert sent == expected
        assert all(graph.ops[source].kind.is_forward for source, _, skip in graph.messages if skip == LAST)


def test_a_skip_needs_its_other_end() -> None:
    workload = schemes.dapple(4, 1).with_skips([SkipLink(0, 2), SkipLink(1, 3)]).workload
    needs = {str(op): " ".join(map(str, workload.needs(op))) for op in workload.ops()}
    assert needs["F0.2"] == "F0.1 F0.0"
    assert needs["B0.0"] == "F0.0 B0.1 B0.2"
    assert needs["B0.2"] == "F0.2 B0.3"


@pytest.mark.parametrize(
    ("skips", "message"),
    [
        ([SkipLink(2, 0)], "skip 2 to 0: expected a stage and one after the next, of 4 stages"),
        ([SkipLink(0, 1)], "skip 0 to 1: expected a stage and one after the next"),
        ([SkipLink(1, 4)], "skip 1 to 4: expected a stage and one after the next"),
        ([SkipLink(1, 1, once=True)], "skip 1 to 1, once: expected a stage and one after it"),
        ([SkipLink(0, 2), SkipLink(0, 2)], "skip 0 to 2 exists more than once"),
    ],
)
def test_a_skip_that_leads_nowhere_is_refused(skips: list[SkipLink], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(schemes.dapple(4, 4).with_skips(skips))


SKIP = SkipLink(0, 3)


def is_skip(action: Action, kind: type[Action]) -> bool:
    return isinstance(action, kind) and isinstance(action, Send | Receive) and action.skip == SKIP


def without(kind: type[Action]) -> Callable[[list[Action]], None]:
    def change(row: list[Action]) -> None:
        row.remove(next(action for action in row if is_skip(action, kind)))

    return change


def twice(row: list[Action]) -> None:
    index, action = next((i, a) for i, a in enumerate(row) if is_skip(a, Receive))
    row.insert(index, action)


def to_the_wrong_stage(row: list[Action]) -> None:
    index, action = next((i, a) for i, a in enumerate(row) if is_skip(a, Send))
    assert isinstance(action, Send)
    row[index] = replace(action, skip=None)


@pytest.mark.parametrize(
    ("worker", "change", "message"),
    [
        (0, without(Send), "Forward F0.3 waits for worker 0 to send F0.0 by the skip connection 0 to 3"),
        (3, without(Receive), "no receive of F0.0 for stage 3 from worker 0, which F0.3 needs"),
        (0, without(Receive), "no receive of B1.3 for stage 0 from worker 3, which B1.0 needs"),
        (3, twice, "ReceiveActivation F0.0 for stage 3 from worker 0 exists more than once"),
        (0, to_the_wrong_stage, "Forward F0.3 waits for worker 0 to send F0.0 by the skip connection 0 to 3"),
    ],
)
@pytest.mark.parametrize("matching", Matching)
def test_skips_that_are_not_sent_and_received_once_are_found(
    worker: int, change: Callable[[list[Action]], None], message: str, matching: Matching
) -> None:
    schedule = schemes.gpipe(4, 2).with_skips([SKIP])
    rows = [list(row) for row in lower(schedule, matching=matching).actions]
    change(rows[worker])
    program = Program(schedule, tuple(map(tuple, rows)), matching=matching)
    found = [r.detail for r in inspect(schedule, program=program).results if r.ok is False]
    assert message in "".join(found)


def test_receives_in_another_order_are_found() -> None:
    """Over NCCL what comes by the skip would be taken for what comes from the stage before."""
    schedule = schemes.hanayo(3, 2, waves=1).with_skips([SkipLink(0, 4)])  # stages 1 and 4: worker 1
    rows = [list(row) for row in lower(schedule).actions]
    places = [
        i
        for i, a in enumerate(rows[1])
        if isinstance(a, Receive) and a.peer == 0 and a.output.kind.is_forward
    ]
    one, two = places[:2]
    rows[1][one], rows[1][two] = rows[1][two], rows[1][one]
    program = Program(schedule, tuple(map(tuple, rows)))
    with pytest.raises(ScheduleError, match="workers 0 and 1: message 0 between them"):
        check(schedule, program=program)


def test_a_file_with_a_skip_to_no_stage_is_refused() -> None:
    text = dumps(schemes.dapple(3, 2).with_skips([SkipLink(0, 2)]))
    assert '"skips": [\n    [0, 2]\n  ]' in text
    assert "skips" not in dumps(schemes.dapple(3, 2))
    with pytest.raises(ConfigError, match=r"skips\[0\]: from stage 0 to 7, but there are 3 stages"):
        loads(text.replace("[0, 2]\n", "[0, 7]\n"), "x.json")
