"""After a caught error: a pipeline goes on as if the call had not been, or says that it is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf

WAYS = ("loss", "gradient", "forward", "backward", "optimizer", "function", "interrupt", "target")
CLOSED = r"the pipeline is closed, because an earlier call failed: .*start the workers again"


class FaultError(Exception):
    """The user's own error."""


class Layer(nn.Module):
    """A linear layer with batch statistics, which fails on request, in one way."""

    def __init__(self, state: dict[str, str | None]) -> None:
        super().__init__()
        self.linear, self.norm, self.state = nn.Linear(4, 4), nn.BatchNorm1d(4), state

    def forward(self, x: Tensor) -> Tensor:
        way = self.state["way"] if self.training else None
        if way == "forward":
            raise FaultError(way)
        if way == "interrupt":
            raise KeyboardInterrupt
        y: Tensor = self.norm(self.linear(x))
        if way in {"backward", "gradient"}:
            y.register_hook(partial(_hook, way))
        return y


def _hook(way: str, gradient: Tensor) -> Tensor:
    if way == "backward":
        raise FaultError(way)
    return torch.full_like(gradient, torch.inf)


class FaultySgd(torch.optim.SGD):
    """An optimiser that fails on request."""

    way: dict[str, str | None]

    def step(self, closure: Any = None) -> Any:
        if self.way["way"] == "optimizer":
            raise FaultError("optimizer")
        return super().step(closure)


def batch(seed: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return x, torch.randn(samples, 4, generator=generator)


def made(scheme: str, **options: Any) -> tuple[cf.Pipeline, dict[str, str | None]]:
    torch.manual_seed(0)
    state: dict[str, str | None] = {"way": None}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if state["way"] == "function":
            raise FaultError("function")
        found: Tensor = nn.functional.mse_loss(output, target)
        return found + (torch.inf if state["way"] == "loss" else 0.0)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = FaultySgd(parameters, lr=0.1)
        made.way = state
        return made

    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Layer(state), nn.Linear(4, 4), nn.Linear(4, 4)]
    return cf.Pipeline(layers, loss, scheme, optimizer=optimizer, **options), state


def _failing(scheme: str, way: str, keeps: bool, options: dict[str, Any]) -> list[str]:
    pipeline, state = made(scheme, **options)
    pipeline.step(*batch(1))
    if keeps:
        pipeline.step(*batch(2), update=False)
    state["way"] = way
    x, y = batch(3)
    y = y[:, :3] if way == "target" else y

    def steps() -> None:
        for _ in range(4):  # what an asynchronous step finds, later steps report
            pipeline.step(x, y)
        pipeline.flush()

    with pytest.raises((cf.CounterflowError, KeyboardInterrupt)):
        steps()
    state["way"] = None
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: pipeline.step(*batch(4)),
        "flush": pipeline.flush,
        "evaluate": lambda: pipeline.evaluate(*batch(4)),
        "predict": lambda: pipeline.predict(batch(4)[0]),
        "state_dict": pipeline.state_dict,
        "local": lambda: pipeline.model_state_dict(local=True),
        "load": lambda: pipeline.load_model_state_dict({}),
        "trainable": lambda: pipeline.set_trainable(lambda _: True),
        "ema": lambda: pipeline.ema(0.9),
        "step again": lambda: pipeline.step(*batch(4)),
    }
    for call in calls.values():
        with pytest.raises(cf.WorkerError, match=CLOSED):
            call()
    pipeline.close()
    return list(calls)


