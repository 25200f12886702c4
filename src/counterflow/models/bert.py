"""BERT: an embedding, blocks that normalise last, and the two heads of its pre-training; a list of layers.

Invariant: layer 0 accepts a tuple of token ids, segment ids and perhaps a mask; with a mask the blocks pass
on ``(hidden, mask)``, without one only the hidden tensor; the last layer returns logits. Masked samples of a
text are made elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError

from .loss import IGNORED, masked_token_loss
from .parts import (
    Embedding,
    FeedForward,
    Lookup,
    Output,
    Projection,
    SelfAttention,
    Transformer,
    require_at_least,
)

Hidden = Tensor | tuple[Tensor, Tensor]
"""Input and output of a block: [samples, positions, hidden], alone or with the mask [samples, positions]."""

_EPSILON = 1e-12
"""BERT's own epsilon, less than LayerNorm's default."""

_MASKED_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class BERTConfig(Transformer):
    """The shape of a BERT.

    Attributes:
        segments: number of different segment ids.
        next_sentence: whether the model has a pooler and a head that predicts if segment 1 follows segment 0.

    Raises:
        ConfigError: the shape cannot be built.

    >>> config = BERTConfig(layers=2, hidden=16, heads=2, vocabulary=32, positions=8)
    >>> [type(layer).__name__ for layer in config.build()]
    ['BERTEmbedding', 'BERTBlock', 'BERTBlock', 'BERTHead']
    """

    vocabulary: int = 30522
    positions: int = 512
    segments: int = 2
    next_sentence: bool = True

    def __post_init__(self) -> None:
        Transformer.__post_init__(self)
        require_at_least(1, segments=self.segments)

    def build(self) -> list[nn.Module]:
        """The layers, on torch's default device and in its default dtype at the time of the call."""
        embedding = BERTEmbedding(self)
        blocks = [BERTBlock(self) for _ in range(self.layers)]
        return [embedding, *blocks, BERTHead(self, embedding.tokens.weight if self.tied else None)]

    def sample(
        self,
        samples: int,
        positions: int | None = None,
        *,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[tuple[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]:
        """Random inputs and targets.

        Args:
            samples: number of samples.
            positions: tokens of a sample; None: the model's maximum.
            device: device of the tensors; on ``meta`` they have only a shape.
            generator: source of randomness; None: torch's own.

        Returns:
            Token ids and segment ids, and the target for :meth:`loss`: about 15 % of the tokens and at least
            one of each sample, with the next-sentence labels if the model has that head.
        """
        length = positions or self.positions
        size = (samples, length)
        tokens = torch.randint(self.vocabulary, size, device=device, generator=generator)
        segments = torch.randint(self.segments, size, device=device, generator=generator)
        masked = torch.rand(size, device=device, generator=generator) < _MASKED_SHARE
        always = torch.randint(length, (samples, 1), device=device, generator=generator)
        masked |= torch.arange(length, device=device) == always
        target = torch.where(masked, tokens, IGNORED)
        follows = torch.randint(2, (samples,), device=device, generator=generator)
        return (tokens, segments), (target, follows) if self.next_sentence else target

    def loss(self, output: Hidden, target: Hidden) -> Tensor:
        """The model's loss, :func:`~counterflow.models.loss.masked_token_loss`."""
        return masked_token_loss(output, target)


class BERTEmbedding(Embedding):
    """``(token ids, segment ids)`` or ``(token ids, segment ids, mask)`` to the input of the blocks.

    Ids are int64, the mask bool and True for tokens; each is [samples, positions].
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__(config)
        self.segments = Lookup(config.segments, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=_EPSILON)

    def forward(self, inputs: tuple[Tensor, ...]) -> Hidden:
        """Add the vectors of tokens, positions and segments and normalise."""
        if not isinstance(inputs, tuple) or len(inputs) not in (2, 3):
            received = f"a tuple of {len(inputs)}" if isinstance(inputs, tuple) else type(inputs).__name__
            raise ConfigError(
                f"BERT's input is {received}: give (token ids, segment ids) or (token ids, segment ids, mask)"
            )
        tokens, segments = inputs[:2]
        hidden = self.dropout(self.norm(self.placed(tokens) + self.segments(segments)))
        return hidden if len(inputs) == 2 else (hidden, inputs[2].bool())


class BERTBlock(nn.Module):
    """Attention, then feed-forward, each added to its input and then normalised."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config.hidden, config.heads, config.dropout, causal=False)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=_EPSILON)
        self.feed_forward = FeedForward(config.hidden, tanh=False)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=_EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, inputs: Hidden) -> Hidden:
        """The output in the form of the input; the mask is passed through."""
        hidden, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, mask)))
        hidden = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return hidden if mask is None else (hidden, mask)


class BERTHead(nn.Module):
    """The masked-token head with its own decoder and bias, and the pooler with the next-sentence head.

    It returns logits [samples, positions, vocabulary]; with the next-sentence head a tuple of these and of
    logits [samples, 2].
    """

    def __init__(self, config: BERTConfig, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.transform = Projection(config.hidden, config.hidden)
        self.activation = nn.GELU()
        self.norm = nn.LayerNorm(config.hidden, eps=_EPSILON)
        self.decoder = Output(config.hidden, config.vocabulary, bias=True, weight=weight)
        self.pooler = Projection(config.hidden, config.hidden) if config.next_sentence else None
        self.next_sentence = Projection(config.hidden, 2) if config.next_sentence else None

    def forward(self, inputs: Hidden) -> Hidden:
        """Logits of every position's token, and of the sample's first position for the next sentence."""
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        tokens: Tensor = self.decoder(self.norm(self.activation(self.transform(hidden))))
        if self.pooler is None or self.next_sentence is None:
            return tokens
        follows: Tensor = self.next_sentence(torch.tanh(self.pooler(hidden[:, 0])))
        return tokens, follows
