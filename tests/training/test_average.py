"""Runs that keep an average of the weights: told, written, converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from counterflow.checkpoints import load_weights
from counterflow.errors import ConfigError
from counterflow.integrations.conversion import convert
from counterflow.training import loop
from counterflow.training.folder import read_metrics
from counterflow.training.job import prepare

from .conftest import Configure, Train

SHORT = {"train__steps": 6, "train__evaluate_every": 3}


@pytest.mark.parametrize("changes", [{}, {"pipeline__zero_stage": 1}, {"pipeline__barrier": False}])
def test_it_is_evaluated_and_trains_to_the_same(
    train: Train, config: Configure, tmp_path: Path, changes: dict[str, Any]
) -> None:
    train("plain", **SHORT, **changes)
    train("averaged", train__ema_decay=0.5, **SHORT, **changes)
    plain, lines = (read_metrics(tmp_path / name) for name in ("plain", "averaged"))
    told = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in told] == [3, 6]
    for line in told:
        assert line["ema_validation_loss"] != line["validation_loss"]
    for mine, other in zip(plain, lines, strict=True):
        assert all(mine[name] == other[name] for name in mine if "second" not in name)
    job = prepare(config("again", train__ema_decay=0.5, **SHORT, **changes))
    average = load_weights(tmp_path / "averaged", ema=True)
    model = torch.nn.Sequential(*job.layers).to_empty(device="cpu").eval()
    model.load_state_dict(average)
    inputs, targets = job.bundle.batches.validation(loop._VALIDATION_SAMPLES)
    with torch.no_grad():
        loss = job.bundle.loss(model(inputs), targets).item()
    assert loss == pytest.approx(told[-1]["ema_validation_loss"], rel=1e-5)
    convert(tmp_path / "averaged", tmp_path / "a.safetensors", ema=True)
    for name, value in load_file(tmp_path / "a.safetensors").items():
        assert torch.equal(value, average[name])


def test_a_run_without_one_has_none_to_give(train: Train, tmp_path: Path) -> None:
    train("plain", train__steps=2)
    with pytest.raises(ConfigError, match=r"has no average of the weights; train with train\.ema_decay"):
        load_weights(tmp_path / "plain", ema=True)
    with pytest.raises(ConfigError, match=r"has no average of the weights; train with train\.ema_decay"):
        convert(tmp_path / "plain", tmp_path / "a.safetensors", ema=True)
    convert(tmp_path / "plain", tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="contains weights only, and no average of them; leave out --ema"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ema=True)
