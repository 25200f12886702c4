"""All-to-alls of experts beside the compute of other micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import counterflow as cf

from .test_mesh import cases_of


def test_overlap_changes_no_bit() -> None:
    cf.launch(cases_of("four", "overlap_cases.py"), workers=4, timeout_seconds=60, threads=1)


def test_draws_of_the_other_op_are_found() -> None:
    with pytest.raises(cf.CounterflowError):
        cf.launch(
            cases_of("without_generators", "overlap_cases.py"), workers=4, timeout_seconds=60, threads=1
        )


@pytest.mark.parametrize(
    ("what", "op"), [("forward", r"action 12: Forward F2\.1"), ("backward", r"action 15: Backward B0\.1")]
)
def test_an_op_of_a_pair_that_fails_is_named(what: str, op: str) -> None:
    with pytest.raises(
        cf.WorkerError, match=rf"worker 1, {op}(, layer \d+ \(\w+\))?: ArithmeticError: no experts today"
    ):
        cf.launch(cases_of(f"fail_{what}", "overlap_cases.py"), workers=4, timeout_seconds=60, threads=1)


def test_workers_that_are_threads_are_refused() -> None:
    with pytest.raises(
        cf.ConfigError, match="overlap_experts: workers are threads, which have no all-to-all"
    ):
        cf.launch(_threads, workers=2, transport="local")


def _threads() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    schedule = cf.schemes.dualpipe_v(2, 4)
    cf.Pipeline(layers, nn.MSELoss(), schedule, optimizer=torch.optim.AdamW, overlap_experts=True)


def test_a_schedule_with_pairs_runs_one_op_after_another_without_the_option() -> None:
    schedule = cf.schemes.dualpipe_v(1, 4)
    losses = [
        cf.launch(_loss, made, workers=1, transport="local") for made in (schedule, cf.with_pairs(schedule))
    ]
    assert losses[0] == losses[1]


def _loss(schedule: cf.Schedule) -> float:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2) for _ in range(2)]
    inputs = torch.randn(4, 2)
    with cf.Pipeline(layers, nn.MSELoss(), schedule, optimizer=torch.optim.AdamW) as pipeline:
        assert pipeline.schedule.pairs == ()
        return [pipeline.step(inputs, inputs).loss for _ in range(3)][-1]
