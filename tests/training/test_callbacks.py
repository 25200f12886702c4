"""What callbacks are told, that a failing one costs nothing, and what TensorBoard reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from counterflow import ConfigError
from counterflow.training import Callback, TensorBoard
from counterflow.training.folder import RunFolder, read_metrics
from counterflow.training.run import run
from counterflow.training.training_report import About, Numbers

from .conftest import Configure, Watcher, losses

pytestmark = pytest.mark.filterwarnings("ignore:::tensorboard")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder: steps and values by tag."""
    read = EventAccumulator(str(folder))
    read.Reload()
    tags = read.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags}


class Failing(Callback):
    def __init__(self, where: str) -> None:
        self.where = where
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            raise RuntimeError("no room")

    def begun(self, about: About, folder: Path) -> None:
        self._called("begun")

    def recorded(self, lines: Sequence[Numbers]) -> None:
        self._called("recorded")

    def ended(self) -> None:
        self._called("ended")


def test_all_are_told_and_a_failing_one_is_left_out(
    config: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    watchers = [Watcher(), Watcher()]
    failing = [Failing(where) for where in ("begun", "recorded", "ended")]
    done = run(config(train__steps=2), watchers[0], Callback(), *failing, watchers[1])
    assert done is not None
    assert watchers[0].lines == watchers[1].lines == read_metrics(done[1])
    assert [watcher.over for watcher in watchers] == [1, 1]
    assert [callback.calls[-1] for callback in failing] == ["begun", "recorded", "ended"]
    assert failing[1].calls.count("recorded") == 1
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "without it" in line] == [
        f"Failing.{where} failed; the run continues without it" for where in ("begun", "recorded", "ended")
    ]


def test_tensorboard_reads_the_metrics_also_of_a_run_that_went_on(config: Configure) -> None:
    keys = {"train__loggers": '["tensorboard"]', "train__evaluate_every": 2, "train__checkpoint_every": 2}
    for steps in (3, 6):  # the second goes on from step 3
        run(config(train__steps=steps, train__resume='"auto"', **keys))
    folder = config().train.out
    assert folder is not None
    lines = read_metrics(folder)
    found = scalars(folder / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in found["train/loss"]] == pytest.approx(losses(folder))
    evaluations = [
        (int(line["step"]), line["validation_loss"]) for line in lines if "validation_loss" in line
    ]
    assert [step for step, _ in found["validation/loss"]] == [step for step, _ in evaluations]
    assert found.keys() == {
        *("train/loss", "train/grad_norm", "train/learning_rate", "train/samples_per_second"),
        "validation/loss",
    }
    assert str(folder / "tensorboard") in RunFolder(folder).files()


def test_tensorboard_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "mine")
    board.recorded([])
    board.ended()
    assert not (tmp_path / "mine").exists()
    board.recorded([{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
    board.ended()
    assert scalars(tmp_path / "mine") == {"train/loss": [(1, 0.5), (2, 0.25)]}


def test_without_tensorboard_nothing_is_started(
    config: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("counterflow.common.extras.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r'tensorboard is not installed; pip install "counterflow\[tensor'):
        run(config(train__loggers='["tensorboard"]'))
    assert not (tmp_path / "run").exists()


def test_an_unknown_logger_is_refused(config: Configure) -> None:
    with pytest.raises(ConfigError, match=r'train\.loggers = .*: must be a list; known: "tensorboard"'):
        config(train__loggers='["wandb"]')
