"""Memory that `cf.memory` counts without a step against measured peaks, worker by worker.

    python benchmarks/first_step_memory.py [--keep] [--only MODEL]

Claim: a worker's memory is known before the first step to within 5 % of the most bytes that torch's allocator
gave it in a step: models of one's own, found by an example or listed, in schedules of every kind.

Measured are the third and the fifth step (the first, second and fourth compare the pipeline with the model's
own forward), from the pipeline's making on: all allocations of a worker's process, kernels' included. Workers
are processes over Gloo: of threads, one may free what another allocated. The mini-batch is the user's.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch names it
from kit import RESULTS, arguments, machine_line
from memory import peak_of_steps
from torch import Tensor, nn

import counterflow as cf
from counterflow.runtime.parameters.digest import digest

GOAL = 0.05
"""Share by which a count may be wrong."""


class Mlp(nn.Sequential):
    """Linear layers of different widths."""

    def __init__(self) -> None:
        sizes = [64, 512, 256, 512, 256, 512, 256, 128]
        layers: list[nn.Module] = []
        for first, second in itertools.pairwise(sizes):
            layers += [nn.Linear(first, second), nn.GELU()]
        super().__init__(*layers, nn.Linear(128, 16))


class ConvPair(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(first, second, 3, padding=1),
            nn.Conv2d(second, second, 3, padding=1),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(second) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, channels, height, width]."""
        x = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(x)))


class UNet(nn.Module):
    """Encoder and decoder with skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.down = nn.ModuleList([ConvPair(3, w), ConvPair(w, 2 * w), ConvPair(2 * w, 4 * w)])
        self.middle = ConvPair(4 * w, 8 * w)
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * n * w, n * w, 2, 2) for n in (4, 2, 1)])
        self.merge = nn.ModuleList([ConvPair(2 * n * w, n * w) for n in (4, 2, 1)])
        self.head = nn.Conv2d(w, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes, height, width] of images."""
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)


