"""Calls of one worker that other workers answer, over the control plane.

Invariant: all workers take part in each round, in the same order: one asks, and the worker that is asked
answers. ``Rounds.end`` ends the rounds on all of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.mappings import PackedSpec, packed_spec, register_mapping_classes, unpacked_spec
from counterflow.errors import WorkerError

from ..transport.base import Pending, Transport


@dataclass(frozen=True, slots=True)
class Request:
    """A question to one worker.

    Attributes:
        rank: rank of the worker; None: the rounds end.
        content: what is asked.
    """

    rank: int | None
    content: Any


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor on its way to another worker.

    Attributes:
        tensor: its values, without a graph.
        requires_grad: whether it requires a gradient.
    """

    tensor: Tensor
    requires_grad: bool

    def __reduce__(self) -> tuple[Any, ...]:
        # Torch pickles a storage as a file of its own, in ten times the time.
        plain = self.tensor
        if plain.layout is not torch.strided or plain.is_quantized or not plain.numel():
            return Packed, (plain, self.requires_grad)
        flat = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
        contents = flat.view(torch.uint8).numpy().tobytes()
        return _of_bytes, (contents, plain.dtype, tuple(plain.shape), self.requires_grad)


def _of_bytes(contents: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Packed:
    tensor = torch.frombuffer(bytearray(contents), dtype=torch.uint8).view(dtype).reshape(shape)
    return Packed(tensor, requires_grad)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a worker meets while it answers.

    Attributes:
        text: type and message of the error.
    """

    text: str


class Rounds:
    """Rounds of one worker.

    Between processes requests and answers are messages of the control plane; threads gather them.

    Args:
        transport: transport to the other workers.
        rank: rank of the worker that asks.
        tag: tag of the messages.
    """

    def __init__(self, transport: Transport, rank: int, tag: int) -> None:
        self._transport, self.rank, self._tag = transport, rank, tag
        self._sends: list[Pending] = []

    def gather(self, content: object) -> list[Any]:
        """Return the content of every worker by rank; all workers call it."""
        rows = self._transport.gather_objects(packed(content))
        return [unpacked(cast("PackedTree", row), self._transport.device) for row in rows]

    def call(self, rank: int, content: object) -> Any:
        """Return the answer of a worker.

        Raises:
            RemoteError: the worker failed.
        """
        request = Request(rank, packed(content))
        if self._transport.shares_process:
            self._transport.gather_objects(request)
            answer = self._transport.gather_objects(None)[rank]
        else:
            self._send(request, rank)
            answer = self._receive(rank)
        if isinstance(answer, Failure):
            raise RemoteError(answer.text)
        return unpacked(cast("PackedTree", answer), self._transport.device)

    def end(self) -> None:
        """End the rounds on all workers."""
        request = Request(None, None)
        if self._transport.shares_process:
            self._transport.gather_objects(request)
            return
        for rank in range(self._transport.world_size):
            if rank != self.rank:
                self._send(request, rank)
        self._finish_sends()

    def serve(self, answer: Callable[[Any], Any]) -> None:
        """Answer requests until the rounds end."""
        shared = self._transport.shares_process
        while True:
            request = self._transport.gather_objects(None)[self.rank] if shared else self._receive(self.rank)
            rank, content = cast("Request", request).rank, cast("Request", request).content
            if rank is None:
                self._finish_sends()
                return
            reply: object = None
            if rank == self._transport.rank:
                try:
                    reply = packed(answer(unpacked(content, self._transport.device)))
                except Exception as error:  # the worker that asks reports it
                    reply = Failure(f"{type(error).__name__}: {error}")
            if shared:
                self._transport.gather_objects(reply)
            else:
                self._send(reply, self.rank)

    def _send(self, content: object, rank: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        self._sends.append(self._transport.control.send_described([data], rank, self._tag))

    def _receive(self, rank: int) -> Any:
        (data,) = self._transport.control.receive_described(rank, self._tag).wait()
        return pickle.loads(data.cpu().numpy().tobytes())  # noqa: S301 - of a worker of this run

    def _finish_sends(self) -> None:
        for send in self._sends:
            send.wait()
        self._sends.clear()


class RemoteError(WorkerError):
    """An error of a call that another worker runs."""


class PackedTree(NamedTuple):
    """A tree on its way to another worker, which alone makes the objects of users' classes in it.

    Attributes:
        leaves: leaves, of which tensors are packed.
        spec: structure of the tree.
    """

    leaves: list[Any]
    spec: PackedSpec


def packed(tree: Any) -> PackedTree:
    """Return a tree whose tensors can travel between processes."""
    register_mapping_classes(tree)
    leaves, spec = pytree.tree_flatten(tree)
    return PackedTree(
        [_packed(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], packed_spec(spec)
    )


def _packed(tensor: Tensor) -> Packed:
    plain = tensor.detach()
    return Packed(plain.cpu() if plain.device.type != "cpu" else plain.clone(), tensor.requires_grad)


def unpacked(tree: PackedTree, device: torch.device) -> Any:
    """Return a tree with the tensors that were packed, on a device."""

    def unpack(leaf: Packed) -> Tensor:
        tensor = leaf.tensor.to(device)
        # A copy is no leaf: layers may change it in place.
        return tensor.requires_grad_().clone() if leaf.requires_grad else tensor

    leaves = [unpack(leaf) if isinstance(leaf, Packed) else leaf for leaf in tree.leaves]
    return pytree.tree_unflatten(leaves, unpacked_spec(tree.spec))
