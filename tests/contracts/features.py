"""Features that change how a model is trained, each as one record: its layers, options and tolerance.

A feature is a row of ``FEATURES``; what two of them make together is a ``Case``. ``test_features`` runs each
and every pair with every scheme that has them, and compares them with ``one_process``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import counterflow as cf

WIDTH, POSITIONS, SAMPLES = 4, 4, 8
DECAY = 0.75
SKIPPED_STEP = 2
"""Step whose loss is infinite, where updates are skipped."""

Layers = list[nn.Module]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.linear(x).tanh()
        return y


class Recurrent(nn.Module):
    """A layer that reads the position before, whose last one passes to the next slice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        earlier = torch.cat([self.carry.take(torch.zeros_like(x[:, :1])), x[:, :-1]], 1)
        self.carry.leave(x[:, -1:])
        y: Tensor = x + self.linear(earlier).tanh()
        return y


class Normed(nn.Module):
    """Batch statistics of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return y


class Router(nn.Module):
    """Experts' weights, whose balance over samples is a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.linear(x).softmax(-1)
        cf.add_loss(2.0 * shares.square().sum(-1).mean(), "balance")
        y: Tensor = x * shares
        return y


class Balanced(nn.Module):
    """Experts' weights, whose balance is of a micro-batch and no mean over its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.linear(x).softmax(-1)
        cf.add_loss(2.0 * shares.flatten(0, 1).mean(0).square().sum(), "balance")
        y: Tensor = x * shares
        return y


class Loads(nn.Module):
    """A residual layer that reads what an earlier layer saved."""

    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.linear, self.load = nn.Linear(WIDTH, WIDTH), skip.loader()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.linear(self.load()).tanh()
        return y


def base() -> Layers:
    """Eight layers of a sequence."""
    return [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, WIDTH)]


def _skip(layers: Layers) -> None:
    skip = cf.Skip("entry")
    layers[1], layers[6] = nn.Sequential(layers[1], skip.saver()), Loads(skip)


def _tied(layers: Layers) -> None:
    layers[7].weight = layers[0].weight


def _recurrent(layers: Layers) -> None:
    layers[2] = Recurrent()


def _normed(layers: Layers) -> None:
    layers[3] = Normed()


def _router(layers: Layers) -> None:
    layers[4] = Router()


def _balanced(layers: Layers) -> None:
    layers[4] = Balanced()


def _frozen(layers: Layers) -> None:
    layers[5].requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A way to train otherwise.

    Attributes:
        name: in the tests' names.
        change: function that changes the layers in place.
        options: of the pipeline; plain torch does the same by its own means.
        schedule: options of the scheme.
        replicas: pipelines that share the mini-batch, in schemes with one direction.
        dtype: of the weights; the lower one of two features counts.
        tolerance: error of losses, and of changes of weights relative to the largest, that is accepted.
        exact: whether a training that is saved and loaded goes on bit for bit.
        together: steps whose gradients make one update.
        samples: of a replica's mini-batch.
        steps: steps of the training, of which the last two follow a state that is saved.
        transport: of the workers.
        ema, scheduled, skips, counted: whether there are an average of the weights, a learning rate that
            falls, an infinite loss in one step, a loss that counts some of its elements.
    """

    name: str
    change: Callable[[Layers], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    exact: bool = True
    together: int = 1
    samples: int = SAMPLES
    steps: int = 4
    transport: str = "local"
    ema: bool = False
    scheduled: bool = False
    skips: bool = False
    counted: bool = False


F32, F64 = torch.float32, torch.float64

FEATURES = {
    feature.name: feature
    for feature in (
        Feature(name="recompute layers", options={"recompute": "layer"}),
        Feature(name="recompute stages", options={"recompute": "stage"}),
        Feature(name="split", schedule={"split": True}),
        Feature(name="slices", schedule={"slices": 2}, change=_recurrent),
        Feature(name="doubled", schedule={"concat": "forward-doubling"}),
        Feature(name="halved", schedule={"concat": "backward-halving"}),
        Feature(name="skip connection", change=_skip),
        Feature(name="tied weights", change=_tied),
        Feature(name="batch norm", change=_normed),
        Feature(name="deferred batch norm", change=_normed, options={"deferred_batch_norm": True}),
        Feature(name="added loss", change=_router),
        Feature(name="balance", change=_balanced, options={"per_micro_batch_loss": True}),
        Feature(name="frozen layer", change=_frozen),
        Feature(name="counted loss", counted=True),
        Feature(name="unequal micro-batches", samples=7),
        Feature(name="average", ema=True),
        Feature(name="learning rate", scheduled=True),
        Feature(name="accumulation", together=2),
        Feature(name="clipping", options={"clip_norm": 0.05}),
        Feature(name="skipped update", skips=True, options={"skip_non_finite": True}),
        Feature(name="no barrier", options={"barrier": False}),
        Feature(name="sharded updates", options={"zero_stage": 1}, replicas=2),
        Feature(name="two replicas", replicas=2),
        Feature(name="small messages", options={"compress": True}, dtype=F32, tolerance=2e-2, exact=False),
        Feature(
            name="small sums",
            options={"gradient_compression": "bfloat16"},
            replicas=2,
            dtype=F32,
            tolerance=3e-2,
        ),
        Feature(name="autocast", options={"autocast": torch.bfloat16}, dtype=F32, tolerance=5e-2),
        Feature(name="bfloat16", options={"compute_dtype": torch.bfloat16}, dtype=F32, tolerance=5e-2),
        Feature(
            name="loss scale",
            options={"autocast": torch.float16, "loss_scale": 2.0**10, "loss_scale_interval": 2},
            dtype=F32,
            tolerance=2e-2,
        ),
        Feature(name="compiled", options={"compile": "eager"}),
        # Not exact: the plain second part of a split backward adds a product into a gradient in one kernel.
        Feature(name="captured", options={"capture": True}, steps=8, transport="strict-nccl", exact=False),
    )
}


@dataclass(frozen=True)
class Scheme:
    """A scheme with its sizes.

    Attributes:
        name: registered name.
        sizes: its options.
        has: further options that features may set.
        two_directions: whether stages have two copies without replicas.
    """

    name: str
    sizes: Mapping[str, Any]
    has: Sequence[str] = ()
    two_directions: bool = False


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("1f1b", {"stages": 3, "micro_batches": 4}, ("split", "slices")),
        Scheme("interleaved", {"workers": 2, "micro_batches": 4}, ("split", "slices")),
        Scheme("zb-v", {"workers": 2, "micro_batches": 4}, ("slices",)),
        Scheme(
            "chimera",
            {"stages": 2, "micro_batches": 4},  # more micro-batches than stages, of which two run together
            ("split", "slices", "concat"),
            two_directions=True,
        ),
        Scheme("pipedream-2bw", {"stages": 3, "micro_batches": 4}),
        Scheme("wpipe", {"workers": 2, "micro_batches": 4}),
    )
}