class Residual(nn.Module):
    """Residual block, with a projection where the size changes."""

    def __init__(self, first: int, second: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(first, second, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(second, second, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(second), nn.BatchNorm2d(second)
        self.short = nn.Sequential() if first == second else nn.Conv2d(first, second, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features of features."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    """ResNet of eight blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = [16, 16, 16, 32, 32, 64, 64, 128, 128]
        pairs = itertools.pairwise(widths)
        self.blocks = nn.Sequential(*(Residual(a, b, 1 if a == b else 2) for a, b in pairs))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes] of images."""
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Pre-norm block of attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [batch, positions, width]."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Causal transformer with learned positions."""

    def __init__(self, width: int = 128, layers: int = 6, vocabulary: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary] of tokens."""
        x = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (Mlp, F.mse_loss),
    "unet": (UNet, F.cross_entropy),
    "resnet": (ResNet, F.cross_entropy),
    "transformer": (Transformer, token_loss),
}


def batch(model: str, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a model."""
    generator = torch.Generator().manual_seed(1)
    if model == "mlp":
        return torch.randn(samples, 64, generator=generator), torch.randn(samples, 16, generator=generator)
    if model == "transformer":
        tokens = torch.randint(512, (samples, 65), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    shape = (samples, 32, 32) if model == "unet" else (samples,)
    return images, torch.randint(2, shape, generator=generator)


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A pipeline that is counted and measured; samples are of a micro-batch."""

    model: str
    schedule: str
    optimizer: str = "adamw"
    samples: int = 8
    replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Name in the table."""
        extra = [f"{name}={value}" for name, value in self.options.items()]
        replicas = [f"{self.replicas} replicas"] if self.replicas > 1 else []
        return " ".join([self.model, self.schedule, self.optimizer, *replicas, *extra])


SCHEDULES = (
    "1f1b(stages=4, micro_batches=6)",
    "gpipe(stages=3, micro_batches=4)",
    "zb-v(workers=2, micro_batches=6)",
    "chimera(stages=4, micro_batches=4)",
    "interleaved(workers=2, micro_batches=4, chunks=2)",
    "pipedream-2bw(stages=3, micro_batches=4)",
)


def runs() -> Iterator[Run]:
    """All models in all kinds of schedules, and each option in some."""
    for model in MODELS:
        samples = 64 if model == "mlp" else 8
        for schedule in SCHEDULES:
            yield Run(model, schedule, samples=samples)
    one = SCHEDULES[0]
    yield Run("mlp", SCHEDULES[1], "sgd", samples=64)
    yield Run("mlp", "wpipe(workers=2, micro_batches=6)", "momentum", samples=64)
    yield Run("unet", one, "momentum", options={"recompute": "stage"})
    yield Run("resnet", one, "sgd", options={"recompute": "layer"})
    yield Run("resnet", "hanayo(workers=2, micro_batches=4, waves=1)", "momentum")
    yield Run("transformer", one, "sgd", options={"recompute": "layer"})
    yield Run("transformer", "gpipe(stages=2, micro_batches=4)", options={"recompute": "stage"})
    yield Run("transformer", "zb-h1(stages=3, micro_batches=6)", "momentum", options={"clip_norm": 1.0})
    yield Run("transformer", "1f1b(stages=2, micro_batches=4)", options={"autocast": "bfloat16"})
    yield Run("transformer", "1f1b(stages=2, micro_batches=4)", options={"compute_dtype": "bfloat16"})
    yield Run("transformer", "1f1b(stages=2, micro_batches=4)", replicas=2)
    yield Run("mlp", "1f1b(stages=2, micro_batches=4)", replicas=2, samples=64, options={"zero_stage": 1})


def measured(each: list[Run]) -> list[int]:
    """Peaks of this worker, by run."""
    peaks = []
    digest([torch.zeros(2**17)], torch.device("cpu"))  # makes its tables, which are the process's
    for run in each:
        model, loss = MODELS[run.model]
        inputs, targets = batch(run.model, run.samples * micro_batches(run.schedule))
        gc.collect()  # what goes later would go from this run's bytes
        gc.disable()
        torch.manual_seed(0)
        example = {} if run.model == "mlp" else {"example": inputs}

        def make(run: Run = run, example: Any = example, model: Any = model, loss: Any = loss) -> cf.Pipeline:
            return cf.Pipeline(
                model(),
                loss,
                run.schedule,
                optimizer=OPTIMIZERS[run.optimizer],
                digest_every=0,
                **example,
                **run.options,
            )

        peaks.append(peak_of_steps(make, inputs, targets))
        gc.enable()
    return peaks


def micro_batches(schedule: str) -> int:
    """Micro-batches of a schedule's text."""
    return int(schedule.partition("micro_batches=")[2].partition(",")[0].rstrip(")"))


def counted(run: Run) -> Any:
    """Memory that is known without a step."""
    model, loss = MODELS[run.model]
    inputs, targets = (
        tensor.to("meta") for tensor in batch(run.model, run.samples * micro_batches(run.schedule))
    )
    options = {"optimizer": OPTIMIZERS[run.optimizer], **run.options}
    return cf.memory(model(), loss, run.schedule, inputs, targets, replicas=run.replicas, **options)


def main() -> None:
    """Count, measure and compare."""
    parser = arguments(__doc__, "first_step_memory.txt")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    each = [run for run in runs() if options.only in str(run)]
    lines = [machine_line(), "", f"{'run':<72}{'worker':>7}{'counted':>11}{'measured':>11}{'error':>8}"]
    errors: list[float] = []
    for model in MODELS:
        memories: dict[str, Any] = {}
        together: dict[int, list[Run]] = {}
        for run in each:
            if run.model == model:
                began = time.perf_counter()
                memory = memories[str(run)] = counted(run)
                print(f"{run}: counted in {time.perf_counter() - began:.1f} s", flush=True)
                together.setdefault(len(memory.workers) * run.replicas, []).append(run)
        for count, members in sorted(together.items()):
            rows = cf.launch(
                measured, members, workers=count, transport="gloo", threads=1, timeout_seconds=900
            )
            for run, *sizes in zip(members, *rows, strict=True):
                for worker, (size, row) in enumerate(zip(sizes, memories[str(run)].workers, strict=False)):
                    errors.append(row.total / size - 1)
                    mib = f"{row.total / 2**20:>7.2f} MiB{size / 2**20:>7.2f} MiB"
                    lines.append(f"{'' if worker else str(run):<72}{worker:>7}{mib}{errors[-1]:>+8.1%}")
                    print(lines[-1], flush=True)
    absolute = sorted(map(abs, errors))
    within = sum(error <= GOAL for error in absolute)
    lines += [
        "",
        f"{within} of {len(errors)} workers within {GOAL:.0%}; median {absolute[len(absolute) // 2]:.1%}, "
        f"worst {absolute[-1]:.1%}",
    ]
    print("\n".join(lines[-2:]))
    if options.keep:
        (RESULTS / "first_step_memory.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
