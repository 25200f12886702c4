"""A pipeline's whole state: what ``torch.distributed.checkpoint`` and ``torch.save`` make of it."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

import counterflow as cf
from counterflow.schedule.ir import Schedule

SCHEDULES = [cf.schemes.dapple(stages=2, micro_batches=4), cf.schemes.chimera(stages=2, micro_batches=4)]


def numbers(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, inputs.flip(1)


def made(schedule: Schedule) -> cf.Pipeline:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    return cf.Pipeline(
        layers,
        nn.MSELoss(),
        schedule,
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    )


def losses(pipeline: cf.Pipeline, first: int) -> list[float]:
    return [pipeline.step(*numbers(seed)).loss for seed in range(first, first + 3)]


def saved_and_loaded(folder: str) -> Any:
    one, other = made(SCHEDULES[0]), made(SCHEDULES[1])
    assert isinstance(one, Stateful)
    losses(one, 0)
    save({"pipeline": one}, checkpoint_id=folder)
    expected = losses(one, 3)
    load({"pipeline": other}, checkpoint_id=folder)
    return expected, losses(other, 3), other.steps


@pytest.mark.filterwarnings("ignore")  # torch's own, of its storage
def test_torchs_checkpoints_take_a_pipeline_whole(tmp_path: Path) -> None:
    for expected, found, steps in cf.launch(saved_and_loaded, str(tmp_path), workers=2, transport="gloo"):
        assert found == pytest.approx(expected, rel=1e-5)
        assert steps == 6


def test_a_saved_state_is_read_with_weights_only() -> None:
    def work() -> Any:
        one, other = made(SCHEDULES[0]), made(SCHEDULES[1])
        losses(one, 0)
        file = io.BytesIO()
        torch.save(one.state_dict(), file)
        file.seek(0)
        expected = losses(one, 3)
        other.load_state_dict(torch.load(file, weights_only=True))
        return expected, losses(other, 3)

    for expected, found in cf.launch(work, workers=2, transport="local"):
        assert found == pytest.approx(expected, rel=1e-5)


def test_weights_alone_are_no_state_to_resume_from() -> None:
    def work() -> None:
        pipeline = made(SCHEDULES[0])
        pipeline.load_state_dict(pipeline.model_state_dict())

    with pytest.raises(cf.ConfigError, match=r"no 'model'.*alone are loaded by load_model_state_dict"):
        cf.launch(work, workers=2, transport="local")


class Renamed(nn.Module):
    """Its state is another library's: ``kernel`` is the weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_state_dict_post_hook(_to_kernel)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_kernel)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def _to_kernel(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}linear.weight").t()


def _from_kernel(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    state[f"{prefix}linear.weight"] = state.pop(f"{prefix}kernel").t()


def _renaming(schedule: str) -> tuple[list[float], dict[str, Any], list[str]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), Renamed(), nn.Linear(4, 4), Renamed())
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    pipeline = cf.Pipeline(model, nn.MSELoss(), schedule, optimizer=optimizer)
    x = torch.linspace(-1, 1, 32).view(8, 4)
    losses = [pipeline.step(x, x).loss for _ in range(2)]
    state = pipeline.state_dict()
    pipeline.step(x, x)
    pipeline.load_state_dict(state)
    losses.append(pipeline.step(x, x).loss)
    return losses, pipeline.model_state_dict(), sorted(state["optimizer"])


@pytest.mark.parametrize(
    "scheme", ["dapple(stages=2, micro_batches=2)", "chimera(stages=2, micro_batches=2)"]
)
def test_a_layers_state_may_have_other_names_than_its_parameters(scheme: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), Renamed(), nn.Linear(4, 4), Renamed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, expected = torch.linspace(-1, 1, 32).view(8, 4), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, state, names in cf.launch(_renaming, scheme, workers=2, transport="local"):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert list(state) == list(model.state_dict())
        torch.testing.assert_close(state, dict(model.state_dict()))
        assert names == sorted(name for name, _ in model.named_parameters())