@pytest.mark.parametrize(
    ("scheme", "keeps", "options"),
    [
        ("dapple(stages=2, micro_batches=4)", False, {}),
        ("dapple(stages=2, micro_batches=4)", True, {"recompute": "stage"}),
        ("dapple(stages=2, micro_batches=4)", False, {"barrier": False}),
        ("zb-v(workers=2, micro_batches=4)", False, {"clip_norm": 1.0}),
        ("chimera(stages=2, micro_batches=4)", False, {"deferred_batch_norm": True, "zero_stage": 1}),
        ("pipedream-2bw(stages=2, micro_batches=4)", False, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_step_that_failed_closes_the_pipeline(scheme: str, keeps: bool, options: dict[str, Any]) -> None:
    for way in WAYS:
        called = cf.launch(
            _failing, scheme, way, keeps, options, workers=2, transport="local", timeout_seconds=30
        )
        assert [len(calls) for calls in called] == [10, 10]


def test_a_step_that_failed_closes_the_pipeline_of_processes() -> None:
    scheme = "dapple(stages=2, micro_batches=4)"
    called = cf.launch(_failing, scheme, "loss", True, {}, workers=2, transport="gloo", timeout_seconds=60)
    assert [len(calls) for calls in called] == [10, 10]


def _batches(bad: str) -> dict[str, Any]:
    x, y = batch(5)

    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield x[:2], y[:2]
        raise FaultError("data")

    every: dict[str, dict[str, Any]] = {
        "targets": {"inputs": x, "targets": y[:7]},
        "none": {"inputs": x[:0], "targets": y[:0]},
        "missing": {"inputs": None, "targets": y},
        "data": {"micro_batches": broken()},
        "count": {"micro_batches": [(x, y)]},
        "both": {"inputs": x, "targets": y, "micro_batches": [(x, y)] * 4},
        "number": {"inputs": 3.0, "targets": y},
    }
    return every[bad]


BAD = ("targets", "none", "missing", "data", "count", "both", "number")


def _refusing(scheme: str, evaluates: bool, options: dict[str, Any], bad: tuple[str, ...]) -> list[Any]:
    """Losses of steps between which mini-batches are refused on all workers, and the weights."""
    pipeline, _ = made(scheme, **options)
    keeps = scheme.startswith("dapple")
    found: list[Any] = []
    for number in range(3):
        if evaluates or "barrier" in options:
            found += [step.loss for step in pipeline.flush()]
        for which in bad:
            call = pipeline.evaluate if evaluates else pipeline.step
            with pytest.raises(cf.CounterflowError) as error:
                call(**_batches(which))
            assert "closed" not in str(error.value)
        if keeps:
            found.append(pipeline.step(*batch(10 + number), update=False).loss)
        found.append(pipeline.step(*batch(number)).loss)
    found += [step.loss for step in pipeline.flush()]
    return [str(found), pipeline.steps, pipeline.model_state_dict()]


@pytest.mark.parametrize(
    ("scheme", "evaluates", "options"),
    [
        ("dapple(stages=2, micro_batches=4)", False, {}),
        ("dapple(stages=2, micro_batches=4)", True, {}),
        ("dapple(stages=2, micro_batches=4)", False, {"barrier": False}),
        ("chimera(stages=2, micro_batches=4)", False, {"zero_stage": 1}),
        ("pipedream-2bw(stages=2, micro_batches=4)", True, {}),
    ],
    ids=str,
)
def test_a_refused_mini_batch_leaves_the_pipeline_as_it_was(
    scheme: str, evaluates: bool, options: dict[str, Any]
) -> None:
    refused = cf.launch(
        _refusing, scheme, evaluates, options, BAD, workers=2, transport="local", timeout_seconds=30
    )
    plain = cf.launch(_refusing, scheme, evaluates, options, (), workers=2, transport="local")
    for (losses, steps, state), (other, other_steps, other_state) in zip(refused, plain, strict=True):
        assert (losses, steps) == (other, other_steps)
        assert all(torch.equal(state[name], tensor) for name, tensor in other_state.items())


def test_a_refused_mini_batch_leaves_the_pipeline_of_processes_as_it_was() -> None:
    scheme = "dapple(stages=2, micro_batches=4)"
    refused = cf.launch(_refusing, scheme, False, {}, BAD, workers=2, transport="gloo", timeout_seconds=60)
    plain = cf.launch(_refusing, scheme, False, {}, (), workers=2, transport="local")
    assert refused[0][:2] == plain[0][:2]


def _refused_in_flight(scheme: str, options: dict[str, Any]) -> tuple[str, str]:
    pipeline, _ = made(scheme, **options)
    pipeline.step(*batch(0))
    assert pipeline.in_flight
    with pytest.raises(cf.ConfigError) as refused:
        pipeline.step(*batch(1, samples=9))
    with pytest.raises(cf.WorkerError, match=CLOSED) as closed:
        pipeline.flush()
    return str(refused.value), str(closed.value)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("dapple(stages=2, micro_batches=4)", {"barrier": False}),
        ("pipedream-2bw(stages=2, micro_batches=4)", {}),
    ],
    ids=str,
)
def test_what_is_refused_while_others_may_work_closes_the_pipeline(
    scheme: str, options: dict[str, Any]
) -> None:
    found = cf.launch(_refused_in_flight, scheme, options, workers=2, transport="local", timeout_seconds=30)
    assert all("was given 9 samples, the one before 8" in each for row in found for each in row)


def _refused_by_one(first: bool) -> list[str]:
    pipeline, _ = made("dapple(stages=2, micro_batches=4)")
    losses = [] if first else [pipeline.step(*batch(0)).loss]
    x, y = batch(5)
    with pytest.raises(cf.ConfigError) as refused:
        pipeline.step(None if pipeline.worker == 0 else x, y)
    try:
        losses.append(pipeline.step(*batch(1)).loss)
    except cf.WorkerError as error:
        return [str(refused.value), str(error)]
    return [str(refused.value), str(losses)]


def test_what_one_worker_refuses_all_refuse() -> None:
    first, second = cf.launch(_refused_by_one, True, workers=2, transport="local", timeout_seconds=30)
    assert "holds the first stage and needs the inputs" in first[0]
    assert second[0] == f"rank 0 refused its mini-batch: {first[0]}"
    assert first[1] == second[1]
    assert float(first[1][1:-1]) > 0


def test_what_one_worker_refuses_when_another_has_begun_closes_the_pipeline() -> None:
    first, second = cf.launch(_refused_by_one, False, workers=2, transport="local", timeout_seconds=30)
    assert "holds the first stage and needs the inputs" in first[0]
    assert "rank 0 refused its mini-batch, which other workers had begun" in second[0]
    assert all(
        "the pipeline is closed, because an earlier call failed" in each for each in (first[1], second[1])
    )
