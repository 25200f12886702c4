"""A stage's runs are composed of its wrappers, in order, and of no further ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from counterflow.runtime.messages.values import Keyworded
from counterflow.runtime.stages.aux_loss import AuxLossCollector
from counterflow.runtime.stages.input_guard import InputGuard
from counterflow.runtime.stages.named_layer import NamedLayer
from counterflow.runtime.stages.precision import Autocast
from counterflow.runtime.stages.randomness import RandomStreams
from counterflow.runtime.stages.replays import LayerReplays
from counterflow.runtime.stages.sample_rows import SampleRows
from counterflow.runtime.stages.stage import LocalStage
from counterflow.runtime.stages.stage_wrappers import Run, StageWrapper, composed
from counterflow.schedule.modes import Recompute

ROWS = SampleRows(0, 2, 0, 2)


class Both(StageWrapper):
    """Notes when it begins and ends."""

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted = name, noted

    def wrap_stage(self, run: Run, value: Any, step: int, rows: SampleRows) -> Any:
        return self._around(f"{self.name} of the stage", run, value, step, rows)

    def wrap_layer(self, layer: NamedLayer, run: Run, value: Any, step: int, rows: SampleRows) -> Any:
        return self._around(f"{self.name} of layer {layer.index}", run, value, step, rows)

    def _around(self, place: str, run: Run, value: Any, step: int, rows: SampleRows) -> Any:
        assert (step, rows) == (3, ROWS)
        self.noted.append(place)
        found = run(value, step, rows)
        self.noted.append(f"end of {place}")
        return found


class OfLayers(StageWrapper):
    """Is around layers alone."""

    def wrap_layer(self, _: NamedLayer, run: Run, value: Any, step: int, rows: SampleRows) -> Any:
        return run(value + 1, step, rows)


def layers(*modules: nn.Module, first: int = 4) -> list[NamedLayer]:
    return [NamedLayer(index, {}, module) for index, module in enumerate(modules, first)]


class Doubles(nn.Module):
    def forward(self, x: float) -> float:
        return 2 * x


def test_the_first_wrapper_is_the_outermost() -> None:
    noted: list[str] = []
    run = composed(layers(Doubles()), [Both("a", noted), Both("b", noted)])
    assert run(1, 3, ROWS) == 2
    begins = ["a of the stage", "b of the stage", "a of layer 4", "b of layer 4"]
    assert noted == [*begins, *(f"end of {place}" for place in reversed(begins))]


def test_layers_follow_each_other_and_a_wrapper_wraps_each() -> None:
    assert composed(layers(Doubles(), Doubles()), [OfLayers()])(1, 3, ROWS) == 10
    assert composed(layers(Doubles(), Doubles()), [])(1, 3, ROWS) == 4


def test_a_wrapper_is_in_no_run_that_it_does_not_wrap() -> None:
    run = composed(layers(Doubles(), Doubles()), [OfLayers()])
    assert not isinstance(run, partial)  # nothing is around the stage


def test_the_first_layer_takes_keyword_arguments() -> None:
    class Adds(nn.Module):
        def forward(self, x: float, *, more: float) -> float:
            return x + more

    assert composed(layers(Adds(), Doubles()), [])(Keyworded(1.0, {"more": 2.0}), 3, ROWS) == 6.0
    assert composed(layers(Adds()), [])(Keyworded(None, {"x": 1.0, "more": 3.0}), 3, ROWS) == 4.0


def stage(recompute: Recompute = Recompute.NONE, **options: Any) -> LocalStage:
    streams = RandomStreams(0, torch.device("cpu"))
    return LocalStage(1, layers(nn.Linear(2, 2), nn.Dropout(0.5)), streams, recompute, **options)


def wrappers_of(run: Any) -> list[type]:
    """Those around a stage, the outermost first."""
    found = []
    while isinstance(run, partial):
        found.append(type(run.func.__self__))  # type: ignore[attr-defined]
        (run,) = run.args
    return found


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        (Recompute.NONE, [AuxLossCollector, InputGuard]),
        (Recompute.LAYER, [AuxLossCollector, InputGuard, LayerReplays]),
    ],
)
def test_a_stage_has_what_it_needs(recompute: Recompute, expected: list[type]) -> None:
    copy = stage(recompute)
    assert wrappers_of(copy.run_layers) == expected
    with copy.evaluating():
        assert wrappers_of(copy.run_layers) == [AuxLossCollector]
        assert not copy.layers[1].module.training
    assert wrappers_of(copy.run_layers) == expected


def test_what_is_composed_is_there_once_and_goes_when_it_is_over() -> None:
    copy = stage()
    before = len(copy.wrappers)
    copy.note_checked()
    assert len(copy.wrappers) == before - 1  # what layers hand on is known
    copy.split()
    assert [kind.__name__ for kind in wrappers_of(copy.run_layers)] == [
        "AuxLossCollector",
        "InputGuard",
        "HooksOnce",
    ]
    assert len(copy.wrappers) == before - 1


def test_precision_is_a_wrapper_where_it_is_not_plain() -> None:
    def low(copy: LocalStage) -> Autocast:
        return Autocast(torch.device("cpu"), torch.bfloat16, copy.parameters(), keeps=True)

    assert not any(isinstance(wrapper, Autocast) for wrapper in stage().wrappers)
    assert any(isinstance(wrapper, Autocast) for wrapper in stage(precision=low).wrappers)


def test_diagnoses_run_layers_on_copies_of_their_inputs() -> None:
    """A layer may change its input in place, even one that a diagnosis made a leaf."""

    class Halves(nn.Module):
        def forward(self, value: dict[str, torch.Tensor]) -> torch.Tensor:
            return value.pop("x").mul_(0.5) + value["table"].add_(1)

    copy = LocalStage(1, layers(Halves()), RandomStreams(0, torch.device("cpu")), Recompute.NONE)
    ((_, run, _),) = copy.layer_runs()
    value = {"x": torch.ones(2, 2, requires_grad=True), "table": torch.zeros(2)}
    outputs = [run(value, 3, ROWS) for _ in range(2)]
    assert [output.tolist() for output in outputs] == [[[1.5, 1.5], [1.5, 1.5]]] * 2
    assert value["x"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert value["table"].tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(outputs[0].sum(), [value["x"]])
    assert gradient.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_stage_draws_by_step_and_rows_and_not_when_it_evaluates() -> None:
    copy, x = stage(), torch.ones(2, 2)
    first, again = (copy.run_layers(x, 3, ROWS) for _ in range(2))
    assert torch.equal(first, again)
    others = [
        copy.run_layers(x, step, SampleRows(batch, 2, 0, 2)) for step, batch in ((4, 0), (3, 1), (5, 2))
    ]
    assert any(not torch.equal(first, other) for other in others)
    with copy.evaluating():
        state = torch.get_rng_state()
        assert torch.equal(copy.run_layers(x, 3, ROWS), copy.layers[0].module(x))
        assert torch.equal(torch.get_rng_state(), state)
