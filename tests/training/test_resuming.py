"""Runs that go on: from where, with what, and that the curve is the one of a run that was never stopped."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow import ConfigError
from counterflow.checkpoints import files
from counterflow.checkpoints.index import INDEX, Index, complete
from counterflow.checkpoints.reader import Checkpoint
from counterflow.errors import CounterflowError, WorkerError
from counterflow.training import load_config, loop
from counterflow.training.folder import RunFolder, folder_of, read_metrics
from counterflow.training.metrics import lines_of
from counterflow.training.run import run
from counterflow.training.supervision.appending import Appending
from counterflow.training.supervision.exclusive import Lock

from .conftest import Configure, Train, Watcher, losses, small


@pytest.fixture
def die(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a run end as if killed, before a step is made."""
    step = loop.Trainer._step

    def die_(at: int | None) -> None:
        def mortal(trainer: loop.Trainer, number: int) -> Any:
            if number == at:
                trainer.saver.wait()
                raise RuntimeError("killed")
            return step(trainer, number)

        monkeypatch.setattr(loop.Trainer, "_step", mortal)

    return die_


NO_FLUSH = {
    "schedule__stages": None,
    "schedule__micro_batches": 2,
    "model__layers": 4,
    "schedule__periods": 6,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline__barrier": False},
        {"train__ema_decay": 0.5},
        {
            "pipeline__autocast": "float16",
            "pipeline__loss_scale": 2.0**21,
            "pipeline__loss_scale_interval": 2,
        },
        {"schedule__scheme": "wpipe", "schedule__workers": 1, **NO_FLUSH},
        {"schedule__scheme": "pipedream-2bw", **NO_FLUSH, "schedule__stages": 2},
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    train: Train, die: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The whole curve, bit for bit, with each step once; also the figures at the end."""
    same = {
        "train__steps": 7,
        "train__evaluate_every": 2,
        "train__checkpoint_every": 2,
        "model__dropout": 0.1,
        **changes,
    }
    whole = train("whole", **same)
    die(5)
    with pytest.raises(
        WorkerError, match=r"killed; the metrics of \d steps are in .*, from which train\.resume can"
    ):
        train("killed", **same)
    die(None)
    resumed = train("killed", train__resume="auto", **same)
    assert (resumed.about.first_step, resumed.steps) == (4, 7)
    lines = read_metrics(tmp_path / "killed")
    assert list(map(_timeless, lines)) == list(map(_timeless, read_metrics(tmp_path / "whole")))
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert (resumed.training_loss, resumed.validation_loss) == (whole.training_loss, whole.validation_loss)
    one, other = (Checkpoint.load(tmp_path / name, name) for name in ("whole", "killed"))
    torch.testing.assert_close(one.model, other.model, rtol=0, atol=0)
    torch.testing.assert_close(one.optimizer, other.optimizer, rtol=0, atol=0)
    schedulers = [
        {key: of.objects([key])[key] for key in of.index.objects if "scheduler" in key} for of in (one, other)
    ]
    assert schedulers[0] == schedulers[1] != {}
    assert not list((tmp_path / "killed").rglob(".*"))


def _timeless(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if "second" not in name}


def test_auto_begins_where_nothing_is(train: Train, config: Configure, die: Any, tmp_path: Path) -> None:
    die(1)
    with pytest.raises(WorkerError):
        train(train__steps=3, train__resume="auto")  # before any checkpoint
    die(None)
    assert train(train__steps=3, train__resume="auto").steps == 3
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line] == [1, 2, 3]
    with pytest.raises(
        ConfigError, match=r"it has made 3 steps, and train\.steps = 2; give train\.steps = 4"
    ):
        train(train__steps=2, train__resume="auto")
    with pytest.raises(
        ConfigError,
        match=r'train\.resume = "auto": resumes in the folder train\.out, which is not given; give',
    ):
        config(train__resume="auto", train__out=None)


def test_a_resumed_run_has_its_own_config_but_for_what_is_changed(train: Train, tmp_path: Path) -> None:
    train(train__steps=2, model__dropout=0.1)
    run_ = tmp_path / "run"
    for sets in ([f"train.resume={run_}"], ["train.resume=auto", f"train.out={run_}"]):
        resumed = load_config(sets=[*sets, "pipeline.recompute=layer"], steps=4)
        assert (resumed.model.hidden, resumed.model.dropout, resumed.train.steps) == (16, 0.1, 4)
        assert folder_of(resumed) == run_
    watcher = Watcher()
    done = run(resumed, watcher)
    assert done is not None
    assert done[1] == run_
    assert watcher.about is not None
    assert watcher.about.resumed == str(run_ / "checkpoint" / "step-2")
    assert watcher.about.changed == (
        'pipeline.recompute = "layer", was "none"',
        "train.steps = 4, was 2",
    )
    assert [line["step"] for line in read_metrics(run_) if "loss" in line] == [1, 2, 3, 4]


def test_a_run_resumes_from_a_program_with_entries_of_any_name(train: Train, tmp_path: Path) -> None:
    train(train__steps=1)
    path = tmp_path / "run" / "checkpoint" / "step-1" / INDEX
    about = {"config": "my run: 5", "optimizer": "Adam", "data": "wiki", "validation_loss": "low"}
    path.write_bytes(Index.load(path, "run").model_copy(update={"about": about}).dumps())
    resumed = train("next", train__steps=2, train__resume=str(path.parent))
    assert (resumed.steps, resumed.about.changed) == (2, ())


def test_one_process_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"process {os.getpid()} on .* writes a run there; wait for its end"
    ):
        Lock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())
    (tmp_path / ".lock").write_text("process 1 on a machine that was cut off\n")
    Lock(tmp_path).release()


def test_a_folder_that_another_run_writes_is_refused(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = Lock(tmp_path / "run")
    for resume in (None, "auto"):
        with pytest.raises(ConfigError, match="writes a run there"):
            train(train__steps=1, train__resume=resume)
    lock.release()
    train(train__steps=1)


def changed_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_refused_by_its_path(train: Train, tmp_path: Path) -> None:
    """Where the user named it; ``auto`` uses the one before."""
    train(train__steps=4, train__checkpoint_every=2)
    last = tmp_path / "run" / "checkpoint" / "step-4"
    for file, message in (
        ("optimizer-1.safetensors", r"step-4 is damaged: optimizer-1\.safetensors was changed"),
        ("metrics.jsonl", r"step-4 is damaged: metrics\.jsonl was changed"),
        (INDEX, r"step-4/checkpoint\.json is not a checkpoint, or damaged"),
    ):
        changed_bit(last / file)
        with pytest.raises(ConfigError, match=message):
            train(f"other-{file}", train__steps=6, train__resume=tmp_path / "run")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def nested(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with three checkpoints, and one of six that was never stopped."""
    root = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_VALIDATION_SAMPLES", 32)
        patch.setattr(loop, "_REPEATS", 1)
        patch.setattr(importlib.import_module("counterflow.drawing"), "draw_charts", lambda *_: None)
        for name, steps in (("run", 4), ("whole", 6)):
            run(small(root / name, train__steps=steps, **BEGUN), Watcher())
    return root


BEGUN = {"train__checkpoint_every": 1, "train__keep_last": 3, "train__keep_best": False}


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (changed_bit, INDEX),
        (empty, INDEX),
        (nested, INDEX),
        (changed_bit, "metrics.jsonl"),
        (longer, "metrics.jsonl"),
        (Path.unlink, "metrics.jsonl"),
        (changed_bit, "optimizer-1.safetensors"),
        (empty, "model-0.safetensors"),
        (longer, "objects-0.pt"),
    ],
)
def test_auto_goes_on_from_the_checkpoint_before_a_damaged_one(  # noqa: PLR0917
    begun: Path,
    train: Train,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    file: str,
) -> None:
    """It does not count among those that are kept, either."""
    shutil.copytree(begun / "run", tmp_path / "run")
    root = tmp_path / "run" / "checkpoint"
    damage(root / "step-4" / file)
    resumed = train(train__steps=6, train__resume="auto", **BEGUN)
    assert (resumed.about.first_step, resumed.about.resumed) == (3, str(root / "step-3"))
    assert losses(tmp_path / "run") == losses(begun / "whole")
    assert sorted(folder.name for folder in root.iterdir()) == [
        "damaged-step-4",
        "step-4",
        "step-5",
        "step-6",
    ]
    assert any("step-4" in line and "renamed to damaged-step-4" in line for line in caplog.messages)


