"""Models as users write them: blocks of linear layers, and between them what Python can do in a forward.

A feature is such a piece of Python. It stands in the forward of the whole model (``inline``), or is a block
of its own; its owner, the model or that block, has its attributes, buffers and modules. Every feature lists
what a user may do to its owner between two steps.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import random
import threading
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import counterflow as cf

WIDTH, VOCABULARY, POSITIONS = 6, 9, 5

SCALE = 1.0
"""A global number that forwards read."""
TABLE = {"gain": 1.0}
"""A global dict that forwards read."""
LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("LEVEL", default=1.0)
"""A context variable that forwards read."""


GLOBAL_HOOKS: list[Any] = []
"""Handles of hooks of all modules."""


class Strength:
    """A class whose attribute forwards read."""

    value = 1.0


def amplified(x: Tensor) -> Tensor:
    """A function of this module, which users replace."""
    return x * 1.0


@dataclass
class Config:
    """A configuration that all layers of a model share."""

    gain: float = 0.5
    activation: str = "tanh"
    options: dict[str, Any] = field(default_factory=lambda: {"bias": 0.0})


def restore_globals() -> None:
    """Set this module's globals, and torch's, as they were at first."""
    global SCALE, amplified
    SCALE, amplified = 1.0, _amplified
    TABLE.update(gain=1.0)
    Strength.value = 1.0
    LEVEL.set(1.0)
    torch.set_default_dtype(torch.float32)
    while GLOBAL_HOOKS:
        GLOBAL_HOOKS.pop().remove()
    linear_table.cache_clear()
    counted_table.clear()


_amplified = amplified


@functools.lru_cache
def linear_table(positions: int) -> Tensor:
    """A table that is made once for each size."""
    return torch.linspace(0, 1, positions, dtype=torch.float64)


counted_table: dict[int, Tensor] = {}

Run = Callable[[Any, Tensor], Tensor]
Act = Callable[[Any, Config], Any]


@dataclass(frozen=True)
class Feature:
    """A piece of Python in a forward.

    Attributes:
        setup: gives the owner its attributes.
        run: what the forward does, with the owner as ``self``.
        habits: what a user does to the owner between two steps, by name.
        by_unit: whether its numbers are those of each micro-batch alone, as documented.
        in_order: whether it depends on the order of forwards, so that copies of a stage differ.
        mixes_positions: whether positions see each other.
        varies: whether the numbers are random, so that only their variation is compared.
        inline_only: whether it is no block.
        block_only: whether it is not in the whole model's forward.
        loose: whether it computes in lower precision.
    """

    setup: Callable[[Any, Config], None]
    run: Run
    habits: dict[str, Act] = field(default_factory=dict)
    by_unit: bool = False
    in_order: bool = False
    mixes_positions: bool = False
    varies: bool = False
    inline_only: bool = False
    block_only: bool = False
    loose: bool = False


FEATURES: dict[str, Feature] = {}


def nothing(_owner: Any, _config: Config) -> None:
    """Setup of a feature without attributes."""


def attribute(**values: Callable[[], Any]) -> Callable[[Any, Config], None]:
    """Setup of attributes, each made by a function."""

    def setup(owner: Any, _config: Config) -> None:
        for name, make in values.items():
            setattr(owner, name, make())

    return setup


def ones() -> Tensor:
    return torch.ones(WIDTH, dtype=torch.float64)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def setting(name: str, value: Any) -> Act:
    """A habit: an attribute is set."""
    return lambda owner, _config: setattr(owner, name, value() if callable(value) else value)


# -- attributes of the model and of objects that it reaches

FEATURES["temperature"] = Feature(
    attribute(temperature=lambda: 1.0),
    lambda self, x: x / self.temperature,
    {
        "set": setting("temperature", 3.0),
        "set to a tensor": setting("temperature", lambda: torch.tensor(2.0)),
    },
)


def _use_config(self: Any, x: Tensor) -> Tensor:
    config = self.settings
    x = x + config.gain * (torch.tanh(x) if config.activation == "tanh" else torch.relu(x))
    return x + config.options["bias"]


def _take_config(owner: Any, config: Config) -> None:
    owner.settings = config


FEATURES["config"] = Feature(
    _take_config,
    _use_config,
    {
        "number": lambda _, config: setattr(config, "gain", 0.1),
        "text": lambda _, config: setattr(config, "activation", "relu"),
        "entry of its dict": lambda _, config: config.options.update(bias=0.3),
        "other object": lambda owner, _: setattr(owner, "settings", Config(gain=0.2)),
    },
)
FEATURES["tensor"] = Feature(
    attribute(visible=ones),
    lambda self, x: x * self.visible,
    {
        "replaced": setting("visible", lambda: torch.zeros(WIDTH, dtype=torch.float64)),
        "zeroed": lambda owner, _: owner.visible.zero_(),
        "an entry set": lambda owner, _: owner.visible.__setitem__(0, 3.0),
        "through a view": lambda owner, _: owner.visible[1:].fill_(0.5),
        "through data": lambda owner, _: owner.visible.data.fill_(0.5),
        "through numpy": lambda owner, _: owner.visible.numpy().fill(0.25),
    },
)
FEATURES["list"] = Feature(
    attribute(factors=lambda: [1.0, 0.5]),
    lambda self, x: x * sum(self.factors),
    {
        "an entry set": lambda owner, _: owner.factors.__setitem__(0, 2.0),
        "appended": lambda owner, _: owner.factors.append(1.0) if len(owner.factors) < 3 else None,
        "replaced": setting("factors", lambda: [0.25]),
    },
)
FEATURES["nested"] = Feature(
    attribute(tables=lambda: {"a": {"scale": [1.0]}, "names": ("a",)}),
    lambda self, x: x * self.tables["a"]["scale"][0],
    {"inner entry set": lambda owner, _: owner.tables["a"]["scale"].__setitem__(0, 3.0)},
)
FEATURES["array"] = Feature(
    attribute(array=lambda: np.ones(WIDTH)),
    lambda self, x: x * torch.from_numpy(self.array),
    {"an entry set": lambda owner, _: owner.array.__setitem__(0, 3.0)},
)
FEATURES["function"] = Feature(
    attribute(act=lambda: torch.tanh),
    lambda self, x: x + self.act(x),
    {
        "replaced": setting("act", lambda: torch.relu),
        "partial": setting("act", lambda: functools.partial(torch.mul, other=0.1)),
    },
)
FEATURES["optional"] = Feature(
    nothing,
    lambda self, x: x if getattr(self, "extra", None) is None else x + self.extra,
    {"set": setting("extra", lambda: ones() * 0.3)},
)
FEATURES["class attribute"] = Feature(
    nothing, lambda _, x: x * Strength.value, {"set": lambda *_: setattr(Strength, "value", 2.0)}
)


# -- what is around the model


def _set_scale(*_: Any) -> None:
    global SCALE  # noqa: PLW0603
    SCALE = 3.0


def _replace_amplified(*_: Any) -> None:
    global amplified  # noqa: PLW0603
    amplified = torch.sin


FEATURES["global"] = Feature(nothing, lambda _, x: x * SCALE, {"set": _set_scale})
FEATURES["global dict"] = Feature(
    nothing, lambda _, x: x * TABLE["gain"], {"set": lambda *_: TABLE.update(gain=2.0)}
)
FEATURES["global function"] = Feature(nothing, lambda _, x: amplified(x), {"replaced": _replace_amplified})
FEATURES["context variable"] = Feature(
    nothing, lambda _, x: x * LEVEL.get(), {"set": lambda *_: LEVEL.set(2.0)}
)


def _closure(owner: Any, _config: Config) -> None:
    level = 1.0

    def scaled(x: Tensor) -> Tensor:
        return x * level

    def set_level(value: float) -> None:
        nonlocal level
        level = value

    owner.scaled, owner.set_level = scaled, set_level


FEATURES["closure"] = Feature(
    _closure, lambda self, x: self.scaled(x), {"set": lambda owner, _: owner.set_level(2.0)}
)
FEATURES["default dtype"] = Feature(
    nothing,
    lambda _, x: x + torch.full((WIDTH,), 1 / 3),
    {"set": lambda *_: torch.set_default_dtype(torch.float64)},
)
FEATURES["grad mode"] = Feature(nothing, lambda _, x: x if torch.is_grad_enabled() else x.softmax(-1))
FEATURES["training flag"] = Feature(
    nothing,
    lambda self, x: 1.5 * x if self.training else x,
    {"eval": lambda owner, _: owner.eval(), "flag set": setting("training", False)},
)
FEATURES["autocast flag"] = Feature(
    nothing, lambda _, x: x * 2 if torch.is_autocast_enabled("cpu") else x, loose=True
)


# -- contexts within a forward


def _in_lower(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.lower):
        return x + (x.float() @ self.low_weight.float()).double()


def _low_setup(owner: Any, _config: Config) -> None:
    owner.low_weight, owner.lower = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), True


FEATURES["autocast region"] = Feature(
    _low_setup, _in_lower, {"switched off": setting("lower", False)}, loose=True
)


def _without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = x.norm(dim=-1, keepdim=True)
    return x / (1 + size)


FEATURES["no_grad region"] = Feature(nothing, _without_gradient)


def _penalty(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(self.energy(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=torch.is_grad_enabled())
    return x + force


FEATURES["gradient in forward"] = Feature(attribute(energy=linear), _penalty)


class Scaled(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor * 0.5, None


FEATURES["own function"] = Feature(
    attribute(factor=lambda: 0.5),
    lambda self, x: x + Scaled.apply(x, self.factor),
    {"its number set": setting("factor", 2.0)},
)
FEATURES["checkpoint"] = Feature(
    attribute(inner=lambda: nn.Sequential(linear(), nn.Tanh())),
    lambda self, x: x + checkpoint(self.inner, x, use_reentrant=False),
)
FEATURES["vmap"] = Feature(
    attribute(mapped=linear), lambda self, x: x + torch.vmap(torch.tanh)(self.mapped(x))
)


# -- weights that are not the module's own


def _hyper(owner: Any, _config: Config) -> None:
    owner.code, owner.hyper, owner.target = (
        nn.Parameter(torch.randn(3)),
        nn.Linear(3, WIDTH * WIDTH),
        linear(),
    )


FEATURES["functional_call"] = Feature(
    _hyper,
    lambda self, x: (
        x
        + torch.func.functional_call(self.target, {"weight": self.hyper(self.code).view(WIDTH, WIDTH)}, (x,))
    ),
)


def _swap(self: Any, x: Tensor) -> Tensor:
    own = self.swapped.weight
    self.swapped.weight = self.other
    x = self.swapped(x)
    self.swapped.weight = own
    return x + self.swapped(torch.tanh(x))


FEATURES["weights swapped"] = Feature(
    attribute(swapped=linear, other=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)), _swap
)


def _cast(self: Any, x: Tensor) -> Tensor:
    weight = self.source.weight
    key = weight._version, weight.data_ptr()
    if self.cast_key != key:
        self.cast_key, self.cast = key, weight.detach() * 0.5
    return x + functional.linear(x, self.cast) + self.source(x)


FEATURES["derived weight cached"] = Feature(
    attribute(source=linear, cast_key=lambda: None, cast=lambda: None), _cast
)


def _teach(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        taught = self.teacher(x)
    return x + self.student(x) - 0.5 * taught


def _follow(owner: Any, _config: Config) -> None:
    if not owner.student.weight.is_meta:  # of a worker that has it
        owner.teacher.load_state_dict(owner.student.state_dict())


FEATURES["teacher"] = Feature(
    attribute(student=linear, teacher=lambda: linear().requires_grad_(False)), _teach, {"follows": _follow}
)
FEATURES["weight norm"] = Feature(
    attribute(normed=lambda: parametrizations.weight_norm(linear())), lambda self, x: x + self.normed(x)
)
FEATURES["spectral norm"] = Feature(
    attribute(spectral=lambda: parametrizations.spectral_norm(linear())),
    lambda self, x: x + self.spectral(x),
    by_unit=True,
    in_order=True,
)


# -- caches, counters and state


FEATURES["lru_cache"] = Feature(nothing, lambda _, x: x + linear_table(x.shape[-1]))


def _global_cache(_self: Any, x: Tensor) -> Tensor:
    if x.shape[-1] not in counted_table:
        counted_table[x.shape[-1]] = torch.arange(x.shape[-1], dtype=x.dtype) / 7
    return x + counted_table[x.shape[-1]]


FEATURES["global cache"] = Feature(nothing, _global_cache)


def _cache(self: Any, x: Tensor) -> Tensor:
    if x.shape[-1] not in self.cached:
        self.cached[x.shape[-1]] = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
    return x * (1 + self.cached[x.shape[-1]])


FEATURES["own cache"] = Feature(
    attribute(cached=dict), _cache, {"an entry set": lambda owner, _: owner.cached.update({WIDTH: ones()})}
)


def _lazy(self: Any, x: Tensor) -> Tensor:
    if self.lazy is None:
        self.lazy = torch.linspace(1, 2, x.shape[-1], dtype=x.dtype)
    return x * self.lazy


FEATURES["lazy attribute"] = Feature(attribute(lazy=lambda: None), _lazy, {"set": setting("lazy", ones)})


def _count(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * (1 + 0.05 * self.calls)


FEATURES["Python counter"] = Feature(attribute(calls=lambda: 0), _count, by_unit=True, in_order=True)
FEATURES["iterator"] = Feature(
    attribute(cycle=lambda: itertools.cycle([1.0, 0.7, 1.3])),
    lambda self, x: x * next(self.cycle),
    by_unit=True,
    in_order=True,
)
FEATURES["generator"] = Feature(
    attribute(steps=lambda: (1 + 0.1 * i for i in itertools.count())),
    lambda self, x: x * next(self.steps),
    by_unit=True,
    in_order=True,
)


def _buffer(name: str, make: Callable[[], Tensor]) -> Callable[[Any, Config], None]:
    return lambda owner, _config: owner.register_buffer(name, make())


FEATURES["buffer"] = Feature(
    _buffer("mask", ones),
    lambda self, x: x * self.mask,
    {
        "replaced": setting("mask", lambda: torch.zeros(WIDTH, dtype=torch.float64)),
        "zeroed": lambda owner, _: owner.mask.is_meta or owner.mask.zero_(),
        "registered anew": lambda owner, _: owner.register_buffer("mask", ones() * 0.5),
        "data replaced": lambda owner, _: owner.mask.is_meta or setattr(owner.mask, "data", ones() * 2),
    },
)


def _average(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.average.mul_(0.9).add_(0.1 * x.detach().flatten(0, -2).mean(0))
    return x - self.average


FEATURES["running average"] = Feature(
    _buffer("average", lambda: torch.zeros(WIDTH, dtype=torch.float64)), _average, by_unit=True, in_order=True
)


def _average_view(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.averages[0].mul_(0.9).add_(0.1 * x.detach().flatten(0, -2).mean(0))
    return x - self.averages[0]


FEATURES["running average in a view"] = Feature(
    _buffer("averages", lambda: torch.zeros(2, WIDTH, dtype=torch.float64)),
    _average_view,
    by_unit=True,
    in_order=True,
)


def _previous(self: Any, x: Tensor) -> Tensor:
    found = x if self.previous is None else x + 0.1 * self.previous
    self.previous = x.detach().flatten(0, -2).mean(0)
    return found


FEATURES["previous kept"] = Feature(attribute(previous=lambda: None), _previous, by_unit=True, in_order=True)


# -- random draws of others than torch's streams

FEATURES["random"] = Feature(nothing, lambda _, x: x * (1 + random.random()), varies=True)
FEATURES["numpy random"] = Feature(nothing, lambda _, x: x * (1 + float(np.random.rand())), varies=True)
FEATURES["own generator"] = Feature(
    attribute(draws=lambda: torch.Generator().manual_seed(3)),
    lambda self, x: x * (1 + torch.rand((), generator=self.draws, dtype=x.dtype)),
    varies=True,
)
FEATURES["torch random"] = Feature(nothing, lambda _, x: x * (1 + torch.rand((), dtype=x.dtype)), varies=True)
FEATURES["number drawn by torch"] = Feature(
    nothing, lambda _, x: x * (1 + torch.rand(()).item()), varies=True
)


def _drop_path(self: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else x + self.path(x)


FEATURES["layer dropped at random"] = Feature(attribute(path=linear), _drop_path, varies=True)


# -- modules with attributes of their own


def _norm(self: Any, x: Tensor) -> Tensor:
    return self.norm(x.flatten(0, -2)).view_as(x)


FEATURES["batch norm"] = Feature(
    attribute(norm=lambda: nn.BatchNorm1d(WIDTH)),
    _norm,
    {
        "eval": lambda owner, _: owner.norm.eval(),
        "momentum": lambda owner, _: setattr(owner.norm, "momentum", 0.5),
    },
    by_unit=True,
    in_order=True,
)
FEATURES["batch norm in eval"] = Feature(
    attribute(frozen_norm=lambda: nn.BatchNorm1d(WIDTH).eval()),
    lambda self, x: self.frozen_norm(x.flatten(0, -2)).view_as(x),
    {"eps": lambda owner, _: setattr(owner.frozen_norm, "eps", 0.5)},
)
FEATURES["layer norm"] = Feature(
    attribute(layer_norm=lambda: nn.LayerNorm(WIDTH)),
    lambda self, x: x + self.layer_norm(x),
    {"eps": lambda owner, _: setattr(owner.layer_norm, "eps", 1.0)},
)
FEATURES["dropout"] = Feature(
    attribute(drop=lambda: nn.Dropout(0.0), dropped=linear),
    lambda self, x: x + self.drop(self.dropped(x)),
    {"p set": lambda owner, _: setattr(owner.drop, "p", 1.0)},
)
FEATURES["dropout of all"] = Feature(
    attribute(drop_all=lambda: nn.Dropout(1.0), alive=linear),
    lambda self, x: x + self.drop_all(self.alive(x)),
    {"eval": lambda owner, _: owner.drop_all.eval()},
)


def _hooked(owner: Any, _config: Config) -> None:
    owner.hooked = linear()
    owner.handle = owner.hooked.register_forward_hook(lambda _module, _given, output: output * 2)


FEATURES["hook"] = Feature(
    _hooked, lambda self, x: x + self.hooked(x), {"removed": lambda owner, _: owner.handle.remove()}
)
FEATURES["attention"] = Feature(
    attribute(attention=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    lambda self, x: x + (self.attention(x, x, x, need_weights=False)[0] if x.dim() == 3 else torch.tanh(x)),
    mixes_positions=True,
)


def _lock(owner: Any, _config: Config) -> None:
    owner.lock, owner.locked = threading.Lock(), linear()


def _with_lock(self: Any, x: Tensor) -> Tensor:
    with self.lock:
        return x + self.locked(x)


FEATURES["lock"] = Feature(_lock, _with_lock)


# -- what is added to the loss


def _add(self: Any, x: Tensor) -> Tensor:
    cf.add_loss(self.coefficient * x.square().mean(), "square")
    return x


FEATURES["add_loss"] = Feature(
    attribute(coefficient=lambda: 0.1), _add, {"its coefficient": setting("coefficient", 1.0)}
)


def _add_balance(self: Any, x: Tensor) -> Tensor:
    share = self.router(x).softmax(-1).flatten(0, -2)
    chosen = functional.one_hot(share.argmax(-1), WIDTH).to(x.dtype)
    cf.add_loss(0.1 * WIDTH * (chosen.mean(0) * share.mean(0)).sum(), "balance")
    return x + share.view_as(x)


FEATURES["add_loss of a product of means"] = Feature(attribute(router=linear), _add_balance)


# -- positions, routes, weights of other modules


def _place(self: Any, x: Tensor) -> Tensor:
    return x + self.place[: x.shape[1]] if x.dim() == 3 else x + self.place[0]


FEATURES["positions"] = Feature(
    attribute(place=lambda: nn.Parameter(torch.randn(3 * POSITIONS, WIDTH) / 3)), _place, mixes_positions=True
)


def _causal(self: Any, x: Tensor) -> Tensor:
    if x.dim() < 3:
        return x + torch.tanh(self.scorer(x))
    count = x.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    return x + (self.scorer(x) @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ x


FEATURES["causal attention by hand"] = Feature(attribute(scorer=linear), _causal, mixes_positions=True)
FEATURES["running sum of positions"] = Feature(
    nothing, lambda _, x: x + 0.1 * x.cumsum(1) if x.dim() == 3 else x, mixes_positions=True
)


def _route(self: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, -2)
    chosen = self.gate(flat).argmax(-1)
    found = torch.zeros_like(flat)
    for number, expert in enumerate(self.experts):
        rows = (chosen == number).nonzero().squeeze(-1)
        found = found.index_add(0, rows, expert(flat[rows]))
    return x + found.view_as(x)


FEATURES["experts by index"] = Feature(
    attribute(gate=lambda: nn.Linear(WIDTH, 2), experts=lambda: nn.ModuleList([linear(), linear()])), _route
)
FEATURES["fixed target"] = Feature(
    attribute(online=linear, frozen=lambda: linear().requires_grad_(False)),
    lambda self, x: x + self.online(x) - 0.5 * self.frozen(x).detach(),
)


@torch.no_grad()
def _decorated(self: Any, x: Tensor) -> Tensor:
    return self.aside(x)


FEATURES["decorated without gradients"] = Feature(
    attribute(aside=linear), lambda self, x: x + 0.5 * _decorated(self, x)
)
FEATURES["parameters in a list"] = Feature(
    attribute(sizes=lambda: nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])),
    lambda self, x: x * self.sizes[0] + self.sizes[1],
)
FEATURES["module in a plain list"] = Feature(
    attribute(hidden=lambda: [linear().double().requires_grad_(False)]),
    lambda self, x: x + 0.3 * self.hidden[0](x.double()).to(x.dtype),
)


# -- numbers of the samples


def _decide(self: Any, x: Tensor) -> Tensor:
    return x * 0.5 if float(x.mean().detach()) > 0 else x * 1.5


FEATURES["decides by numbers"] = Feature(nothing, _decide, by_unit=True)
FEATURES["number of samples"] = Feature(nothing, lambda _, x: x * (1 + x.shape[0] / 8), by_unit=True)
FEATURES["mean of samples"] = Feature(nothing, lambda _, x: x - x.mean(0, keepdim=True), by_unit=True)


# -- models


class Mlp(nn.Module):
    """Two linear layers beside a skip, with attributes that users set."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain, self.drop = (
            nn.Linear(WIDTH, 8),
            nn.Linear(8, WIDTH),
            0.5,
            nn.Dropout(0.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(self.drop(torch.tanh(self.up(x))))


class Dense(nn.Module):
    """A linear layer and a nonlinearity that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.up = linear()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)) * self.gain
        return 1.2 * h if self.training else h


class Gate(nn.Module):
    """A product of two branches, beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = linear(), linear(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.sigmoid(self.up(x)) * self.down(x)


BLOCKS: dict[str, Callable[[], nn.Module]] = {"mlp": Mlp, "dense": Dense, "gate": Gate}


def block_of(name: str, config: Config) -> nn.Module:
    """A feature as a module of its own."""
    feature = FEATURES[name]
    kind = type(name.title().replace(" ", ""), (nn.Module,), {"forward": feature.run})
    module = kind()
    feature.setup(module, config)
    return module


@dataclass
class State:
    """What passes between blocks, as an object."""

    hidden: Tensor
    aside: Tensor


class Pair(NamedTuple):
    """What passes between blocks, as a named tuple."""

    hidden: Tensor
    aside: Tensor


class Carries(nn.Module):
    """A block that takes and returns a container of the hidden state and something aside."""

    def __init__(self, block: nn.Module, container: str) -> None:
        super().__init__()
        self.block, self.container = block, container

    def forward(self, value: Any) -> Any:
        match self.container:
            case "tuple":
                return self.block(value[0]), value[1]
            case "list":
                return [self.block(value[0]), *value[1:]]
            case "pair":
                return value._replace(hidden=self.block(value.hidden))
            case "object":
                return State(self.block(value.hidden), value.aside)
        return type(value)({**value, "hidden": self.block(value["hidden"])})


def packed(x: Tensor, container: str) -> Any:
    """The hidden state in its container."""
    aside = x[..., :1] * 2
    match container:
        case "tuple":
            return x, aside
        case "list":
            return [x, aside, None, 2]
        case "pair":
            return Pair(x, aside)
        case "dict":
            return {"hidden": x, "aside": aside, "note": "text"}
        case "ordered":
            return OrderedDict(hidden=x, aside=aside)
        case "mapping":
            return UserDict(hidden=x, aside=aside)
        case "object":
            return State(x, aside)
    return x


def unpacked(value: Any, container: str) -> Tensor:
    """The hidden state, with a use of what was aside."""
    match container:
        case "tuple" | "list":
            return value[0] + value[1]
        case "dict" | "ordered" | "mapping":
            return value["hidden"] + value["aside"]
        case "object" | "pair":
            return value.hidden + value.aside
    return value


class Output(dict[str, Any]):
    """An output with attributes, as many libraries have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Result:
    """An output as an object of a class of the user's own."""

    logits: Tensor
    hidden: Tensor


def as_output(x: Tensor, form: str, *, training: bool = True) -> Any:
    """The model's output in its form."""
    match form:
        case "by mode":
            return (x, x.detach().mean(-1)) if training else x
        case "list":
            return [x, x.detach().mean(-1)]
        case "tuple":
            return x, x.detach().mean(-1)
        case "dict":
            return {"logits": x, "hidden": x.detach()}
        case "object":
            return Result(x, x.detach())
    return x


def logits_of(output: Any) -> Tensor:
    """The logits of an output of any form."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, (tuple, list)) else output.logits


class Net(nn.Module):
    """A whole model, whose forward has features among its blocks."""

    def __init__(self, case: Any, config: Config) -> None:
        super().__init__()
        self.entry = nn.Embedding(VOCABULARY, WIDTH) if case.tokens else linear()
        self.blocks = nn.ModuleList(blocks_of(case, config))
        self.head = nn.Linear(WIDTH, VOCABULARY if case.tokens else WIDTH)
        if case.tied:
            self.head.weight = self.entry.weight
        self.depth, self.form, self.container, self.skip, self.repeat = (
            len(self.blocks),
            case.form,
            case.container,
            case.skip,
            case.repeat,
        )
        self.forces, self.collect, self.borrow = case.forces, case.collect, case.borrow
        if case.borrow:
            self.lend = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.touches: dict[int, list[Run]] = {}
        for place, name in case.inline:
            FEATURES[name].setup(self, config)
            self.touches.setdefault(place, []).append(FEATURES[name].run)

    def forward(self, x: Tensor, side: Tensor | None = None, bounds: Tensor | None = None) -> Any:
        if self.forces:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = self.body(x, side, bounds)
                (force,) = torch.autograd.grad(y.sum(), x, create_graph=self.training)
                return as_output(y + force, self.form, training=self.training)
        return as_output(self.body(x, side, bounds), self.form, training=self.training)

    def body(self, x: Tensor, side: Tensor | None, bounds: Tensor | None) -> Tensor:
        source, x = x, self.entry(x)
        if side is not None:
            x = x + side
        if bounds is not None:
            x = x * (1 + bounds.to(x.dtype).mean())
        first, seen = x, []
        value = packed(x, self.container)
        for number, block in enumerate(self.blocks[: self.depth]):
            if number in self.touches:
                x = unpacked(value, self.container)
                for touch in self.touches[number]:
                    x = touch(self, x)
                value = packed(x, self.container)
            value = block(value)
            seen.append(unpacked(value, self.container))
        x = unpacked(value, self.container)
        if self.collect:
            x = x + torch.stack(seen).mean(0)
        if self.borrow:
            x = x + functional.linear(
                x, self.entry.weight if x.shape[-1] == len(self.entry.weight) else self.lend
            )
        if self.repeat:
            x = unpacked(self.blocks[0](packed(x, self.container)), self.container)
        if self.skip:
            x = x + first
        if self.forces and source.is_floating_point():
            x = x + source**2
        return self.head(x)


class First(nn.Module):
    """The first layer of a list: takes what the mini-batch gives."""

    def __init__(self, entry: nn.Module, container: str) -> None:
        super().__init__()
        self.entry, self.container = entry, container

    def forward(self, given: Any, side: Tensor | None = None, bounds: Tensor | None = None) -> Any:
        if isinstance(given, tuple):
            given, side = given
        elif isinstance(given, dict):
            given, side = given["x"], given["side"]
        x = self.entry(given)
        x = x if side is None else x + side
        x = x if bounds is None else x * (1 + bounds.to(x.dtype).mean())
        return packed(x, self.container)


class Last(nn.Module):
    """The last layer of a list."""

    def __init__(self, head: nn.Module, container: str, form: str) -> None:
        super().__init__()
        self.head, self.container, self.form = head, container, form

    def forward(self, value: Any) -> Any:
        x = self.head(unpacked(value, self.container))
        return as_output(x, self.form, training=self.training)


class Notes:
    """An object through which layers tell each other something."""

    def __init__(self) -> None:
        self.value: Any = None
        self.values: list[Tensor] = []


class Writes(nn.Module):
    """A layer that leaves something in an object that a later layer reads."""

    def __init__(self, notes: Notes, kind: str) -> None:
        super().__init__()
        self.notes, self.kind, self.inner = notes, kind, linear()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x)
        if self.kind == "list":
            self.notes.values.append(x.mean(-1, keepdim=True))
        elif self.kind == "detached":
            self.notes.value = x.detach().mean(-1, keepdim=True)
        else:
            self.notes.value = x
        return x


class Reads(nn.Module):
    """A layer that reads what an earlier layer left."""

    def __init__(self, notes: Notes, kind: str) -> None:
        super().__init__()
        self.notes, self.kind, self.inner = notes, kind, linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (self.notes.values.pop() if self.kind == "list" else self.notes.value)


class BufferWriter(nn.Module):
    """A layer that updates a buffer which another layer reads."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().flatten(0, -2).mean(0))
        return x


class BufferReader(nn.Module):
    """A layer that reads the buffer of another layer."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) - self.mean


class Normed(nn.Module):
    """A linear layer and a batch norm, which another layer may have too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = linear(), norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x + self.norm(x.flatten(0, -2)).view_as(x)


SHARED: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {}


def _notes(kind: str) -> Callable[[], tuple[nn.Module, nn.Module]]:
    def make() -> tuple[nn.Module, nn.Module]:
        notes = Notes()
        return Writes(notes, kind), Reads(notes, kind)

    return make


def _one_buffer() -> tuple[nn.Module, nn.Module]:
    mean = torch.zeros(WIDTH, dtype=torch.float64)
    return BufferWriter(mean), BufferReader(mean)


def _one_norm() -> tuple[nn.Module, nn.Module]:
    norm = nn.BatchNorm1d(WIDTH)
    return Normed(norm), Normed(norm)


SHARED["object"] = _notes("object")
SHARED["detached object"] = _notes("detached")
SHARED["list"] = _notes("list")
SHARED["buffer"] = _one_buffer
SHARED["batch norm"] = _one_norm


def blocks_of(case: Any, config: Config) -> list[nn.Module]:
    """The blocks of a case, with those that are features and those that share something."""
    made: list[nn.Module] = [
        BLOCKS[name]() if name in BLOCKS else block_of(name, config) for name in case.blocks
    ]
    if case.shared:
        kind, first, second = case.shared
        made[first], made[second] = SHARED[kind]()
    if case.container != "tensor":
        made = [Carries(block, case.container) for block in made]
    return made


def as_double(module: nn.Module) -> nn.Module:
    """The module in float64; buffers that two modules have stay one."""
    shared: dict[int, Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = shared.setdefault(id(buffer), buffer.double())
        for parameter in part._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.double()
    return module


def list_of(case: Any, config: Config) -> nn.Sequential:
    """The layers of a case as a sequential, with features in layers of their own."""
    entry = nn.Embedding(VOCABULARY, WIDTH) if case.tokens else linear()
    head = nn.Linear(WIDTH, VOCABULARY if case.tokens else WIDTH)
    if case.tied:
        head.weight = entry.weight
    blocks = blocks_of(case, config)
    if case.repeat:
        blocks.append(blocks[0])
    return nn.Sequential(First(entry, case.container), *blocks, Last(head, case.container, case.form))
