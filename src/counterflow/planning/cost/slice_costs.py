"""What a slice of a micro-batch costs of the whole one, by stage.

A slice takes a fixed share of the whole's seconds however short it is, a share in proportion to its length,
and a share in proportion to its attention: all pairs of its positions with those up to them. Of a split
backward's halves only the one that attends has such a share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.schedule.ir import OpKind
from counterflow.simulation import Piece

from ..inputs.profile import LayerProfile


@dataclass(frozen=True, slots=True)
class SliceCost:
    """Shares of a stage's seconds without the overhead of an op, and bytes, for one micro-batch.

    Attributes:
        fixed: share that each slice takes.
        attention: share of a forward, and of a backward, that is attention to earlier positions.
        of_half: the same of the half of a split backward that attends.
        state_bytes: bytes that slices leave to later ones, as far as they grow with them.
        slice_state_bytes: bytes that each slice leaves however short it is.
    """

    fixed: float = 0.0
    attention: float = 0.0
    of_half: float = 0.0
    state_bytes: float = 0.0
    slice_state_bytes: float = 0.0

    @classmethod
    def of(cls, layers: Sequence[LayerProfile], samples: float) -> SliceCost:
        """The cost of slices of a stage with these layers."""
        seconds = [layer.forward(samples) + layer.backward(samples) for layer in layers]
        halves = [(layer.input_gradient(samples), layer.weight_gradients(samples)) for layer in layers]
        whole = sum(seconds)
        if not whole:
            return cls()
        pairs = [*zip(layers, seconds, strict=True)]
        fixed = sum(layer.fixed_share * took for layer, took in pairs) / whole
        attention = sum(layer.attention_share * took for layer, took in pairs) / whole
        inputs, weights = map(sum, zip(*halves, strict=True))
        of_half = attention * (inputs + weights) / inputs if inputs else 0.0
        state = sum(layer.state_bytes for layer in layers) * samples
        slice_state = sum(layer.slice_state_bytes for layer in layers) * samples
        return cls(fixed, attention, min(of_half, 1.0 - fixed), state, slice_state)

    def share(self, kind: OpKind, work: float, attention: float) -> float:
        """Share of the whole op's seconds that a slice takes.

        Args:
            kind: kind of the op.
            work: the slice's share of the sequence.
            attention: its share of the attention, see ``Piece.attention``.

        >>> from counterflow.schedule.op import F
        >>> half = SliceCost(attention=0.5)
        >>> half.share(F, 0.5, 0.25), half.share(F, 0.5, 0.75)
        (0.375, 0.625)
        """
        grows = 0.0
        if kind.attends:
            grows = self.of_half if kind.half else self.attention
        return self.fixed + (1.0 - self.fixed - grows) * work + grows * attention

    def least(self, kind: OpKind, lengths: tuple[int, ...]) -> float:
        """The least share of any slice of these relative lengths."""
        pieces = [Piece(kind, 0, 0, parts=len(lengths), part=j, lengths=lengths) for j in range(len(lengths))]
        return min(self.share(kind, piece.work, piece.attention) for piece in pieces)
