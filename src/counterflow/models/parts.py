"""Parts of GPT and BERT: weights with the papers' initialisation, attention, feed-forward.

Invariant: a module that owns parameters sets all of them in ``reset_parameters``, and modules are built in
the order of ``modules()``; so a layer made on the meta device, emptied onto a device and reset module by
module is the layer that the same seed builds there directly. Each model decides where to normalise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.api.attention import attend
from counterflow.api.carry import Carry
from counterflow.errors import ConfigError

INITIAL_DEVIATION = 0.02
"""Standard deviation of fresh weights in the papers' models (GPT-2 and BERT)."""


def require_at_least(smallest: int, **numbers: int) -> None:
    """Refuse a number of a model's shape that is too small.

    >>> require_at_least(1, heads=0)
    Traceback (most recent call last):
    counterflow.errors.ConfigError: heads=0: must be 1 or more
    """
    for name, number in numbers.items():
        if number < smallest:
            raise ConfigError(f"{name}={number}: must be {smallest} or more")


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a transformer.

    Attributes:
        layers: transformer blocks; the model's list has two more layers, the embedding and the head.
        hidden: width of a position's vector, a multiple of ``heads``.
        heads: attention heads of a block.
        vocabulary: number of different tokens.
        positions: tokens of the longest sample.
        dropout: share of activations dropped in training, 0 or more and below 1.
        tied: whether the output layer's weight is the token embedding's own parameter.

    Raises:
        ConfigError: a number is below 1, the heads do not divide the hidden size, or the dropout is not from
            0 to 1.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    dropout: float = 0.1
    tied: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, layers=self.layers, hidden=self.hidden, heads=self.heads)
        require_at_least(1, positions=self.positions, vocabulary=self.vocabulary)
        if self.hidden % self.heads:
            raise ConfigError(
                f"hidden={self.hidden} with heads={self.heads}: the heads must divide the hidden size"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}: must be 0 or more and below 1")


class Projection(nn.Linear):
    """A linear map whose weights are initialised as normal with a given deviation, and its bias as 0."""

    def __init__(self, inputs: int, outputs: int, deviation: float = INITIAL_DEVIATION) -> None:
        self.deviation = deviation  # first: nn.Linear's constructor resets
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        """Draw the weights, zero the bias."""
        draw(self.weight, self.deviation)
        nn.init.zeros_(self.bias)


class Lookup(nn.Embedding):
    """A table of vectors that are initialised as normal with a given deviation."""

    weight: nn.Parameter

    def __init__(self, rows: int, hidden: int, deviation: float = INITIAL_DEVIATION) -> None:
        self.deviation = deviation  # first: nn.Embedding's constructor resets
        super().__init__(rows, hidden)

    def reset_parameters(self) -> None:
        """Draw the vectors."""
        draw(self.weight, self.deviation)


class Embedding(nn.Module):
    """Vectors of tokens and of their positions."""

    def __init__(self, config: Transformer, deviation: float = INITIAL_DEVIATION) -> None:
        super().__init__()
        self.tokens = Lookup(config.vocabulary, config.hidden, deviation)
        self.positions = Lookup(config.positions, config.hidden, deviation)
        self.dropout = nn.Dropout(config.dropout)
        self.before = Carry()
        """Tokens of earlier slices."""

    def placed(self, tokens: Tensor) -> Tensor:
        """The sum of the tokens' and the positions' vectors, [samples, positions, hidden].

        Raises:
            ConfigError: samples are longer than the model's table of positions.
        """
        length, most = tokens.shape[1], self.positions.num_embeddings
        context, before = self.before.context, self.before.count_positions(length)
        total = (before + length) * (1 if context is None else context.share.count)
        if total > most:
            raise ConfigError(
                f"samples of {total} tokens for a model of {most} positions: at most {most} are legal"
            )
        place = self.before.positions(length, before, tokens.device)
        embedded: Tensor = self.tokens(tokens) + self.positions(place)
        return embedded


class Output(nn.Module):
    """A linear map to the vocabulary; its weight may be the embedding's own (tied).

    Args:
        hidden: width of an input vector.
        vocabulary: width of an output vector.
        bias: whether one is added.
        weight: the [vocabulary, hidden] parameter to share; None makes one.
        deviation: standard deviation of fresh weights.
    """

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        *,
        bias: bool,
        weight: nn.Parameter | None,
        deviation: float = INITIAL_DEVIATION,
    ) -> None:
        super().__init__()
        self.deviation = deviation
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden)) if weight is None else weight
        self.bias = nn.Parameter(torch.empty(vocabulary)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, a tied one too, and zero the bias."""
        draw(self.weight, self.deviation)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, hidden] to [..., vocabulary]."""
        return functional.linear(hidden, self.weight, self.bias)


class SelfAttention(nn.Module):
    """Multi-head self-attention of a sample's positions. Tensor parallelism divides its heads.

    Rows of ``projection`` are grouped by head, its query, key and value in turn (as in Megatron-LM),
    so a contiguous part of the rows can be whole heads.

    Args:
        hidden: width of a position's vector, a multiple of ``heads``.
        heads: attention heads.
        dropout: share of the attention weights that is dropped in training.
        causal: whether a position sees only itself and those before it.
        deviations: standard deviations of fresh weights, and of those of the output projection.
    """

    tensor_parallel_plan: ClassVar = {"output": "rowwise", "projection": "colwise"}

    def __init__(
        self,
        hidden: int,
        heads: int,
        dropout: float,
        *,
        causal: bool,
        deviations: tuple[float, float] = (INITIAL_DEVIATION, INITIAL_DEVIATION),
    ) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.dropout = dropout
        self.causal = causal
        self.carry = Carry() if causal else None
        self.projection = Projection(hidden, 3 * hidden, deviations[0])
        self.output = Projection(hidden, hidden, deviations[1])

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            hidden: [samples, positions, hidden].
            mask: bool, [samples, positions], True for positions that may be seen; None: all.
        """
        # With tensor parallelism a position has a part of the heads.
        stacked = self.projection(hidden).unflatten(2, (-1, 3, self.head_dim))
        queries, keys, values = stacked.permute(3, 0, 2, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        if self.carry is not None and mask is None:
            mixed = attend(self.carry, queries, keys, values, dropout=dropout)
        else:
            seen = None if mask is None else mask[:, None, None, :]
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, seen, dropout, is_causal=self.causal
            )
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them, at four times the width. Tensor parallelism divides that.

    Args:
        hidden: width of a position's vector.
        tanh: whether the GELU is the approximation by a tanh (GPT-2) or exact (BERT).
        deviations: standard deviations of the fresh weights of the first map, and of the second.
    """

    tensor_parallel_plan: ClassVar = {"expand": "colwise", "contract": "rowwise"}

    def __init__(
        self,
        hidden: int,
        *,
        tanh: bool,
        deviations: tuple[float, float] = (INITIAL_DEVIATION, INITIAL_DEVIATION),
    ) -> None:
        super().__init__()
        self.expand = Projection(hidden, 4 * hidden, deviations[0])
        self.activation = nn.GELU("tanh" if tanh else "none")
        self.contract = Projection(4 * hidden, hidden, deviations[1])

    def forward(self, hidden: Tensor) -> Tensor:
        """[samples, positions, hidden] to the same shape."""
        output: Tensor = self.contract(self.activation(self.expand(hidden)))
        return output


def draw(weight: Tensor, deviation: float) -> None:
    """Draw fresh weights with a standard deviation; nothing on the meta device."""
    if not weight.is_meta:  # torch takes half a millisecond to draw nothing: seconds for a deep model
        nn.init.normal_(weight, std=deviation)