def test_metrics_that_are_missing_are_those_of_the_checkpoint(
    begun: Path, train: Train, tmp_path: Path
) -> None:
    shutil.copytree(begun / "run", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    train(train__steps=6, train__resume="auto", **BEGUN)
    assert losses(tmp_path / "run")[:4] == losses(begun / "run")
    assert len(losses(tmp_path / "run")) == 6


def test_damage_of_several_checkpoints(begun: Path, train: Train, tmp_path: Path) -> None:
    shutil.copytree(begun / "run", tmp_path / "run")
    root = tmp_path / "run" / "checkpoint"
    changed_bit(root / "step-4" / "model-0.safetensors")
    changed_bit(root / "step-3" / "model-1.safetensors")
    assert train(train__steps=5, train__resume="auto", **BEGUN).about.first_step == 2
    for step in (3, 4, 5):
        changed_bit(root / f"step-{step}" / INDEX)
    assert train(train__steps=6, train__resume="auto", **BEGUN).about.first_step == 0
    assert losses(tmp_path / "run") == losses(begun / "whole")
    assert sorted(folder.name for folder in root.glob("damaged-*")) == [
        "damaged-step-3",
        "damaged-step-4",
        "damaged-step-5",
    ]


def test_a_run_that_goes_back_keeps_its_own_checkpoints(
    begun: Path, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those of the training that it leaves, though these are of later steps and may be better."""
    shutil.copytree(begun / "whole", tmp_path / "run")
    root = tmp_path / "run" / "checkpoint"
    earlier = min(complete(root), key=lambda folder: int(folder.name[5:]))
    step = int(earlier.name[5:])
    later = sorted(folder.name for folder in complete(root)[1:])
    assert later
    two = BEGUN | {"train__keep_last": 2, "optimizer__learning_rate": 0.5}
    first = train(train__steps=step + 1, train__resume=str(earlier), **two)
    assert first.about.first_step == step
    names = {folder.name for folder in root.iterdir()}
    assert names == {earlier.name, f"step-{step + 1}", *(f"abandoned-{name}" for name in later)}
    assert any(f"{later[0]} is of later steps than step {step}" in line for line in caplog.messages)
    second = train(train__steps=step + 2, train__resume="auto", **two)
    assert second.about.first_step == step + 1  # of the run that went back
    third = train(train__steps=step + 2, train__resume=str(root / f"step-{step + 1}"), **two)
    assert third.about.first_step == step + 1
    assert f"abandoned-2-step-{step + 2}" in {folder.name for folder in root.iterdir()}


def test_a_checkpoint_that_is_damaged_later_does_not_count(train: Train, tmp_path: Path) -> None:
    root, two = tmp_path / "run" / "checkpoint", BEGUN | {"train__keep_last": 2}
    train(train__steps=3, **two)
    empty(root / "step-2" / "model-0.safetensors")
    train(train__steps=4, train__resume="auto", **two)
    assert sorted(folder.name for folder in root.iterdir()) == ["damaged-step-2", "step-3", "step-4"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__ema_decay": 0.5, "pipeline__barrier": False},
        {"pipeline__autocast": "float16", "pipeline__loss_scale": 2.0**21},
        {"schedule__scheme": "pipedream-2bw", **NO_FLUSH, "schedule__stages": 2},
    ],
)
def test_a_run_that_was_killed_after_its_last_checkpoint_ends_well(
    train: Train, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Its summary and timeline are written; its steps and checkpoint stay as they are, bit for bit."""
    same = {"train__steps": 3, "train__evaluate_every": 2, "train__keep_last": 1, **changes}
    whole, folder = train(**same), tmp_path / "run"
    files_before = {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name in LASTING
    }
    for name in ("summary.json", "timeline.json"):
        (folder / name).unlink()
    for name in (".lock", ".attempt"):
        (folder / name).write_text("process 1")
    ended = train(train__resume="auto", **same)
    assert (ended.steps, ended.about.first_step, ended.stopped) == (3, 3, False)
    assert (ended.training_loss, ended.validation_loss) == (whole.training_loss, whole.validation_loss)
    assert ended.samples_per_second > 0
    assert (folder / "summary.json").exists()
    assert (folder / "timeline.json").exists()
    assert not list(folder.rglob(".*"))
    assert {path: path.read_bytes() for path in files_before} == files_before
    assert RunFolder(folder).finished(3)


LASTING = {"metrics.jsonl", "checkpoint.json", "model-0.safetensors", "optimizer-1.safetensors"}


@pytest.mark.parametrize("resume", ["auto", "run"])
def test_data_that_were_changed_are_told(train: Train, tmp_path: Path, resume: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"a pipeline of four stages " * 200)
    train(train__steps=2, data__path=text)
    text.write_bytes(b"another one of six stages " * 200)
    watcher, more = Watcher(), {"train__steps": 3, "data__path": text}
    if resume == "auto":
        with pytest.raises(
            ConfigError, match=r'text\.txt" changed since .*step-2 was written; put it back, or resume with'
        ):
            train(watcher=watcher, train__resume="auto", **more)
        text.rename(tmp_path / "moved.txt")
        text.write_bytes(b"a pipeline of four stages " * 200)
        assert train(watcher=watcher, train__resume="auto", **more).steps == 3
    else:
        assert train(watcher=watcher, train__resume=tmp_path / "run", **more).steps == 3
        assert watcher.about is not None
        assert watcher.about.changed[-1] == f'data.path = "{text}" changed'


def test_the_last_and_the_best_are_kept(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(3 * [3.0, 1.0, 2.0, 4.0, 5.0])
    lock = threading.Lock()
    by_step: dict[int, float] = {}

    def evaluate(trainer: loop.Trainer) -> None:
        trainer._flush()
        with lock:
            loss = by_step.setdefault(trainer.pipeline.steps, 0.0) or next(found)
            by_step[trainer.pipeline.steps] = loss
        trainer.validation = trainer.pipeline.steps, loss

    monkeypatch.setattr(loop.Trainer, "_evaluate", evaluate)
    same = {"train__steps": 5, "train__evaluate_every": 1, "train__checkpoint_every": 1}
    train("both", **same)
    kept = [folder.name for folder in complete(tmp_path / "both" / "checkpoint")]
    assert kept == ["step-2", "step-4", "step-5"]
    train("last", train__keep_last=1, train__keep_best=False, **same)
    assert [folder.name for folder in complete(tmp_path / "last" / "checkpoint")] == ["step-5"]


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = files.write
    full: set[str] = set()

    def limited(path: Path, pieces: Any) -> Any:
        if (
            path.parent.name.partition(".draft")[0].rpartition(".")[0] in full
            and path.suffix == ".safetensors"
        ):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, pieces)

    monkeypatch.setattr(files, "write", limited)
    summary = train(train__steps=6, train__checkpoint_every=0)
    assert summary.steps == 6
    full |= {".step-7", ".step-8", ".step-9"}
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(
            CounterflowError,
            match=r"of step 9 is not written: .*safetensors: No space left on device; earlier ones",
        ),
    ):
        train(train__steps=9, train__resume="auto", train__checkpoint_every=1)
    assert sum("checkpoint of step 7 is not written: " in text for text in caplog.messages) == 1
    folder = tmp_path / "run" / "checkpoint"
    assert [entry.name for entry in folder.iterdir()] == ["step-6"]
    assert losses(tmp_path / "run")[8:]
    full.clear()
    assert train(train__steps=9, train__resume="auto").about.first_step == 6


def test_steps_go_on_while_a_checkpoint_is_written(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that is due while another is still being written is left out."""
    write, later = files.write, threading.Event()

    def slow(path: Path, pieces: Any) -> Any:
        if path.parent.name.startswith(".step-2."):
            assert later.wait(60)
        return write(path, pieces)

    def told(line: dict[str, float]) -> None:
        if line["step"] == 5:
            later.set()

    monkeypatch.setattr(files, "write", slow)
    monkeypatch.setattr(loop, "PATIENCE_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING):
        train(watcher=Watcher(told), train__steps=5, train__checkpoint_every=2)
    assert "no checkpoint of step 4 is written: that of step 2 is still being written" in caplog.messages
    assert [folder.name for folder in complete(tmp_path / "run" / "checkpoint")] == ["step-2", "step-5"]


def test_metrics_wait_for_room_on_the_disk(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is written in part is taken back, and written with the next one."""
    folder = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    first, second, third = ({"step": step, "seconds": 0.1} for step in (1, 2, 3))
    folder.record(first)
    write = os.pwrite

    def full(handle: int, data: bytes, at: int) -> int:
        if data.endswith(b"}\n") and data.startswith(b"{"):
            return write(handle, data[: len(data) // 2], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    folder.record(second)
    monkeypatch.undo()
    assert read_metrics(tmp_path) == [first]
    assert [line["step"] for line in lines_of(folder.history)] == [1, 2]
    folder.record(third)
    assert read_metrics(tmp_path) == [first, second, third]


def test_storage_that_hangs_holds_up_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, write, comes_back = tmp_path / "metrics.jsonl", os.pwrite, threading.Event()
    path.touch()
    metrics = Appending(path, patience_seconds=0.05)
    metrics.add(b"1\n")

    def hang(handle: int, data: bytes, at: int) -> int:
        assert comes_back.wait(60)
        return write(handle, data, at)

    monkeypatch.setattr(os, "pwrite", hang)
    metrics.add(b"2\n")
    until_now = metrics.size
    began = time.monotonic()
    for number in range(3, 103):
        metrics.add(f"{number}\n".encode())
    assert time.monotonic() - began < 60
    assert caplog.messages == [f"{path} cannot be written: it takes more than 0.05 s; training continues"]
    assert path.read_bytes() == b"1\n"
    assert b"".join(metrics.pieces(until_now)) == b"1\n2\n"
    comes_back.set()
    metrics.settle()
    assert path.read_bytes() == b"".join(b"%d\n" % number for number in range(1, 103))
    assert b"".join(metrics.pieces(metrics.size)) == path.read_bytes()


def test_a_checkpoint_takes_no_more_memory_the_longer_the_run(tmp_path: Path) -> None:
    """A copy of the history at each checkpoint, in threads, was kept by as many of the allocator's arenas."""
    folder = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' * 400_000)
    folder.record({"step": 2})
    history = folder.history_until_now()
    folder.record({"step": 3})
    tracemalloc.start()
    try:
        files.write(tmp_path / "copy", history())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert (tmp_path / "copy").read_bytes() == b'{"step": 1}\n' * 400_000 + b'{"step": 2}\n'


def test_a_folder_that_cannot_be_written_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, opened = tmp_path / "metrics.jsonl", os.open
    path.touch()
    metrics = Appending(path)

    def stale(*arguments: Any) -> int:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "open", stale)
    metrics.add(b"1\n")
    assert caplog.messages == [f"{path} cannot be written: Stale file handle; training continues"]
    monkeypatch.setattr(os, "open", opened)
    metrics.add(b"2\n")
    assert path.read_bytes() == b"1\n2\n"
