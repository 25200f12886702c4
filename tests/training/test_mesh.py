"""Runs whose stages are on several ranks each, by ``[mesh]``: the losses of one rank per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterflow.errors import ConfigError
from counterflow.training import RunConfig, load_config
from counterflow.training.job import prepare
from counterflow.training.mesh_report import mesh_report, rank_places

from .conftest import Train, losses

RUNS: dict[str, dict[str, Any]] = {
    "dp_shard=2": {"mesh__dp_shard": 2, "train__samples": 8, "schedule__micro_batches": 2},
    "cp=2": {"mesh__cp": 2},
    "tp=2": {"mesh__tp": 2, "pipeline__recompute": "layer"},
}


@pytest.mark.parametrize("degrees", RUNS)
def test_losses_are_those_without_a_mesh(train: Train, tmp_path: Path, degrees: str) -> None:
    """And a checkpoint is gone on from without the mesh."""
    same: dict[str, Any] = {"schedule__micro_batches": 4, "optimizer__schedule": "constant"}
    train("plain", train__steps=4, **same)
    mesh = same | RUNS[degrees] | {"pipeline__transport": "gloo"}
    summary = train("mesh", train__steps=2, **mesh)
    assert (summary.about.processes, summary.about.samples) == (4, 16)
    alone = same | {key: 1 for key in RUNS[degrees] if key.startswith("mesh")} | {"train__samples": 16}
    train("later", train__steps=4, train__resume=tmp_path / "mesh", **alone)
    together = losses(tmp_path / "later")
    assert together == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert losses(tmp_path / "mesh") == pytest.approx(losses(tmp_path / "plain")[:2], rel=1e-5)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["mesh.ep=2"], "mesh.ep = 2: must divide mesh.dp_shard"),
        (["mesh.dp_shard=2", "mesh.ep=2"], "ep = 2: the model has no experts that can be divided"),
        (["mesh.tp=3"], "4 heads of output cannot be divided among 3 positions"),
        (["mesh.cp=3"], "give a multiple of 6"),
        (["mesh.cp=2", "model.kind=bert"], "bert attends in both directions"),
        (["mesh.tp=2", "pipeline.transport=local"], "workers that are threads have no collectives"),
        (["mesh.tp=2", "pipeline.zero_stage=1"], "pipeline.zero_stage: cannot be combined with"),
        (["mesh.tp=2", "pipeline.gradient_compression=int8"], "pipeline.gradient_compression: cannot be"),
        (["mesh.tp=2", "train.fewer_after=9"], "train.fewer_after: plans of fewer workers have no"),
        (["mesh.dp_shard=2", "schedule.scheme=pipedream"], "keeps several versions of its weights"),
        (["mesh.tp=2", "schedule.scheme=pipedream"], "clips each stage by its own norm"),
    ],
)
def test_what_a_mesh_cannot_have_is_refused(sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(load_config(sets=["schedule.scheme=chimera", *sets]))
    assert words in str(error.value)


def test_slices_of_shared_sequences_are_accepted() -> None:
    prepare(load_config(sets=["mesh.cp=2", "schedule.scheme=dapple", "schedule.slices=2"]))


def config_of(*sets: str) -> RunConfig:
    return load_config(sets=sets, scheme="dapple", workers=2)


def test_processes_are_counted() -> None:
    config = config_of("mesh.dp_shard=2", "mesh.tp=2", "pipeline.replicas=3")
    assert (config.processes, config.sample_shares) == (24, 6)
    with pytest.raises(ConfigError, match=r"2 workers per replica, each on 4 ranks by \[mesh\], and 3"):
        config.expect_processes(8)


def test_report_of_ranks() -> None:
    job = prepare(config_of("mesh.dp_shard=2", "mesh.cp=2"))
    places = rank_places(job)
    assert [place.rank for place in places] == [*range(8)]
    assert (places[5].place, places[5].stages) == (
        {"replica": 0, "worker": 1, "dp_shard": 0, "cp": 1},
        (1,),
    )
    assert (places[5].samples, places[5].sequence) == ((0, 2), (1, 2))
    report = mesh_report(job)
    assert [row.ranks for row in report.weights] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {tuple(row.summed_by_fsdp) for row in report.weights} == {("dp_shard", "cp")}


def test_devices_of_a_plan_place_ranks() -> None:
    job = prepare(config_of("mesh.tp=2", "plan.devices=[2, 3, 0, 1]"))
    assert [(place.rank, place.place["worker"], place.place["tp"]) for place in rank_places(job)] == [
        (0, 1, 0),
        (1, 1, 1),
        (2, 0, 0),
        (3, 0, 1),
    ]


def test_memory_of_a_rank_is_its_shards() -> None:
    plain, sharded = (prepare(config_of(*sets)).least_bytes() for sets in ((), ("mesh.dp_shard=2",)))
    # weights, gradients and two states; shards but for the gradients, which are whole until they are summed
    assert [sharded_bytes / all_bytes for sharded_bytes, all_bytes in zip(sharded, plain, strict=True)] == [
        pytest.approx(0.625, rel=0.01)
    ] * 2
