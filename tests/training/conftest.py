"""Runs small enough for a test: two threads, a model of a few hundred weights, no pictures."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from counterflow.training import Callback, RunConfig, load_config, loop
from counterflow.training.folder import read_metrics
from counterflow.training.run import run
from counterflow.training.training_report import About, Numbers, Summary

SMALL = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "model.positions": 16,
    "pipeline.transport": "local",
    "optimizer.warmup_steps": 2,
    "train.samples": 16,
    "train.threads": 1,
}


class Watcher(Callback):
    """Remembers what it is told; ``then`` is called with each new line."""

    def __init__(self, then: Callable[[Numbers], None] | None = None) -> None:
        self.about: About | None = None
        self.lines: list[Numbers] = []
        self.over = 0
        self.events: list[str] = []
        self.then = then

    def begun(self, about: About, folder: Path) -> None:
        assert folder.is_dir()
        self.about = about

    def recorded(self, lines: Sequence[Numbers]) -> None:
        for line in lines:
            self.lines.append(line)
            if self.then is not None:
                self.then(line)

    def happened(self, event: str) -> None:
        self.events.append(event)

    def ended(self) -> None:
        self.over += 1


Configure = Callable[..., RunConfig]
Train = Callable[..., Summary]


@pytest.fixture
def config(tmp_path: Path) -> Configure:
    """A small config that writes into a folder of that name; keys are given with ``__`` for a dot."""

    def config_(out: str = "run", **changes: Any) -> RunConfig:
        return small(tmp_path / out, **changes)

    return config_


def small(out: Path, **changes: Any) -> RunConfig:
    """A small config that writes into a folder; keys are given with ``__`` for a dot."""
    keys = SMALL | {"train.out": out, "schedule.scheme": "chimera", "schedule.stages": 2}
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(sets=[f"{key}={_toml(value)}" for key, value in keys.items() if value is not None])


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture
def train(config: Configure) -> Train:
    """Run a small config."""

    def train_(
        out: str = "run", watcher: Watcher | None = None, max_restarts: int = 0, **changes: Any
    ) -> Summary:
        done = run(config(out, **changes), watcher or Watcher(), max_restarts=max_restarts)
        assert done is not None
        return done[0]

    return train_


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Path]]:
    """What would be drawn, and where to: drawing takes longer than training."""
    calls: list[tuple[Any, Path]] = []
    room = importlib.import_module("counterflow.drawing")  # the package has a function of that name
    monkeypatch.setattr(room, "draw_charts", lambda charts, path: calls.append((charts, path)))
    return calls


@pytest.fixture(autouse=True)
def _measured_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations of fewer samples, and ops that are timed once: their figures are not what is tested."""
    monkeypatch.setattr(loop, "_VALIDATION_SAMPLES", 32)
    monkeypatch.setattr(loop, "_REPEATS", 1)


def losses(folder: Path) -> list[float]:
    """The training loss of every step of a run."""
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]
