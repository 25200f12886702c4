"""One worker's messages between stages: what is posted, what was received, what is being sent.

Invariant: what was received is in a buffer of its own until nothing refers to it. Of the messages
to a worker only the last one is held: the next send waits until it has left, which it has unless the receiver
is ops behind; a message whose gradient was received has also left. So a worker holds the same
bytes in each step, however the workers take turns. On a GPU the host is ahead of what leaves, and does not
wait.

A value that the next stage did not use has no gradient, and what was computed for it alone gets none either,
as in one process. Which gradients exist is learnt with the shapes, in the first mini-batch of a kind. From
then on a message has those alone, and where others are missing an error says so: no message is looked into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from ..graphs import pointers
from ..transport.base import Pending, Transport
from .arrivals import PostedDescribed, PostedReceive, Taken, note_missing
from .compression import Compression
from .envelope import Envelope, MessageForm
from .values import NUMBER, BufferPool, Shapes, Structure, TensorSpec, described

_Sized = tuple[Structure | None, int]
_MISSING = torch.empty(0, dtype=torch.bool)
"""Stands for a gradient that there is not: none has this dtype."""


class MessageQueue:
    """Sends and receives messages.

    Args:
        transport: how messages travel.
        compression: makes messages smaller; None: they go as they are.
    """

    def __init__(self, transport: Transport, compression: Compression | None) -> None:
        self.transport = transport
        self.compression = compression
        self._pool = BufferPool(transport.device)
        self._arrivals: dict[int, PostedReceive | PostedDescribed] = {}
        self._outbox: dict[int, tuple[Sequence[Tensor | None], Sequence[_Sized]]] = {}
        self._waits = transport.device.type == "cpu"
        """Whether the host waits until the message before has left; it is ahead of a device."""
        self._last: dict[int, tuple[int, Pending, Sequence[Tensor]]] = {}
        """Last message to each rank, with its number."""
        self._others: deque[tuple[Pending, Sequence[Tensor]]] = deque()
        """Messages that leave when they are received, or when a device reaches them."""

    def put(self, number: int, tensors: Sequence[Tensor | None], structures: Sequence[_Sized] = ()) -> None:
        """Lay ready what is sent later; of activations also the structure and size of each unit's."""
        self._outbox[number] = tensors, structures

    def take(self, number: int, count: int, *, as_leaves: bool = False) -> list[Taken]:
        """Wait for a message.

        Args:
            number: of the message.
            count: units it is about.
            as_leaves: whether gradients are made for those tensors that required them on the sender.

        Returns:
            By unit its structure (of activations), its tensors, and the buffers to be given back when they
            are needed no more.
        """
        self.transport.get_ready()
        return self._arrivals.pop(number).take(count, as_leaves=as_leaves)

    def take_gradients(
        self, number: int, answers: int | None
    ) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """Wait for the gradients of one unit; None where there is none. And their buffers.

        ``answers`` is the number of the message whose gradients they are, if that may be let go of now.
        """
        self.transport.get_ready()
        found = self._arrivals.pop(number).take_gradient()
        if answers is not None:
            self._arrived(answers)
        return found

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """The engine needs what came in these buffers no more."""
        if buffers:
            self._pool.give(buffers)

    def release(self, memory: AbstractSet[int]) -> None:
        """Wait until what is sent from some memory (``pointers``) is sent: its owner may change it then."""
        for pending, tensors in self._in_flight():
            if not memory.isdisjoint(pointers(tensors)):
                pending.wait()

    def drain(self) -> None:
        """Wait until all is sent."""
        for pending, _ in self._in_flight():
            pending.wait()
        self._last.clear()
        self._others.clear()

    def _in_flight(self) -> Iterator[tuple[Pending, Sequence[Tensor]]]:
        yield from ((pending, tensors) for _, pending, tensors in self._last.values())
        yield from self._others

    def send(self, envelope: Envelope, known: Shapes | None, learnt: Shapes) -> None:
        """Begin to send what lies ready.

        Args:
            envelope: the message's.
            known: the shapes in which it goes; None: nobody knows them yet, and it describes itself.
            learnt: where it is noted then which gradients are missing.
        """
        laid, structures = self._outbox.pop(envelope.number)
        if known is not None:
            message = self._to_send(envelope, envelope.form(known, self.compression), laid, structures)
            self._keep(envelope, self.transport.send(message, envelope.peer, envelope.number), message)
            return
        tensors = [_MISSING if tensor is None else tensor for tensor in laid]
        if envelope.gradient:
            missing = frozenset(place for place, tensor in enumerate(laid) if tensor is None)
            note_missing(learnt, envelope.of[0], missing)
        else:
            parts, counts = zip(*structures, strict=True)
            tensors.insert(0, described(parts, counts))
        pending = self.transport.send_described(tensors, envelope.peer, envelope.number)
        self._keep_other(pending, tensors)

    def receive(self, envelope: Envelope, known: Shapes | None, learnt: Shapes) -> None:
        """Post a receive; arguments as of ``send``."""
        arrival: PostedReceive | PostedDescribed
        if known is None:
            described_ = self.transport.receive_described(envelope.peer, envelope.number)
            arrival = PostedDescribed(described_, envelope, learnt)
        else:
            compression, form = self.compression, envelope.form(known, self.compression)
            buffers = list(map(self._pool.take, form.message))
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
        laid: Sequence[Tensor | None],
        structures: Sequence[_Sized],
    ) -> Sequence[Tensor]:
        """A message whose shapes the receiver knows."""
        tensors: Any = laid
        if envelope.gradient:
            _check_missing(envelope, form, laid)
            if form.missing:
                tensors = [tensor for tensor in laid if tensor is not None]
        else:
            _check(envelope, form, tensors, structures)
        if self.compression is None:
            return tensors  # type: ignore[no-any-return]
        return self.compression.pack([tensor.detach() for tensor in tensors])

    def _keep(self, envelope: Envelope, pending: Pending, tensors: Sequence[Tensor]) -> None:
        """Keep what is sent in place of the message before it, which has left by now or is waited for."""
        if not self._waits:
            self._keep_other(pending, tensors)
            return
        if self._others:
            self._let_go()
        before = self._last.get(envelope.peer)
        self._last[envelope.peer] = envelope.number, pending, tensors
        if before is not None:
            before[1].wait()

    def _arrived(self, number: int) -> None:
        """Let go of the message of that number, if it is kept: an answer came to it."""
        for peer, (last, pending, _) in self._last.items():
            if last == number:
                pending.wait()
                del self._last[peer]
                return

    def _keep_other(self, pending: Pending, tensors: Sequence[Tensor]) -> None:
        """Keep what is sent until it is, as far as that is known without waiting."""
        self._let_go()
        self._others.append((pending, tensors))

    def _let_go(self) -> None:
        others = self._others
        while others and others[0][0].done():
            others.popleft()


