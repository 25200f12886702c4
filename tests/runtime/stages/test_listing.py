"""A list of layers that the user changes while a pipeline trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from counterflow import ConfigError, Pipeline, launch

X = torch.ones(4, 4)


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def _steps(
    change: Callable[[Any], Any], call: str, schedule: str, convert: Callable[[nn.Sequential], Any]
) -> float:
    model = convert(_made())
    pipeline = Pipeline(model, nn.MSELoss(), schedule, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    pipeline.step(X, X)
    change(model)
    if call == "predict":
        pipeline.predict(X)
    if call == "evaluate":
        pipeline.evaluate(X, X)
    return pipeline.step(X, X).loss


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.__setitem__(2, nn.Identity()), "layer 2 of the model is another Identity now"),
        (lambda m: m.append(nn.Tanh()), "has 5 layers now, and had 4"),
        (lambda m: m.register_forward_hook(lambda *_: None), "hooks of its own forward"),
        (lambda m: setattr(m, "forward", lambda x: x), "was given a forward of its own"),
    ],
)
@pytest.mark.parametrize("call", ["step", "evaluate", "predict"])
def test_a_change_of_a_sequential_is_refused(change: Any, words: str, call: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launch(
            _steps,
            change,
            call,
            "dapple(stages=2, micro_batches=2)",
            lambda m: m,
            workers=2,
            transport="local",
        )


def test_a_layer_replaced_in_a_list_is_refused_and_a_list_that_is_emptied_is_not() -> None:
    schedule = "chimera(stages=2, micro_batches=2)"

    def run(change: Any) -> list[float]:
        return launch(_steps, change, "step", schedule, list, workers=2, transport="local")

    with pytest.raises(ConfigError, match="where a Sequential was"):
        run(lambda layers: layers.__setitem__(0, nn.Identity()))
    assert run(lambda layers: layers.clear()) == run(lambda _: None)


def test_what_is_set_within_a_layer_counts() -> None:
    def loss(change: Any) -> float:
        found = launch(
            _steps,
            change,
            "step",
            "gpipe(stages=1, micro_batches=1)",
            lambda m: m,
            workers=1,
            transport="local",
        )
        return float(found[0])

    changed = _made()
    optimizer = torch.optim.SGD(changed.parameters(), lr=0.1)
    nn.functional.mse_loss(changed(X), X).backward()
    optimizer.step()
    changed[2] = nn.Sequential(changed[2][0], nn.Identity())  # type: ignore[index]
    with torch.no_grad():
        wanted = float(nn.functional.mse_loss(changed(X), X))
    assert loss(lambda m: m[2].__setitem__(1, nn.Identity())) == pytest.approx(wanted, rel=1e-6)


def _within(change: Callable[[nn.Sequential], Any]) -> Callable[[nn.Sequential], None]:
    def changed(model: nn.Sequential) -> None:
        layer = model[1]
        assert isinstance(layer, nn.Sequential)
        if not next(layer.parameters()).is_meta:
            change(layer)

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layer: prune.l1_unstructured(layer[0], "weight", amount=0.5), "0.weight_orig .* added"),
        (lambda layer: parametrizations.weight_norm(layer[0]), "0.parametrizations.* added"),
        (lambda layer: setattr(layer[0], "weight", nn.Parameter(torch.eye(4))), "0.weight .* replaced"),
        (lambda layer: layer.__setitem__(0, nn.Linear(4, 4)), "0.weight .* replaced"),
        (lambda layer: layer.append(nn.BatchNorm1d(4)), "2.weight .* added"),
        (lambda layer: layer[0].register_parameter("bias", None), "0.bias .* removed"),
        (lambda layer: layer.register_buffer("scale", torch.ones(1)), "scale .* added"),
    ],
)
@pytest.mark.parametrize(
    "schedule", ["dapple(stages=2, micro_batches=2)", "chimera(stages=2, micro_batches=2)"]
)
def test_other_weights_within_a_layer_are_refused(change: Any, words: str, schedule: str) -> None:
    with pytest.raises(ConfigError, match=f"{words} after the pipeline was made"):
        launch(_steps, _within(change), "step", schedule, lambda m: m, workers=2, transport="local")


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.__setitem__(1, nn.Identity()),
        lambda layer: layer.append(nn.Tanh()),
        lambda layer: layer.register_buffer("scale", torch.ones(1), persistent=False),
    ],
)
def test_modules_without_weights_may_change(change: Any) -> None:
    schedule = "dapple(stages=2, micro_batches=2)"
    launch(_steps, _within(change), "step", schedule, lambda m: m, workers=2, transport="local")
