"""GPT: an embedding, blocks that normalise first, and an output layer; a list of layers.

Invariant: layer 0 accepts token ids, every further one the previous one's tensor, and the last returns
logits. Text is not sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError

from .loss import next_token_loss
from .parts import (
    INITIAL_DEVIATION,
    Embedding,
    FeedForward,
    Output,
    SelfAttention,
    Transformer,
    require_at_least,
)
from .routed import RoutedFeedForward


@dataclass(frozen=True, slots=True)
class GPTConfig(Transformer):
    """The shape of a GPT.

    Attributes:
        output_bias: whether the output layer has a bias.
        deviation: standard deviation of fresh weights, above 0; GPT-2's 0.02 is low for a narrow model.
        experts: feed-forward networks of each block, of which each token passes some; 0: one for all tokens.
        experts_per_token: those that a token passes.

    Raises:
        ConfigError: the shape cannot be built.

    >>> config = GPTConfig(layers=2, hidden=16, heads=2, vocabulary=32, positions=8)
    >>> [type(layer).__name__ for layer in config.build()]
    ['GPTEmbedding', 'GPTBlock', 'GPTBlock', 'GPTHead']
    """

    output_bias: bool = False
    deviation: float = INITIAL_DEVIATION
    experts: int = 0
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        Transformer.__post_init__(self)
        if not self.deviation > 0:
            raise ConfigError(f"deviation={self.deviation}: must be above 0")
        require_at_least(0, experts=self.experts)
        require_at_least(1, experts_per_token=self.experts_per_token)
        if self.experts and self.experts_per_token > self.experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token}: must be experts={self.experts} or less"
            )

    def build(self) -> list[nn.Module]:
        """The layers, on torch's default device and in its default dtype at the time of the call."""
        embedding = GPTEmbedding(self, self.deviation)
        blocks = [GPTBlock(self) for _ in range(self.layers)]
        return [embedding, *blocks, GPTHead(self, embedding.tokens.weight if self.tied else None)]

    def sample(
        self,
        samples: int,
        positions: int | None = None,
        *,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Random token ids and the tokens that follow them, each [samples, positions], int64.

        Args:
            samples: number of samples.
            positions: tokens of a sample; None: the model's maximum.
            device: device of the tensors; on ``meta`` they have only a shape.
            generator: source of randomness; None: torch's own.
        """
        size = (samples, (positions or self.positions) + 1)
        tokens = torch.randint(self.vocabulary, size, device=device, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The model's loss, :func:`~counterflow.models.loss.next_token_loss`."""
        return next_token_loss(output, target)


class GPTEmbedding(Embedding):
    """Token ids [samples, positions], int64, to vectors [samples, positions, hidden]."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Add the vectors of tokens and positions."""
        output: Tensor = self.dropout(self.placed(tokens))
        return output


class GPTBlock(nn.Module):
    """Attention, then feed-forward, each after a normalisation and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # GPT-2: contributions to the residual stream start smaller the more blocks add to it.
        fresh = config.deviation, config.deviation / math.sqrt(2 * config.layers)
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = SelfAttention(
            config.hidden, config.heads, config.dropout, causal=True, deviations=fresh
        )
        self.feed_forward_norm = nn.LayerNorm(config.hidden)
        self.feed_forward = (
            RoutedFeedForward(config.hidden, config.experts, config.experts_per_token, deviations=fresh)
            if config.experts
            else FeedForward(config.hidden, tanh=True, deviations=fresh)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[samples, positions, hidden] to the same shape."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        output: Tensor = hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return output


class GPTHead(nn.Module):
    """The last normalisation and the output layer: [samples, positions, hidden] to logits."""

    def __init__(self, config: GPTConfig, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.output = Output(
            config.hidden,
            config.vocabulary,
            bias=config.output_bias,
            weight=weight,
            deviation=config.deviation,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [samples, positions, vocabulary]."""
        output: Tensor = self.output(self.norm(hidden))
        return output
