"""Degrees of a mesh: its dimensions, and what is refused before a rank starts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import counterflow as cf
from counterflow.models.gpt import GPTConfig
from counterflow.runtime.mesh.mesh_function import _modules_of_rare_dtypes

SIZES = (1, 2, 3, 4, 6)


@pytest.mark.parametrize(("dp_shard", "cp", "tp"), [*itertools.product(SIZES, SIZES, (1, 2, 4))])
def test_experts_borrow_positions(dp_shard: int, cp: int, tp: int) -> None:
    for ep in range(1, dp_shard * cp * tp + 1):
        if dp_shard * cp * tp % ep:
            with pytest.raises(cf.ConfigError, match=rf"ep = {ep}: must divide dp_shard \* cp \* tp"):
                cf.MeshDegrees(dp_shard, cp, tp, ep)
            continue
        degrees = cf.MeshDegrees(dp_shard, cp, tp, ep)
        sizes = degrees.sizes
        assert math.prod(sizes.values()) == degrees.positions == dp_shard * cp * tp
        assert math.prod(sizes[name] for name in degrees.expert_dims) == ep
        assert math.prod(sizes[name] for name in degrees.context_dims) == cp
        assert math.prod(sizes[name] for name in degrees.shard_dims) == dp_shard * cp
        assert math.prod(sizes[name] for name in degrees.tensor_dims) == tp
        assert tuple(sizes) == (*degrees.shard_dims, *degrees.tensor_dims)
        shares = math.prod(sizes[name] for name in degrees.tensor_dims if name in degrees.expert_dims)
        assert shares == math.gcd(ep, tp), "positions of tensor parallelism are borrowed first"


def test_literal_dimensions() -> None:
    assert cf.MeshDegrees(dp_shard=2, cp=2, ep=4).sizes == {"dp_shard": 2, "cp": 2}
    assert cf.MeshDegrees(dp_shard=2, cp=2, ep=4).expert_dims == ("dp_shard", "cp")
    assert cf.MeshDegrees(dp_shard=2, cp=4, ep=2).sizes == {"dp_shard": 2, "cp": 2, "cp_ep": 2}
    assert cf.MeshDegrees(dp_shard=2, cp=4, ep=2).context_dims == ("cp", "cp_ep")
    assert cf.MeshDegrees(dp_shard=6, ep=3).sizes == {"dp_shard": 2, "dp_shard_ep": 3}
    assert cf.MeshDegrees(dp_shard=2, tp=2, ep=2).expert_dims == ("tp",)
    assert cf.MeshDegrees(tp=4, ep=2).sizes == {"tp": 2, "tp_ep": 2}
    assert cf.MeshDegrees().sizes == {}
    assert cf.MeshDegrees().options(1, 4) == {}


def test_degrees_below_one_are_refused() -> None:
    with pytest.raises(cf.ConfigError, match="tp = 0: must be 1 or more"):
        cf.MeshDegrees(tp=0)


def test_models_that_are_not_divided_are_refused() -> None:
    with torch.device("meta"):
        layers = GPTConfig(layers=1, hidden=12, heads=3, vocabulary=8, positions=8).build()
    with pytest.raises(cf.ConfigError, match=r"layer 1: attention .*: 3 heads of output cannot be divided"):
        cf.MeshDegrees(tp=2).refuse_undivided(layers)
    cf.MeshDegrees(tp=3).refuse_undivided(layers)
    with pytest.raises(cf.ConfigError, match="no module of the model says how tensor parallelism divides"):
        cf.MeshDegrees(tp=2).refuse_undivided([nn.Linear(2, 2)])
    with pytest.raises(cf.ConfigError, match="ep = 2: the model has no experts that can be divided"):
        cf.MeshDegrees(dp_shard=2, ep=2).refuse_undivided(layers)
    experts = nn.Module()
    experts.expert_parameters = ("up",)  # type: ignore[assignment]
    experts.up = nn.Parameter(torch.zeros(3, 2, 2))
    with pytest.raises(cf.ConfigError, match="layer 0: 3 experts of Module cannot be divided among 2"):
        cf.MeshDegrees(dp_shard=2, ep=2).refuse_undivided([experts])


def test_a_module_with_weights_of_two_dtypes_is_refused() -> None:
    layer = nn.Linear(2, 2)
    layer.bias = nn.Parameter(layer.bias.detach().double())
    with pytest.raises(
        cf.ConfigError, match=r"inner \(Linear\) has weights of torch.float32 and torch.float64"
    ):
        _modules_of_rare_dtypes(nn.ModuleDict({"inner": layer}))
    assert _modules_of_rare_dtypes(nn.Linear(2, 2)) == []
