"""Models whose forwards do what users' do between their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf


class Residuals(nn.Module):
    """Skips over all blocks, weights and constants between modules, dropout by the mode, a dict as output."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.entry = nn.Linear(4, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("shift", torch.rand(width))
        self.table = torch.arange(float(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        samples = x.shape[0]
        value = self.entry(x) * self.scale + self.shift + 0.01 * self.table.to(x.dtype)
        first = value
        for block in self.blocks:
            value = value + block(value)
        value = functional.dropout(value, 0.2, self.training)
        value += 1.0
        return {"scores": self.head(value + first).reshape(samples, 3, 1), "features": value}


class Net(nn.Module):
    """A small U-Net that takes a time and gives a tuple."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.time = nn.Linear(1, width)
        self.entry = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for _ in range(2))
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor, time: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        embedded = self.time(time[:, None].to(image.dtype))[:, :, None, None]
        value = torch.tanh(self.entry(image) + embedded)
        saved = []
        for layer in self.down:
            saved.append(value)
            value = torch.tanh(layer(value) + embedded)
        value = self.middle(value)
        for layer in self.up:
            value = functional.interpolate(value, scale_factor=2.0)
            value = torch.tanh(layer(torch.cat([value, saved.pop()], 1)))
        return self.head(value) * scale, embedded.flatten(1)


class Tied(nn.Module):
    """An embedding whose weight is the head's, and positions from a buffer, as long as the input."""

    def __init__(self, words: int = 11, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(16, width)
        self.register_buffer("numbers", torch.arange(16)[None], persistent=False)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, batch_first=True, dropout=0.0) for _ in range(4)
        )
        self.unused = nn.Linear(width, width)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        length = ids.size(1)
        numbers: Any = self.numbers
        value = self.words(ids) + self.places(numbers[:, :length])
        hidden = torch.full((length, length), torch.finfo(value.dtype).min, device=ids.device).triu(1)
        if mask is not None:
            value = value * mask[..., None]
        for block in self.blocks:
            value = block(value, src_mask=hidden)
        return functional.linear(value, self.words.weight)


class Decides(nn.Module):
    """Goes one way or another by a number in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:  # here
            return self.one(x)  # type: ignore[no-any-return]
        return self.other(x)  # type: ignore[no-any-return]


def sample(number: int) -> Tensor:
    return torch.randn((8, 8), generator=torch.Generator().manual_seed(number))


def losses(make: Callable[[], nn.Module]) -> list[float]:
    """Losses of one process."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    results = []
    for step in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(sample(step)), sample(step + 10))
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return results


def staged(make: Callable[[], nn.Module]) -> list[float]:
    """Losses of two stages."""

    def work() -> list[float]:
        torch.manual_seed(0)
        with cf.Pipeline(
            make(),
            nn.MSELoss(),
            "dapple(stages=2, micro_batches=2)",
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
            example=sample(0),
        ) as pipeline:
            return [pipeline.step(sample(step), sample(step + 10)).loss for step in range(3)]

    return cf.launch(work, workers=2, transport="local")[0]


Numbers = tuple[list[float], dict[str, Tensor]]
"""Losses, and the state at the end."""


def _batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn((8, 8), generator=draws, dtype=torch.float64) for _ in range(2))
    return inputs, targets


def trained(make: Callable[[], nn.Module], micro_batches: int = 1, steps: int = 3) -> Numbers:
    """Training in one process, in plain torch and float64."""
    torch.manual_seed(0)
    model = make().double()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in zip(*(t.chunk(micro_batches) for t in _batch(step)), strict=True):
            loss = functional.mse_loss(model(inputs), targets) / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, dict(model.state_dict())


def _train(make: Callable[[], nn.Module], scheme: str, steps: int, options: dict[str, Any]) -> Numbers:
    torch.manual_seed(0)
    with cf.Pipeline(
        make().double(),
        nn.MSELoss(),
        scheme,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        example=_batch(0)[0],
        **options,
    ) as pipeline:
        losses = [pipeline.step(*_batch(step)).loss for step in range(steps)]
        return losses, dict(pipeline.model_state_dict())


def trained_in_stages(
    make: Callable[[], nn.Module], scheme: str, transport: str = "local", steps: int = 3, **options: Any
) -> Numbers:
    """The same training in the stages of two workers."""
    return cf.launch(_train, make, scheme, steps, options, workers=2, transport=transport)[0]
