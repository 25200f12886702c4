"""A run goes on with fewer workers when one does not come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from counterflow import ConfigError
from counterflow.checkpoints import memory_copies
from counterflow.checkpoints.memory_parts import overlapping
from counterflow.data.text_batches import NextByte
from counterflow.runtime.workers import world
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.formats import loads
from counterflow.schedule.modes import Recompute
from counterflow.training import load_config
from counterflow.training.run import run
from counterflow.training.supervision.events import FAILED, FEWER, RESTARTED, STARTED, note, read
from counterflow.training.supervision.fewer import Absence, wait_for_others, with_fewer

from ..conftest import Configure, Train, Watcher, losses

FOUR = {
    "schedule__stages": 4,
    "train__steps": 6,
    "train__evaluate_every": 0,
    "train__checkpoint_every": 2,
    "train__keep_last": 9,
}


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let a worker lose its device in step 6, each time there is a worker of that rank."""

    def dies_(rank: int) -> None:
        batch = NextByte.batch

        def read_(self: NextByte, step: int, *args: Any, **options: Any) -> Any:
            if step == 5 and current_transport().rank == rank:
                raise dist.DistBackendError("the device is gone")
            return batch(self, step, *args, **options)

        monkeypatch.setattr(NextByte, "batch", read_)

    return dies_


def event(folder: Path, name: str) -> dict[str, Any]:
    (found,) = [event for event in read(folder) if event["event"] == name]
    return found


@pytest.mark.parametrize(("every", "source"), [(0, "checkpoint"), (1, "memory")])
def test_three_of_four_go_on_with_the_same_curve(  # noqa: PLR0917
    train: Train,
    dies: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    every: int,
    source: str,
) -> None:
    monkeypatch.setattr(memory_copies, "ROOT", tmp_path)
    more = FOUR | {"train__memory_every": every}
    train("whole", **more)
    dies(3)
    watcher = Watcher()
    summary = train("fewer", watcher, max_restarts=1, train__fewer_after=0, **more)
    assert summary.about.processes == 3
    assert losses(tmp_path / "fewer") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6, abs=0)
    assert event(tmp_path / "fewer", FAILED)["worker"] == 3
    assert event(tmp_path / "fewer", RESTARTED)["source"] == source
    told = event(tmp_path / "fewer", FEWER)
    assert told["workers"] == 3
    assert watcher.events[1] == f"3 workers are left: continuing with {told['runs']}"
    assert load_config(tmp_path / "fewer" / "config.toml").processes == 4  # the same command goes on with all
    assert str(loads((tmp_path / "fewer" / "schedule.json").read_text(), "it")) == told["runs"]
    assert not list(tmp_path.glob("counterflow-*"))


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"schedule__stages": 4}, 3),
        ({"schedule__stages": 4}, 1),
        ({"schedule__scheme": "dapple", "pipeline__replicas": 2}, 3),
        ({"schedule__scheme": "dapple", "pipeline__replicas": 3}, 2),
        ({"schedule__scheme": "pipedream"}, 1),
    ],
)
def test_mini_batches_and_micro_batches_stay(config: Configure, changes: dict[str, Any], left: int) -> None:
    before = config(**changes, train__fewer_after=5, optimizer__name="sgd", pipeline__clip_norm=0.5)
    after = with_fewer(before, left)
    schedule = after.build_schedule()
    assert after.processes == left
    assert schedule.synchronous
    assert after.train.samples * after.pipeline.replicas == before.train.samples * before.pipeline.replicas
    had = before.train.samples // before.build_schedule().micro_batches
    assert after.train.samples == had * schedule.micro_batches
    same = ("transport", "clip_norm", "sync", "timeout_seconds")
    assert all(getattr(after.pipeline, key) == getattr(before.pipeline, key) for key in same)
    assert (after.model, after.optimizer, after.data) == (before.model, before.optimizer, before.data)
    assert after.train.model_copy(update={"samples": before.train.samples}) == before.train


def test_what_is_recomputed_stays_so(config: Configure) -> None:
    assert with_fewer(config(pipeline__recompute="layer"), 1).pipeline.recompute is Recompute.LAYER


