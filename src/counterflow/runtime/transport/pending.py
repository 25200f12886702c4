"""What is in flight on a transport over torch.distributed, and how it is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work

from .staging import PendingSend

if TYPE_CHECKING:
    from .control import DistributedTransport


class Done:
    """What was over before it began."""

    __slots__ = ()

    def done(self) -> bool:
        """See ``Pending.done``."""
        return True

    def wait(self) -> None:
        """See ``Pending.wait``."""
        return


DONE = Done()


class Works:
    """Works of torch.distributed in flight; Gloo tells of a receive only when it is waited for."""

    __slots__ = ("peer", "transport", "works")

    def __init__(self, transport: DistributedTransport, peer: int, works: Sequence[Work]) -> None:
        self.transport, self.peer, self.works = transport, peer, works

    def done(self) -> bool:
        """See ``Pending.done``."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self.transport.wait(self.works, self.peer)
        self.works = ()


class Sending:
    """A message over Gloo, looked after by the reaper."""

    __slots__ = ("send", "transport")

    def __init__(self, transport: DistributedTransport, send: PendingSend) -> None:
        self.transport, self.send = transport, send

    def done(self) -> bool:
        """See ``Pending.done``."""
        return self.send.over and self.send.error is None

    def wait(self) -> None:
        """See ``Pending.wait``."""
        if not self.done():
            self.transport.wait_sent(self.send)


def copy_moves(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Into each buffer what has arrived for it elsewhere."""
    if moves:
        with torch.no_grad():
            for buffer, arrived in moves:
                buffer.copy_(arrived, non_blocking=True)


class Receiving(Works):
    """Posted receives; ``moves`` are the buffers that could not be received into directly."""

    __slots__ = ("moves",)

    def __init__(
        self,
        transport: DistributedTransport,
        peer: int,
        works: Sequence[Work],
        moves: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(transport, peer, works)
        self.moves = moves

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self.transport.wait(self.works, self.peer)
        self.works = ()
        copy_moves(self.moves)
        self.moves = ()


class DescribedReceiving:
    """A posted receive of a header; the tensors' receives are posted when it is there."""

    __slots__ = ("header", "peer", "tag", "tensors", "transport", "works")

    def __init__(
        self, transport: DistributedTransport, peer: int, tag: int, header: Tensor, works: Sequence[Work]
    ) -> None:
        self.transport, self.peer, self.tag, self.header, self.works = transport, peer, tag, header, works
        self.tensors: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """See ``Described.wait``."""
        if self.tensors is None:
            self.transport.wait(self.works, self.peer)
            self.tensors = self.transport.receive_after(self.header, self.peer, self.tag)
        return self.tensors


def in_place_of(
    buffers: Sequence[Tensor], device: torch.device, *, pinned: bool = False
) -> tuple[list[Tensor], tuple[tuple[Tensor, Tensor], ...]]:
    """Buffers to receive into where some cannot be received into directly, and what to move afterwards."""
    targets = [
        torch.empty(buffer.shape, dtype=buffer.dtype, device=device, pin_memory=pinned) for buffer in buffers
    ]
    return targets, tuple(zip(buffers, targets, strict=True))
