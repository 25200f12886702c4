"""Trainings that go on between Counterflow and folders of torch.distributed.checkpoint, as torchtitan's."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.integrations.conversion import convert
from counterflow.schedule.ir import Schedule

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Model(nn.Module):
    """A model whose head is tied to its embedding, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.exit = nn.Linear(8, 11, bias=False)
        self.exit.weight = self.entry.weight
        self.register_buffer("scale", torch.full((), 1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.exit(self.blocks(self.entry(tokens))) * self.scale
        return output


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def new() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (8,), generator=generator), torch.randint(11, (8,), generator=generator)


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def alone(
    model: Model, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: range
) -> list[float]:
    """The losses of one process."""
    losses = []
    for step in steps:
        tokens, targets = batch(step)
        loss = functional.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def titan(model: Model, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What torchtitan saves: the weights by their own names beside the other parts."""
    return {
        **model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "train_state": {"step": step, "ntokens_seen": 64},
        "lr_scheduler": {"last_epoch": step},
        "dataloader": {"dp_rank_0": pickle.dumps({"at": step})},
    }


def piped(make: Optimizer, schedule: Schedule, start: Path, steps: range, out: Path | None) -> list[float]:
    """The losses of a pipeline that goes on."""
    pipeline = cf.Pipeline(
        new(), functional.cross_entropy, schedule, optimizer=make, scheduler=halving, example=batch(0)[0]
    )
    assert cf.load_checkpoint(pipeline, start) == steps.start
    losses = [pipeline.step(*batch(step)).loss for step in steps]
    if out is not None:
        cf.save_checkpoint(pipeline, out)
    return losses


@pytest.mark.parametrize("make", [adamw, momentum], ids=["AdamW", "SGD"])
def test_a_training_goes_on_in_a_pipeline_and_back(make: Optimizer, tmp_path: Path) -> None:
    model = new()
    optimizer = make(model.parameters())
    scheduler = halving(optimizer)
    alone(model, optimizer, scheduler, range(2))
    save(titan(model, optimizer, 2), checkpoint_id=tmp_path / "theirs", no_dist=True)
    expected = alone(model, optimizer, scheduler, range(2, 6))

    converted = convert(tmp_path / "theirs", tmp_path / "ours")
    assert converted.kind == "a checkpoint that train.resume goes on with"
    for schedule in (cf.schemes.dapple(2, 4), cf.schemes.zb_v(2, 4)):
        out = tmp_path / schedule.scheme
        work = piped, make, schedule, tmp_path / "ours", range(2, 4), out
        losses = cf.launch(*work, workers=2, transport="local", timeout_seconds=60)[0]
        assert losses == pytest.approx(expected[:2], rel=1e-12)

        convert(out, tmp_path / f"back from {schedule.scheme}", torchtitan=True)
        restored = new()
        new_optimizer = make(restored.parameters())
        schedule_again = halving(new_optimizer)
        alone(restored, new_optimizer, schedule_again, range(1))  # their code has state to load into
        state = titan(restored, new_optimizer, 0)
        del state["dataloader"]  # a pipeline's run has none of theirs
        load(state, checkpoint_id=tmp_path / f"back from {schedule.scheme}", no_dist=True)
        restored.load_state_dict({name: state[name] for name in restored.state_dict()})
        set_optimizer_state_dict(restored, new_optimizer, state["optimizer"], options=FLAT)
        assert (state["train_state"]["step"], state["lr_scheduler"]["last_epoch"]) == (4, 4)
        schedule_again.last_epoch = state["lr_scheduler"]["last_epoch"]
        assert alone(restored, new_optimizer, schedule_again, range(4, 6)) == pytest.approx(
            expected[2:], rel=1e-12
        )


def sharded(folder: str) -> dict[str, Tensor]:
    """Save what two workers share, as FSDP2 shards it; returns the whole."""
    mesh = init_device_mesh("cpu", (2,))
    model = new()
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=mesh)
    save({"model": model.state_dict()}, checkpoint_id=folder)
    return full


def test_pieces_of_sharded_weights_below_model(tmp_path: Path) -> None:
    expected = cf.launch(sharded, str(tmp_path / "theirs"), workers=2, transport="gloo", timeout_seconds=60)[
        0
    ]
    converted = convert(tmp_path / "theirs", tmp_path / "weights.safetensors")
    assert converted.tensors == len(expected)
    torch.testing.assert_close(load_file(tmp_path / "weights.safetensors"), expected, rtol=0, atol=0)
    converted = convert(tmp_path / "theirs", tmp_path / "ours")
    assert converted.kind == "a checkpoint that train.resume begins with"
    torch.testing.assert_close(cf.load_weights(tmp_path / "ours"), expected, rtol=0, atol=0)


class Runs:
    """Code that a pickle would run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def saved(folder: Path, state: dict[str, Any]) -> Path:
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_what_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ones = torch.ones(2)
    state = {"state.a.exp_avg": ones, "param_groups.a.lr": 0.1}
    groups = {"state": {"a": {"exp_avg": ones}}, "param_groups": [{"params": ["a"], "lr": 0.1}]}
    weights = saved(tmp_path / "weights", {"a": ones})
    dangerous = tmp_path / "dangerous"
    dangerous.mkdir()
    (dangerous / ".metadata").write_bytes(pickle.dumps(Runs()))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (dangerous, {}, "it contains posix.system, which is not read"),
        (saved(tmp_path / "state", {"optimizer": state}), {}, "has no weights"),
        (
            saved(tmp_path / "of", {"b": ones, "optimizer": state}),
            {},
            "exp_avg belongs to no weight of the model",
        ),
        (saved(tmp_path / "class", {"a": ones, "optimizer": state}), {}, "does not show of which optimiser"),
        (saved(tmp_path / "groups", {"a": ones, "optim": groups}), {}, "flatten_optimizer_state_dict"),
        (weights, {"torchtitan": True}, "is not the checkpoint of a run"),
        (weights, {"ema": True}, "leave out --ema"),
    ]
    for folder, options, message in cases:
        with pytest.raises(ConfigError, match=re.escape(message)):
            convert(folder, tmp_path / "made", **options)
        assert not (tmp_path / "made").exists()
    assert not (tmp_path / "ran").exists()
    converted = convert(tmp_path / "class", tmp_path / "made", optimizer="Adam")
    assert converted.tensors == 2
    (weights / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ConfigError, match="weights: a cannot be read"):
        convert(weights, tmp_path / "other")


def test_a_folder_of_torch_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(ConfigError, match="convert it first with `counterflow convert"):
        cf.load_weights(tmp_path)
