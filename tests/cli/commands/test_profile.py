"""``counterflow profile``: of a user's file; configs are in ``tests/training/test_profiling.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.planning.inputs import input_files

from ..conftest import Run

OWN = """
import torch
from torch import nn


def make_model():
    layers = [nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(20)), nn.Linear(8, 2)]
    return layers, nn.MSELoss(), (torch.ones(6, 4), torch.ones(6, 2))
"""
FAST = "--workers", "1", "--sizes", "1", "--repeats", "1"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_users_file_is_profiled_and_planned(run: Run, own: Path) -> None:
    answer = run("profile", "own.py:make_model", *FAST)
    assert answer.code == 0
    assert "linear-2 × 20" in answer.out
    assert "1 worker of" in answer.out
    command = answer.err.rpartition("counterflow plan ")[2].split()
    assert command[-2:] == ["--mini-batch", "6"]
    model = input_files.load_model(own.parent / "profile" / "model.toml")
    assert model.name == "own.py:make_model"
    planned = run("plan", *command, "--scheme", "gpipe", "--micro-batch-size", "3")
    assert planned.code == 0
    call = "Run it on 1 worker: cf.Pipeline(model, loss, 'gpipe(stages=1, micro_batches=2, groups=1)'"
    assert call in planned.err


def test_wrong_subjects_are_refused(run: Run, own: Path) -> None:
    for arguments, message in (
        (("none.py",), "none.py: no such file"),
        (("own.py:other",), "own.py has no function other"),
        (("own.py", "--set", "model.layers=2"), "--set model.layers=2: own.py has no keys"),
        (("own.py", "--sizes", "0"), "give one size of a micro-batch or more"),
    ):
        answer = run("profile", *arguments)
        assert answer.code == 2
        assert message in answer.err
