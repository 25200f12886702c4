"""The named language models as numbers, which a config reads without importing torch.

``presets.py`` makes models of them, and states what a paper leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """The training objective of a language model."""

    GPT = "gpt"  # the next token
    BERT = "bert"  # masked tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a language model.

    Attributes:
        family: training objective.
        layers: transformer blocks.
        hidden: width of the hidden states.
        heads: attention heads.
        positions: tokens of the longest sample.
        vocabulary: number of different tokens.
        source: paper of the model.
        sequence: tokens of a sample in that paper's runs; None: the model's positions.
        dropout: share of activations dropped in training.
        deviation: standard deviation of fresh weights; None: the family's own.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    positions: int
    vocabulary: int
    source: str
    sequence: int | None = None
    dropout: float = 0.1
    deviation: float | None = None


_WPIPE = "WPipe, appendix A.2"

SHAPES = {
    "example": Shape(
        *(Family.GPT, 8, 64, 4, 64, 256),
        source="Counterflow's example: bytes of text, on a processor of two cores",
        dropout=0.0,
        deviation=0.1,
    ),
    "bert-48": Shape(Family.BERT, 48, 1024, 16, 512, 30522, "Chimera, Table 4", sequence=128),
    "bert-48-mixpipe": Shape(
        *(Family.BERT, 48, 1024, 16, 512, 30592),
        source="MixPipe, Table II; the vocabulary padded to a multiple of 128",
    ),
    "bert-64": Shape(Family.BERT, 64, 2560, 64, 512, 30522, "Hanayo, §5"),
    "bert-96": Shape(Family.BERT, 96, 768, 12, 512, 30522, _WPIPE, sequence=128),
    "bert-192": Shape(Family.BERT, 192, 768, 12, 512, 30522, _WPIPE, sequence=128),
    "bert-384": Shape(Family.BERT, 384, 768, 12, 512, 30522, _WPIPE, sequence=128),
    "bert-768": Shape(Family.BERT, 768, 768, 12, 512, 30522, _WPIPE, sequence=128),
    "gpt-2": Shape(Family.GPT, 64, 1280, 20, 1024, 50257, "Chimera, Table 4", sequence=632),
    "gpt-72": Shape(Family.GPT, 72, 1024, 16, 512, 50304, "MixPipe, Table II"),
    "gpt-128": Shape(Family.GPT, 128, 1024, 16, 1024, 50257, "Hanayo, §5"),
}
"""The language models by name."""

EXAMPLE = SHAPES["example"]
"""The default shape of a model."""
