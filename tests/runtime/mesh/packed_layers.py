"""Layers of a user with windows, packed documents, padding and rotary embeddings, and the same in torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import counterflow as cf

D = torch.float64
SEQUENCE, VOCABULARY = 16, 23


class PackedEmbedding(nn.Module):
    """Vectors of tokens, beside the numbers of documents and what is seen: [samples, positions, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8, dtype=D)

    def forward(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, documents, seen = packed.unbind(2)
        return self.tokens(tokens), documents, seen


class WindowedAttention(nn.Module):
    """Attention within a window and a document, with rotary embeddings; ``plain`` by torch alone."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.plain, self.window = plain, 6
        self.projections = nn.Linear(8, 16, dtype=D)
        self.carry = cf.Carry()

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, documents, seen = value
        samples, length, _ = x.shape
        positions = torch.arange(length) if self.plain else self.carry.positions(length)
        queries, keys, values = (
            part.view(samples, length, -1, 4).transpose(1, 2)
            for part in self.projections(x).split((8, 4, 4), 2)
        )
        queries, keys = _rotated(queries, positions), _rotated(keys, positions)
        if self.plain:
            ahead = positions[:, None] - positions
            mask = (ahead >= 0) & (ahead < self.window) & (documents[:, :, None] == documents[:, None])
            # A query without keys gives 0, and plain softmax no number.
            masked = (mask & seen.bool()[:, None])[:, None]
            scores = (queries @ keys.mT / 2).masked_fill(~masked, -1e300)
            mixed = (scores.softmax(-1) * masked) @ values
        else:
            mixed = cf.attend(
                self.carry, queries, keys, values, window=self.window, documents=documents, seen=seen.bool()
            )
        return x + mixed.transpose(1, 2).flatten(2), documents, seen


def _rotated(tensor: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None] / torch.tensor([1.0, 10.0], dtype=D)
    first, second = tensor.chunk(2, -1)
    sine, cosine = angles.sin(), angles.cos()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class PackedHead(nn.Module):
    """Logits of vectors that come with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(8, VOCABULARY, dtype=D)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        output: Tensor = self.output(value[0])
        return output


def layers(*, plain: bool = False) -> list[nn.Module]:
    """Layers that a user writes with ``cf.attend``; ``plain``: the same in torch."""
    torch.manual_seed(4)
    blocks = [WindowedAttention(plain=plain) for _ in range(2)]
    return [PackedEmbedding(), *blocks, PackedHead()]


def inputs_of(tokens: Tensor) -> Tensor:
    """Tokens with the numbers of their documents, and padding before and behind, which is not seen."""
    documents = (torch.arange(SEQUENCE)[None] >= 2 + torch.arange(len(tokens))[:, None]).long()
    documents[:, 13:] += 1
    seen = torch.ones_like(tokens)
    seen[0, :3] = seen[1, 11:] = 0
    return torch.stack([tokens, documents, seen], 2)
