"""What has no dimension of samples: detection targets of any number, and graphs.

    python examples/irregular_batches.py

Two workers as threads. Each model is trained by one process as well, with the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import counterflow as cf

SCHEDULE = cf.schemes.dapple(2, 4)
STEPS = 3


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


# -- images, each with boxes of any number: a list of dicts, cut by its entries


def detector() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh()), nn.Linear(16, 4)]


def images(step: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(step)
    counts = torch.randint(1, 5, (8,), generator=generator).tolist()
    boxes = [torch.rand(count, 4, generator=generator) for count in counts]
    return torch.randn(8, 3, 4, 4, generator=generator), [{"boxes": each} for each in boxes]


def nearest(output: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    """The mean over images of the distance to the nearest box."""
    pairs = zip(output, targets, strict=True)
    return torch.stack([(box - target["boxes"]).abs().sum(1).min() for box, target in pairs]).mean()


def detect() -> list[float]:
    with cf.Pipeline(detector(), nearest, SCHEDULE, optimizer=adam, target_dims=cf.ENTRIES) as pipeline:
        return [pipeline.step(*images(step)).loss for step in range(STEPS)]


# -- graphs of any size, collated to a class: ready micro-batches, of which samples= tells the numbers


@dataclass
class Batch:
    """Some graphs in one, as graph libraries collate them.

    Attributes:
        x: features by node.
        edges: pairs of nodes.
        of: by node the number of its graph.
        graphs: how many.
    """

    x: Tensor
    edges: Tensor
    of: Tensor
    graphs: int


pytree.register_pytree_node(
    Batch,
    lambda batch: ([batch.x, batch.edges, batch.of], batch.graphs),
    lambda tensors, graphs: Batch(*tensors, graphs),
)


class Convolve(nn.Linear):
    """Adds to each node what its neighbours have; hands on graphs."""

    def forward(self, batch: Batch) -> Batch:
        to, source = batch.edges
        seen = batch.x.index_add(0, to, batch.x[source])
        return Batch(super().forward(seen).tanh(), batch.edges, batch.of, batch.graphs)


class Pool(nn.Linear):
    """Classes by graph."""

    def forward(self, batch: Batch) -> Tensor:
        sums = batch.x.new_zeros(batch.graphs, batch.x.shape[1]).index_add(0, batch.of, batch.x)
        return super().forward(sums)


def classifier() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Convolve(6, 8), Convolve(8, 8), Pool(8, 3)]


def collated(step: int, number: int, count: int) -> tuple[Batch, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    of = torch.arange(count).repeat_interleave(torch.randint(3, 7, (count,), generator=generator))
    edges = torch.randint(0, len(of), (2, 20), generator=generator)
    return Batch(torch.randn(len(of), 6, generator=generator), edges, of, count), torch.randint(
        0, 3, (count,), generator=generator
    )


COUNTS = [4, 4, 3, 1]


def classify() -> list[float]:
    with cf.Pipeline(classifier(), nn.CrossEntropyLoss(), SCHEDULE, optimizer=adam) as pipeline:
        losses = []
        for step in range(STEPS):
            ready = [collated(step, number, count) for number, count in enumerate(COUNTS)]
            losses.append(pipeline.step(micro_batches=ready, samples=COUNTS).loss)
        return losses


# -- the same in one process


def alone(layers: list[nn.Module], loss: Callable[[Any, Any], Tensor], batches: Any) -> list[float]:
    """Losses of steps of some micro-batches: the mean over all samples."""
    model = nn.Sequential(*layers)
    optimizer, losses = adam(list(model.parameters())), []
    for ready in batches:
        samples = sum(len(target) for _, target in ready)
        found = sum(loss(model(given), target) * len(target) for given, target in ready) / samples
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def main() -> None:
    whole = [[images(step)] for step in range(STEPS)]
    graphs = [[collated(step, n, count) for n, count in enumerate(COUNTS)] for step in range(STEPS)]
    for name, work, expected in (
        ("boxes", detect, alone(detector(), nearest, whole)),
        ("graphs", classify, alone(classifier(), nn.CrossEntropyLoss(), graphs)),
    ):
        (losses, _) = cf.launch(work, workers=2, transport="local")
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        print(f"{name}: " + " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
