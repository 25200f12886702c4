"""Gathers of many workers in two rounds: bit for bit what few workers' one round gives."""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from counterflow.runtime.transport import gathers
from counterflow.runtime.transport.base import Gathering, Status, TimedOut
from counterflow.runtime.transport.gathers import Gathers, gather_routes

_SECONDS = 30.0


class Wire:
    """Messages between workers: between two, the first that is sent is for the first receive, and so on."""

    def __init__(self) -> None:
        self.broken: set[int] = set()
        self._lock = threading.Lock()
        self._messages: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = {}
        self._posted: Counter[tuple[bool, int, int]] = Counter()

    def next(self, source: int, target: int, *, sends: bool) -> queue.SimpleQueue[Tensor]:
        """Where the next message between two goes, or is received."""
        with self._lock:
            number = self._posted[sends, source, target]
            self._posted[sends, source, target] += 1
            return self._messages.setdefault((source, target, number), queue.SimpleQueue())


class Receive:
    def __init__(self, wire: Wire, source: int, target: int, buffer: Tensor) -> None:
        self.wire, self.source, self.buffer = wire, source, buffer
        self.message = wire.next(source, target, sends=False)
        self.over = False

    def wait(self) -> None:
        if self.source in self.wire.broken:
            raise RuntimeError("gloo: the connection broke")
        if not self.over:
            self.buffer.copy_(self.message.get(timeout=_SECONDS))
            self.over = True


class End:
    """What ``Gathers`` needs of a transport."""

    def __init__(self, wire: Wire, rank: int, world_size: int, timeout_seconds: float = _SECONDS) -> None:
        self.wire, self.rank, self.world_size = wire, rank, world_size
        self.timeout_seconds = timeout_seconds
        self.status = Status(rank)

    def post(self, tensors: Sequence[Tensor], peer: int, tag: int) -> list[Any]:
        for tensor in tensors:
            self.wire.next(self.rank, peer, sends=True).put(tensor.clone())
        return []

    def accept(self, buffers: Sequence[Tensor], peer: int, tag: int) -> list[Any]:
        return [Receive(self.wire, peer, self.rank, buffer) for buffer in buffers]

    def wait(self, works: Sequence[Any], peer: int) -> None:
        for work in works:
            work.wait()

    def sent(self, peer: int, works: Sequence[Any]) -> None:
        assert not works

    def translate_error(self, error: RuntimeError, peer: int, waited_seconds: float) -> Exception:
        return ConnectionError(f"rank {peer}: {error}")


def made(wire: Wire, world_size: int, **options: Any) -> list[Gathers]:
    ends = [End(wire, rank, world_size, **options) for rank in range(world_size)]
    return [Gathers(cast("Any", end)) for end in ends]


def closed(every: Sequence[Gathers]) -> None:
    for one in every:
        assert one.close(_SECONDS)


def row(rank: int, width: int) -> list[float]:
    odd = [math.nan, -0.0, math.inf, 5e-324, 0.1 + 0.2]
    return [odd[(rank + column) % 5] * (rank + 1) for column in range(width)]


def bits(rows: list[list[float]]) -> list[list[int]]:
    tensors = (torch.tensor(one, dtype=torch.float64) for one in rows)
    return [tensor.view(torch.int64).tolist() for tensor in tensors]


def gathered(world_size: int, widths: Sequence[int], *, ahead: bool = False) -> list[list[list[list[int]]]]:
    """By gather and rank its rows; all are started before any is waited for, and the last one first."""
    every = made(Wire(), world_size)
    if ahead:
        for one in every:
            one.expect()
    started: list[list[Gathering]] = [
        [one.start(row(rank, width)) for rank, one in enumerate(every)] for width in widths
    ]
    found = [[bits(gathering.wait()) for gathering in one] for one in reversed(started)]
    closed(every)
    return found[::-1]


@pytest.mark.table
@pytest.mark.parametrize("world_size", [18, 19, 25, 31, 40])
@pytest.mark.parametrize("ahead", [False, True])
def test_two_rounds_give_what_one_gives(
    monkeypatch: pytest.MonkeyPatch, world_size: int, ahead: bool
) -> None:
    widths = [9, 0, 1, 33, 100, 9]
    found = gathered(world_size, widths, ahead=ahead)
    monkeypatch.setattr(gathers, "_FEW_WORKERS", world_size)
    assert gathered(world_size, widths) == found
    assert [len(rows[0]) for one in found for rows in one] == [w for w in widths for _ in range(world_size)]


@pytest.mark.parametrize("world_size", [17, 18, 40, 1_000])
def test_what_is_sent_is_received(world_size: int) -> None:
    ways = [gather_routes(rank, world_size) for rank in range(world_size)]
    for rank, way in enumerate(ways):
        assert {rank} | {r for ranks in (way.group, *way.sources.values()) for r in ranks} == {
            *range(world_size)
        }
        assert all(ways[source].group == ranks for source, ranks in way.sources.items())
        assert sorted(way.sources) == [s for s, other in enumerate(ways) if rank in other.targets]
    most = max(len(way.group) - 1 + len(way.targets) for way in ways)
    assert most <= 2.5 * math.sqrt(world_size) + 2


def test_nobody_has_to_wait_before_others_can() -> None:
    """Who waits for a message of the step before it reads the gather would hold up whoever sends it."""
    every = made(Wire(), 20)
    started = [one.start([float(rank)]) for rank, one in enumerate(every)]
    assert started[7].wait() == [[float(rank)] for rank in range(20)]
    closed(every)


def test_a_broken_connection_is_told_where_the_worker_waits() -> None:
    wire = Wire()
    every = made(wire, 18)
    wire.broken.add(3)
    started = [one.start([1.0]) for one in every]
    with pytest.raises(ConnectionError, match="rank -1: gloo: the connection broke"):
        started[0].wait()


def test_a_worker_that_does_not_come_is_waited_for_so_long() -> None:
    (first, *_) = made(Wire(), 18, timeout_seconds=0.05)
    with pytest.raises(TimedOut):
        first.start([1.0]).wait()
