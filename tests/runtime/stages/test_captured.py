"""Captured passes: the numbers of plain torch from replayed graphs, and stages that run plainly for a reason.

Workers have pretended devices, whose graphs replay operators at fixed addresses and overwrite memory that a
GPU would overwrite.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

import counterflow as cf
from counterflow.runtime.stages.capture_rules import refuse_graph
from counterflow.runtime.stages.named_layer import NamedLayer
from counterflow.runtime.stages.precision import Precision
from counterflow.runtime.stages.randomness import RandomStreams
from counterflow.runtime.stages.sample_rows import SampleRows
from counterflow.runtime.stages.stage_graphs import CapturedLayers, StageGraphs
from counterflow.schedule.ir import Schedule
from counterflow.testing.strict_nccl.device import Device
from counterflow.testing.strict_nccl.operator_modes import computing

from ...kit import F64, adamw, batch, momentum, run, sgd

PLAIN = 4
"""Steps before the first capture: two that count memory, and two that are watched."""

SCHEDULES = [
    cf.schemes.dapple(2, 6),
    cf.schemes.chimera(2, 4),
    cf.schemes.interleaved(2, 4, 2),
    cf.schemes.gpipe(2, 4),
    cf.schemes.zb_h1(2, 6),
    cf.schemes.zb_v(2, 4),
    cf.schemes.dualpipe_v(2, 4),
]


class Block(nn.Module):
    """A layer with views, norms, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(4, dtype=F64), nn.Linear(4, 6, dtype=F64)
        self.second = nn.Linear(6, 4, dtype=F64)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(self.norm(x)))
        return x + self.second(y) + self.first.weight.sum(0) * y[:, :4]  # type: ignore[no-any-return]


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def train(
    layers: list[nn.Module],
    schedule: Schedule,
    steps: int = PLAIN + 4,
    *,
    optimizer: Any = momentum,
    between: Callable[[cf.Pipeline, int], None] = lambda *_: None,
    samples: Callable[[int], int] = lambda _: 12,
    capture: bool = True,
    dtype: torch.dtype = F64,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor], dict[int, Any]]:
    """Losses, state and reports of all stages; ``between`` is called before each step."""

    def work() -> Any:
        pipeline = cf.Pipeline(
            copy.deepcopy(layers), mse_loss, schedule, optimizer=optimizer, capture=capture, **options
        )
        losses = []
        for number in range(steps):
            between(pipeline, number)
            losses.append(pipeline.step(*batch(number, samples(number), dtype=dtype)).loss)
        pipeline.flush()
        return losses, pipeline.model_state_dict(), pipeline.captured

    results = run(work, transport="strict-nccl")
    losses, state, _ = results[0]
    return losses, state, {stage: report for _, _, reports in results for stage, report in reports.items()}


def expected(layers: list[nn.Module], steps: int = PLAIN + 4) -> tuple[list[float], dict[str, Tensor]]:
    """The same training in one process, in plain torch."""
    model = nn.Sequential(*copy.deepcopy(layers))
    optimizer, losses = momentum(model.parameters()), []
    for number in range(steps):
        inputs, targets = batch(number, 12)
        loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def assert_same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first[:2], second[:2], rtol=1e-10, atol=1e-12, equal_nan=True)


def assert_replayed(reports: dict[int, Any], least: int = 1) -> None:
    assert reports
    for report in reports.values():
        assert report.reason is None
        assert report.units > 0
        assert report.replays >= least


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_replays_have_the_numbers_of_plain_torch(schedule: Schedule) -> None:
    layers = blocks(schedule.stages)
    losses, state, reports = train(layers, schedule)
    assert_same((losses, state), expected(layers))
    micro_batches = schedule.micro_batches
    for report in reports.values():
        assert report.reason is None
        # Of the units after the plain steps all but the first ones in flight are replays.
        pipes = 2 if schedule.scheme == "chimera" else 1
        assert report.replays == (4 * micro_batches // pipes - report.units)
        assert 0 < report.units <= micro_batches


@pytest.mark.parametrize("barrier", [True, False])
def test_options_around_the_layers(barrier: bool) -> None:
    options: dict[str, Any] = {"clip_norm": 0.1, "barrier": barrier}
    results = [
        train(blocks(2), cf.schemes.dapple(2, 4), capture=capture, **options) for capture in (True, False)
    ]
    assert results[0][0] == results[1][0]
    assert_same(results[0], results[1])
    assert_replayed(results[0][2], 8)


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4, dtype=F64), nn.Dropout(0.4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", [cf.schemes.chimera(2, 4), cf.schemes.zb_h1(2, 4)], ids=str)
def test_draws_are_those_of_plain_passes(schedule: Schedule) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=F64), Draws(), nn.Linear(4, 4, dtype=F64), Draws(), Block(), Block()]
    results = [train(layers, schedule, capture=capture, cuts=[3]) for capture in (True, False)]
    assert_same(results[0], results[1])
    assert_replayed(results[0][2], 4)


