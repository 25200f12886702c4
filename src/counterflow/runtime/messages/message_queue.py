"""One worker's messages between stages: posted, received and being sent.

Invariant: a received value has its buffer to itself until nothing refers to it. At most one send per peer is
outstanding: the next send waits for it, which takes no time unless the receiver is ops behind; a message
whose gradient was received is sent too. So a worker holds the same bytes in each step, in whatever order the
workers proceed. On a GPU the host runs ahead of the sends, and does not wait.

A value that the next stage did not use has no gradient, nor do the tensors that were computed for it alone,
as in one process. The missing gradients are learnt with the shapes, in the first mini-batch of a kind. From
then on a message omits them, and any other missing gradient is an error: no message needs a description.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.tensors.graphs import pointers
from counterflow.errors import ConfigError

from ..transport.base import Pending, Transport
from .arrivals import PostedDescribed, PostedReceive, Received, note_missing
from .compression import Compression
from .envelope import Envelope, MessageForm
from .receive_memory import ReceiveMemory
from .values import NUMBER, BufferPool, Shapes, Structure, TensorSpec, described

_Sized = tuple[Structure | None, int]
_MISSING = torch.empty(0, dtype=torch.bool)
"""Placeholder of a missing gradient: no gradient has this dtype."""


class MessageQueue:
    """Sends and receives messages.

    Args:
        transport: sends and receives the messages.
        compression: compresses messages; None: they are sent uncompressed.
        end_ops: drops what the last op needed and no later one does, receive buffers among it.
    """

    def __init__(
        self,
        transport: Transport,
        compression: Compression | None,
        end_ops: Callable[[], None] = lambda: None,
    ) -> None:
        self.transport = transport
        self.compression = compression
        self._end_ops = end_ops
        self._pool = BufferPool(transport.device)
        self._memory = ReceiveMemory(transport.device)
        self._arrivals: dict[int, PostedReceive | PostedDescribed] = {}
        self._outbox: dict[int, tuple[Sequence[Tensor | None], Sequence[_Sized]]] = {}
        self._waits = transport.device.type == "cpu"
        """True if the host waits until the previous message to a rank is sent; it runs ahead of a device."""
        self._last: dict[int, tuple[int, Pending, Sequence[Tensor]]] = {}
        """Last message to each rank, with its number."""
        self._untracked: deque[tuple[Pending, Sequence[Tensor]]] = deque()
        """Messages that are sent when they are received, or when a device reaches them."""

    def put(self, number: int, tensors: Sequence[Tensor | None], structures: Sequence[_Sized] = ()) -> None:
        """Enqueue tensors for a later ``send``; of activations also each unit's structure and number of
        tensors.
        """
        self._outbox[number] = tensors, structures

    def take(self, number: int, count: int, *, as_leaves: bool = False) -> list[Received]:
        """Wait for a message.

        Args:
            number: number of the message.
            count: number of its units.
            as_leaves: True to require gradients of those tensors that required them on the sender.

        Returns:
            By unit its structure (of activations), its tensors, and the buffers to return when they are no
            longer needed.
        """
        return self._arrivals.pop(number).take(count, as_leaves=as_leaves)

    def take_gradients(
        self, number: int, answers: int | None
    ) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """Wait for the gradients of one unit (None for those that are missing), and return their buffers too.

        ``answers`` is the number of the message whose gradients they are, if it can be released now.
        """
        gradients = self._arrivals.pop(number).take_gradient()
        if answers is not None:
            self._release_answered(answers)
        return gradients

    def return_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Return receive buffers to the pool."""
        if buffers:
            self._pool.put(buffers)

    def release(self, memory: AbstractSet[int]) -> None:
        """Wait for all sends from some memory (``pointers``), after which its owner may change it."""
        for pending, tensors in self._in_flight():
            if not memory.isdisjoint(pointers(tensors)):
                pending.wait()

    def drain(self) -> None:
        """Wait for all sends."""
        for pending, _ in self._in_flight():
            pending.wait()
        self._last.clear()
        self._untracked.clear()

    def _in_flight(self) -> Iterator[tuple[Pending, Sequence[Tensor]]]:
        yield from ((pending, tensors) for _, pending, tensors in self._last.values())
        yield from self._untracked

    def send(self, envelope: Envelope, known: Shapes | None, learnt: Shapes) -> None:
        """Begin to send the enqueued tensors of a message.

        Args:
            envelope: envelope of the message.
            known: the shapes of its values; None: the receiver does not know them, so the message has them.
            learnt: shapes in which missing gradients are noted in that case.
        """
        enqueued, structures = self._outbox.pop(envelope.number)
        if known is not None:
            message = self._to_send(envelope, envelope.form(known, self.compression), enqueued, structures)
            self._track(envelope, self.transport.send(message, envelope.peer, envelope.number), message)
            return
        tensors = [_MISSING if tensor is None else tensor for tensor in enqueued]
        if self.compression is not None:  # which values arrive depends on no step
            tensors = list(map(self.compression.round, tensors))
        if envelope.gradient:
            missing = frozenset(place for place, tensor in enumerate(enqueued) if tensor is None)
            note_missing(learnt, envelope.of[0], missing)
        else:
            parts, counts = zip(*structures, strict=True)
            tensors.insert(0, described(parts, counts))
        pending = self.transport.send_described(tensors, envelope.peer, envelope.number)
        self._append_untracked(pending, tensors)

    def receive(self, envelope: Envelope, known: Shapes | None, learnt: Shapes) -> None:
        """Post a receive; arguments as of ``send``."""
        arrival: PostedReceive | PostedDescribed
        if known is None:
            described_ = self.transport.receive_described(envelope.peer, envelope.number)
            arrival = PostedDescribed(described_, envelope, learnt)
        else:
            compression, form = self.compression, envelope.form(known, self.compression)
            if form.region is None:
                buffers = list(map(self._pool.take, form.message))
            else:
                buffers = self._memory.take(form.region, form.message, self._end_ops)
            pending = self.transport.receive(buffers, envelope.peer, envelope.number)
            restore = None
            if compression is not None:
                restore = partial(compression.unpack, specs=form.flat, pool=self._pool)
            arrival = PostedReceive(pending, buffers, form, restore)
        self._arrivals[envelope.number] = arrival

    def _to_send(
        self,
        envelope: Envelope,
        form: MessageForm,
        enqueued: Sequence[Tensor | None],
        structures: Sequence[_Sized],
    ) -> Sequence[Tensor]:
        tensors: Any = enqueued
        if envelope.gradient:
            _check_missing(envelope, form, enqueued)
            if form.missing:
                tensors = [tensor for tensor in enqueued if tensor is not None]
        else:
            _check(envelope, form, tensors, structures)
        if self.compression is None:
            return tensors  # type: ignore[no-any-return]
        return self.compression.pack([tensor.detach() for tensor in tensors])

    def _track(self, envelope: Envelope, pending: Pending, tensors: Sequence[Tensor]) -> None:
        if not self._waits:
            self._append_untracked(pending, tensors)
            return
        if self._untracked:
            self._release_sent()
        before = self._last.get(envelope.peer)
        self._last[envelope.peer] = envelope.number, pending, tensors
        if before is not None:
            before[1].wait()

    def _release_answered(self, number: int) -> None:
        for peer, (last, pending, _) in self._last.items():
            if last == number:
                pending.wait()
                del self._last[peer]
                return

    def _append_untracked(self, pending: Pending, tensors: Sequence[Tensor]) -> None:
        self._release_sent()
        self._untracked.append((pending, tensors))

    def _release_sent(self) -> None:
        untracked = self._untracked
        while untracked and untracked[0][0].done():
            untracked.popleft()


