"""The layers of a user's model, and the names their parameters have in it."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from counterflow.capture.model_layers import ListLayers, layers_of, parameter_count, state_names
from counterflow.errors import ConfigError


class Tower(nn.Module):
    """A user's model whose forward is more than a chain of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, 4)
        self.trunk = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.exit = nn.Linear(4, 2)


class Named(nn.Module):
    """A layer that wraps a part of a model."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.part(value).relu()
        return output


def submodules(tower: Tower) -> list[nn.Module]:
    return [tower.entry, *tower.trunk, tower.exit]


def wrapped(tower: Tower) -> list[nn.Module]:
    return [Named(tower.entry), *tower.trunk, Named(tower.exit)]


def test_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
    assert layers_of(model) == [model[0], model[1]]
    assert state_names(model)[1] == {"1.weight": "1.1.weight", "1.bias": "1.1.bias"}


def test_a_sequential_with_names() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 3), second=nn.ReLU()))
    assert state_names(model) == [{"weight": "first.weight", "bias": "first.bias"}, {}]


def test_a_list() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU()]
    for model in (layers, tuple(layers), nn.ModuleList(layers)):
        assert layers_of(model) == layers
        assert state_names(model) == [{"weight": "0.weight", "bias": "0.bias"}, {}]


def test_a_module_that_stands_there_twice() -> None:
    twice = nn.Linear(2, 2)
    model = nn.Sequential(twice, nn.ReLU(), twice)
    assert layers_of(model) == [twice, model[1], twice]
    assert [name for names in state_names(model) for name in names.values()] == list(model.state_dict())


def test_a_module_with_a_function_that_lists_its_layers() -> None:
    tower = Tower()
    assert layers_of(tower, submodules) == submodules(tower)


@pytest.mark.parametrize("list_layers", [submodules, wrapped])
def test_state_names_cover_the_models_state(list_layers: ListLayers) -> None:
    tower = Tower()
    names = state_names(tower, list_layers)
    assert [name for layer in names for name in layer.values()] == list(tower.state_dict())
    assert names[2]["running_mean"] == "trunk.1.running_mean"


def test_layers_that_wrap_parts() -> None:
    tower = Tower()
    assert state_names(tower, wrapped)[0] == {"part.weight": "entry.weight", "part.bias": "entry.bias"}
    with pytest.raises(ConfigError, match=r"part\.weight of layer 4 \(Named\) is no parameter or buffer"):
        state_names(tower, lambda t: [*wrapped(t), Named(nn.Linear(2, 2))])


def test_the_chain_of_layers_is_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    value = inputs = torch.randn(4, 2)
    for layer in layers_of(model):
        value = layer(value)
    assert torch.equal(value, model(inputs))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers of Tower are not known: give example=, .*nn\.Seq"):
        layers_of(Tower())
    with pytest.raises(ConfigError, match="the layers of int are not known"):
        layers_of(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the list has no layers"):
        layers_of([])
    with pytest.raises(ConfigError, match=r"layer 1 is a function: every layer must be an nn\.Module"):
        layers_of([nn.ReLU(), submodules])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"exit\.weight of the Tower is in none of the 3 listed layers"):
        layers_of(Tower(), lambda tower: submodules(tower)[:-1])


def test_a_tied_parameter_counts_once() -> None:
    linear = nn.Linear(3, 3)
    assert parameter_count([linear]) == parameter_count([linear, linear]) == 12