@pytest.mark.parametrize(
    ("schedule", "options", "units"),
    [
        (cf.schemes.dapple(2, 4), {}, 1),
        (cf.schemes.dapple(2, 6), {"barrier": False}, 1),
        (cf.schemes.chimera(2, 4), {}, 1),
        (cf.schemes.zb_v(2, 4), {}, 4),
        (cf.schemes.interleaved(2, 4, 2), {}, 1),
        (cf.schemes.gpipe(2, 4), {"autocast": "bfloat16", "dtype": torch.float32}, 1),
        (cf.schemes.dapple(2, 4), {"compute_dtype": "bfloat16", "dtype": torch.float32}, 1),
    ],
    ids=["dapple", "no barrier", "chimera", "zb-v", "interleaved", "autocast", "compute_dtype"],
)
def test_stages_that_are_computed_again_replay_both_forwards(
    schedule: Schedule, options: dict[str, Any], units: int
) -> None:
    """Graphs are free after the first forward: fewer units than micro-batches in flight have some."""
    layers: list[nn.Module] = [nn.Sequential(block, nn.Dropout(0.3)) for block in blocks(schedule.stages)]
    if "dtype" in options:
        layers = [layer.float() for layer in layers]
    results = [
        train(layers, schedule, capture=capture, recompute="stage", **options) for capture in (True, False)
    ]
    assert_same(results[0], results[1])
    micro_batches = schedule.micro_batches
    for report in results[0][2].values():
        assert report.reason is None
        assert 0 < report.units <= units
        pipes = 2 if schedule.scheme == "chimera" else 1
        assert report.replays == 2 * 4 * micro_batches // pipes - report.units


class Twice(nn.Module):
    """A weight of the layer before, and an input that is changed in place."""

    def __init__(self, before: nn.Linear) -> None:
        super().__init__()
        self.tied, self.scale = before, nn.Parameter(torch.ones(4, dtype=F64))

    @override
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        y = x.pop("y").mul_(2.0)
        return functional.linear(y, self.tied.weight.t()) * self.scale + x["x"]


class ToDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4, dtype=F64), nn.Dropout(0.3)

    @override
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.dropout(x), "y": self.layer(x)}


def recomputed_layers(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(stages):
        to_dict = ToDict()
        layers += [Block(), Draws(), to_dict, Twice(to_dict.layer), Block()]
    return layers


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (cf.schemes.dapple(2, 4), {}),
        (cf.schemes.dapple(2, 6), {"barrier": False, "clip_norm": 0.1}),
        (cf.schemes.chimera(2, 4), {}),
        (cf.schemes.gems(2, 4), {}),
        (cf.schemes.interleaved(2, 4, 2), {}),
        (cf.schemes.gpipe(2, 4), {"autocast": "bfloat16", "dtype": torch.float32}),
        (cf.schemes.dapple(2, 4), {"compute_dtype": "bfloat16", "dtype": torch.float32}),
    ],
    ids=["dapple", "no barrier", "chimera", "gems", "interleaved", "autocast", "compute_dtype"],
)
def test_layers_that_are_computed_again_are_captured(schedule: Schedule, options: dict[str, Any]) -> None:
    layers = recomputed_layers(schedule.stages)
    if "dtype" in options:
        layers = [layer.float() for layer in layers]
    options = {"cuts": [5 * stage for stage in range(1, schedule.stages)], **options}
    results = [
        train(layers, schedule, capture=capture, recompute=recompute, **options)
        for capture, recompute in ((True, "layer"), (False, "layer"), (False, "none"))
    ]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    for report in results[0][2].values():
        assert report.reason is None
        assert report.replays > 0


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=F64)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)  # type: ignore[no-any-return]


