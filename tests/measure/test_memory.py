"""Predicted against measured peaks of allocated bytes; ``benchmarks/memory.py`` has more runs."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from counterflow.measure.equal_layers import kinds_of
from counterflow.measure.layer_costs import assembled
from counterflow.measure.layer_times import bytes_of
from counterflow.measure.stages.allocations import allocated
from counterflow.measure.stages.timing import measure_stages
from counterflow.models.gpt import GPTConfig
from counterflow.planning import Cluster, Configuration, Link, Model, Profile
from counterflow.planning.predict import Predictor
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import registry, schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute

GPT = GPTConfig(layers=4, hidden=32, heads=2, vocabulary=64, positions=64, dropout=0.0)
SAMPLES = 2


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _batch(samples: int) -> tuple[Any, Any]:
    return GPT.sample(samples, generator=torch.Generator().manual_seed(1))


def _pipeline(schedule: Schedule, **more: Any) -> Pipeline:
    with torch.device("meta"):  # else the layers that were given are there too
        layers = GPT.build()
    return Pipeline(layers, GPT.loss, schedule, optimizer=_adam, digest_every=0, **more)


def _profiled() -> tuple[Model, Profile]:
    layers = GPT.build()
    found = bytes_of(_pipeline, len(layers), *_batch(SAMPLES))
    assert found.update.states == 2.0
    model = Model("gpt", tuple(kinds_of(layers)), found.update.states, _batch(1)[0].nbytes)
    return model, assembled(layers, [found])


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    ((model, profile),) = launch(_profiled, workers=1, transport="local")
    link = Link(0.0, 0.0)
    return Predictor(model, profile, Cluster("c", 1, 2, 1e12, inside=link, between=link, cores=2))


def _peak(schedule: Schedule, cuts: tuple[int, ...], recompute: str) -> int:
    inputs, targets = _batch(SAMPLES * schedule.micro_batches)
    with allocated() as now:
        pipeline = _pipeline(schedule, cuts=list(cuts), recompute=recompute)
    for _ in range(2):  # the first step learns shapes, and makes the optimiser's state
        with allocated(since=now.current) as now:
            pipeline.step(inputs, targets)
    return now.peak


@pytest.mark.parametrize(
    ("scheme", "recompute"), [("gpipe", "none"), ("dapple", "stage"), ("zb-h1", "none"), ("zb-h1", "stage")]
)
def test_peaks_are_as_predicted(predictor: Predictor, scheme: str, recompute: str) -> None:
    options = {"stages": 2, "micro_batches": 4}
    plan = Configuration.of(scheme, options, 1, SAMPLES, recompute=Recompute(recompute))
    play = predictor.play(plan)
    gc.collect()  # what goes later would go from these bytes
    gc.disable()
    try:
        work = partial(_peak, registry.build(scheme, options), play.stages.cuts, recompute)
        peaks = launch(work, workers=2, transport="strict-local")
    finally:
        gc.enable()
    assert [worker.total for worker in play.memory] == pytest.approx(peaks, rel=0.05)


def test_what_was_allocated_before_is_freed_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    gc.collect()  # cycles of earlier measurements would be freed in this one, with the sizes that those saw
    before = [torch.ones(1000)]
    with allocated() as allocation:
        before.clear()
    assert (allocation.current, capfd.readouterr().err) == (0, "")


def test_allocations_are_counted_with_scratch() -> None:
    with allocated() as found:
        kept = torch.ones(100) + torch.ones(100)
    assert (found.current, found.peak, kept.nbytes) == (400, 1200, 400)
    with allocated(since=found.current) as after:
        del kept
    assert (after.current, after.peak) == (0, 400)


def _saved_with_autocast() -> float:
    made = partial(torch.optim.SGD, lr=0.1)
    loss, one = torch.nn.functional.cross_entropy, schemes.dapple(1, 1)
    layer = torch.nn.Linear(8, 1000)
    with Pipeline([layer], loss, one, optimizer=made, autocast=torch.bfloat16) as pipeline:
        (cost,) = measure_stages(pipeline, torch.ones(4, 8), torch.zeros(4, dtype=torch.long), repeats=1)
    return cost.activation_bytes


def test_a_loss_is_measured_in_the_precision_that_autocast_has_for_it() -> None:
    (saved,) = launch(_saved_with_autocast, workers=1, transport="local")
    assert 4 * 1000 * 4 <= saved < 4 * 1000 * 4 + 1000
