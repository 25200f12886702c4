"""Plans with several devices a worker, run on four processes: what a rank holds is what was predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import counterflow as cf
from counterflow.common import toml
from counterflow.common.parallel_degrees import above_one
from counterflow.planning.inputs.layer_parts import Division
from counterflow.planning.inputs.profile import Profile
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.task import load_example
from counterflow.runtime.pipeline import Pipeline
from counterflow.training.job import prepare
from counterflow.training.load import load_config
from counterflow.training.planned import planned_config
from counterflow.training.stage_mesh import degrees_of, samples_of


def held(path: str) -> tuple[dict[int, tuple[int, int]], float]:
    """By stage of this rank, the bytes of its weights and of its optimiser's state; the loss of a step."""
    config = load_config(path)
    job, degrees = prepare(config), degrees_of(config)
    pipeline = Pipeline(
        job.layers, job.bundle.loss, job.schedule, optimizer=job.optimizer, cuts=job.cuts, seed=0,
        **degrees.options(config.pipeline.replicas, job.schedule.workers),
    )  # fmt: skip
    data = pipeline.data
    batch = job.bundle.batches.batch(0, config.train.samples, replica=data.number, replicas=data.count)
    loss = pipeline.step(*samples_of(pipeline, batch)).loss
    stages = {}
    for number, optimizer in pipeline.optimizers.items():
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        states = [state for row in optimizer.state.values() for state in row.values() if state.dim()]
        stages[number] = sum(map(local_bytes, weights)), sum(map(local_bytes, states))
    return stages, float(loss)


def local_bytes(tensor: Any) -> int:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes


def with_attention_divided(profile: Profile) -> Profile:
    """A profile whose blocks have a table for tensor parallelism: the attention of 4 heads in 32 features."""
    block = profile.layers["gpt-block"]
    projection, output = 32 * 96 + 96, 32 * 32
    share = 4 * (projection + output) / block.weights_bytes
    sums = {"forward_sums": 1, "backward_sums": 1}
    divided = replace(block, tensor_parallel=Division(weights=share, parts=4, **sums))
    return replace(profile, layers={**profile.layers, "gpt-block": divided})


@pytest.fixture(scope="module")
def loss_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Loss of the same model and samples on one process."""
    task = load_example("gpt-moe")
    path = tmp_path_factory.mktemp("one") / "one.toml"
    train = "\n".join(f"{key} = {toml.shown(value)}" for key, value in task.model.train.items())
    schedule = '[schedule]\nscheme = "gpipe"\nstages = 1\nmicro_batches = 1\n'
    path.write_text(f"[model]\n{train}\n{schedule}[train]\nsamples = {task.mini_batch}\n", encoding="utf-8")
    found: Any = cf.launch(held, str(path), workers=1, transport="local")
    return float(found[0][1])


@pytest.mark.parametrize(
    ("limits", "mesh"),
    [
        ({"experts": (2,), "depths": (2,)}, {"dp_shard": 2, "ep": 2}),
        ({"experts": (2,), "contexts": (2,), "depths": (2,)}, {"cp": 2, "ep": 2}),
        ({"experts": (2,), "shards": (4,), "depths": (1,)}, {"dp_shard": 4, "ep": 2}),
        ({"tensor_parallel": (2,), "depths": (2,)}, {"tp": 2}),
        ({"tensor_parallel": (2,), "experts": (2,), "depths": (2,)}, {"tp": 2, "ep": 2}),
        (
            {"tensor_parallel": (2,), "experts": (2,), "shards": (2,), "depths": (1,)},
            {"dp_shard": 2, "tp": 2, "ep": 2},
        ),
        ({"tensor_parallel": (2,), "experts": (4,), "depths": (1,)}, {"dp_shard": 2, "tp": 2, "ep": 4}),
    ],
)
def test_ranks_hold_what_was_predicted(
    limits: dict[str, tuple[int, ...]], mesh: dict[str, int], loss_of_one_process: float, tmp_path: Path
) -> None:
    task = load_example("gpt-moe")
    constraints = Constraints(("dapple",), samples=(2,), **limits)  # type: ignore[arg-type]
    profile = with_attention_divided(task.profile)
    result = search(task.model, profile, task.cluster, task.mini_batch, constraints, count=1)
    play = result.best[0].play
    config = planned_config(task.model, profile, task.cluster, play.prediction())
    table = {name: size for name, size in config.mesh.values().items() if name != "ring" and size > 1}
    assert table == mesh == above_one(play.configuration.degrees)
    assert config.processes == 4
    path = tmp_path / "plan.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    ranks: Any = cf.launch(held, str(path), workers=4, threads=1, timeout_seconds=120)
    positions = play.configuration.degrees.positions
    for rank, (stages, loss) in enumerate(ranks):
        worker = rank // positions
        assert {*stages} == {stage for _, stage in play.schedule.placement.stages_on(worker)}
        for stage, (weights, states) in stages.items():
            assert weights == pytest.approx(play.stages.weights[stage], rel=1e-12)
            assert states == pytest.approx(play.stages.optimizer[stage], rel=1e-12)
        assert loss == pytest.approx(ranks[0][1])
    assert ranks[0][1] == pytest.approx(loss_of_one_process, rel=1e-6)
