"""The ways of values and gradients from one stage to another: within a worker, or in a message.

Invariant: an op that takes or gives something does not know which of the two it is. On both, what is given
for a unit is taken once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from counterflow.schedule.ir import SkipLink

from ..messages.arrivals import NONE, Taken
from ..messages.envelope import Of, Place
from ..messages.message_queue import MessageQueue
from ..messages.values import Structure, Unit

Piece = tuple[Structure | None, list[Tensor]]
"""What goes one way for a unit, taken apart."""

Gradients = tuple[list[Tensor | None], Sequence[Tensor]]
"""The gradients of one unit, None where there is none; and the buffers of the pool that they are in."""


class Route(Protocol):
    """A way from one stage to another, for what one op makes."""

    def give(self, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        """Lay ready what was made, by unit."""

    def take(
        self, units: Sequence[Unit], leaf: Callable[[Tensor], Tensor], *, as_leaves: bool
    ) -> list[Taken]:
        """Wait for what was given, by unit, as leaves of a graph.

        Args:
            units: whose.
            leaf: makes a leaf of a tensor that is another stage's too.
            as_leaves: whether gradients are wanted.
        """

    def give_gradients(self, unit: Unit, found: list[Tensor | None]) -> None:
        """Lay ready the gradients of what was taken."""

    def take_gradients(self, unit: Unit) -> Gradients:
        """Wait for the gradients of what was given."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What stages of a worker gave to others of it, and the gradients for it, by where it is from."""

    pieces: dict[Of, Piece] = field(default_factory=dict)
    gradients: dict[Of, list[Tensor | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalRoute(Route):
    """A way between two stages of this worker.

    Attributes:
        place: from where.
        handed: what this worker's stages gave to each other.
    """

    place: Place
    handed: HandedOver

    @override
    def give(self, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        for unit, piece in zip(units, pieces, strict=True):
            self.handed.pieces[self.place, unit] = piece

    @override
    def take(
        self, units: Sequence[Unit], leaf: Callable[[Tensor], Tensor], *, as_leaves: bool
    ) -> list[Taken]:
        del as_leaves  # they are as they were given
        found: list[Taken] = []
        for unit in units:
            structure, tensors = self.handed.pieces.pop((self.place, unit))
            found.append((structure, [leaf(tensor) for tensor in tensors], NONE))
        return found

    @override
    def give_gradients(self, unit: Unit, found: list[Tensor | None]) -> None:
        self.handed.gradients[self.place, unit] = found

    @override
    def take_gradients(self, unit: Unit) -> Gradients:
        return self.handed.gradients.pop((self.place, unit)), NONE


@dataclass(frozen=True, slots=True)
class SliceRoute(Route):
    """The way of a stage's state from the run of one slice to that of the next, and of its gradient back.

    Attributes:
        place: whose state.
        handed: what this worker's stages gave to each other.
        by: how many slices further on it is taken: by an op that leaves it 1, of a backward -1; 0: here.
    """

    place: Place
    handed: HandedOver
    by: int

    def _key(self, unit: Unit) -> Of:
        return self.place, unit._replace(part=unit.part + self.by)

    @override
    def give(self, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        for unit, piece in zip(units, pieces, strict=True):
            self.handed.pieces[self._key(unit)] = piece

    @override
    def take(
        self, units: Sequence[Unit], leaf: Callable[[Tensor], Tensor], *, as_leaves: bool
    ) -> list[Taken]:
        """In the memory in which it was left: it is saved once."""
        del leaf, as_leaves
        found: list[Taken] = []
        for unit in units:
            structure, tensors = self.handed.pieces.pop(self._key(unit))
            found.append((structure, [t.detach().requires_grad_(t.requires_grad) for t in tensors], NONE))
        return found

    @override
    def give_gradients(self, unit: Unit, found: list[Tensor | None]) -> None:
        self.handed.gradients[self._key(unit)] = found

    @override
    def take_gradients(self, unit: Unit) -> Gradients:
        return self.handed.gradients.pop(self._key(unit)), NONE


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
    def give(self, units: Sequence[Unit], pieces: Sequence[Piece]) -> None:
        del units
        flat = pieces[0][1] if len(pieces) == 1 else [t for _, tensors in pieces for t in tensors]
        self.messages.put(self.number, flat, [(structure, len(tensors)) for structure, tensors in pieces])

    @override
    def take(
        self, units: Sequence[Unit], leaf: Callable[[Tensor], Tensor], *, as_leaves: bool
    ) -> list[Taken]:
        del leaf
        return self.messages.take(self.number, len(units), as_leaves=as_leaves)

    @override
    def give_gradients(self, unit: Unit, found: list[Tensor | None]) -> None:
        del unit
        self.messages.put(self.number, found)

    @override
    def take_gradients(self, unit: Unit) -> Gradients:
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
