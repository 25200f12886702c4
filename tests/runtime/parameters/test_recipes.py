"""Optimisers, schedulers and choices of what is trained that workers make differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import counterflow as cf
from counterflow.runtime.workers.world import current_transport

DAPPLE, CHIMERA = "dapple(stages=2, micro_batches=2)", "chimera(stages=2, micro_batches=2)"
SGD, StepLR, LambdaLR = torch.optim.SGD, torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.LambdaLR
X = torch.ones(8, 4)


def made(scheme: str, optimizer: Any, **options: Any) -> cf.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    return cf.Pipeline(layers, nn.MSELoss(), scheme, optimizer=optimizer, **options)


def _differing(scheme: str, which: str, options: dict[str, Any]) -> None:
    other = current_transport().rank == 1
    optimizers: dict[str, Any] = {
        "lr": lambda ps: SGD(ps, lr=0.2 if other else 0.1),
        "class": lambda ps: torch.optim.Adam(ps, lr=0.1) if other else SGD(ps, lr=0.1),
        "group": lambda ps: SGD([{"params": ps, "weight_decay": 0.1 if other else 0.0}], lr=0.1),
        "groups": lambda ps: SGD(
            [{"params": ps[:1]}, {"params": ps[1:]}] if other else [{"params": ps}], lr=0.1
        ),
    }
    schedulers: dict[str, Any] = {
        "step": lambda optimizer: StepLR(optimizer, 3 if other else 2),
        "lambda": lambda optimizer: LambdaLR(
            optimizer, (lambda step: 1 / (1 + step)) if other else lambda step: 1 / (2 + step)
        ),
    }
    made(
        scheme, optimizers.get(which, lambda ps: SGD(ps, lr=0.1)), scheduler=schedulers.get(which), **options
    )


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("lr", r"of rank 0 has lr = 0\.1, that of rank 1 lr = 0\.2; give all workers the same"),
        ("class", r"optimizer = torch\.optim\.sgd\.SGD, that of rank 1 optimizer = torch\.optim\.adam\.Adam"),
        ("group", r"weight_decay = 0\.0 of group 0, that of rank 1 weight_decay = 0\.1"),
        ("groups", "groups = 1, that of rank 1 groups = 2"),
        ("step", "scheduler's step_size = 2, that of rank 1 scheduler's step_size = 3"),
        ("lambda", "scheduler's lr_lambdas"),
    ],
)
def test_other_optimizers_are_refused(which: str, message: str) -> None:
    for scheme in (CHIMERA,) if which == "groups" else (CHIMERA, DAPPLE):  # stages may have other groups
        with pytest.raises(cf.ConfigError, match=message):
            cf.launch(_differing, scheme, which, {}, workers=2, transport="local", timeout_seconds=20)


def test_other_optimizers_are_refused_where_their_state_is_sharded() -> None:
    with pytest.raises(cf.ConfigError, match=r"lr = 0\.1, that of rank 1 lr = 0\.2"):
        cf.launch(
            _differing, CHIMERA, "lr", {"zero_stage": 1}, workers=2, transport="local", timeout_seconds=20
        )


def _by_group() -> float:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        groups = [[p for p in parameters if (p.dim() > 1) is matrices] for matrices in (True, False)]
        return SGD([{"params": group} for group in groups if group], lr=0.1)

    def scheduler(made_: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return LambdaLR(made_, lambda step: 1 / (1 + step))

    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(4, 4, bias=False), nn.LayerNorm(4))]
    pipeline = cf.Pipeline(
        layers, nn.MSELoss(), CHIMERA, optimizer=optimizer, scheduler=scheduler, zero_stage=1
    )
    return pipeline.step(X, X).loss


def test_owners_of_other_groups_have_as_many_functions_of_a_scheduler() -> None:
    """With sharded state, a worker may own matrices alone."""
    losses = cf.launch(_by_group, workers=2, transport="local", timeout_seconds=20)
    assert losses[0] == losses[1]


def _by_stage(which: str) -> float:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if which == "picky" and any(not name[0].isdigit() for name, _ in parameters.named):
            raise KeyError(parameters.named[0][0])
        rates: dict[float, list[nn.Parameter]] = {0.1: [], 0.2: []}
        for name, parameter in parameters.named:
            rates[0.1 if name.startswith("0.") else 0.2].append(parameter)
        groups = [{"params": its, "lr": lr} for lr, its in rates.items() if its]
        return SGD(groups, lr=0.1, momentum=0.9)

    return made(DAPPLE, optimizer).step(X, X).loss


@pytest.mark.parametrize("which", ["by name", "picky"])
def test_optimizers_may_go_by_their_parameters(which: str) -> None:
    losses = cf.launch(_by_stage, which, workers=2, transport="local", timeout_seconds=20)
    assert losses[0] == losses[1]


# -- calls


def _choosing(case: str) -> float:
    pipeline = made(CHIMERA, lambda ps: SGD(ps, lr=0.1))
    pipeline.step(X, X)
    first = pipeline.worker == 0
    match case:
        case "choice":
            with pytest.raises(
                cf.ConfigError, match=r"set_trainable: rank 0 trains 0\.weight, and rank 1, w"
            ):
                pipeline.set_trainable(lambda name: first or not name.startswith("0."))
        case "decay":
            with pytest.raises(cf.ConfigError, match=r"averages weights with a decay of 0\.\d, rank"):
                pipeline.ema(0.9 if first else 0.8)
        case "no decay":
            with pytest.raises(cf.ConfigError, match="give a number from 0 to less than 1"):
                pipeline.ema(1.5)
        case "set_trainable" if first:
            pipeline.set_trainable(bool)
        case "ema" if first:
            pipeline.ema(0.9)
        case "state_dict" if first:
            pipeline.state_dict()
        case "timeline" if first:
            pipeline.timeline()
        case "close" if first:
            pipeline.close()
    return pipeline.step(X, X).loss


@pytest.mark.parametrize("case", ["choice", "decay", "no decay"])
def test_what_is_refused_alike_changes_nothing(case: str) -> None:
    found = cf.launch(_choosing, case, workers=2, transport="local", timeout_seconds=20)
    assert found == cf.launch(_choosing, "", workers=2, transport="local", timeout_seconds=20)


@pytest.mark.parametrize("case", ["set_trainable", "ema", "state_dict", "timeline", "close"])
def test_a_call_of_one_worker_is_named(case: str) -> None:
    with pytest.raises(
        cf.ConfigError, match=rf"calls {case}, after 1 steps.*all workers make the same calls"
    ):
        cf.launch(_choosing, case, workers=2, transport="local", timeout_seconds=20)
