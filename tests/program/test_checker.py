"""The checker: each rule with a case that breaks only that rule; everything the schemes make passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.errors import DeadlockError, ScheduleError
from counterflow.program.actions import (
    Action,
    Compute,
    Matching,
    Program,
    Receive,
    Send,
    StartGather,
    StartSync,
    Update,
    WaitGather,
    WaitSync,
)
from counterflow.program.checker import check, inspect
from counterflow.program.lowering import Shared, lower
from counterflow.schedule import schemes
from counterflow.schedule.ir import Op, OpKind, Product, Schedule
from counterflow.schedule.modes import Sync
from counterflow.schedule.placement import looped
from counterflow.schedule.schemes.chimera import Concat

from ..tables import examples, table


def broken(schedule: Schedule, program: Program | None = None, limit: float | None = None) -> list[str]:
    """The rules that fail (not those that could not be looked at)."""
    report = inspect(schedule, program=program, peak_limit=limit)
    return [result.rule for result in report.results if result.ok is False]


def _detail(schedule: Schedule, program: Program | None, rule: str) -> str:
    return next(r.detail for r in inspect(schedule, program=program).results if r.rule == rule)


def edited(schedule: Schedule, worker: int, change: Callable[[list[Op]], object]) -> Schedule:
    orders = [list(order) for order in schedule.orders]
    change(orders[worker])
    return replace(schedule, orders=tuple(map(tuple, orders)))


def rewritten(program: Program, worker: int, change: Callable[[list[Action]], None]) -> Program:
    lists = [list(actions) for actions in program.actions]
    change(lists[worker])
    return replace(program, actions=tuple(map(tuple, lists)))


def test_a_missing_op_breaks_only_that_every_op_is_there_once() -> None:
    schedule = edited(schemes.chimera(4, 4), 0, lambda order: order.pop())
    assert broken(schedule) == ["every op exactly once"]
    with pytest.raises(ScheduleError, match=r"B1\.0 is in no order, though other stages of pipe 0 have"):
        check(schedule)


@pytest.mark.parametrize(
    "op",
    [
        Op(OpKind.FORWARD, 4, (0,)),
        Op(OpKind.FORWARD, 0, (4,)),
        Op(OpKind.FORWARD, 0, (0,), pipe=2),
        Op(OpKind.FORWARD, 0, (0,)),
        Op(OpKind.FORWARD, 0, ()),
    ],
)
def test_foreign_and_doubled_ops_are_told_with_their_place(op: Op) -> None:
    schedule = edited(schemes.chimera(4, 4), 0, lambda order: order.append(op))
    assert broken(schedule) == ["every op exactly once"]
    assert "worker 0, op 8" in inspect(schedule).results[0].detail


def test_an_op_on_another_worker_breaks_only_the_placement() -> None:
    schedule = schemes.dapple(2, 2)
    orders = (schedule.orders[0][:-1], (*schedule.orders[1], schedule.orders[0][-1]))
    moved = replace(schedule, orders=orders)
    assert broken(moved) == ["every op on the worker that holds its stage"]
    assert "worker 1, op 4: B1.0, but worker 0 holds stage 0 of pipe 0" in inspect(moved).results[1].detail


def test_a_backward_before_its_forward_breaks_only_that() -> None:
    def swap(order: list[Op]) -> None:
        order[0], order[1] = order[1], order[0]

    schedule = edited(schemes.dapple(2, 2), 1, swap)
    assert broken(schedule) == ["forward before its backward"]


def test_a_deadlock_shows_its_circle() -> None:
    # Worker 0 wants the gradient of micro-batch 1 before it has sent that micro-batch on.
    orders = tuple(tuple(map(_op, text.split())) for text in ("F0.0 B0.0 F1.0 B1.0", "F0.1 F1.1 B0.1 B1.1"))
    stuck = replace(schemes.dapple(2, 2), orders=orders)
    assert broken(stuck) == ["no deadlock with buffered sends"]
    with pytest.raises(DeadlockError) as caught:
        check(stuck)
    assert "worker 0, op 1: B0.0 waits for B0.1 (worker 1, op 2)" in str(caught.value)
    assert "worker 1, op 1: F1.1 waits for F1.0 (worker 0, op 2)" in str(caught.value)


def _op(text: str) -> Op:
    return Op(OpKind(text[0]), int(text[3]), (int(text[1]),))


def test_a_ring_of_late_receives_breaks_only_rendezvous_sends() -> None:
    # Three workers in a ring (chunks on a looped placement): each sends before it posts its receive.
    schedule = schemes.interleaved(workers=3, micro_batches=3, chunks=2)
    program = lower(schedule)
    late = program
    for worker in range(3):
        late = rewritten(late, worker, _receives_after_sends)
    assert broken(schedule, late) == ["no deadlock with rendezvous sends"]


def _receives_after_sends(actions: list[Action]) -> None:
    """Move each receive down past sends to other peers, as far as order and need allow."""
    moved = True
    while moved:
        moved = False
        for i in range(len(actions) - 1):
            first, second = actions[i], actions[i + 1]
            if not isinstance(first, Receive):
                continue
            if isinstance(second, Send) and second.peer != first.peer:
                free = True
            elif isinstance(second, Receive | Send):
                free = False
            else:
                op = getattr(second, "op", None)
                free = op is not None and not _takes(op, first.output)
            if free:
                actions[i], actions[i + 1] = second, first
                moved = True


def test_receives_before_ops_that_their_messages_need_break_only_that() -> None:
    # Round the ring once: worker 0 posts the receive of F0.2 before the forward that it comes from.
    schedule = schemes.interleaved(workers=3, micro_batches=1, chunks=2)
    rule = "no receive is posted before an op of its own worker that the message needs"

    def hurry(actions: list[Action]) -> None:
        place = next(i for i, a in enumerate(actions) if isinstance(a, Receive) and a.output == _op("F0.2"))
        actions.insert(0, actions.pop(place))

    program = rewritten(lower(schedule), 0, hurry)
    assert broken(schedule, program) == [rule]
    assert _detail(schedule, program, rule) == (
        "worker 0, action 0: ReceiveActivation F0.2 from worker 2 is posted before F0.0, which it needs"
    )
    # By tags, where no message waits on a device, that is how early receives may be posted.
    assert broken(schedule, replace(program, matching=Matching.TAG)) == []


def test_receives_all_round_a_ring_before_the_sends_break_only_that_messages_hold() -> None:
    # Each worker of the ring runs one more forward before it sends what the next one waits for.
    schedule = schemes.interleaved(workers=3, micro_batches=3, chunks=2)
    rule = "no deadlock with sends and receives that hold their worker"
    program = lower(schedule)
    assert broken(schedule, program) == []
    for worker, output, before in ((0, "F0.2", "F2.0"), (1, "F0.3", "F2.1"), (2, "F0.4", "F2.2")):
        program = rewritten(program, worker, partial(_receive_before, _op(output), _op(before)))
    assert broken(schedule, program) == [rule]
    detail = _detail(schedule, program, rule)
    assert "worker 0, action" in detail
    assert "ReceiveActivation F0.2 from worker 2 waits for worker 2 to send F0.2" in detail


def _receive_before(output: Op, op: Op, actions: list[Action]) -> None:
    place = next(i for i, a in enumerate(actions) if isinstance(a, Receive) and a.output == output)
    receive = actions.pop(place)
    actions.insert(actions.index(Compute(op)), receive)


def _takes(op: Op, output: Op) -> bool:
    step = 1 if op.kind is OpKind.FORWARD else -1
    return (
        op.kind is output.kind
        and op.stage == output.stage + step
        and op.micro_batches == output.micro_batches
    )


def test_swapped_receives_break_only_the_order_of_messages() -> None:
    schedule = schemes.dapple(2, 4)
    program = lower(schedule)

    def swap(actions: list[Action]) -> None:
        one, other = [
            i for i, a in enumerate(actions) if isinstance(a, Receive) and a.output.kind.is_forward
        ][:2]
        early = actions.pop(other)
        actions.insert(one, early)

    assert broken(schedule, rewritten(program, 1, swap)) == ["every send has its receive, in one order"]


def test_another_version_breaks_only_the_promise_of_versions() -> None:
    schedule = schemes.pipedream(2, periods=4)

    def older(order: list[Op]) -> None:
        for i, op in enumerate(order):
            if op.micro_batches == (2,):
                order[i] = op._replace(version=0)

    assert broken(edited(schedule, 0, older)) == ["weight versions as promised"]


def test_a_version_freed_too_early_breaks_only_the_versions() -> None:
    schedule = schemes.pipedream_2bw(2, 2, periods=4)

    def free(actions: list[Action]) -> None:
        i = next(i for i, a in enumerate(actions) if isinstance(a, Update) and a.version == 2)
        update = actions[i]
        assert isinstance(update, Update)
        actions[i] = replace(update, frees=(0, 1))

    held = "weight versions made once, and held while needed"
    assert broken(schedule, rewritten(lower(schedule), 0, free)) == [held]


def test_a_program_without_its_updates_breaks_only_the_versions() -> None:
    schedule = schemes.dapple(2, 2)

    def never(actions: list[Action]) -> None:
        actions.pop()

    program = rewritten(lower(schedule), 0, never)
    assert broken(schedule, program) == ["weight versions made once, and held while needed"]


@pytest.mark.parametrize(
    ("schedule", "one", "other"),
    [
        (schemes.zb_h1(2, 2), "W1.1", "I1.1"),
        (schemes.dapple(2, 2), "B1.1", "F1.1"),
    ],
)
def test_a_program_that_computes_in_another_order_breaks_that(
    schedule: Schedule, one: str, other: str
) -> None:
    def swap(actions: list[Action]) -> None:
        places = {str(a.op): i for i, a in enumerate(actions) if isinstance(a, Compute)}
        first, second = places[one], places[other]
        actions[first], actions[second] = actions[second], actions[first]

    assert "each worker computes its order" in broken(schedule, rewritten(lower(schedule), 1, swap))

    def forget(actions: list[Action]) -> None:
        actions.remove(next(a for a in actions if isinstance(a, Compute)))

    assert "each worker computes its order" in broken(schedule, rewritten(lower(schedule), 1, forget))


def test_a_stage_without_sync_breaks_only_the_gradient_sync() -> None:
    schedule = schemes.chimera(4, 4)
    program = lower(schedule)
    lists = tuple(
        tuple(a for a in actions if not (isinstance(a, (StartSync, WaitSync)) and a.stage == 2))
        for actions in program.actions
    )
    assert broken(schedule, replace(program, actions=lists)) == ["gradient sync covers every copy"]


def test_a_sync_before_the_last_backward_breaks_only_the_gradient_sync() -> None:
    schedule = schemes.chimera(4, 4)

    def hurry(actions: list[Action]) -> None:
        start = next(i for i, a in enumerate(actions) if isinstance(a, StartSync) and a.stage == 3)
        first = next(
            i
            for i, a in enumerate(actions)
            if isinstance(a, Compute) and Product.WEIGHT_GRADIENTS in a.op.kind.makes
        )
        actions.insert(first, actions.pop(start))

    assert broken(schedule, rewritten(lower(schedule), 0, hurry)) == ["gradient sync covers every copy"]


def test_sums_of_the_same_workers_in_two_orders_break_only_that() -> None:
    schedule = schemes.chimera(2, 2)
    program = lower(schedule, shared=Shared(statistics=(0, 1)))

    def swap(actions: list[Action]) -> None:
        one, two = [i for i, a in enumerate(actions) if isinstance(a, StartSync)][-2:]
        actions[one], actions[two] = actions[two], actions[one]

    assert broken(schedule, program) == []
    rule = "sums of the same workers start in one order"
    swapped = rewritten(program, 1, swap)
    assert broken(schedule, swapped) == [rule]
    assert _detail(schedule, swapped, rule) == (
        "workers 0, 1: sum 2 among them is StartSync statistics of stage 0, period 0 on worker 0 "
        "and StartSync statistics of stage 1, period 0 on worker 1"
    )


def test_an_update_before_the_agreement_breaks_only_that() -> None:
    schedule = schemes.dapple(2, 2)

    def hurry(actions: list[Action]) -> None:
        actions[-2:] = actions[-1], actions[-2]

    program = rewritten(lower(schedule), 1, hurry)
    assert broken(schedule, program) == ["loss and norm agreed on before any update"]
    start, wait = StartGather(0, 0), WaitGather(0, 0)
    alone = rewritten(lower(schedule), 1, lambda actions: actions.remove(start))
    assert broken(schedule, alone) == ["no deadlock with buffered sends"]
    assert "waits for worker 1 to start the gather of loss and norm of period 0" in _detail(
        schedule, alone, "no deadlock with buffered sends"
    )

    def silence(actions: list[Action]) -> None:
        actions.remove(start)
        actions.remove(wait)

    nowhere = rewritten(rewritten(lower(schedule), 0, silence), 1, silence)
    assert broken(schedule, nowhere) == ["loss and norm agreed on before any update"]


def test_all_that_a_model_shares_is_in_the_list() -> None:
    shared = Shared(ties=((0, 3),), statistics=(1,))
    program = lower(schemes.dapple(4, 2), shared=shared)
    ends = [[str(a) for a in row[-7:] if not isinstance(a, Compute | Send)] for row in program.actions]
    assert ends[0] == [*ends[3][:5], "Update stage 0 to version 1"]
    assert ends[0][:5] == [
        "StartSync tied gradients of stages 0 and 3, period 0",
        "WaitSync tied gradients of stages 0 and 3, period 0",
        "StartGather loss and norm of period 0",
        "WaitGather loss and norm of period 0",
        "Clip of period 0",
    ]
    assert ends[1] == [*ends[0][2:5], "Update stage 1 to version 1"]
    wide = lower(schemes.dapple(4, 2), shared=shared, replicas=2)
    assert [str(a) for a in wide.actions[1][-3:]] == [
        "Update stage 1 to version 1",
        "StartSync statistics of stage 1, period 0",
        "WaitSync statistics of stage 1, period 0",
    ]
    # Both ends of a wave are on one worker: alone it has nothing to sum.
    waves = lower(schemes.hanayo(2, 2), shared=Shared(ties=((0, 3),)))
    assert not [a for row in waves.actions for a in row if isinstance(a, StartSync)]


@pytest.mark.parametrize("matching", list(Matching))
def test_either_way_of_matching_passes(matching: Matching) -> None:
    for depth, n, extra in ((2, 3, 0), (4, 9, 2), (6, 5, 3)):
        for schedule in every_scheme(depth, n, extra):
            shared = Shared(ties=((0, schedule.stages - 1),) if schedule.synchronous else (), statistics=(0,))
            check(schedule, program=lower(schedule, replicas=2, matching=matching, shared=shared))


def test_where_tags_match_a_message_without_receive_is_found() -> None:
    schedule = schemes.dapple(2, 4)

    def forget(actions: list[Action]) -> None:
        actions.remove(next(a for a in actions if isinstance(a, Receive)))

    program = rewritten(lower(schedule, matching=Matching.TAG), 1, forget)
    assert "every send has its receive, in one order" in broken(schedule, program)


def test_the_peak_has_a_limit() -> None:
    schedule = schemes.chimera(4, 4)
    assert broken(schedule, limit=4) == []
    assert broken(schedule, limit=3) == ["peak within the limit"]
    with pytest.raises(ScheduleError, match="worker 1, op 3: F3"):
        check(schedule, peak_limit=3)


def every_scheme(depth: int, n: int, extra: int) -> Iterator[Schedule]:
    """Schedules of every scheme at one depth and number of micro-batches."""
    yield schemes.gpipe(depth, n, groups=1 + extra % 3)
    yield schemes.dapple(depth, n)
    yield schemes.interleaved(depth, n, chunks=1 + extra % 4)
    yield schemes.hanayo(depth, n, waves=1 + extra % 3)
    yield schemes.pipedream(depth, periods=n)
    yield schemes.pipedream_2bw(depth, max(n, depth), periods=1 + extra % 4)
    yield schemes.wpipe(depth, max(n, depth), periods=1 + extra % 4)
    if depth % 2 == 0:
        yield schemes.gems(depth, n)
        divisors = [f for f in range(1, depth // 2 + 1) if (depth // 2) % f == 0]
        for concat in Concat:
            yield schemes.chimera(depth, n, pairs=divisors[extra % len(divisors)], concat=concat)
        injected = 2 + 2 * (extra % (depth // 2))
        early = extra % ((depth - injected) // 2 + 1)
        yield schemes.mixpipe(depth, n, injected=injected, early_forwards=early)
        yield schemes.mixpipe(depth, n, injected="max")


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(st.integers(2, 9), st.data())
def test_everything_the_schemes_make_passes(depth: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 4 * depth if depth < 6 else 2 * depth))
    for schedule in every_scheme(depth, n, extra=data.draw(st.integers(0, 12))):
        report = inspect(schedule)
        assert report.ok, (schedule, [r for r in report.results if not r.ok])


def test_lowering_passes_its_own_checks_in_every_mode() -> None:
    for (depth, n, extra), (sync, replicas) in table(
        ((2, 3, 0), (4, 4, 1), (4, 9, 2), (6, 5, 3), (8, 8, 1), (3, 7, 4)), list(product(Sync, (1, 2)))
    ):
        for schedule in every_scheme(depth, n, extra):
            program = lower(schedule, sync=sync, replicas=replicas)
            check(schedule, program=program)


def test_a_literal_program() -> None:
    program = lower(schemes.chimera(2, 2), sync="eager")
    assert [str(action) for action in program.actions[0]] == [
        "Forward F0.0",
        "SendActivation F0.0 to worker 1",
        "ReceiveActivation F1.0p1 from worker 1",
        "Forward F1.1p1",
        "Backward B1.1p1",
        "SendGradient B1.1p1 to worker 1",
        "ReceiveGradient B0.1 from worker 1",
        "StartSync gradients of stage 1, period 0",
        "Backward B0.0",
        "StartSync gradients of stage 0, period 0",
        "WaitSync gradients of stage 1, period 0",
        "WaitSync gradients of stage 0, period 0",
        "StartGather loss and norm of period 0",
        "WaitGather loss and norm of period 0",
        "Clip of period 0",
        "Update stage 1 to version 1",
        "Update stage 0 to version 1",
    ]


def test_looped_placement_of_one_worker_needs_no_message() -> None:
    schedule = schemes.interleaved(1, 3, chunks=3)
    assert schedule.placement == looped(1, 3)
    kinds = {type(action) for action in lower(schedule).actions[0]}
    assert not kinds & {Send, Receive}
