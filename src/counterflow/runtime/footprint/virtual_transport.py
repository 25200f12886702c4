"""Transport of workers whose messages have shapes and no numbers.

Invariant: what a worker allocates does not depend on how far the others are: a message holds no memory of its
sender, and a receiver allocates what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.common.tensors.torch_private import without_modes

from ..transport.base import Group, Transport
from ..transport.local import Hub, LocalTransport, ThreadControl
from ..transport.pending import DONE, Transfer
from .ledger import Ledger, Part
from .virtual_mode import is_virtual


class VirtualHub(Hub):
    """State that the threads share, with each worker's ledger."""

    def __init__(self, world_size: int, *, timeout_seconds: float = 300.0) -> None:
        super().__init__(world_size, timeout_seconds=timeout_seconds)
        self.ledgers = [Ledger() for _ in range(world_size)]

    @override
    def transport(self, rank: int, device: torch.device | str = "cpu") -> Transport:
        return VirtualTransport(self, rank, torch.device(device))


class _VirtualControl(ThreadControl):
    @override
    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        message = self.hub.message(self.rank, peer, tag)
        with message.lock:
            if message.buffers is not None:
                _copy_small(tensors, message.buffers)
            else:
                message.tensors = [_description(tensor) for tensor in tensors]
            message.delivered.set()
        return DONE

    @override
    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        message = self._expected(peer, tag)
        with message.lock:
            if message.tensors is not None:
                _copy_small(message.tensors, buffers)
                message.tensors = None
            else:
                message.buffers = buffers
        message.posted.set()
        return self._transfer(message.delivered, peer)

    @override
    def receive_described(self, peer: int, tag: int) -> Transfer[list[Tensor]]:
        message = self._expected(peer, tag)
        message.posted.set()

        def allocated(_: None) -> list[Tensor]:
            assert message.tensors is not None
            values = (
                torch.empty(t.shape, dtype=t.dtype) if t.is_meta else t.detach().clone()
                for t in message.tensors
            )
            return [
                value.requires_grad_(tensor.requires_grad)
                for value, tensor in zip(values, message.tensors, strict=True)
            ]

        return self._transfer(message.delivered, peer).then(allocated)

    @override
    def spread(self, tensor: Tensor, source: int) -> None:
        if is_virtual(tensor):
            self._join_all(None).wait()
        else:
            super().spread(tensor, source)


class VirtualTransport(LocalTransport):
    """One worker's transport, which notes the beginnings and ends of its ops in the worker's ledger."""

    def __init__(self, hub: VirtualHub, rank: int, device: torch.device) -> None:
        super().__init__(hub, rank, device)
        self.control = _VirtualControl(hub, rank, device)
        self.ledger = hub.ledgers[rank]

    @override
    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        self.ledger.assign(buffers, Part.MESSAGES)
        return super().receive(buffers, peer, tag)

    @override
    def computed(self) -> None:
        self.ledger.mark()

    @override
    def stay_near(self) -> None:
        self.ledger.mark()

    @override
    def all_reduce(self, tensor: Tensor, group: Group) -> Transfer[None]:
        if not is_virtual(tensor):
            return super().all_reduce(tensor, group)
        return self.control.join(group, None, lambda _: None)

    @override
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Transfer[None]:
        if not is_virtual(sent):
            return super().all_to_all(received, sent, group)
        return self.control.join(group, None, lambda _: None)

    @override
    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        if is_virtual(tensor):
            self.control.join(group, None, lambda _: None).wait()
        else:
            super().broadcast(tensor, source, group)


def _description(tensor: Tensor) -> Tensor:
    if not is_virtual(tensor):
        with without_modes():  # the sender has no copy
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return shape.requires_grad_(tensor.requires_grad)


def _copy_small(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    with without_modes(), torch.no_grad():  # the worker that copies has neither
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if tensor.shape != buffer.shape:
                raise RuntimeError(
                    f"a message has shape {tuple(tensor.shape)} where {tuple(buffer.shape)} was expected"
                )
            if not (tensor.is_meta or is_virtual(buffer)):
                buffer.copy_(tensor)
