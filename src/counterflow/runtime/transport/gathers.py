"""Gathers of a few numbers by rank, over the control plane."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from .tags import GATHER_TAG

if TYPE_CHECKING:
    from .control import DistributedTransport

_FEW_WORKERS = 16
"""So many tell each other directly what they gather."""

_ROW_WORDS = 32
"""They do it in rows of so many float64, a longer one in several: all messages of a tag are alike."""

_GATHERS_AHEAD = 4
"""Rows of so many gathers are asked for before they are needed: two a step, and what its caller gathers."""


class Rows(NamedTuple):
    """Rows of a gather under way or to come: their place, and by peer (-1: all together) what brings them."""

    rows: Tensor
    arriving: Mapping[int, Sequence[Work]]


class Gathering:
    """A gather under way: its columns in one or several parts, and how many there are."""

    __slots__ = ("parts", "transport", "width")

    def __init__(self, transport: DistributedTransport, parts: Sequence[Rows], width: int) -> None:
        self.transport, self.parts, self.width = transport, parts, width

    def wait(self) -> list[list[float]]:
        """See ``base.Gathering.wait``."""
        for part in self.parts:
            for peer, works in part.arriving.items():
                self.transport.wait(works, peer)
        whole = self.parts[0].rows if len(self.parts) == 1 else torch.cat([p.rows for p in self.parts], 1)
        gathered: list[list[float]] = whole[:, : self.width].tolist()
        return gathered


class Gathers:
    """The gathers of one transport: few workers tell each other directly, many by a collective of Gloo.

    Args:
        transport: whose they are.
    """

    def __init__(self, transport: DistributedTransport) -> None:
        self._transport = transport
        self._expected: deque[Rows] = deque()
        """The gathers to come whose receives are posted; their messages come in this order."""

    def start(self, values: Sequence[float]) -> Gathering:
        """Begin one.

        Of few workers the last one to come has all the rows at once, and the others have its row after one
        message, where Gloo's ring takes one after another.
        """
        transport, width = self._transport, len(values)
        if transport.world_size > _FEW_WORKERS:
            mine = torch.tensor(values or [0.0], dtype=torch.float64, device="cpu")
            rows = torch.empty(transport.world_size, len(mine), dtype=torch.float64, device="cpu")
            work = transport.collective(
                lambda: dist.all_gather(list(rows.unbind()), mine, group=transport.control, async_op=True)
            )
            assert work is not None
            return Gathering(transport, (Rows(rows, {-1: (work,)}),), width)
        parts = []
        for at in range(0, max(width, 1), _ROW_WORDS):
            piece = values[at : at + _ROW_WORDS]
            mine = torch.tensor(
                [*piece, *[0.0] * (_ROW_WORDS - len(piece))], dtype=torch.float64, device="cpu"
            )
            part = self._expected.popleft() if self._expected else self._expect()
            part.rows[transport.rank] = mine
            works: list[Work] = []
            for peer in part.arriving:
                works += transport.post((mine,), peer, GATHER_TAG)
            transport.sent(-1, works)
            parts.append(part)
        return Gathering(transport, parts, width)

    def expect(self) -> None:
        """Post receives ahead: a row that is asked for only when it is needed comes a way later."""
        if self._transport.world_size <= _FEW_WORKERS:
            while len(self._expected) < _GATHERS_AHEAD:
                self._expected.append(self._expect())

    def _expect(self) -> Rows:
        """Post the receives of a gather's rows."""
        transport = self._transport
        rows = torch.empty(transport.world_size, _ROW_WORDS, dtype=torch.float64, device="cpu")
        peers = (rank for rank in range(transport.world_size) if rank != transport.rank)
        return Rows(rows, {peer: transport.accept((rows[peer],), peer, GATHER_TAG) for peer in peers})