def test_nothing_runs_on_so_few(config: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterflow.training.supervision.fewer.memory_bytes", lambda *_: 1000.0)
    with pytest.raises(ConfigError, match="1 worker is left, but no plan runs on them: no plan fits"):
        with_fewer(config(), 1)


@pytest.mark.parametrize(
    ("stages", "layout", "other", "expected"),
    [
        ([0], [3], [1, 2, 3], [0, 1, 2]),
        ([1], [3], [1, 2, 3], [3]),
        ([0, 3], [1, 2, 3], [2], [0, 1]),
        ([0, 1], [2], [2], [0, 1]),
        ([0], [], [5], [0, 1]),
    ],
)
def test_stages_of_another_layout(
    stages: list[int], layout: list[int], other: list[int], expected: list[int]
) -> None:
    assert overlapping(stages, layout, other) == expected


# --- For how long a worker may stay away ------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def failed(folder: Path, attempt: int, *, came: bool, lost: bool = True) -> dict[str, Any]:
    if came and attempt:
        note(folder, RESTARTED, attempt=attempt, step=5, source="memory")
    return note(folder, FAILED, attempt=attempt, step=6, worker=1, message="gone", lost=lost)


def absence(folder: Path, after: float | None) -> tuple[Absence, Clock]:
    clock = Clock()
    return Absence(folder, after, now=lambda: clock.seconds, sleep=clock.sleep), clock


def test_all_are_waited_for_if_nothing_else_is_said(tmp_path: Path) -> None:
    found, clock = absence(tmp_path, None)
    assert not any(found.over(failed(tmp_path, n, came=False)) for n in range(9))
    assert clock.seconds == 100


def test_attempts_are_spread_over_the_time(tmp_path: Path) -> None:
    note(tmp_path, RESTARTED, attempt=1, step=5, source="memory")  # of a command before
    note(tmp_path, STARTED, restarts=9)
    found, clock = absence(tmp_path, 60)
    assert not found.over(failed(tmp_path, 0, came=True))
    assert clock.seconds == 100  # the first attempt is made at once
    over = [found.over(failed(tmp_path, n, came=False)) for n in (1, 2, 3, 4, 5)]
    assert over == [False, False, False, False, True]
    assert clock.seconds == 160


def test_who_came_back_is_waited_for_anew(tmp_path: Path) -> None:
    found, clock = absence(tmp_path, 60)
    found.over(failed(tmp_path, 0, came=True))
    clock.seconds += 50
    assert not found.over(failed(tmp_path, 1, came=True))
    clock.seconds += 50
    assert not found.over(failed(tmp_path, 2, came=False))
    assert clock.seconds == 210  # what was left of the time
    assert found.over(failed(tmp_path, 3, came=False))


def test_an_error_of_the_run_itself_is_nobodys_absence(tmp_path: Path) -> None:
    found, _ = absence(tmp_path, 0)
    assert not found.over(failed(tmp_path, 0, came=True, lost=False))


# --- Under torchrun ---------------------------------------------------------------------------------------


@pytest.fixture
def one_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | {"TORCHELASTIC_MAX_RESTARTS": "9"}).items():
        monkeypatch.setenv(name, value)


def test_fewer_than_needed_are_refused_if_nothing_is_said(config: Configure, one_is_here: None) -> None:
    with pytest.raises(ConfigError, match="1 process was started, but 2 workers per replica"):
        run(config(pipeline__transport="gloo"), Watcher())


def test_fewer_that_torchrun_starts_plan_for_themselves(
    config: Configure, one_is_here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(world, "attempt", lambda _: 0)
    monkeypatch.setattr(world, "text_from_first", lambda make, _: make())
    begun = []

    def trainer(job: Any, *_: Any, **__: Any) -> None:
        begun.append(job)
        raise ConfigError("begun")

    monkeypatch.setattr("counterflow.training.run.Trainer", trainer)
    with pytest.raises(ConfigError, match="begun"):
        run(config(pipeline__transport="gloo", train__fewer_after=0), Watcher())
    assert begun[0].about.processes == 1
    assert begun[0].about.samples == 16


def test_the_wait_ends_a_time_after_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    wait_for_others(tmp_path, 7.0)
    note(tmp_path, FAILED, step=6, message="gone", lost=True)
    wait_for_others(tmp_path, 0.0)
    assert slept[0] == pytest.approx(7.0, abs=0.5)
    assert slept[1] == 0