def _check_missing(envelope: Envelope, form: MessageForm, laid: Sequence[Tensor | None]) -> None:
    """Refuse gradients that are missing where they were not, or are there where they were missing."""
    for place, tensor in enumerate(laid):
        if (tensor is None) != (place in form.missing):
            raise ConfigError(
                f"stage {envelope.stage} has {'no' if tensor is None else 'a'} gradient for input {place} of "
                f"those that take one, where it had {'one' if tensor is None else 'none'} before; make the "
                "pipeline with dynamic_shapes=True"
            )


def _check(
    envelope: Envelope, form: MessageForm, tensors: Sequence[Tensor], structures: Sequence[_Sized]
) -> None:
    """Refuse outputs of other structures and shapes than those that the receiver knows."""
    for (structure, _), known in zip(structures, form.structures, strict=True):
        if structure is not known and structure != known:
            raise ConfigError(
                f"stage {envelope.stage} gave {_said(structure)} where it gave {_said(known)} for inputs of "
                "the same shapes before; make the pipeline with dynamic_shapes=True"
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


def _said(structure: Structure | None) -> str:
    """A structure for a message, with the numbers of its tensors."""
    if structure is None:
        return "a tensor"
    constants = iter(structure.constants)
    leaves = [
        f"tensor {at}" if at >= 0 else "a number" if at == NUMBER else repr(next(constants)[1])
        for at in structure.at
    ]
    return str(pytree.tree_unflatten(leaves, structure.spec))


def _shapes(found: Sequence[Tensor | TensorSpec]) -> str:
    return ", ".join(f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in found)