def _check_missing(envelope: Envelope, form: MessageForm, enqueued: Sequence[Tensor | None]) -> None:
    for place, tensor in enumerate(enqueued):
        if (tensor is None) != (place in form.missing):
            raise ConfigError(
                f"stage {envelope.stage} has {'no' if tensor is None else 'a'} gradient for input {place} of "
                f"those that take one, where it had {'one' if tensor is None else 'none'} before; make the "
                "pipeline with dynamic_shapes=True"
            )


def _check(
    envelope: Envelope, form: MessageForm, tensors: Sequence[Tensor], structures: Sequence[_Sized]
) -> None:
    for (structure, _), known in zip(structures, form.structures, strict=True):
        if structure is not known and structure != known:
            raise ConfigError(
                f"stage {envelope.stage} gave {_described(structure)} where it gave {_described(known)} for "
                "inputs of the same shapes before; make the pipeline with dynamic_shapes=True"
            )
    expected = form.flat
    if len(tensors) == len(expected):
        for tensor, spec in zip(tensors, expected, strict=True):
            if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                break
        else:
            return
    raise ConfigError(
        f"stage {envelope.stage} gave {_shapes(tensors)} where it gave {_shapes(expected)} for inputs of the "
        "same shapes before; make the pipeline with dynamic_shapes=True"
    )


def _described(structure: Structure | None) -> str:
    if structure is None:
        return "a tensor"
    constants = iter(structure.constants)
    leaves = [
        f"tensor {at}" if at >= 0 else "a number" if at == NUMBER else repr(next(constants)[1])
        for at in structure.at
    ]
    return str(pytree.tree_unflatten(leaves, structure.spec))


def _shapes(tensors: Sequence[Tensor | TensorSpec]) -> str:
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
