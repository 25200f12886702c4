"""Degrees of parallelism: every place where users meet them has the degrees of the one record."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest

import counterflow as cf
from counterflow.common.parallel_degrees import DEGREES, Degrees, refuse_degrees
from counterflow.planning.plan_report import ConfigurationShown
from counterflow.training.sections.mesh_section import MeshSection


def test_configs_meshes_and_plans_have_the_same_degrees() -> None:
    names = [field.name for field in fields(Degrees)]
    assert names == [*DEGREES]
    assert [*MeshSection.model_fields] == [field.name for field in fields(cf.MeshDegrees)] == [*names, "ring"]
    assert {row.plan_key for row in DEGREES.values()} <= {*ConfigurationShown.model_fields}


def test_experts_borrow_the_closest_positions() -> None:
    for dp_shard, cp, tp, ep in product(range(1, 7), repeat=4):
        sizes = {"dp_shard": dp_shard, "cp": cp, "tp": tp, "ep": ep}
        if dp_shard * cp * tp % ep:
            with pytest.raises(
                cf.ConfigError, match=rf"mesh\.ep = {ep}: must divide mesh\.dp_shard \* mesh\.cp"
            ):
                refuse_degrees(sizes, "mesh.")
            continue
        degrees = Degrees(**sizes)
        shards, contexts, tensors = degrees.borrowed
        assert shards * contexts * tensors == ep
        assert dp_shard % shards == cp % contexts == tp % tensors == 0
        assert degrees.expert_shards * ep == degrees.shards * tensors
