"""The models that the cases are made of, after what other systems' tests and examples train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(functional.gelu(self.up(x)))
        return found


class WithKwargs(Mlp):
    """A first layer with keyword arguments."""

    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        y = super().forward(x) * scale
        return y if shift is None else y + shift


class Alias(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x).tanh())
        return found


class Twice(nn.Module):
    """A norm that is used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x + self.fc(self.norm(x)))
        return found


class ToDict(Mlp):
    """Hands on a dict: with an index, a flag, None and a number."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "more": [x.argmax(1), x[:, :1] > 0, None], "scale": 0.5}


class ThroughDict(nn.Linear):
    """Takes such a dict and hands one on."""

    def forward(self, given: Any) -> Any:
        y = super().forward(given["y"]) * given["scale"] + given["more"][0][:, None]
        return {**given, "y": torch.where(given["more"][1], y, y.tanh())}


class FromDict(nn.Linear):
    """Ends with its main value."""

    def forward(self, given: Any) -> Tensor:
        return super().forward(given["y"])


class OneOfMany(nn.Module):
    """Hands on what nobody needs beside what is needed, and what has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        x = given[0] if isinstance(given, tuple) else given
        return self.fc(x).tanh(), self.unused(x), x.detach().square()


class First(nn.Module):
    """The first of a tuple."""

    def forward(self, given: Any) -> Tensor:
        found: Tensor = given[0]
        return found


class Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return gradients[0].clamp(-1, 1)


class Product(torch.autograd.Function):
    """A linear layer by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class ByHand(nn.Linear):
    """A layer of custom functions."""

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        found: Tensor = Rounded.apply(product) + self.bias  # type: ignore[no-untyped-call]
        return found


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x).tanh() + self.b(self.a(x))
        return found


class Recurrent(nn.Module):
    """Takes and gives (output, state), as layers of translation models do."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, given: Any) -> Any:
        x, state = given if isinstance(given, tuple) else (given, None)
        if state is None:
            y, (h, c) = self.rnn(x)
        else:
            y, (h, c) = self.rnn(x, tuple(part.transpose(0, 1).contiguous() for part in state))
        return x + y, (h.transpose(0, 1), c.transpose(0, 1))


class Embedded(nn.Module):
    """Tokens, and a mask of those that count, to (values, mask)."""

    def __init__(self, tokens: int, *, tied: bool = True) -> None:
        super().__init__()
        self.tied = tied
        self.weight = nn.Parameter(torch.randn(tokens, WIDTH) / 4)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:
        mask = tokens != 0 if mask is None else mask
        return functional.embedding(tokens, self.weight), mask


class Attention(nn.Module):
    """A block with rotary tables of its own, and a mask that is handed on."""

    rotary: Tensor

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp, self.dropout = Mlp(), nn.Dropout(dropout)
        angles = torch.outer(torch.arange(16.0), 10.0 ** -torch.arange(2.0))
        self.register_buffer("rotary", torch.cat([angles, angles], 1), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        angles = self.rotary[: x.shape[2]]
        left, right = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()

    def forward(self, given: Any) -> Any:
        x, mask = given
        samples, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(samples, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        allowed = mask[:, None, None, :] & torch.ones(length, length, dtype=torch.bool).tril()
        allowed = allowed | torch.eye(length, dtype=torch.bool)
        y = functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, attn_mask=allowed)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(samples, length, WIDTH)))
        return self.mlp(x), mask


class Head(nn.Module):
    """Logits, by the embedding's weight if it is given."""

    def __init__(self, tokens: int, embedding: Embedded | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(tokens, WIDTH) / 4) if embedding is None else embedding.weight

    def forward(self, given: Any) -> Tensor:
        return functional.linear(self.norm(given[0]), self.weight)
