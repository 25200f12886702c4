"""A small program for each of NCCL's rules that must hang on GPUs, which is told, and its corrected form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from counterflow.testing.strict_nccl import (
    NcclRuleError,
    StrictGroup,
    ThreadEndpoint,
    current_stream,
    run_ranks,
)

CPU = torch.device("cpu")


def hangs(program: Callable[[ThreadEndpoint], object], ranks: int, *told: str) -> None:
    """The program is reported, in these words."""
    with pytest.raises(NcclRuleError) as caught:
        run_ranks(program, ranks)
    for words in told:
        assert words in str(caught.value)


def meet(group: StrictGroup, *pair: int) -> None:
    """Make the communicator of two ranks, without a message."""
    if group.endpoint.rank in pair:
        group._make(f"the pair {pair[0]}-{pair[1]} of {group.title}", pair)


def exchange(group: StrictGroup, mine: Tensor, theirs: Tensor, peer: int) -> None:
    """What ``batch_isend_irecv`` does with NCCL."""
    group._start_coalescing(CPU)
    group.send([mine], peer, 0)
    group.recv([theirs], peer, 0)
    group._end_coalescing(CPU).wait()


# -- making communicators


def d1(end: ThreadEndpoint, *, early: bool) -> float:
    """Interleaved stages' second step: two workers exchange in one go, and a third never does."""
    group = end.group(range(3), "all")
    if early:
        group.allreduce([torch.zeros(1)]).wait()
    value = torch.zeros(1)
    if end.rank < 2:
        exchange(group, torch.full((1,), 1.0 + end.rank), value, 1 - end.rank)
    if end.rank == 1:
        group.send([value + 4], 2, 0)
    if end.rank == 2:
        group.recv([value], 1, 0).wait()
    return value.item()


def test_grouped_messages_need_a_communicator_that_all_have_made() -> None:
    hangs(lambda end: d1(end, early=False), 3, "rank 1 makes all: waits for rank 2 to enter", "in a circle")
    assert run_ranks(lambda end: d1(end, early=True), 3) == [2.0, 1.0, 5.0]


def d2(end: ThreadEndpoint, *, early: bool) -> float:
    """Eager sums' first step: a worker starts a sum while those behind it wait for its message."""
    messages, copies = end.group(range(3), "messages"), end.group([0, 2], "sums") if end.rank != 1 else None
    if early and copies is not None:
        copies.allreduce([torch.zeros(1)]).wait()
    gradient, value = torch.ones(1), torch.zeros(1)
    if end.rank == 0:
        assert copies is not None
        summed = copies.allreduce([gradient])
        messages.send([torch.full((1,), 7.0)], 1, 0)
        summed.wait()
    elif end.rank == 1:
        messages.recv([value], 0, 0).wait()
        messages.send([value * 2], 2, 0)
    else:
        assert copies is not None
        messages.recv([value], 1, 0).wait()
        gradient = value + 0
        copies.allreduce([gradient]).wait()
    return gradient.item()


def test_making_a_communicator_holds_the_host() -> None:
    hangs(
        lambda end: d2(end, early=False),
        3,
        "rank 0 makes sums: waits for rank 2 to enter",
        "in a circle",
    )
    assert run_ranks(lambda end: d2(end, early=True), 3) == [15.0, 1.0, 15.0]


def ring(end: ThreadEndpoint, *, one_order: bool) -> float:
    """Workers in a ring post their receives early: each makes another pair first."""
    group = end.group(range(3), "ring")
    after, before = (end.rank + 1) % 3, (end.rank - 1) % 3
    if one_order:
        for low, high in sorted({tuple(sorted((end.rank, other))) for other in (after, before)}):
            token = torch.zeros(1)
            work = group.send([token], high, 0) if end.rank == low else group.recv([token], low, 0)
            work.wait()
    value = torch.zeros(1)
    received = group.recv([value], before, 0)
    group.send([torch.full((1,), float(end.rank))], after, 0)
    received.wait()
    return value.item()


def test_pairs_are_made_in_one_order() -> None:
    hangs(lambda end: ring(end, one_order=False), 3, "in a circle", "the pair 0-1 of ring")
    assert run_ranks(lambda end: ring(end, one_order=True), 3) == [2.0, 0.0, 1.0]


# -- messages


def test_a_send_ends_when_its_receive_is_posted() -> None:
    def program(end: ThreadEndpoint, *, posted: bool) -> tuple[bool, bool]:
        group, word = end.group(range(2), "pair"), end.group(range(2), "word")
        meet(group, 0, 1)
        if end.rank == 1:
            word.barrier()
            if posted:
                group.recv([torch.zeros(1)], 0, 0)
            word.barrier()
            return False, True
        sent = group.send([torch.ones(1)], 1, 0)
        before = sent.is_completed()
        word.barrier()
        word.barrier()
        return before, sent.is_completed()

    assert run_ranks(lambda end: program(end, posted=True), 2) == [(False, True)] * 2
    hangs(lambda end: program(end, posted=False), 2, "had not run: rank 0's send to rank 1")


