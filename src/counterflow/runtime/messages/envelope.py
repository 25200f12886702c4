"""A message as it is known before it travels: its peer, what it is about, and its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.schedule.ir import SkipLink

from .compression import Compression
from .values import Shapes, Structure, TensorSpec, Unit

Place = int | SkipLink
"""What something travels from: a stage whose output the next one takes, or a skip connection."""

Of = tuple[Place, Unit]


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The shapes in which a message comes.

    Attributes:
        known: where they were looked up.
        structures: of the values that travel, by unit.
        specs: of their tensors, by unit.
        flat: of all their tensors.
        message: of the tensors that are sent.
        gradients: of a message of gradients, how many tensors take one.
        missing: the places of those among them that get none.
    """

    known: Shapes
    structures: Sequence[Structure | None]
    specs: Sequence[Sequence[TensorSpec]]
    flat: Sequence[TensorSpec]
    message: Sequence[TensorSpec]
    gradients: int = 0
    missing: frozenset[int] = frozenset()


@dataclass(slots=True)
class Envelope:
    """A message between two stages.

    Attributes:
        number: the same on both sides.
        peer: the other side's rank.
        stage: of the op that makes what travels, for errors.
        of: what it is about, by unit.
        gradient: whether it has the gradient of what went from there, and not that itself.
    """

    number: int
    peer: int
    stage: int
    of: Sequence[Of]
    gradient: bool
    _form: MessageForm | None = None

    def form(self, known: Shapes, compression: Compression | None) -> MessageForm:
        """The shapes in which it comes where those of a mini-batch are ``known``."""
        found = self._form
        if found is None or found.known is not known:
            found = self._form = self._looked_up(known, compression)
        return found

    def _looked_up(self, known: Shapes, compression: Compression | None) -> MessageForm:
        layouts = [known[of] for of in self.of]
        structures, specs = [layout.structure for layout in layouts], [layout.tensors for layout in layouts]
        gradients, missing = 0, frozenset[int]()
        if self.gradient:
            wanted, missing = [spec for spec in specs[0] if spec.requires_grad], layouts[0].missing
            gradients = len(wanted)
            structures = [None]
            specs = [[spec for place, spec in enumerate(wanted) if place not in missing]]
        flat = [spec for unit in specs for spec in unit]
        message = flat if compression is None else compression.message(flat)
        return MessageForm(known, structures, specs, flat, message, gradients, missing)
