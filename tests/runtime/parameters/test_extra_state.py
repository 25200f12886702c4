"""What is in none of the listed layers: saved, loaded strictly, alike on all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.checkpoints import load_checkpoint, load_weights, save_checkpoint
from counterflow.checkpoints.memory_copies import MemoryCopies
from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule


class Model(nn.Module):
    """A buffer, two names of one frozen parameter and extra state are in no layer."""

    def __init__(self, number: int = 7) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((4,), float(number)))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.contact = nn.Linear(3, 1).requires_grad_(False)
        self.again = self.contact
        self.number = number

    def get_extra_state(self) -> dict[str, int]:
        return {"number": self.number}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def made(number: int = 7) -> Model:
    torch.manual_seed(number)
    return Model(number)


def piped(model: nn.Module, schedule: Schedule | None = None, **more: Any) -> Pipeline:
    return Pipeline(
        model,
        nn.MSELoss(),
        schedule or schemes.dapple(2, 4),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        list_layers=lambda its: list(its.get_submodule("body").children()),
        **more,
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].tolist() == value.tolist() if isinstance(value, Tensor) else found[name] == value


def test_all_of_it_is_loaded() -> None:
    def work() -> tuple[dict[str, Any], dict[str, Any], int]:
        state = piped(made()).model_state_dict()
        model = made(9)
        pipeline = piped(model)
        pipeline.load_model_state_dict(state)
        return state, pipeline.model_state_dict(), model.number

    for state, found, number in launch(work, workers=2, transport="local", timeout_seconds=30):
        assert number == 7
        _same(found, state)
        _same(found, made().state_dict())


@pytest.mark.parametrize("name", ["mean", "contact.weight", "_extra_state"])
def test_a_name_that_the_state_lacks_is_refused_and_nothing_loaded(name: str) -> None:
    def work() -> None:
        model = made(9)
        pipeline = piped(model)
        state = {n: v for n, v in made().state_dict().items() if n.replace("again", "contact") != name}
        with pytest.raises(ConfigError, match=f"the state has no '{name}'"):
            pipeline.load_model_state_dict(state)
        _same(pipeline.model_state_dict(), made(9).state_dict())

    launch(work, workers=2, transport="local", timeout_seconds=30)


def test_another_shape_is_refused() -> None:
    def work() -> None:
        state: dict[str, Any] = made().state_dict()
        piped(made()).load_model_state_dict(state | {"mean": torch.zeros(1)})

    with pytest.raises(ConfigError, match=r"mean has shape \(1,\) in the state, \(4,\) in the model"):
        launch(work, workers=2, transport="local", timeout_seconds=30)


def test_on_the_meta_device_it_is_refused_at_once() -> None:
    def work() -> None:
        model = made()
        model.mean = torch.empty(4, device="meta")
        piped(model)

    with pytest.raises(
        ConfigError, match="mean of the Model is in none of the listed layers and on the meta"
    ):
        launch(work, workers=2, transport="local", timeout_seconds=30)


def test_workers_whose_models_differ_take_that_of_rank_0() -> None:
    def work() -> tuple[list[float], list[float]]:
        from counterflow.runtime.workers.world import current_transport

        model = made(3)
        rank = current_transport(None, device=None, timeout_seconds=None).rank
        model.get_buffer("mean").add_(rank)
        model.contact.weight.data.add_(rank)
        state = piped(model).model_state_dict(local=True)
        return state["mean"].tolist(), state["contact.weight"].tolist()

    expected = [3.0] * 4, made(3).contact.weight.tolist()
    assert launch(work, workers=2, transport="local", timeout_seconds=30) == [expected] * 2


def test_checkpoints_have_it(tmp_path: Path) -> None:
    def work() -> tuple[dict[str, Any], dict[str, Any], int]:
        pipeline = piped(made(), schemes.chimera(2, 4))
        pipeline.step(*batch())
        path = save_checkpoint(pipeline, tmp_path)
        model = made(9)
        other = piped(model)
        load_checkpoint(other, path)
        return pipeline.model_state_dict(), other.model_state_dict(), model.number

    for state, found, number in launch(work, workers=2, transport="local", timeout_seconds=30):
        assert number == 7
        _same(found, state)
        _same(load_weights(tmp_path), state)


def test_a_checkpoint_without_it_is_refused(tmp_path: Path) -> None:
    def work() -> None:
        path = save_checkpoint(piped(made()), tmp_path)
        model = made()
        model.register_buffer("other", torch.zeros(1))
        load_checkpoint(piped(model), path)

    with pytest.raises(ConfigError, match="has no 'other'"):
        launch(work, workers=2, transport="local", timeout_seconds=30)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_copies_in_memory_have_it(tmp_path: Path, zero_stage: int) -> None:
    def work() -> tuple[dict[str, Any], dict[str, Any], int]:
        pipeline = piped(made(), schemes.chimera(2, 4), zero_stage=zero_stage)
        pipeline.step(*batch())
        memory = MemoryCopies(pipeline.transport, "run", pipeline.cuts, root=tmp_path)
        memory.keep(pipeline, [])
        memory.settle()
        model = made(9)
        other = piped(model, schemes.chimera(2, 4), zero_stage=zero_stage)
        again = MemoryCopies(pipeline.transport, "run", pipeline.cuts, root=tmp_path)
        found = again.find()
        assert found is not None
        again.restore(found, other)
        return pipeline.state_dict(), other.state_dict(), model.number

    for state, found, number in launch(work, workers=2, transport="local", timeout_seconds=30):
        assert number == 7
        _same(found["model"], state["model"])


def test_a_hook_of_the_whole_states_names_is_refused() -> None:
    def rename(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}body.0.weight").t()

    def work() -> None:
        model = made()
        model.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]
        piped(model)

    with pytest.raises(ConfigError, match="kernel in the state_dict of the Model is none of its parameters"):
        launch(work, workers=2, transport="local", timeout_seconds=30)