def test_buffers_change_as_in_plain_passes() -> None:
    layers = [*blocks(1), Norm(), Norm(), *blocks(1)]
    results = [train(layers, cf.schemes.dapple(2, 4), capture=capture) for capture in (True, False)]
    assert_same(results[0], results[1])
    assert_replayed(results[0][2], 4)


def test_a_stage_that_changes_buffers_and_is_computed_again_runs_plainly() -> None:
    layers = [*blocks(1), Norm(), *blocks(2)]
    results = [
        train(layers, cf.schemes.dapple(2, 4), capture=capture, recompute="stage", cuts=[2])
        for capture in (True, False)
    ]
    assert_same(results[0], results[1])
    assert "changes buffers, and is computed again" in results[0][2][0].reason
    assert results[0][2][1].replays > 0


def test_autocast_and_loss_scale() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(2)]

    def work(capture: bool) -> Any:
        pipeline = cf.Pipeline(
            copy.deepcopy(layers), mse_loss, cf.schemes.dapple(2, 4), optimizer=sgd,
            autocast="bfloat16", loss_scale=1024.0, capture=capture,
        )  # fmt: skip
        losses = [pipeline.step(*batch(n, 8, dtype=torch.float32)).loss for n in range(PLAIN + 2)]
        return losses, pipeline.model_state_dict(), pipeline.captured

    captured, plain = (run(work, capture, transport="strict-nccl") for capture in (True, False))
    assert captured[0][0] == plain[0][0]
    torch.testing.assert_close(captured[0][1], plain[0][1], rtol=0, atol=0)
    for result in captured:
        assert_replayed(result[2], 4)


class Single(nn.Module):
    """Weights of which one is frozen, statistics and draws in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.frozen, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.frozen.requires_grad_(False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return self.dropout(self.norm(x + y + self.frozen(y)))  # type: ignore[no-any-return]


def reset_weights(pipeline: cf.Pipeline, number: int) -> None:
    """Change all weights between two steps, as a user who loads others."""
    if number == PLAIN + 2:
        pipeline.load_model_state_dict({n: w * 0.5 for n, w in pipeline.model_state_dict().items()})


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (cf.schemes.dapple(2, 4), {}),
        (cf.schemes.dapple(2, 4), {"barrier": False}),
        (cf.schemes.dapple(2, 4), {"compute_dtype": "float16", "loss_scale": 256.0, "clip_norm": 0.1}),
        (cf.schemes.chimera(2, 4), {}),
        (cf.schemes.zb_v(2, 4), {}),
        (cf.schemes.interleaved(2, 4, 2), {"between": reset_weights}),
    ],
    ids=["dapple", "no barrier", "float16", "chimera", "zb-v", "weights of a user"],
)
def test_weights_are_cast_into_the_memory_that_graphs_read(
    schedule: Schedule, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Single() for _ in range(schedule.stages)]
    results = [
        train(
            layers, schedule, capture=capture, dtype=torch.float32, **{"compute_dtype": "bfloat16", **options}
        )
        for capture in (True, False)
    ]
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert len(set(results[0][0])) == len(results[0][0])  # weights change
    assert_replayed(results[0][2], 4)


@pytest.mark.parametrize("schedule", [cf.schemes.pipedream_2bw(2, 4), cf.schemes.wpipe(2, 4)], ids=str)
def test_each_version_of_a_weight_is_cast_into_its_own_memory(schedule: Schedule) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Single() for _ in range(schedule.stages)]
    results = [
        train(layers, schedule, capture=capture, dtype=torch.float32, compute_dtype="bfloat16")
        for capture in (True, False)
    ]
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


def test_each_shape_has_graphs_of_its_own() -> None:
    def samples(number: int) -> int:
        return 9 if number % 2 else 12

    results = [
        train(blocks(2), cf.schemes.dapple(2, 4), PLAIN + 8, samples=samples, capture=capture)
        for capture in (True, False)
    ]
    assert_same(results[0], results[1])
    assert_replayed(results[0][2])
    assert all(report.shapes == 2 for report in results[0][2].values())  # micro-batches of 2 and 3 samples


def test_a_load_an_evaluation_and_a_prediction_between_steps() -> None:
    inputs, targets = batch(100, 12)

    def work(capture: bool) -> Any:
        pipeline = cf.Pipeline(
            copy.deepcopy(blocks(2)), mse_loss, cf.schemes.dapple(2, 4), optimizer=momentum, capture=capture
        )
        numbers: list[Any] = []
        state = pipeline.state_dict()
        for number in range(PLAIN + 6):
            if number == PLAIN + 2:
                pipeline.load_state_dict(state)
            numbers.append(pipeline.step(*batch(number, 12)).loss)
            numbers.append(pipeline.evaluate(inputs, targets).loss)
            numbers.append(pipeline.predict(inputs).tolist() if number % 2 else 0)
        return numbers, pipeline.model_state_dict(), pipeline.captured

    captured, plain = (run(work, capture, transport="strict-nccl") for capture in (True, False))
    assert captured[0][0] == plain[0][0]
    assert_same(captured[0], plain[0])
    for result in captured:
        assert_replayed(result[2], 8)


class Scaled(nn.Linear):
    scale = 1.0

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def scaled(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [Scaled(4, 4, dtype=F64) for _ in range(count)]
    for layer in layers:
        layer.scale = 1.0
    return [*layers]


@pytest.mark.parametrize("change", ["attribute", "frozen", "memory"])
def test_changes_between_steps_have_the_graphs_made_again(change: str) -> None:
    def between(pipeline: cf.Pipeline, number: int) -> None:
        if number != PLAIN + 2:
            return
        for layer in modules(pipeline):
            if change == "attribute":
                layer.scale = 0.5
            elif change == "frozen":
                layer.bias.requires_grad_(False)
            else:
                layer.weight.data = layer.weight.data * 2

    results = [
        train(scaled(2), cf.schemes.dapple(2, 4), PLAIN + 8, between=between, capture=capture)
        for capture in (True, False)
    ]
    assert_same(results[0], results[1])
    assert_replayed(results[0][2], 6)


class Gained(nn.Module):
    """A layer with attributes of its class, and one that it may have."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tanh = nn.Linear(4, 4, dtype=F64), nn.Tanh()

    @override
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.tanh(self.linear(x)) * self.factor * getattr(self, "late", 1.0)
        return output


