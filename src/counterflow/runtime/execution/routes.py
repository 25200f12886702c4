"""Routes of values and gradients from one stage to another: within a worker, or in a message.

Invariant: an op does not know which of the two a route is. On both, a value of a unit is received once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from counterflow.schedule.ir import SkipLink

from ..messages.arrivals import NONE, Received
from ..messages.envelope import Of, Place
from ..messages.message_queue import MessageQueue
from ..messages.values import Structure, Unit

Piece = tuple[Structure | None, list[Tensor]]
"""Structure and tensors of a value on a route."""

Gradients = tuple[list[Tensor | None], Sequence[Tensor]]
"""The gradients of one unit, None where there is none; and the buffers of the pool that they are in."""


class Route(Protocol):
    """A way from one stage to another, for what one op makes."""

    def send(self, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        """Send values, by unit."""

    def receive(
        self, units: Sequence[Unit], leaf: Callable[[Tensor], Tensor], *, as_leaves: bool
    ) -> list[Received]:
        """Wait for the values of units, and return them as leaves of a graph.

        Args:
            units: whose.
            leaf: makes a leaf of a tensor that is another stage's too.
            as_leaves: whether gradients are wanted.
        """

    def send_gradients(self, unit: Unit, gradients: list[Tensor | None]) -> None:
        """Send the gradients of a received value."""

    def receive_gradients(self, unit: Unit) -> Gradients:
        """Wait for the gradients of a sent value."""


@dataclass(frozen=True, slots=True)
class LocalMailbox:
    """Mailbox of values and gradients between stages of one worker, by their source."""

    pieces: dict[Of, Piece] = field(default_factory=dict)
    gradients: dict[Of, list[Tensor | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalRoute(Route):
    """A way between two stages of this worker.

    Attributes:
        place: from where.
        mailbox: values between this worker's stages.
    """

    place: Place
    mailbox: LocalMailbox

    @override
    def send(self, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        for unit, piece in zip(units, pieces, strict=True):
            self.mailbox.pieces[self.place, unit] = piece

    @override
    def receive(
        self, units: Sequence[Unit], leaf: Callable[[Tensor], Tensor], *, as_leaves: bool
    ) -> list[Received]:
        del as_leaves  # they are as they were given
        received: list[Received] = []
        for unit in units:
            structure, tensors = self.mailbox.pieces.pop((self.place, unit))
            received.append((structure, [leaf(tensor) for tensor in tensors], NONE))
        return received

    @override
    def send_gradients(self, unit: Unit, gradients: list[Tensor | None]) -> None:
        self.mailbox.gradients[self.place, unit] = gradients

    @override
    def receive_gradients(self, unit: Unit) -> Gradients:
        return self.mailbox.gradients.pop((self.place, unit)), NONE


@dataclass(frozen=True, slots=True)
class SliceRoute(Route):
    """The way of a stage's state from the run of one slice to that of the next, and of its gradient back.

    Attributes:
        place: whose state.
        mailbox: values between this worker's stages.
        by: how many slices further on it is taken: by an op that leaves it 1, of a backward -1; 0: here.
    """

    place: Place
    mailbox: LocalMailbox
    by: int

    def _key(self, unit: Unit) -> Of:
        return self.place, unit._replace(part=unit.part + self.by)

    @override
    def send(self, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        for unit, piece in zip(units, pieces, strict=True):
            self.mailbox.pieces[self._key(unit)] = piece

    @override
    def receive(
        self, units: Sequence[Unit], leaf: Callable[[Tensor], Tensor], *, as_leaves: bool
    ) -> list[Received]:
        """In the memory in which it was left: it is saved once."""
        del leaf, as_leaves
        received: list[Received] = []
        for unit in units:
            structure, tensors = self.mailbox.pieces.pop(self._key(unit))
            received.append((structure, [t.detach().requires_grad_(t.requires_grad) for t in tensors], NONE))
        return received

    @override
    def send_gradients(self, unit: Unit, gradients: list[Tensor | None]) -> None:
        self.mailbox.gradients[self._key(unit)] = gradients

    @override
    def receive_gradients(self, unit: Unit) -> Gradients:
        return self.mailbox.gradients.pop(self._key(unit)), NONE


@dataclass(frozen=True, slots=True)
class MessageRoute(Route):
    """A way to or from another worker.

    Attributes:
        number: of the message.
        messages: the worker's.
        answers: the number of the message whose gradients come this way, if that is let go of then.
    """

    number: int
    messages: MessageQueue
    answers: int | None = None

    @override
    def send(self, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        del units
        if len(pieces) == 1:
            ((structure, flat),) = pieces
            self.messages.put(self.number, flat, ((structure, len(flat)),))
            return
        flat = [tensor for _, tensors in pieces for tensor in tensors]
        self.messages.put(self.number, flat, [(structure, len(tensors)) for structure, tensors in pieces])

    @override
    def receive(
        self, units: Sequence[Unit], leaf: Callable[[Tensor], Tensor], *, as_leaves: bool
    ) -> list[Received]:
        del leaf
        return self.messages.take(self.number, len(units), as_leaves=as_leaves)

    @override
    def send_gradients(self, unit: Unit, gradients: list[Tensor | None]) -> None:
        del unit
        self.messages.put(self.number, gradients)

    @override
    def receive_gradients(self, unit: Unit) -> Gradients:
        del unit
        return self.messages.take_gradients(self.number, self.answers)


@dataclass(frozen=True, slots=True)
class SkipRoute:
    """A skip connection's way for what one op makes or takes.

    Attributes:
        link: the skip connection.
        route: the way; None: what is made once in a mini-batch is on this worker, or does not go again.
        first: of what is made once, whether this op is the first that makes or takes it.
    """

    link: SkipLink
    route: Route | None
    first: bool = True