def crossing(end: ThreadEndpoint, way: str) -> float:
    """Both send, then receive, between the same two."""
    group = end.group(range(2), "pair")
    back = end.group(range(2), "back")
    mine, theirs = torch.full((1,), float(end.rank)), torch.zeros(1)
    if way == "one communicator":
        group.send([mine], 1 - end.rank, 0)
        group.recv([theirs], 1 - end.rank, 0).wait()
    elif way == "grouped":
        exchange(group, mine, theirs, 1 - end.rank)
    else:  # one for each direction
        there, here = (group, back) if end.rank == 0 else (back, group)
        first, second = (there.send, here.recv) if end.rank == 0 else (here.recv, there.send)
        work = [call([mine if call == there.send else theirs], 1 - end.rank, 0) for call in (first, second)]
        work[end.rank == 0].wait()
    return theirs.item()


def test_messages_that_cross_are_grouped_or_have_a_communicator_each() -> None:
    hangs(lambda end: crossing(end, "one communicator"), 2, "rank 0's send to rank 1", "does not run yet")
    assert run_ranks(lambda end: crossing(end, "grouped"), 2) == [1.0, 0.0]
    assert run_ranks(lambda end: crossing(end, "two"), 2) == [1.0, 0.0]


def test_messages_match_by_their_order() -> None:
    def program(end: ThreadEndpoint, order: tuple[int, int]) -> list[float]:
        group = end.group(range(2), "pair")
        if end.rank == 0:
            for number in (1, 2):
                group.send([torch.full((number,), float(number))], 1, number)
            return []
        buffers = {number: torch.zeros(number) for number in order}
        for number in order:
            group.recv([buffers[number]], 0, number)  # the tag says what it is; nobody looks at it
        current_stream().synchronize()  # type: ignore[union-attr]
        return [buffers[1][0].item()]

    hangs(lambda end: program(end, (2, 1)), 2, "does not fit", "send to rank 1 (number 0, 1 float32)")
    run_ranks(lambda end: program(end, (1, 2)), 2)


def test_a_tensor_must_not_change_while_it_is_sent() -> None:
    def program(end: ThreadEndpoint, *, waits: bool) -> float:
        group, word = end.group(range(2), "pair"), end.group(range(2), "word")
        word.barrier()
        value = torch.zeros(1)
        if end.rank == 0:
            value += 1
            sent = group.send([value], 1, 0)
            if waits:
                sent.wait()
            value.mul_(2)
            word.barrier()
        else:
            meet(group, 0, 1)
            if waits:
                group.recv([value], 0, 0).wait()
            word.barrier()
            if not waits:
                group.recv([value], 0, 0).wait()
        return value.item()

    hangs(lambda end: program(end, waits=False), 2, "changed in place while it was sent")
    assert run_ranks(lambda end: program(end, waits=True), 2) == [2.0, 1.0]


# -- streams


def test_a_wait_is_the_streams_and_the_host_goes_on() -> None:
    def program(end: ThreadEndpoint) -> float:
        group, back = end.group(range(2), "there"), end.group(range(2), "back")
        for each in (group, back):
            meet(each, 0, 1)
        value, one = torch.zeros(1), torch.ones(1)
        if end.rank == 0:
            back.recv([value], 1, 0).wait()
            group.send([one], 1, 0)  # a host that waited would never come here
            return value.item()
        group.recv([value], 0, 0).wait()
        back.send([value + 1], 0, 0)
        return value.item()

    # Rank 0's send comes after what its stream waits for, and that after the send: host and stream differ.
    hangs(program, 2, "comes after", "in a circle")


def test_a_stream_of_its_own_does_not_wait() -> None:
    def program(end: ThreadEndpoint) -> float:
        from counterflow.testing.strict_nccl.streams import Stream, on

        there, back = end.group(range(2), "there"), end.group(range(2), "back")
        for each in (there, back):
            meet(each, 0, 1)
        value, one = torch.zeros(1), torch.ones(1)
        if end.rank == 0:
            received = back.recv([value], 1, 0)
            received.wait()
            main, side = current_stream(), Stream(end.wait)
            assert main is not None
            event = main.record_event()
            assert not event.query()
            with on(side):
                there.send([one], 1, 0)
            event.synchronize()
            assert event.query()
            return value.item()
        there.recv([value], 0, 0).wait()
        back.send([value + 1], 0, 0)
        return value.item()

    assert run_ranks(program, 2) == [2.0, 1.0]


