"""Tensors of known shapes over NCCL, from GPU to GPU.

NCCL matches messages by their order; its ``wait`` lets later work on the stream use what came. What is not of
known shapes goes over the control plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.schedule.program.actions import Matching

from .base import Crossing, Pending, TransportKind
from .control import DistributedTransport
from .headers import as_plain
from .pending import DONE, Receiving, Works, in_place_of
from .tags import PAYLOAD, lane_tag


class NcclTransport(DistributedTransport):
    """One process's transport over NCCL."""

    kind = TransportKind.NCCL
    matching = Matching.ORDER

    def make_data_plane(self) -> None:
        """See ``DistributedTransport``."""
        self._messages = self.group_of_all("nccl")

    def connect(self, peers: Iterable[int]) -> None:
        """Make the connections to ``peers`` before messages do. Each of them makes this call as well.

        NCCL connects two ranks at their first message, and neither goes on before both are there; with
        receives posted early, workers in a ring would wait for each other. Here all take one order.
        """
        token = torch.zeros(1, device=self.device)
        for low, high in sorted((min(self.rank, peer), max(self.rank, peer)) for peer in set(peers)):
            if self.rank == low:
                self.send((token,), high, 0).wait()
            else:
                self.receive((token,), low, 0).wait()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Works:
        """See ``Transport.send``."""
        plain = [as_plain(tensor) for tensor in tensors if tensor.numel()]
        return Works(self, peer, self.each(self._messages.send, plain, peer, lane_tag(tag, PAYLOAD)))

    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Receiving:
        """See ``Transport.receive``."""
        targets: Sequence[Tensor] = buffers
        moves: Sequence[tuple[Tensor, Tensor]] = ()
        if not all(buffer.is_contiguous() for buffer in buffers):
            targets, moves = in_place_of(buffers, self.device)
        plain = [as_plain(buffer) for buffer in targets if buffer.numel()]
        works = self.each(self._messages.recv, plain, peer, lane_tag(tag, PAYLOAD))
        return Receiving(self, peer, works, moves)

    def exchange(self, sent: Crossing, received: Crossing, peer: int) -> tuple[Pending, Pending]:
        """See ``Transport.exchange``: both in one launch."""
        both = [(dist.isend, sent), (dist.irecv, received)]
        ops = [
            dist.P2POp(call, as_plain(tensor), peer, self._messages)
            for call, message in both
            for tensor in message.tensors
            if tensor.numel()
        ]
        if not ops:
            return DONE, DONE
        try:
            works = Works(self, peer, dist.batch_isend_irecv(ops))
        except RuntimeError as error:
            raise self.trouble(error, peer, 0.0) from error
        return works, works
