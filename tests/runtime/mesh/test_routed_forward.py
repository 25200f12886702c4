"""Modules of experts whose forward is run on other positions' tokens: what it may be, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import counterflow as cf
from counterflow.runtime.mesh.routed_forward import RoutedForward
from counterflow.runtime.mesh.stage_weights import StageWeights

EXPERTS, WIDTH, HIDDEN = 4, 3, 5


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone, which has all experts."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


class Experts(nn.Module):
    """The loop over experts of transformers' models, with dropout."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.num_experts = form, EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.register_buffer("scale", torch.arange(1.0, EXPERTS + 1))
        self.scales = [1.0, 2.0, 3.0, 4.0]
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        if self.form == "in place":
            hidden_states.mul_(0.5)
        if self.form == "normalised":
            top_k_weights = top_k_weights / top_k_weights.sum(-1, keepdim=True)
        for expert in range(self.num_experts):
            token, k = torch.where(top_k_index == expert)
            rows, weights = hidden_states[token], top_k_weights[token, k, None]
            if self.form == "weighted inputs":
                rows, weights = rows * weights, torch.ones_like(weights)
            rows = self.drop(torch.tanh(rows @ self.up[expert].T)) @ self.down[expert].T
            if self.form == "buffer":
                rows = rows * self.scale[expert]  # type: ignore[index]
            elif self.form == "list":
                rows = rows * self.scales[expert]
            elif self.form == "square":
                weights = weights.square()
            output = output.index_add(0, token, rows * weights)
        return output / top_k_index.shape[-1] if self.form == "mean" else output


def divided(module: Experts, mesh: DeviceMesh) -> Experts:
    for name in ("up", "down"):
        weight = distribute_tensor(module.get_parameter(name).detach(), mesh, [Shard(0)])
        setattr(module, name, nn.Parameter(weight))
    module.forward = RoutedForward("stage 0", module, ["up", "down"], EXPERTS)  # type: ignore[method-assign, assignment]
    return module


def routed(module: nn.Module, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, tokens, WIDTH, generator=generator)
    scores, choices = torch.rand(2, tokens, EXPERTS, generator=generator).topk(2)
    if module.forward.__class__ is not RoutedForward:
        hidden, scores, choices = (tensor.flatten(0, 1) for tensor in (hidden, scores, choices))
    output: Tensor = module(hidden, choices, scores)
    return output.view(2, tokens, WIDTH)


@pytest.mark.parametrize("form", ["plain", "in place"])
def test_a_sum_over_experts_is_that_of_the_module(mesh: DeviceMesh, form: str) -> None:
    torch.manual_seed(0)
    module = Experts(form)
    expected = routed(module.eval(), 7)
    torch.testing.assert_close(routed(divided(module, mesh), 7), expected)


def test_the_comparison_draws_nothing_and_is_made_rarely(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    module, calls = divided(Experts("plain"), mesh), []
    module.drop.register_forward_hook(lambda *_: calls.append(module.drop.training))
    states = []
    for _ in range(3):
        torch.manual_seed(5)
        routed(module, 7)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)
    assert calls.count(False) == 2 * EXPERTS * 2  # of calls 1 and 2, and not of call 3
    assert calls.count(True) == 3 * EXPERTS
    assert module.num_experts == EXPERTS


@pytest.mark.parametrize("form", ["normalised", "weighted inputs", "buffer", "list", "square", "mean"])
def test_other_forwards_are_refused(mesh: DeviceMesh, form: str) -> None:
    torch.manual_seed(0)
    module = divided(Experts(form), mesh)
    routed(module, 0)  # nothing to compare
    with pytest.raises(cf.ConfigError, match=r"stage 0: the forward of Experts is not the sum of weight"):
        routed(module, 7)


# -- weights that other ones replace


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def replaced(module: nn.Module, *names: str) -> None:
    for name in names:
        owner = module.get_submodule(name.rpartition(".")[0])
        parameter = module.get_parameter(name)
        setattr(owner, name.rpartition(".")[2], nn.Parameter(parameter.detach().clone()))


def test_a_tie_that_is_broken_is_refused() -> None:
    module = Tied()
    weights = StageWeights(module, 3)
    weights.preserve(())
    replaced(module, "first.weight")
    with pytest.raises(cf.ConfigError, match=r"first\.weight and second\.weight of stage 3 are one weight"):
        weights.preserve(())
    module.second.weight = module.first.weight  # torch's FSDP keeps ties
    weights.preserve(())


@pytest.mark.parametrize(
    "register",
    [
        lambda weight: weight.register_hook(lambda gradient: gradient),
        lambda weight: weight.register_post_accumulate_grad_hook(lambda _: None),
    ],
)
def test_hooks_that_would_not_be_called_are_refused(register: Callable[[Tensor], object]) -> None:
    module = Tied()
    register(module.first.bias)
    weights = StageWeights(module, 3)
    weights.preserve(())
    with pytest.raises(cf.ConfigError, match=r"first\.bias of stage 3 has a hook, which is not called"):
        weights.preserve({id(module.first.bias)})
    replaced(module, "second.bias")
    weights.preserve(())
    replaced(module, "first.bias")
    with pytest.raises(cf.ConfigError, match=r"first\.bias of stage 3 has a hook, which is not called"):
        weights.preserve(())


def test_attributes_of_weights_are_those_of_the_users() -> None:
    """An optimizer function may make its groups by them."""
    module = Tied()
    vars(module.first.bias)["no_decay"] = True
    weights = StageWeights(module, 3)
    replaced(module, "first.bias")
    weights.preserve(())
    assert vars(module.first.bias)["no_decay"]
