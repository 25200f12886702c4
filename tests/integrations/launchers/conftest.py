"""Runs of two or four small workers under launchers, and what they reach signals_blocked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterflow.training import RunConfig, load_config
from counterflow.training.run import run

from ...training.conftest import SMALL, losses
from . import faults

ROOT = Path(__file__).parents[3]
STEPS = 8


def small(out: Path | None, **changes: Any) -> RunConfig:
    """A config of two workers that are processes; keys are given with ``__`` for a dot."""
    keys = SMALL | {
        "train.out": out, "train.steps": STEPS, "train.checkpoint_every": 2, "train.memory_every": 0,
        "train.evaluate_every": 0, "schedule.scheme": "chimera", "schedule.stages": 2,
        "pipeline.transport": "gloo",
    }  # fmt: skip
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(sets=[f"{key}={value}" for key, value in keys.items() if value is not None])


@pytest.fixture(scope="session")
def signals_blocked(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("signals_blocked")
    assert run(small(folder / "run", pipeline__transport="local")) is not None
    return losses(folder / "run")


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let workers that are started from here meet faults: (rank, step, signal)."""

    def faulty_(*steps: tuple[int, int, int]) -> None:
        place = tmp_path / "site"
        place.mkdir()
        shutil.copy(faults.__file__, place / "sitecustomize.py")
        paths = [str(place), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        monkeypatch.setenv(faults.FAULTS, json.dumps(faults.faults(tmp_path, *steps)))

    return faulty_
