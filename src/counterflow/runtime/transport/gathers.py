"""Gathers of a few numbers by rank, over the control plane.

Few workers send each other their rows directly. Many form a grid of groups of successive ranks: a worker
sends its row to its group, and the group's rows to one or more workers of every other group. So each sends
and receives about twice the square root of the number of workers of messages, in two rounds.

Invariant: a gather ends when all have started it; no worker has to wait for it before others can.
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
from .headers import GATHER_TAG
from .pending import Transfer
from .side_thread import SideThread

_FEW_WORKERS = 16
"""Maximum number of workers that send gathered values to each other directly."""

_ROW_WORDS = 32
"""Length of a gathered row in float64; longer rows are split, so all messages between two ranks are alike."""

_GATHERS_AHEAD = 4
"""Number of gathers whose receives are posted ahead: two a step, and what the step's caller gathers."""


class GatherRoutes(NamedTuple):
    """Sources and targets of the rows that a worker sends and receives.

    Attributes:
        group: the ranks of its group, itself among them.
        sources: rows (of a group) by the rank outside of the group that sends them.
        targets: the ranks of other groups to which it sends its group's rows.
    """

    group: range
    sources: Mapping[int, range]
    targets: Sequence[int]


def gather_routes(rank: int, world_size: int) -> GatherRoutes:
    """Routes of a worker's rows.

    >>> gather_routes(3, 4)
    GatherRoutes(group=range(0, 4), sources={}, targets=[])
    >>> gather_routes(3, 18).sources
    {7: range(4, 9), 12: range(9, 13), 16: range(13, 18)}
    """
    count = 1 if world_size <= _FEW_WORKERS else round(math.sqrt(world_size))
    edges = [number * world_size // count for number in range(count + 1)]
    groups = [range(*pair) for pair in itertools.pairwise(edges)]
    near = next(group for group in groups if rank in group)
    far = [group for group in groups if group is not near]
    place = rank - near.start
    return GatherRoutes(
        near,
        {group[place % len(group)]: group for group in far},
        [peer for group in far for peer in group if (peer - group.start) % len(near) == place],
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
        """Wait for posted messages in the background."""
        ...

    def wait(self, works: Sequence[Work], peer: int) -> None:
        """Wait for work with a peer."""
        ...

    def translate_error(self, error: RuntimeError, peer: int, waited_seconds: float = 0.0) -> Exception:
        """The error to raise for an error of torch.distributed."""
        ...


class Rows:
    """Rows of a gather whose receives are posted.

    Attributes:
        rows: tensor of all rows, by rank.
        near: receives of the rows of the group, by peer.
        far: receives of other groups' rows, by the peer that sends them.
        over: set when all rows are received, or ``error`` is set; only with several groups.
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
        transport: sends and receives the rows.
    """

    def __init__(self, transport: RowTransport) -> None:
        self._transport = transport
        self._routes = gather_routes(transport.rank, transport.world_size)
        self._expected: deque[Rows] = deque()
        """Later gathers whose receives are posted; their messages are received in this order."""
        self._passing: SideThread[Rows] | None = None
        """Thread that passes rows on between groups, as the worker may wait for something else meanwhile."""

    def start(self, values: Sequence[float]) -> Transfer[list[list[float]]]:
        """Begin a gather.

        With few workers the last one to start has all rows at once, and the rest have its row after one
        message, where Gloo's ring takes one after another; with many workers, after two.
        """
        transport, width = self._transport, len(values)
        parts = []
        for at in range(0, max(width, 1), _ROW_WORDS):
            piece = values[at : at + _ROW_WORDS]
            row = torch.tensor(
                [*piece, *[0.0] * (_ROW_WORDS - len(piece))], dtype=torch.float64, device="cpu"
            )
            part = self._expected.popleft() if self._expected else self._expect()
            part.rows[transport.rank] = row
            works: list[Work] = []
            for peer in part.near:
                works += transport.post((row,), peer, GATHER_TAG)
            transport.sent(-1, works)
            if part.far:
                if self._passing is None:
                    self._passing = SideThread("counterflow gathers", self._pass_on)
                self._passing.put(part)
            parts.append(part)
        return Transfer(lambda: self._finish(parts, width))

    def _finish(self, parts: Sequence[Rows], width: int) -> list[list[float]]:
        for part in parts:
            if part.far:
                self._wait_far(part)
            else:
                for peer, works in part.near.items():
                    self._transport.wait(works, peer)
        rows = parts[0].rows if len(parts) == 1 else torch.cat([p.rows for p in parts], 1)
        gathered: list[list[float]] = rows[:, :width].tolist()
        return gathered

    def _wait_far(self, part: Rows) -> None:
        transport, began = self._transport, time.monotonic()
        transport.status.waiting_for = -1
        if not part.over.wait(transport.timeout_seconds):
            raise TimedOut(None, transport.timeout_seconds)
        if isinstance(part.error, RuntimeError):
            raise transport.translate_error(part.error, -1, time.monotonic() - began) from part.error
        if part.error is not None:
            raise part.error
        transport.status.waiting_for = None

    def expect(self) -> None:
        """Post receives of later gathers: a receive that is posted only when needed delays its row."""
        while len(self._expected) < _GATHERS_AHEAD:
            self._expected.append(self._expect())

    def close(self, within_seconds: float) -> bool:
        """End the thread after the items in its queue; return True if it ended in time."""
        return self._passing is None or self._passing.close(within_seconds)

    def _expect(self) -> Rows:
        transport = self._transport
        rows = torch.empty(transport.world_size, _ROW_WORDS, dtype=torch.float64, device="cpu")

        def from_(peer: int, ranks: range) -> list[Work]:
            return transport.accept((rows[ranks.start : ranks.stop],), peer, GATHER_TAG)

        near = {
            peer: from_(peer, range(peer, peer + 1)) for peer in self._routes.group if peer != transport.rank
        }
        return Rows(rows, near, {peer: from_(peer, ranks) for peer, ranks in self._routes.sources.items()})

    def _pass_on(self, part: Rows) -> None:
        transport, routes = self._transport, self._routes
        try:
            _await(part.near)
            group_rows = part.rows[routes.group.start : routes.group.stop]
            works = [
                work for peer in routes.targets for work in transport.post((group_rows,), peer, GATHER_TAG)
            ]
            transport.sent(-1, works)
            _await(part.far)
        except Exception as error:  # raised where the worker waits
            part.error = error
        part.over.set()


def _await(arriving: Mapping[int, Sequence[Work]]) -> None:
    for works in arriving.values():
        for work in works:
            work.wait()
