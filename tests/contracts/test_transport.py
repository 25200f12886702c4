"""What every transport has to do: the same checks for each that registers; then what only some have."""

from __future__ import annotations

import functools
import operator
import runpy
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from counterflow.runtime.transport import gathers as gather_rows
from counterflow.runtime.transport.base import (
    Group,
    PeerLost,
    TimedOut,
    Transport,
)
from counterflow.runtime.transport.control import break_connections
from counterflow.runtime.transport.gloo import GlooTransport
from counterflow.runtime.transport.kinds import kinds
from counterflow.runtime.transport.local import Hub
from counterflow.runtime.transport.ordered import OrderedTransport
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport
from counterflow.testing.strict_local import StrictHub

WORKERS = 3


class Job:
    """A function of this file that another process finds by the path; pytest's module names mean nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> Any:
        return operator.getitem, (File(), self.function.__name__)


class File:
    def __reduce__(self) -> Any:
        return runpy.run_path, (__file__,)


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.float8_e4m3fn),
)


def a_tuple(seed: int) -> list[Tensor]:
    """Tensors of all dtypes and some odd shapes."""
    draw = torch.Generator().manual_seed(seed)
    some = [torch.randint(0, 100, (2, 3), generator=draw).to(torch.float32).to(dtype) for dtype in DTYPES]
    odd = [torch.rand((), generator=draw), torch.empty(0, 4), torch.rand(4, 5, generator=draw).t()]
    negative = torch.rand(3, dtype=torch.complex64, generator=draw).conj().imag  # a bit, no minus in memory
    return [*some, *odd, negative, torch._neg_view(odd[2].contiguous())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in pairs
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def both_ways(transport: Transport) -> None:
    me = transport.rank
    if me > 1:
        return
    buffers = [torch.empty(t.shape, dtype=t.dtype) for t in a_tuple(0)]
    if me == 0:
        arrival = transport.receive(buffers, 1, 7)
        arrival.wait()
        sent = transport.send(a_tuple(0), 1, 8)
    else:
        sent = transport.send(a_tuple(1), 0, 7)
        transport.receive(buffers, 0, 8).wait()
    sent.wait()
    assert sent.done()
    assert same(buffers, a_tuple(1 - me))
    assert transport.status.waiting_for is None


def ring(transport: Transport) -> None:
    me, size = transport.rank, transport.world_size
    buffer = torch.full((1000,), -1.0)
    arrival = transport.receive([buffer], (me - 1) % size, 1)
    sent = transport.send([torch.full((1000,), float(me), requires_grad=True)], (me + 1) % size, 1)
    arrival.wait()
    sent.wait()
    assert buffer.eq((me - 1) % size).all()


def out_of_order(transport: Transport) -> None:
    """Many messages in flight, waited for from the last to the first."""
    if transport.rank == 0:
        buffers = [torch.empty(50) for _ in range(20)]
        arrivals = [transport.receive([buffer], 1, 100 + i) for i, buffer in enumerate(buffers)]
        for arrival in reversed(arrivals):
            arrival.wait()
        assert [buffer[0].item() for buffer in buffers] == list(range(20))
    elif transport.rank == 1:
        for sent in [transport.send([torch.full((50,), float(i))], 0, 100 + i) for i in range(20)]:
            sent.wait()


def scattered_buffer(transport: Transport) -> None:
    whole = torch.zeros(4, 6)
    if transport.rank == 0:
        transport.receive([whole[:, ::2]], 1, 3).wait()
        assert torch.equal(whole, torch.tensor([1.0, 0.0]).repeat(4, 3))
    elif transport.rank == 1:
        transport.send([torch.ones(4, 3)], 0, 3).wait()


def described(transport: Transport) -> None:
    weight = torch.rand(3, 4, requires_grad=True)
    messages = [
        [*a_tuple(5), weight],
        [],
        [torch.full((i % 3, 2, 1), i) for i in range(40)],  # a description longer than one header
    ]
    if transport.rank == 2:
        arrivals = [transport.receive_described(0, 10 + i) for i in range(3)]
        for arrival, expected in zip(arrivals, messages, strict=True):
            found = arrival.wait()
            assert [t.requires_grad for t in found] == [t.requires_grad for t in expected]
            assert same(found[:-1], expected[:-1])
            assert arrival.wait() is found
    elif transport.rank == 0:
        sends = [transport.send_described(message, 2, 10 + i) for i, message in enumerate(messages)]
        for sent in sends:
            sent.wait()


def gathers(transport: Transport) -> None:
    me, size = transport.rank, transport.world_size
    third = 1 / 3  # not a float32
    assert transport.gather([me + third, float("inf")]) == [[r + third, float("inf")] for r in range(size)]
    assert transport.gather([]) == [[]] * size
    long = [me + i / 7 for i in range(75)]  # some may be asked for before, and the two may end together
    transport.get_ready()
    started = [transport.start_gather(values) for values in (long, [float(me)])]
    assert [row[0] for row in started[1].wait()] == list(range(size))
    assert started[0].wait() == [[r + i / 7 for i in range(75)] for r in range(size)]
    assert transport.gather_objects({"rank": me}) == [{"rank": r} for r in range(size)]


def broadcasts(transport: Transport) -> None:
    everybody = transport.group(range(transport.world_size))
    parameter = torch.nn.Parameter(torch.full((5,), float(transport.rank)))
    scattered = torch.full((4, 3), float(transport.rank)).t()
    transport.broadcast(parameter, 2, everybody)
    transport.broadcast(scattered, 1, everybody)
    assert parameter.eq(2).all()
    assert scattered.eq(1).all()
    alone = [transport.group([rank]) for rank in range(transport.world_size)][transport.rank]
    transport.broadcast(parameter, transport.rank, alone)


def sums(transport: Transport) -> None:
    """Bitwise the same on all ranks, for sizes that do not divide and values that do not add up evenly."""
    everybody = transport.group(range(transport.world_size))
    draw = torch.Generator().manual_seed(transport.rank)
    for size in (1, 2, 3, 4, 5, 7, 1000, 10007):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            mine = torch.randn(size, generator=draw).mul(1e3).to(dtype)
            values = cast("list[Tensor]", transport.gather_objects(mine.cpu().clone()))
            transport.all_reduce(mine, everybody).wait()
            mine = mine.cpu()
            found = cast("list[Tensor]", transport.gather_objects(mine))
            assert all(torch.equal(_bits(one), _bits(mine)) for one in found), (size, dtype)
            expected = torch.stack([value.double() for value in values]).sum(0)
            tolerance = 1e-1 if dtype is torch.bfloat16 else 1e-6
            assert torch.allclose(mine.double(), expected, rtol=tolerance, atol=1e3 * tolerance)


def exchanges(transport: Transport) -> None:
    """Row i of each goes to the i-th rank of the group, in the order of the ranks."""
    for ranks in ((0, 1, 2), (0, 2)):
        group = transport.group(ranks)
        if transport.rank not in ranks:
            continue
        place = ranks.index(transport.rank)
        for dtype in (torch.uint8, torch.float32):
            sent = torch.tensor([[10 * place + to, 100 + place] for to in range(len(ranks))], dtype=dtype)
            received = torch.zeros_like(sent)
            transport.all_to_all(received, sent, group).wait()
            expected = [[10 * source + place, 100 + source] for source in range(len(ranks))]
            assert received.tolist() == expected


def crossing_groups(transport: Transport) -> None:
    """Two groups of the same ranks are two: their sums may begin in another order on each rank."""
    first, other, second = (transport.group(ranks) for ranks in ((0, 2), (1,), (0, 2)))
    one, two = torch.ones(10), torch.full((10,), 2.0)
    if transport.rank == 1:
        transport.all_reduce(one, other).wait()
        assert one.eq(1).all()
        return
    started = [(one, first), (two, second)]
    if transport.rank == 2:
        started.reverse()
    sums = [transport.all_reduce(tensor, group) for tensor, group in started]
    for pending in sums:
        pending.wait()
        assert pending.done()
    assert one.eq(2).all()
    assert two.eq(4).all()


def statuses(transport: Transport) -> None:
    transport.status.now("the checks")
    found = transport.statuses()
    assert [status.rank for status in found if status] == [0, 1, 2]
    transport.gather([])


CHECKS = (
    *(both_ways, ring, out_of_order, scattered_buffer, described),
    *(gathers, broadcasts, sums, exchanges, crossing_groups, statuses),
)
MESSAGES = CHECKS[:5]
NOT_IN_ORDER = crossing_groups.__name__
"""What NCCL does not allow: sums that two ranks start in two orders."""


@Job
def check_all() -> dict[str, str]:
    transport = current_transport()
    transport.connect({rank for rank in range(WORKERS) if rank != transport.rank})
    found = {
        check.__name__: outcome(check, transport)
        for check in CHECKS
        if check.__name__ != NOT_IN_ORDER or not isinstance(transport, OrderedTransport)
    }
    return {NOT_IN_ORDER: "passed"} | found


@Job
def check_all_over_gloo() -> dict[str, str]:
    """The checks, those of messages once more as if staged, and at last what a failure does."""
    found: dict[str, str] = check_all()
    staged = GlooTransport(torch.device("cpu"), 60.0, copy_out=lambda tensors: (copies(tensors), a_moment))
    for check in MESSAGES:
        found[f"staged {check.__name__}"] = outcome(check, staged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_rows, "_FEW_WORKERS", 2)
        found["gathers among many"] = outcome(gathers, staged)
    staged.close()
    found["after a failure"] = outcome(after_a_failure, current_transport())
    return found


def copies(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


a_moment = functools.partial(time.sleep, 0.005)


def after_a_failure(transport: Transport) -> None:
    """Rank 1 fails and stays alive: the others' waits end soon, and with its words."""
    began = time.monotonic()
    if transport.rank == 1:
        transport.fail(ValueError("of rank 1"))
        return
    receives = functools.partial(receive_one, transport)
    waits = receives if transport.rank == 0 else functools.partial(transport.gather, [1.0])
    with pytest.raises(PeerLost, match="worker of rank 1 failed: ValueError: of rank 1") as caught:
        waits()
    assert caught.value.rank == 1
    assert time.monotonic() - began < 30
    with pytest.raises(PeerLost, match="of rank 1"):  # and nothing begins any more
        receives()


