"""Several pipelines in the same workers: in turn, one after another, and gone."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import sgd


def run(work: Callable[..., Any], *args: object, workers: int, **options: Any) -> list[Any]:
    return launch(work, *args, workers=workers, timeout_seconds=20, **{"transport": "local", **options})


def models() -> list[list[nn.Module]]:
    torch.manual_seed(0)
    return [[nn.Linear(4, 4) for _ in range(4)] for _ in range(2)]


def _in_turn(
    layers: list[list[nn.Module]], schedules: Sequence[Schedule], which: Sequence[int], evaluates: bool
) -> list[Any]:
    pipelines = [
        Pipeline(copy.deepcopy(layers[i]), nn.functional.mse_loss, schedules[i], optimizer=sgd) for i in which
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(16, 4, generator=generator)
        for pipeline in pipelines:
            pipeline.step(x, x)
    if evaluates:
        pipelines[0].evaluate(x, x)
    return [pipeline.model_state_dict() for pipeline in pipelines]


PAIRS = [
    (schemes.dapple(4, 4), schemes.chimera(4, 4)),
    (schemes.pipedream_2bw(4, 4), schemes.chimera(4, 4)),
    (schemes.pipedream(4), schemes.pipedream(4)),
]


@pytest.mark.table
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pipelines_step_in_turn(pair: Sequence[Schedule], evaluates: bool) -> None:
    layers = models()
    alone = [run(_in_turn, layers, pair, [i], evaluates, workers=4)[0][0] for i in range(2)]
    both = run(_in_turn, layers, pair, [0, 1], evaluates, workers=4)[0]
    for one, other in zip(alone, both, strict=True):
        for name, tensor in one.items():
            assert torch.equal(other[name], tensor)


def test_pipelines_step_in_turn_between_processes() -> None:
    layers, pair = models(), PAIRS[1]
    alone = run(_in_turn, layers, pair, [0], False, workers=4)[0][0]
    both = run(_in_turn, layers, pair, [0, 1], True, workers=4, transport="gloo")[0][0]
    assert all(torch.equal(both[name], tensor) for name, tensor in alone.items())


def test_where_messages_go_by_order_another_pipeline_has_to_be_empty() -> None:
    with pytest.raises(ConfigError, match=r"over strict-local its messages would be taken for this one"):
        run(_in_turn, models(), PAIRS[1], [0, 1], False, workers=4, transport="strict-local")


def _closed(layers: list[nn.Module]) -> float:
    x = torch.ones(8, 4)
    with Pipeline(layers, nn.functional.mse_loss, schemes.pipedream_2bw(4, 4), optimizer=sgd) as pipeline:
        pipeline.step(x, x)
    assert not pipeline.in_flight
    pipeline.close()
    return pipeline.step(x, x).loss


def test_a_closed_pipeline_says_so() -> None:
    with pytest.raises(ConfigError, match="the pipeline is closed; make another one"):
        run(_closed, models()[0], workers=4)


def _after_refusal(layers: list[nn.Module]) -> float:
    def refuse(_: Any) -> torch.optim.Optimizer:
        raise ConfigError("refused")

    x = torch.ones(8, 4)
    with pytest.raises(ConfigError, match="refused") as refusal:
        Pipeline(copy.deepcopy(layers), nn.functional.mse_loss, schemes.dapple(4, 4), optimizer=refuse)
    with Pipeline(layers, nn.functional.mse_loss, schemes.dapple(4, 4), optimizer=sgd) as pipeline:
        loss = pipeline.step(x, x).loss
    assert refusal.tb is not None  # it has the first pipeline
    return loss


def test_a_pipeline_is_made_after_one_that_was_refused() -> None:
    assert run(_after_refusal, models()[0], workers=4)[0] > 0


def _many(layers: list[nn.Module], closes: bool) -> list[int]:
    found, made, new_group = [], [0], dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        made[0] += 1
        return new_group(*args, **options)

    dist.new_group = counted
    x = torch.ones(8, 4)
    for number in range(4):
        pipeline = Pipeline(
            copy.deepcopy(layers), nn.functional.mse_loss, schemes.chimera(2, 2), optimizer=sgd
        )
        pipeline.step(x, x)
        if closes:
            pipeline.close()
        del pipeline
        gc.collect()
        if number in (1, 3):
            found += [len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task")]
            found += made  # torch keeps something of each
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("closes", [False, True])
def test_pipelines_that_are_gone_leave_nothing(closes: bool) -> None:
    for files, threads, groups, then_files, then_threads, then_groups in run(
        _many, models()[0], closes, workers=2, transport="gloo"
    ):
        assert then_files <= files
        assert then_threads <= threads
        assert then_groups == groups > 0
