"""Envelopes of messages: peer, contents by unit, and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from counterflow.schedule.ir import SkipLink

from .compression import Compression
from .receive_memory import Region
from .values import Shapes, Structure, TensorSpec, Unit

Place = int | SkipLink
"""Source of a value: a stage whose output the next one takes, or a skip connection."""

Of = tuple[Place, Unit]


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Shapes of a message.

    Attributes:
        known: the shapes of a mini-batch that they are derived from.
        structures: structures of the values, by unit.
        specs: specs of their tensors, by unit.
        flat: specs of all their tensors.
        message: specs of the tensors that are sent.
        gradients: for gradients, the number of tensors that require one.
        missing: indices of those among them that have none.
        region: part of the memory of received messages; None: any buffer of the pool.
    """

    known: Shapes
    structures: Sequence[Structure | None]
    specs: Sequence[Sequence[TensorSpec]]
    flat: Sequence[TensorSpec]
    message: Sequence[TensorSpec]
    gradients: int = 0
    missing: frozenset[int] = frozenset()
    region: Region | None = None


class RegionAssigner(Protocol):
    """Regions of a list's messages (``receive_layout.py``)."""

    def assign(self, known: Shapes, compression: Compression | None) -> None:
        """Set the forms of all envelopes of the list."""


@dataclass(slots=True)
class Envelope:
    """A message between two stages.

    Attributes:
        number: number of the message, the same on both sides.
        peer: rank of the other side.
        stage: stage of the op that makes the values, for errors.
        of: source and unit of each value.
        gradient: True for the gradients of these values, False for the values.
        layout: regions of its list; None: it is sent, or received in any buffer of the pool.
        known_form: its form in the last mini-batch.
    """

    number: int
    peer: int
    stage: int
    of: Sequence[Of]
    gradient: bool
    layout: RegionAssigner | None = None
    known_form: MessageForm | None = None

    def form(self, known: Shapes, compression: Compression | None) -> MessageForm:
        """Shapes of the message in a mini-batch of ``known`` shapes."""
        form = self.known_form
        if form is None or form.known is not known:
            if self.layout is None:
                self.known_form = self.look_up(known, compression)
            else:
                self.layout.assign(known, compression)
            form = self.known_form
            assert form is not None
        return form

    def look_up(self, known: Shapes, compression: Compression | None) -> MessageForm:
        """Shapes of the message, without its region."""
        layouts = [known[of] for of in self.of]
        structures, specs = [layout.structure for layout in layouts], [layout.tensors for layout in layouts]
        gradients, missing = 0, frozenset[int]()
        if self.gradient:
            required, missing = [spec for spec in specs[0] if spec.requires_grad], layouts[0].missing
            gradients = len(required)
            structures = [None]
            specs = [[spec for place, spec in enumerate(required) if place not in missing]]
        flat = [spec for unit in specs for spec in unit]
        message = flat if compression is None else compression.message(flat)
        return MessageForm(known, structures, specs, flat, message, gradients, missing)