def receive_one(transport: Transport) -> None:
    transport.receive([torch.empty(1)], 1, 1).wait()


def outcome(check: Callable[[Transport], None], transport: Transport) -> str:
    try:
        with torch.device(transport.device):
            check(transport)
    except BaseException:
        return traceback.format_exc()
    return "passed"


@functools.cache
def outcomes(kind: str) -> list[dict[str, str]]:
    if kind == "gloo":
        return launch(check_all_over_gloo, workers=WORKERS, timeout_seconds=60.0)
    return launch(check_all, workers=WORKERS, transport=kind, timeout_seconds=60.0)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (kind.name, check.__name__)
        for kind in kinds()
        if not kind.gpu_each or torch.cuda.device_count() >= WORKERS
        for check in CHECKS
    ],
)
def test_check(kind: str, check: str) -> None:
    assert [found[check] for found in outcomes(kind)] == ["passed"] * WORKERS


@pytest.mark.parametrize(
    "check",
    [
        *(f"staged {check.__name__}" for check in MESSAGES),
        "gathers among many",
        "after a failure",
    ],
)
def test_check_over_gloo(check: str) -> None:
    assert [found[check] for found in outcomes("gloo")] == ["passed"] * WORKERS


def gloo_groups(ranks: int) -> list[Any]:
    """Gloo groups of several ranks, all in this process."""
    store = HashStore()
    made: list[Any] = [None] * ranks

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=10))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.mark.parametrize("gone", [None, 1, 2], ids="rank {} is gone".format)
def test_broken_connections_end_all_waits(gone: int | None) -> None:
    groups = gloo_groups(3)
    waits = {peer: groups[0].recv([torch.empty(1)], peer, 5) for peer in (1, 2)}
    if gone is not None:
        groups[gone] = None
        with pytest.raises(RuntimeError, match=r"(closed|reset) by peer"):
            waits.pop(gone).wait()
    break_connections(groups[0])
    for wait in waits.values():
        with pytest.raises(RuntimeError, match="pair closure"):  # not that it took too long
            wait.wait()


