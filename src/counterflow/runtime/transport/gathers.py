"""Gathers of a few numbers by rank, over the control plane.

Few workers send each other their rows directly. Of many each has a place in a grid: it sends its row to those
of its group, whose ranks follow each other, and their rows together to one or more of each other group. So
each sends and receives about twice the square root of the workers' number of messages, in two rounds.

Invariant: a gather ends when all have started it; nobody has to wait for it before others can.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from .base import Status, TimedOut
from .pending import Transfer
from .side_thread import SideThread
from .tags import GATHER_TAG

_FEW_WORKERS = 16
"""Maximum number of workers that send gathered values to each other directly."""

_ROW_WORDS = 32
"""Length of a gathered row in float64; longer rows are split, so all messages between two ranks are alike."""

_GATHERS_AHEAD = 4
"""Number of gathers whose receives are posted ahead: two a step, and what the step's caller gathers."""


class Way(NamedTuple):
    """Whom a worker sends rows to, and from whom it receives.

    Attributes:
        group: the ranks of its group, itself among them.
        sources: by rank of another group that sends that group's rows, these.
        targets: the ranks of other groups to which it sends its group's rows.
    """

    group: range
    sources: Mapping[int, range]
    targets: Sequence[int]


def way_of(rank: int, world_size: int) -> Way:
    """The way of a worker's rows.

    >>> way_of(3, 4)
    Way(group=range(0, 4), sources={}, targets=[])
    >>> way_of(3, 18)
    Way(group=range(0, 4), sources={7: range(4, 9), 12: range(9, 13), 16: range(13, 18)}, targets=[7, 12, 16])
    """
    count = 1 if world_size <= _FEW_WORKERS else round(math.sqrt(world_size))
    edges = [number * world_size // count for number in range(count + 1)]
    groups = [range(*pair) for pair in itertools.pairwise(edges)]
    mine = next(group for group in groups if rank in group)
    others = [group for group in groups if group is not mine]
    place = rank - mine.start
    return Way(
        mine,
        {group[place % len(group)]: group for group in others},
        [peer for group in others for peer in group if (peer - group.start) % len(mine) == place],
    )


class RowTransport(Protocol):
    """The messages, waits and errors of a transport that gathers need."""

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        ...

    @property
    def world_size(self) -> int:
        """Number of workers."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """Maximum seconds of a wait."""
        ...

    @property
    def status(self) -> Status:
        """The worker's status, which its watch reads."""
        ...

    def post(self, tensors: Sequence[Tensor], peer: int, tag: int) -> list[Work]:
        """Begin to send host tensors."""
        ...

    def accept(self, buffers: Sequence[Tensor], peer: int, tag: int) -> list[Work]:
        """Begin to receive host tensors."""
        ...

    def sent(self, peer: int, works: Sequence[Work]) -> object:
        """Look after messages that were posted."""
        ...

    def wait(self, works: Sequence[Work], peer: int) -> None:
        """Wait for work with a peer."""
        ...

    def trouble(self, error: RuntimeError, peer: int, waited_seconds: float = 0.0) -> Exception:
        """The error to raise for an error of torch.distributed."""
        ...


class Rows:
    """Rows of a gather in flight or to come.

    Attributes:
        rows: their place.
        near: by peer of the group what brings its row.
        far: by peer of another group what brings that group's rows.
        over: set when all are there, or ``error`` is; of many workers.
    """

    __slots__ = ("error", "far", "near", "over", "rows")

    def __init__(
        self, rows: Tensor, near: Mapping[int, Sequence[Work]], far: Mapping[int, Sequence[Work]]
    ) -> None:
        self.rows, self.near, self.far = rows, near, far
        self.over = threading.Event()
        self.error: Exception | None = None


class Gathers:
    """The gathers of one transport.

    Args:
        transport: whose they are.
    """

    def __init__(self, transport: RowTransport) -> None:
        self._transport = transport
        self._way = way_of(transport.rank, transport.world_size)
        self._expected: deque[Rows] = deque()
        """The gathers to come whose receives are posted; their messages come in this order."""
        self._passing: SideThread[Rows] | None = None
        """Thread that passes rows among many workers, which may wait for something else meanwhile."""

    def start(self, values: Sequence[float]) -> Transfer[list[list[float]]]:
        """Begin one.

        Of few workers the last one to start has all the rows at once, and the others have its row after one
        message, where Gloo's ring takes one after another; of many, after two.
        """
        transport, width = self._transport, len(values)
        parts = []
        for at in range(0, max(width, 1), _ROW_WORDS):
            piece = values[at : at + _ROW_WORDS]
            mine = torch.tensor(
                [*piece, *[0.0] * (_ROW_WORDS - len(piece))], dtype=torch.float64, device="cpu"
            )
            part = self._expected.popleft() if self._expected else self._expect()
            part.rows[transport.rank] = mine
            works: list[Work] = []
            for peer in part.near:
                works += transport.post((mine,), peer, GATHER_TAG)
            transport.sent(-1, works)
            if part.far:
                if self._passing is None:
                    self._passing = SideThread("counterflow gathers", self._pass_on)
                self._passing.give(part)
            parts.append(part)
        return Transfer(lambda: self._finish(parts, width))

    def _finish(self, parts: Sequence[Rows], width: int) -> list[list[float]]:
        for part in parts:
            if part.far:
                self._wait_far(part)
            else:
                for peer, works in part.near.items():
                    self._transport.wait(works, peer)
        whole = parts[0].rows if len(parts) == 1 else torch.cat([p.rows for p in parts], 1)
        gathered: list[list[float]] = whole[:, :width].tolist()
        return gathered

    def _wait_far(self, part: Rows) -> None:
        transport, began = self._transport, time.monotonic()
        transport.status.waiting_for = -1
        if not part.over.wait(transport.timeout_seconds):
            raise TimedOut(None, transport.timeout_seconds)
        if isinstance(part.error, RuntimeError):
            raise transport.trouble(part.error, -1, time.monotonic() - began) from part.error
        if part.error is not None:
            raise part.error
        transport.status.waiting_for = None

    def expect(self) -> None:
        """Post receives ahead: a row that is asked for only when it is needed comes a way later."""
        while len(self._expected) < _GATHERS_AHEAD:
            self._expected.append(self._expect())

    def close(self, within_seconds: float) -> bool:
        """Let the thread end after what it was given; whether it did so in time."""
        return self._passing is None or self._passing.close(within_seconds)

    def _expect(self) -> Rows:
        """Post the receives of a gather's rows."""
        transport = self._transport
        rows = torch.empty(transport.world_size, _ROW_WORDS, dtype=torch.float64, device="cpu")

        def from_(peer: int, ranks: range) -> list[Work]:
            return transport.accept((rows[ranks.start : ranks.stop],), peer, GATHER_TAG)

        near = {
            peer: from_(peer, range(peer, peer + 1)) for peer in self._way.group if peer != transport.rank
        }
        return Rows(rows, near, {peer: from_(peer, ranks) for peer, ranks in self._way.sources.items()})

    def _pass_on(self, part: Rows) -> None:
        """Send the rows of this worker's group to the others', when they are there."""
        transport, way = self._transport, self._way
        try:
            _await(part.near)
            ours = part.rows[way.group.start : way.group.stop]
            works = [work for peer in way.targets for work in transport.post((ours,), peer, GATHER_TAG)]
            transport.sent(-1, works)
            _await(part.far)
        except Exception as error:  # raised where the worker waits
            part.error = error
        part.over.set()


def _await(arriving: Mapping[int, Sequence[Work]]) -> None:
    for works in arriving.values():
        for work in works:
            work.wait()