@dataclass(frozen=True)
class Case:
    """A scheme with the features that are combined."""

    scheme: Scheme
    features: tuple[Feature, ...]

    def __str__(self) -> str:
        return f"{self.scheme.name}: {' + '.join(feature.name for feature in self.features)}"

    @property
    def exists(self) -> bool:
        """Whether the scheme has the features' options, and no two features set one option."""
        keys = [key for feature in self.features for key in (*feature.schedule, *feature.options)]
        changes = [feature.change for feature in self.features if feature.change is not None]
        known = all(key in self.scheme.has for feature in self.features for key in feature.schedule)
        return known and len(set(keys)) == len(keys) and len(set(changes)) == len(changes)

    @property
    def schedule(self) -> str:
        """The schedule as text."""
        options = dict(self.scheme.sizes)
        for feature in self.features:
            options |= feature.schedule
        return f"{self.scheme.name}({', '.join(f'{key}={_text(value)}' for key, value in options.items())})"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the pipeline."""
        options: dict[str, Any] = {"digest_every": 1}
        for feature in self.features:
            options |= feature.options
        return options

    def largest(self, attribute: str) -> Any:
        """The largest value that a feature has of a number or a flag."""
        return max(getattr(feature, attribute) for feature in self.features)

    @property
    def replicas(self) -> int:
        many = not self.scheme.two_directions
        return self.largest("replicas") if many else 1

    @property
    def samples(self) -> int:
        return min(feature.samples for feature in self.features)

    @property
    def steps(self) -> int:
        """Steps before and after a state is saved."""
        return int(self.largest("steps"))

    @property
    def transport(self) -> str:
        return next((f.transport for f in self.features if f.transport != "local"), "local")

    @property
    def exact(self) -> bool:
        return all(feature.exact for feature in self.features)

    @property
    def dtype(self) -> torch.dtype:
        return F32 if any(feature.dtype == F32 for feature in self.features) else F64

    @property
    def tolerance(self) -> float:
        """Errors of features add up; those of float32 are at least its rounding."""
        tolerance = sum(feature.tolerance for feature in self.features)
        return max(tolerance, 1e-4) if self.dtype == F32 else tolerance

    def layers(self) -> Layers:
        """The model, with the same numbers each time."""
        torch.manual_seed(0)
        layers = base()
        for feature in self.features:
            if feature.change is not None:
                feature.change(layers)
        return [layer.to(self.dtype) for layer in layers]

    def batch(self, step: int, replica: int) -> tuple[Tensor, Tensor]:
        """A replica's mini-batch: ``[samples, positions, width]``."""
        draw = torch.Generator().manual_seed(100 * step + replica)
        x, y = torch.randn(2, self.samples, POSITIONS, WIDTH, generator=draw, dtype=F64).to(self.dtype)
        if self.largest("skips") and step == SKIPPED_STEP:
            y[0, 0, 0] = torch.inf
        return x, y

    def loss(self, output: Tensor, target: Tensor) -> Any:
        """Mean of squares, or their sum over the targets that count."""
        squares = (output.to(target.dtype) - target).square()
        if not self.largest("counted"):
            return squares.mean()
        counts = (target > -0.5).to(target.dtype)
        return cf.LossSum(torch.where(target > -0.5, squares, 0.0).sum(), counts.sum())

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)

    @property
    def scheduler(self) -> Callable[[torch.optim.Optimizer], Any] | None:
        falling = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        return falling if self.largest("scheduled") else None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