def test_strict_messages_come_in_one_order() -> None:
    hub = StrictHub(2, timeout_seconds=10.0)
    one, two = hub.transport(0), hub.transport(1)
    one.receive([torch.empty(1)], 1, 1)
    one.receive([torch.empty(1)], 1, 2)
    with pytest.raises(RuntimeError, match="message 2 from 1 to 0 where rank 0 had message 1 from 1 to 0"):
        two.send([torch.ones(1)], 0, 2)


def test_strict_send_waits_for_its_receive() -> None:
    hub = StrictHub(2, timeout_seconds=0.2)
    sender = hub.transport(0)
    with pytest.raises(TimedOut, match=r"nothing came within 0\.2 s") as caught:
        sender.send([torch.ones(1)], 1, 1)
    assert caught.value.rank == 1
    assert sender.status.waiting_for == 1


def test_local_waits_end_when_another_fails() -> None:
    hub = Hub(2, timeout_seconds=30.0)
    waiting = hub.transport(0).receive([torch.empty(1)], 1, 1)
    threading.Timer(0.1, hub.transport(1).fail, [ValueError("of rank 1")]).start()
    with pytest.raises(PeerLost, match="worker of rank 1 failed: of rank 1"):
        waiting.wait()


def test_message_of_another_shape() -> None:
    hub = Hub(2)
    hub.transport(0).send([torch.ones(2, 3)], 1, 1)
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\) where \(3, 2\) was expected"):
        hub.transport(1).receive([torch.empty(3, 2)], 0, 1)


def test_groups_are_plain() -> None:
    assert Group((0, 1)) == Group((0, 1), None)
