"""One worker's messages between stages: what is posted, what has come, what is on its way out.

Invariant: what was received is in a buffer of its own until nothing refers to it. Of what was sent to a
worker no more than the last message is kept: whoever sends the next one waits until that has left, which it
has unless the receiver is ops behind; and what it gave a gradient for has arrived. So a worker holds the same
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

from ..execution.tasks import Task
from ..graphs import pointers
from ..mini_batch.batch import Batch
from ..transport.base import Pending, Transport
from .arrivals import (
    PostedDescribed,
    PostedReceive,
    Restore,
    Taken,
    note_missing,
    of_gradient,
    of_outputs,
)
from .compression import Compression
from .values import (
    NUMBER,
    BufferPool,
    Shapes,
    Structure,
    TensorSpec,
    described,
)

_Sized = tuple[Structure | None, int]
_MISSING = torch.empty(0, dtype=torch.bool)
"""Stands for a gradient that there is not: none has this dtype."""


class MessageQueue:
    """Sends and receives what tasks name.

    Args:
        transport: how messages travel.
        batches: the mini-batches in flight, by slot; the interpreter's own list.
        compression: makes messages smaller; None: they go as they are.
    """

    def __init__(
        self, transport: Transport, batches: Sequence[Batch], compression: Compression | None
    ) -> None:
        self.transport = transport
        self.batches = batches
        self.compression = compression
        self._pool = BufferPool(transport.device)
        self._arrivals: dict[int, PostedReceive | PostedDescribed] = {}
        self._outbox: dict[int, tuple[Sequence[Tensor | None], Sequence[_Sized]]] = {}
        self._waits = transport.device.type == "cpu"
        """Whether the host waits until the message before has left; it is ahead of a device."""
        self._last: dict[int, tuple[int, Pending, Sequence[Tensor]]] = {}
        """By rank the last message to it, with its number."""
        self._others: deque[tuple[Pending, Sequence[Tensor]]] = deque()
        """Those that leave when they are received, or when a device gets to them."""

    def put(self, number: int, tensors: Sequence[Tensor | None], structures: Sequence[_Sized] = ()) -> None:
        """Lay ready what a later task sends; of activations also the structure and size of each unit's."""
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

    def take_gradients(self, number: int, answers: int = -1) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """Wait for the gradients of one unit; None where there is none. And their buffers.

        ``answers`` is the number of the message whose gradients they are, if there was one.
        """
        self.transport.get_ready()
        arrival = self._arrivals.pop(number)
        found, buffers = arrival.take_gradient()
        self._arrived(answers)
        return found, buffers

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

    # -- handlers

    def send(self, task: Task) -> None:
        """Begin to send what lies ready."""
        known = self.batches[task.slot].known
        if known is None:
            laid, structures = self._outbox.pop(task.number)
            tensors = [_MISSING if tensor is None else tensor for tensor in laid]
            if task.activation:
                parts, counts = zip(*structures, strict=True)
                tensors.insert(0, described(parts, counts))
            else:
                missing = frozenset(place for place, tensor in enumerate(laid) if tensor is None)
                note_missing(self.batches[task.slot].learnt, of_gradient(task), missing)
            pending = self.transport.send_described(tensors, task.peer, task.number)
            self._keep_other(pending, tensors)
            return
        message = self._to_send(task, known)
        self._keep(task, self.transport.send(message, task.peer, task.number), message)

    def receive(self, task: Task) -> None:
        """Post a receive."""
        batch = self.batches[task.slot]
        arrival: PostedReceive | PostedDescribed
        if batch.known is None:
            described_ = self.transport.receive_described(task.peer, task.number)
            arrival = PostedDescribed(described_, task, batch.learnt)
        else:
            buffers = self._to_receive(task, batch.known)
            pending = self.transport.receive(buffers, task.peer, task.number)
            arrival = PostedReceive(pending, buffers, task, self._restore(task))
        self._arrivals[task.number] = arrival

    # -- their parts

    def _look_up(self, task: Task, known: Shapes) -> None:
        """Note on a task in what shapes its message comes."""
        if task.activation:
            layouts = [known[of] for of in of_outputs(task)]
            task.structures = [layout.structure for layout in layouts]
            task.specs = [layout.tensors for layout in layouts]
        else:  # the gradient of what the stage below gave
            layout = known[of_gradient(task)]
            task.structures = [None]
            wanted = [spec for spec in layout.tensors if spec.requires_grad]
            task.specs = [[spec for place, spec in enumerate(wanted) if place not in layout.missing]]
            task.missing, task.gradients = layout.missing, len(wanted)
        message = _flat(task.specs)
        task.message = message if self.compression is None else self.compression.message(message)
        task.known = known

    def _to_send(self, task: Task, known: Shapes) -> Sequence[Tensor]:
        """A message whose shapes the receiver knows."""
        laid, structures = self._outbox.pop(task.number)
        tensors: Any = laid
        if task.activation:
            if task.known is not known:
                self._look_up(task, known)
            _check(task, tensors, structures)
        else:
            if task.known is not known:
                self._look_up(task, known)
            _check_missing(task, laid)
            if task.missing:
                tensors = [tensor for tensor in laid if tensor is not None]
        if self.compression is None:
            return tensors  # type: ignore[no-any-return]
        return self.compression.pack([tensor.detach() for tensor in tensors])

    def _keep(self, task: Task, pending: Pending, tensors: Sequence[Tensor]) -> None:
        """Keep what is sent in place of the message before it, which has left by now or is waited for."""
        if not self._waits:
            self._keep_other(pending, tensors)
            return
        if self._others:
            self._let_go()
        before = self._last.get(task.peer)
        self._last[task.peer] = task.number, pending, tensors
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

    def _to_receive(self, task: Task, known: Shapes) -> list[Tensor]:
        """Buffers for a message of known shapes."""
        if task.known is not known:
            self._look_up(task, known)
        return list(map(self._pool.take, task.message))

    def _restore(self, task: Task) -> Restore | None:
        """What makes tensors of a message that is compressed."""
        if self.compression is None:
            return None
        return partial(self.compression.unpack, specs=_flat(task.specs), pool=self._pool)


def _flat(by_unit: Sequence[Sequence[TensorSpec]]) -> list[TensorSpec]:
    return [spec for unit in by_unit for spec in unit]


def _check_missing(task: Task, laid: Sequence[Tensor | None]) -> None:
    """Refuse gradients that are missing where they were not, or are there where they were missing."""
    for place, tensor in enumerate(laid):
        if (tensor is None) != (place in task.missing):
            raise ConfigError(
                f"stage {task.stage} has {'no' if tensor is None else 'a'} gradient for input {place} of "
                f"those that take one, where it had {'one' if tensor is None else 'none'} before; make the "
                "pipeline with dynamic_shapes=True"
            )


def _check(task: Task, tensors: Sequence[Tensor], structures: Sequence[_Sized]) -> None:
    """Refuse outputs of other structures and shapes than those that the receiver knows."""
    for (structure, _), known in zip(structures, task.structures, strict=True):
        if structure is not known and structure != known:
            raise ConfigError(
                f"stage {task.stage} gave {_said(structure)} where it gave {_said(known)} for inputs of the "
                "same shapes before; make the pipeline with dynamic_shapes=True"
            )
    expected = task.specs[0] if len(task.specs) == 1 else [spec for unit in task.specs for spec in unit]
    if len(tensors) == len(expected):
        for tensor, spec in zip(tensors, expected, strict=True):
            if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                break
        else:
            return
    raise ConfigError(
        f"stage {task.stage} gave {_shapes(tensors)} where it gave {_shapes(expected)} for inputs of the "
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