def _halved_forward(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = layer.tanh(layer.linear(x)) * 0.5
    return output


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "attribute over that of the class": lambda layer, _: setattr(layer, "factor", 0.5),
    "attribute of the class": lambda _, patch: patch.setattr(Gained, "factor", 0.5),
    "new attribute": lambda layer, _: setattr(layer, "late", 0.5),
    "forward of the layer": lambda layer, _: setattr(layer, "forward", partial(_halved_forward, layer)),
    "forward of the class": lambda _, patch: patch.setattr(Gained, "forward", _halved_forward),
    "forward of a module of torch": lambda layer, _: setattr(layer.tanh, "forward", torch.relu),
    "strides": lambda layer, _: setattr(layer.linear.weight, "data", layer.linear.weight.data.t()),
    "deterministic algorithms": lambda *_: torch.use_deterministic_algorithms(mode=True),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("change", CHANGES)
def test_any_change_between_steps_counts(change: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Gained(), Gained()]
    deterministic = torch.are_deterministic_algorithms_enabled()

    def between(pipeline: cf.Pipeline, number: int) -> None:
        if number == PLAIN + 2:
            for layer in modules(pipeline):
                CHANGES[change](layer, patch)

    results = []
    for capture in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            results.append(train(layers, cf.schemes.gpipe(1, 4), PLAIN + 6, between=between, capture=capture))
        torch.use_deterministic_algorithms(deterministic)
    assert_same(results[0], results[1])
    (report,) = results[0][2].values()
    assert report.reason is None
    assert report.replays == 4 + 4  # in a step before the change, and in one after three further steps


@pytest.mark.parametrize("begins", [True, False])
def test_autocast_around_some_steps_counts(begins: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]

    def work(capture: bool) -> list[float]:
        pipeline = cf.Pipeline(
            copy.deepcopy(layers), mse_loss, cf.schemes.dapple(2, 4), optimizer=sgd, capture=capture,
            dynamic_shapes=True,
        )  # fmt: skip
        losses = []
        for number in range(PLAIN + 6):
            with torch.autocast("cpu", torch.bfloat16, enabled=(number < PLAIN + 2) is not begins):
                losses.append(pipeline.step(*batch(number, 8, dtype=torch.float32)).loss)
        return losses

    captured, plain = (run(work, capture, transport="strict-nccl")[0] for capture in (True, False))
    assert captured == plain


def test_values_that_change_in_each_step_let_a_stage_run_plainly() -> None:
    def between(pipeline: cf.Pipeline, number: int) -> None:
        for layer in modules(pipeline):
            layer.scale = 1 + 0.1 * (number // 3)

    results = [
        train(scaled(2), cf.schemes.dapple(2, 4), PLAIN + 16, between=between, capture=capture)
        for capture in (True, False)
    ]
    assert_same(results[0], results[1])
    for report in results[0][2].values():
        assert re.search("scale.* changes between steps", report.reason)
        assert str(report) == f"runs plainly: {report.reason}"


def modules(pipeline: cf.Pipeline) -> list[Any]:
    engine: Any = pipeline._engine
    return [layer.module for stage in engine.local.stages.values() for layer in stage.layers]


class Pair(nn.Module):
    """Two outputs, of which the layer after uses the second one for some samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)

    @override
    def forward(self, x: Tensor) -> Any:
        return {"one": self.one(x), "two": self.two(x), "unused": self.two(x).detach()}


class Takes(nn.Linear):
    @override
    def forward(self, input: Any) -> Tensor:
        return super().forward(input["one"] + (input["two"] if len(input["one"]) == 2 else 0))


@pytest.mark.parametrize("schedule", [cf.schemes.dapple(2, 4), cf.schemes.zb_h1(2, 4)], ids=str)
@pytest.mark.parametrize("samples", [8, 12])
def test_outputs_without_a_gradient(samples: int, schedule: Schedule) -> None:
    torch.manual_seed(0)
    layers = [Pair(), Takes(4, 4, dtype=F64)]
    results = [
        train(layers, schedule, samples=lambda _: samples, optimizer=adamw, capture=capture)
        for capture in (True, False)
    ]
    assert_same(results[0], results[1])  # an optimizer leaves weights without a gradient as they are
    assert_replayed(results[0][2], 8)


@pytest.mark.parametrize("schedule", [cf.schemes.dapple(2, 4), cf.schemes.zb_h1(2, 4)], ids=str)
def test_hooks_of_weights_run_as_in_plain_passes(schedule: Schedule) -> None:
    def work(capture: bool) -> Any:
        layers: list[Any] = blocks(2)
        calls: list[str] = []

        def doubled(gradient: Tensor) -> Tensor:
            calls.append("gradient")
            return gradient * 2

        for layer in layers:
            layer.first.weight.register_hook(doubled)
        pipeline = cf.Pipeline(layers, mse_loss, schedule, optimizer=sgd, capture=capture)
        losses = [pipeline.step(*batch(number)).loss for number in range(PLAIN + 2)]
        return losses, pipeline.model_state_dict(), len(calls), pipeline.captured

    captured, plain = (run(work, capture, transport="strict-nccl")[0] for capture in (True, False))
    assert_same(captured, plain)
    assert captured[2] == plain[2] > 0
    assert_replayed(captured[3], 4)


@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_captured_backward_in_two_ops_leaves_the_weights_of_products(has_gradient: bool) -> None:
    pretended = Device(0, lambda _launches, _why: None)
    rows = SampleRows(0, 3, 0, 3)
    with computing(pretended.stream, pretended):
        module = Block().to(pretended.handle)
        weights = list(module.parameters())
        x = torch.randn(3, 4, dtype=F64, device=pretended.handle).requires_grad_(has_gradient)
        above = torch.randn_like(x, requires_grad=False)
        wanted = ([x] if has_gradient else []) + weights
        expected = torch.autograd.grad(module(x), wanted, above)
        streams = RandomStreams(0, pretended.handle)
        layers = CapturedLayers("the stage", [NamedLayer(0, {}, module)], frozenset(), streams, Precision())
        unit = StageGraphs(layers, None, [x])
        for _ in range(2):  # captured, replayed
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
            output, _ = unit.forward([x], 0, rows)
            torch.testing.assert_close(output, module(x))
            inputs = unit.backward([above], direct=True, defers=True)
            left = {name for name, w in module.named_parameters() if not w.grad.any()}  # type: ignore[union-attr]
            # The norm has vectors alone, and the first product's weight is used twice.
            assert left == {"second.weight", "second.bias"} if has_gradient else len(left) == len(weights)
            unit.weight_gradients(direct=True)
            torch.testing.assert_close([*inputs, *(weight.grad for weight in weights)], [*expected])


# -- stages that run plainly


class Reads(Scaled):
    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 if input.abs().sum() > 0 else 2)


class Masked(Scaled):
    @override
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y + y[y > 0].sum()


class Counts(Scaled):
    @override
    def forward(self, input: Tensor) -> Tensor:
        self.scale = 1.5 - self.scale / 2
        return super().forward(input)


class Registers(Scaled):
    @override
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        y.register_hook(lambda gradient: gradient * 2)
        return y


class OnHost(Scaled):
    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(2.0)


class Cached(Scaled):
    """It keeps what it makes of its weight until an update."""

    version: Any = None
    double: Any = None

    @override
    def forward(self, input: Tensor) -> Tensor:
        if self.version != self.weight._version:
            self.version, self.double = self.weight._version, self.weight.detach() * 2
        double: Tensor = self.double
        return super().forward(input) + input @ double


class OwnDraws(Scaled):
    @override
    def forward(self, input: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return super().forward(input) + torch.rand(4, dtype=F64, generator=generator, device=input.device)


REASONS = [
    (Reads, "read tensors in Python"),
    (Masked, "the shape of a tensor depends on values"),
    (Counts, "its layers change .*scale"),
    (Registers, "register hooks on activations"),
    (OnHost, "a tensor on the host"),
    (Cached, "its layers change .*(version|double)"),
    (OwnDraws, "a generator of their own"),
]


def not_foreach(parameters: Any) -> torch.optim.Optimizer:
    """Optimizer whose updates count as changes of weights on pretended devices too."""
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def test_stages_that_cannot_be_captured_run_plainly_and_say_why() -> None:
    torch.manual_seed(0)
    layers = [*blocks(1), *(kind(4, 4, dtype=F64) for kind, _ in REASONS), *blocks(2)]
    for layer in layers[1:-2]:
        layer.scale = 1.0  # type: ignore[assignment]
    schedule = cf.schemes.interleaved(2, 4, 5)
    results = [
        train(layers, schedule, PLAIN + 1, optimizer=not_foreach, capture=capture)
        for capture in (True, False)
    ]
    assert_same(results[0], results[1])
    reports = results[0][2]
    assert reports[0].units > 0
    for stage, (_, reason) in enumerate(REASONS, 1):
        assert re.search(reason, reports[stage].reason), reports[stage]
        assert reports[stage].replays == reports[stage].units == 0
    assert reports[9].units > 0


def test_graphs_of_checkpoints_are_refused() -> None:
    x = torch.ones(2, 4, dtype=F64, requires_grad=True)
    layer = nn.Linear(4, 4, dtype=F64)
    leaves = [x, *layer.parameters()]
    assert refuse_graph([layer(x).tanh()], leaves) is None
    assert "neither an input nor a weight" in str(refuse_graph([layer(x)], leaves[:2]))
    for reentrant, reason in ((False, "pack saved tensors"), (True, "checkpointed")):
        output = checkpoint(lambda y: layer(y).tanh(), x, use_reentrant=reentrant)
        assert reason in str(refuse_graph([output], leaves))


@pytest.mark.parametrize(
    ("schedule", "options", "reason"),
    [
        (cf.schemes.pipedream(2, 4), {}, "several versions of its weights"),
        (cf.schemes.zb_h1(2, 4), {"recompute": "layer"}, "computed again one by one"),
    ],
    ids=str,
)
def test_options_with_which_stages_run_plainly(
    schedule: Schedule, options: dict[str, Any], reason: str
) -> None:
    results = [
        train(blocks(2), schedule, PLAIN + 2, capture=capture, optimizer=sgd, **options)
        for capture in (True, False)
    ]
    assert_same(results[0], results[1])
    for report in results[0][2].values():
        assert reason in report.reason


def test_a_host_has_no_graphs() -> None:
    def work() -> Any:
        pipeline = cf.Pipeline(blocks(2), mse_loss, cf.schemes.dapple(2, 4), optimizer=sgd, capture=True)
        pipeline.step(*batch(0))
        return [report.reason for report in pipeline.captured.values()]

    assert run(work) == [["a cpu device has no graphs"]] * 2


def test_compiled_stages_are_refused() -> None:
    def work() -> None:
        cf.Pipeline(
            blocks(2), mse_loss, cf.schemes.dapple(2, 4), optimizer=sgd, capture=True, compile="aot_eager"
        )

    with pytest.raises(cf.ConfigError, match="capture: compile runs code that is no operator of torch"):
        run(work, transport="strict-nccl")
