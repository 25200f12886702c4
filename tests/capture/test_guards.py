"""Changes by a user between two steps count in layers that were found by a recording, or are refused."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf

SCALE = 1.0
SETTINGS: dict[str, Any] = {"scale": 1.0, "deep": {"factors": [1.0]}}


def sample(number: int) -> Tensor:
    return torch.randn((8, 8), generator=torch.Generator().manual_seed(number), dtype=torch.float32)


def scaled(x: Tensor) -> Tensor:
    return x * SCALE * SETTINGS["scale"] * SETTINGS["deep"]["factors"][0]  # type: ignore[no-any-return]


def multiplies(by: list[float]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return x * by[0]

    return function


class Block(nn.Module):
    share = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.one, self.other, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.0)
        self.config, self.activation, self.rate = config, nn.Tanh(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.one(x)))
        hidden = functional.dropout(hidden, self.rate, self.training)
        gain = self.share * self.config.gain * self.config.inner.gain * (1.5 if self.training else 1.0)
        return x + gain * self.other(hidden)  # type: ignore[no-any-return]


class Net(nn.Module):
    mask: Tensor
    weights: Tensor
    temperature: float
    factors: list[Any]
    function: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(gain=1.0, inner=SimpleNamespace(gain=1.0))
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(4))
        self.register_buffer("mask", torch.ones(8))
        self.weights, self.table, self.factors = (
            torch.ones(8),
            np.ones(8, dtype=np.float32),
            [torch.ones(8), 1.0],
        )
        self.by = [1.0]
        self.temperature, self.norm = 1.0, nn.LayerNorm(8)
        self.function = multiplies(self.by)

    @property
    def half_temperature(self) -> float:
        return self.temperature / 2

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.function(scaled(x)) * self.mask * self.weights * torch.as_tensor(self.table.tolist())
        x = (
            x * self.factors[0] * self.factors[1] / self.temperature
            + self.half_temperature
            + 10 * self.norm.eps
        )
        return x * self.further if hasattr(self, "further") else x  # type: ignore[operator]


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda _: None,
    "number": lambda m: setattr(m, "temperature", 1.5),
    "number of an object": lambda m: setattr(m.config, "gain", 0.5),
    "number of a nested object": lambda m: setattr(m.config.inner, "gain", 0.5),
    "number of one block": lambda m: setattr(m.blocks[2], "share", 0.5),
    "number of a class": lambda _: setattr(Block, "share", 0.7),
    "number of a module that is called": lambda m: setattr(m.norm, "eps", 0.01),
    "global": lambda _: set_global("SCALE", 0.9),
    "dict": lambda _: SETTINGS.update(scale=0.8),
    "list in a dict in a dict": lambda _: SETTINGS["deep"]["factors"].__setitem__(0, 0.9),
    "list of a closure": lambda m: m.by.__setitem__(0, 0.9),
    "function": lambda m: setattr(m, "function", lambda x: 0.9 * x),
    "tensor": lambda m: setattr(m, "weights", torch.full((8,), 0.9)),
    "content of a tensor": lambda m: m.weights.mul_(0.9),
    "buffer": lambda m: setattr(m, "mask", torch.full((8,), 0.9)),
    "array": lambda m: m.table.fill(0.9),
    "content of a tensor in a list": lambda m: m.factors[0].fill_(0.9),
    "item of a list": lambda m: m.factors.__setitem__(1, 0.9),
    "mode of one block": lambda m: m.blocks[1].eval(),
    "mode of the model": lambda m: m.eval(),
    "mode of the model again": lambda m: m.train(),
    "module without weights": lambda m: setattr(m.blocks[3], "activation", nn.ReLU()),
    "further module without weights": lambda m: m.blocks.append(nn.Tanh()),
    "method": lambda _: setattr(Block, "forward", lambda self, x: x + 0.1 * self.other(self.one(x))),
    "attribute that did not exist": lambda m: setattr(m, "further", 0.9),
    "attribute that is gone": lambda m: delattr(m, "further"),
    "attribute that nobody reads": lambda m: setattr(m, "unread", 3),
    "default dtype": lambda _: torch.set_default_dtype(torch.float64),
}


FORWARD = Block.forward


def reset() -> None:
    """Undo the changes of what all models share."""
    set_global("SCALE", 1.0)
    SETTINGS.update(scale=1.0, deep={"factors": [1.0]})
    Block.share, Block.forward = 1.0, FORWARD  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    reset()


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target.to(output.dtype))


def pipeline_of(model: nn.Module, scheme: str, **options: Any) -> cf.Pipeline:
    return cf.Pipeline(
        model,
        loss_of,
        scheme,
        optimizer=lambda p: torch.optim.SGD(p, 0.01),
        example=sample(0),
        **options,
    )


def test_what_changes_counts_from_the_next_step_on() -> None:
    expected = {}
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step, (name, change) in enumerate(CHANGES.items()):
        change(model)
        optimizer.zero_grad()
        loss = loss_of(model(sample(step)), sample(step + 100))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            modes = {module: module.training for module in model.modules()}
            predicted = model.eval()(sample(step)).sum().item()
            for module, mode in modes.items():
                module.training = mode
        expected[name] = loss.item(), predicted

    def work() -> dict[str, tuple[float, float]]:
        model, results = make(), {}
        with pipeline_of(model, "dapple(stages=1, micro_batches=1)", witness_every=0) as pipeline:
            for step, (name, change) in enumerate(CHANGES.items()):
                change(model)
                loss = pipeline.step(sample(step), sample(step + 100)).loss
                results[name] = loss, pipeline.predict(sample(step)).sum().item()
        return results

    reset()
    results = cf.launch(work, workers=1, transport="local")[0]
    for name, numbers in expected.items():
        assert results[name] == pytest.approx(numbers, rel=1e-4, abs=1e-5), name


STAGED = ["number", "number of an object", "tensor", "buffer", "mode of one block", "module without weights"]


def train(names: Sequence[str], scheme: str, options: dict[str, Any]) -> list[float]:
    model, losses = make(), []
    with pipeline_of(model, scheme, **options) as pipeline:
        for step, name in enumerate(names):
            CHANGES[name](model)
            losses.append(pipeline.step(sample(step), sample(step + 100)).loss)
    return losses


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("chimera(workers=2, micro_batches=2)", {}),
        ("zb-v(workers=2, micro_batches=2)", {"recompute": "layer"}),
        ("dapple(stages=2, micro_batches=2)", {"compile": "eager", "witness_every": 0}),
    ],
)
def test_workers_see_the_same_changes(scheme: str, options: dict[str, Any]) -> None:
    expected = cf.launch(
        train, STAGED, "dapple(stages=1, micro_batches=2)", {}, workers=1, transport="local"
    )[0]
    results = cf.launch(train, STAGED, scheme, options, workers=2, transport="local")
    for losses in results:
        assert losses == pytest.approx(expected, rel=1e-4)


def test_an_asynchronous_scheme_ends_what_is_in_flight_before() -> None:
    def work() -> list[float]:
        model = make()
        with pipeline_of(model, "pipedream-2bw(stages=2, micro_batches=2)") as pipeline:
            losses = []
            for step, gain in enumerate((1.0, 1.0, 0.5, 0.5)):
                model.config.gain = gain
                losses.append(pipeline.step(sample(step), sample(step + 100)).loss)
            steps = pipeline.flush()
            assert all(step.seconds > 0 for step in steps)
            return losses + [step.loss for step in steps]

    results = cf.launch(work, workers=2, transport="local")
    assert results[0] == pytest.approx(results[1], nan_ok=True)


def disagree(transport: str, values: dict[int, float]) -> None:
    model = make()
    with pipeline_of(model, "dapple(stages=2, micro_batches=2)") as pipeline:
        pipeline.step(sample(0), sample(1))
        model.temperature = values.get(pipeline.worker, 1.0)
        pipeline.step(sample(2), sample(3))


@pytest.mark.parametrize("transport", ["local", "gloo"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({1: 2.0}, "with a changed model"),
        ({0: 2.0, 1: 3.0}, r"other values on rank . \(temperature\) than on rank . \("),
    ],
)
def test_workers_that_set_other_values_are_refused(
    transport: str, values: dict[int, float], message: str
) -> None:
    with pytest.raises(cf.CounterflowError, match=message):
        cf.launch(disagree, transport, values, workers=2, transport=transport)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (
        lambda m: m.blocks[1].register_forward_hook(lambda *_: None),
        r"a hook on 'blocks\.1' was registered",
    ),
    "hook of the model": (lambda m: m.register_forward_pre_hook(lambda *_: None), "a hook on the model"),
    "block": (lambda m: m.blocks.__setitem__(1, Block(m.config)), r"'blocks\.1\.\w+' was replaced by a"),
    "further block": (lambda m: m.blocks.append(Block(m.config)), r"it would call 'blocks\.4'"),
    "shape of a buffer": (lambda m: setattr(m, "mask", torch.ones(1)), "'mask' was replaced"),
    "decision": (
        lambda m: setattr(m, "function", lambda x: x if x.sum() > 0 else -x),
        "function changed .* decides by a tensor's values",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_recorded_again_is_refused_and_may_be_undone(kind: str) -> None:
    change, message = REFUSED[kind]

    def work() -> float:
        model = make()
        with pipeline_of(model, "dapple(stages=1, micro_batches=2)") as pipeline:
            saved = model.function
            pipeline.step(sample(0), sample(1))
            change(model)
            with pytest.raises(cf.ConfigError, match=message):
                pipeline.step(sample(2), sample(3))
            model.function = saved
            return pipeline.step(sample(2), sample(3)).loss if kind == "decision" else 0.0

    assert cf.launch(work, workers=1, transport="local")[0] >= 0.0


class Counts(Net):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what


class Iterates(Counts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.what)  # type: ignore[no-any-return]


class Draws(Counts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.what.random()  # type: ignore[no-any-return]


class Steps(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.what += 1
        return super().forward(x) * self.what  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support")  # of itertools, in Python 3.12
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Iterates(itertools.count()), "reads what, of which each use gives another value"),
        (lambda: Draws(random.Random(0)), "reads what, of which each use gives another value"),
        (lambda: Draws(np.random.default_rng(0)), "reads what, of which each use gives another value"),
        (lambda: Steps(0), "sets its attribute 'what'"),
    ],
)
def test_what_every_forward_changes_is_refused(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(cf.ConfigError, match=message):
        cf.layers(model(), sample(0))


def test_same_model_sees_the_model_as_it_is() -> None:
    model = make()
    layers = cf.layers(model, sample(0))
    model.temperature = 3.0
    model.blocks[0].eval()
    assert cf.same_model(model, layers, sample(1)).ok


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor


class Further(Net):
    """Reads what other habits leave their numbers in."""

    def __init__(self) -> None:
        super().__init__()
        self.slotted, self.ordered = Slotted(), OrderedDict(one=0.5, other=0.7)
        self.big = dict.fromkeys(range(3000), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slotted.scale(super().forward(x)) * next(iter(self.ordered.values())) * self.big[7]
        x = x * float(os.environ.get("COUNTERFLOW_TEST_SCALE", "1"))
        return x * (1.0 if self.blocks[0].one.weight.requires_grad else 2.0) * vars(self)["temperature"]  # type: ignore[union-attr,no-any-return]


FURTHER: dict[str, Callable[[Any], object]] = {
    "slot": lambda m: setattr(m.slotted, "factor", 0.5),
    "order of keys": lambda m: m.ordered.move_to_end("one"),
    "entry of a large dict": lambda m: m.big.update({7: 0.9}),
    "environment": lambda _: os.environ.update(COUNTERFLOW_TEST_SCALE="0.9"),
    "frozen weight": lambda m: m.blocks[0].requires_grad_(False),
    "attribute read by vars": lambda m: setattr(m, "temperature", 0.9),
}


def test_further_habits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERFLOW_TEST_SCALE", "1")

    def work() -> None:
        torch.manual_seed(0)
        model = Further()
        with pipeline_of(model, "dapple(stages=1, micro_batches=1)", witness_every=0) as pipeline:
            for name, change in FURTHER.items():
                change(model)
                with torch.no_grad():
                    expected = loss_of(model(sample(1)), sample(2)).item()
                assert pipeline.step(sample(1), sample(2)).loss == pytest.approx(expected), name

    cf.launch(work, workers=1, transport="local")


class Seeds(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().forward(x) + torch.rand(8)


class Times(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (time.perf_counter() % 1)


class Saves(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor / 2, lambda tensor: tensor):
            return super().forward(x)


class ChangesAView(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.mask[0].mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Seeds, "sets the state of torch's random numbers"),
        (Times, "does not do the same in each run"),
        (Saves, "changes the tensors that autograd saves"),
        (ChangesAView, "changes a buffer or a parameter in place"),
    ],
)
def test_what_no_steps_repeat_is_refused(kind: type[Net], message: str) -> None:
    with pytest.raises(cf.ConfigError, match=message):
        cf.layers(kind(), sample(0))