def test_what_has_not_come_is_not_a_number() -> None:
    unread: list[bool] = []  # what the program saw before it was told of the hang

    def program(end: ThreadEndpoint) -> None:
        group = end.group(range(2), "pair")
        if end.rank == 0:
            group.send([torch.ones(1)], 1, 0)
            return
        meet(group, 0, 1)
        value, late = torch.zeros(1), torch.zeros(1)
        group.recv([value], 0, 0)
        received = group.recv([late], 0, 0)
        unread.append(bool(late.isnan()))  # nobody waited for it
        del received

    hangs(program, 2, "rank 1's receive from rank 0 (number 1")
    assert unread == [True]


# -- collectives


def two_sums(end: ThreadEndpoint, *, one_order: bool) -> float:
    """Two workers start the sums of two groups."""
    one, two = end.group(range(2), "stage 0"), end.group(range(2), "stage 3")
    for group in (one, two):
        group.allreduce([torch.zeros(1)]).wait()
    order = (one, two) if one_order or end.rank == 0 else (two, one)
    values = [torch.full((1,), float(end.rank + 1)) for _ in order]
    works = [group.allreduce([value]) for group, value in zip(order, values, strict=True)]
    for work in works:
        work.wait()
    return values[0].item()


def test_collectives_of_two_groups_are_launched_in_one_order() -> None:
    hangs(
        lambda end: two_sums(end, one_order=False),
        2,
        "rank 0's all-reduce (number 1, 1 float32) on stage 0",
        "stands behind",
        "in a circle",
    )
    assert run_ranks(lambda end: two_sums(end, one_order=True), 2) == [3.0, 3.0]


def test_all_members_take_part_in_a_collective() -> None:
    def program(end: ThreadEndpoint, who: int) -> float:
        group = end.group(range(3), "all")
        group.barrier()
        value = torch.ones(1)
        if end.rank < who:
            group.allreduce([value]).wait()
        return value.item()

    hangs(lambda end: program(end, 2), 3, "rank 2 has ended")
    assert run_ranks(lambda end: program(end, 3), 3) == [3.0] * 3


@pytest.mark.parametrize("other", ["barrier", "broadcast of rank 0", "all-gather"])
def test_an_all_reduce_does_not_meet_another_collective_of_its_size(other: str) -> None:
    def program(end: ThreadEndpoint) -> None:
        group, one = end.group(range(2), "all"), torch.ones(1)
        if end.rank == 0:
            group.allreduce([one]).wait()
        elif other == "barrier":
            group.barrier()
        elif other == "all-gather":
            group.allgather([[torch.zeros(1), torch.zeros(1)]], [one]).wait()
        else:
            group.broadcast(one, 0).wait()

    hangs(
        program, 2, "what meets by its order alone does not fit", "rank 0's all-reduce", f"rank 1's {other}"
    )


def test_the_other_collectives() -> None:
    def program(end: ThreadEndpoint) -> list[float]:
        group = end.group([2, 0, 1], "all")
        value = torch.full((1,), float(end.rank))
        rows = [torch.zeros(1) for _ in range(3)]
        group.allgather([rows], [value]).wait()
        group.broadcast(value, 1).wait()  # the second member: rank 0
        return [value.item(), *torch.cat(rows).tolist()]

    assert run_ranks(program, 3) == [[0.0, 2.0, 0.0, 1.0]] * 3


# -- aborts


def test_an_abort_lets_the_host_go_on_and_ends_the_communicators() -> None:
    def program(end: ThreadEndpoint) -> str:
        group, word = end.group(range(2), "pair"), end.group(range(2), "word")
        meet(group, 0, 1)
        if end.rank == 1:
            word.barrier()
            ThreadEndpoint(end.fabric, 0).abort()  # as a watcher's thread does
            return ""
        received = group.recv([torch.zeros(1)], 1, 0)
        word.barrier()
        received.wait()
        torch.zeros(1).add_(1)  # the stream comes to its end, with whatever is there
        with pytest.raises(torch.distributed.DistBackendError, match="aborted on rank 0"):
            group.send([torch.zeros(1)], 1, 0)
        return str(received.exception())

    assert "aborted" in run_ranks(program, 2)[0]


def test_making_a_communicator_ends_with_an_abort() -> None:
    def program(end: ThreadEndpoint) -> None:
        first, second = end.group(range(2), "first"), end.group(range(2), "second")
        first.barrier()
        if end.rank == 1:
            end.abort()
            ThreadEndpoint(end.fabric, 0).abort()
            return
        with pytest.raises(torch.distributed.DistBackendError, match="aborted on rank 0"):
            second.allreduce([torch.zeros(1)])

    run_ranks(program, 2)
