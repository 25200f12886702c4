"""A worker that was frozen, and thaws when others have gone on or the run has ended, writes nothing."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from counterflow.errors import WorkerError
from counterflow.runtime.workers.world import current_transport
from counterflow.training.folder import LIVE, METRICS, SUMMARY, RunFolder, read_metrics, replace_file
from counterflow.training.loop import Trainer
from counterflow.training.supervision.events import read
from counterflow.training.supervision.exclusive import ATTEMPT, Fence
from counterflow.training.supervision.restarts import reporting_failures

from ..conftest import Configure, Train

LINES = [{"step": step, "seconds": 0.1} for step in (1, 2, 3)]


def known(folder: Path) -> Fence:
    """As a worker has it that was told of the attempt which has begun."""
    fence = Fence(folder)
    fence.mark = fence.current()
    assert fence.mark is not None
    return fence


def test_an_attempt_is_over_when_another_begins_or_the_run_ends(tmp_path: Path) -> None:
    first, second = Fence(tmp_path), Fence(tmp_path)
    first.begin()
    worker = known(tmp_path)
    assert not worker.over()
    second.begin()
    assert worker.over()
    with pytest.raises(WorkerError, match=r"this attempt at the run in .* is over"):
        worker.check()
    later = known(tmp_path)
    first.end()  # as rank 0 that thaws: the mark is not its own
    assert not later.over()
    second.end()
    assert later.over()
    assert not list(tmp_path.iterdir())


def test_storage_that_does_not_answer_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fence(tmp_path).begin()
    worker = known(tmp_path)

    def lost(_: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_bytes", lost)
    assert not worker.over()


def test_without_room_for_a_mark_those_before_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Fence(tmp_path), Fence(tmp_path)
    first.begin()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    second.begin()
    assert first.over()
    assert not second.over()
    assert not list(tmp_path.iterdir())


def test_storage_that_fails_to_delete_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = Fence(tmp_path)

    def stale(*_: Any, **__: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "unlink", stale)
    fence.begin()  # its draft has become the mark
    assert not fence.over()
    fence.end()
    monkeypatch.setattr(Path, "write_text", stale)
    fence.begin()
    assert fence.mark is None


def test_a_mark_is_16_digits_and_what_is_none_is_not_found(tmp_path: Path) -> None:
    fence = Fence(tmp_path)
    fence.begin()
    assert fence.current() == fence.mark
    assert fence.mark is not None
    assert re.fullmatch("[0-9a-f]{16}", fence.mark)
    (tmp_path / ATTEMPT).write_bytes("é".encode())
    assert fence.current() is None
    with pytest.raises(WorkerError) as error:
        fence.check()
    assert str(error.value) == (
        f"this attempt at the run in {tmp_path} is over: another one has begun, or the run has ended; "
        "nothing more is written"
    )


def test_a_signal_while_a_file_is_drafted_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Fence(tmp_path).begin()
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / LIVE, b"{}")
    assert not list(tmp_path.iterdir())


def test_drafts_of_a_killed_worker_go_with_an_empty_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / METRICS).touch()
    (folder.path / f".{LIVE}.123").write_text("{")
    folder.remove_empty()
    assert not folder.path.exists()


@pytest.mark.parametrize("tells", [True, False])
def test_metrics_of_before_are_not_written_among_those_of_now(tmp_path: Path, tells: bool) -> None:
    """Also by who asked before the other one began: its file is another one."""
    (tmp_path / METRICS).touch()
    before, after = RunFolder(tmp_path), RunFolder(tmp_path)
    before.fence.begin()
    before.record(LINES[0])
    after.fence.begin()
    if not tells:
        before.fence.mark = after.fence.mark
    after.rewind(b"")
    after.record(LINES[0] | {"seconds": 0.5})
    before.record(LINES[1])
    before.settle()
    after.record(LINES[2])
    assert read_metrics(tmp_path) == [LINES[0] | {"seconds": 0.5}, LINES[2]]


def test_files_of_now_are_not_replaced(tmp_path: Path) -> None:
    before, after = RunFolder(tmp_path), RunFolder(tmp_path)
    before.fence.begin()
    after.fence.begin()
    anything: Any = None
    before.put_live(anything)
    for write in (before.put_summary, before.put_timeline, before.rewind):
        with pytest.raises(WorkerError, match="is over"):
            write(anything)
    assert [path.name for path in tmp_path.iterdir()] == [ATTEMPT]


def test_rank_0_that_fails_lets_others_note_it(config: Configure) -> None:
    """It may be told of a failure and end before whoever failed has noted it."""
    folder = RunFolder.open(config(), config().build_schedule(), None, b"")
    folder.fence.begin()
    worker = known(folder.path)
    folder.close()
    assert not worker.over()


@pytest.mark.parametrize("over", [False, True])
def test_a_failure_of_before_is_not_noted(tmp_path: Path, over: bool) -> None:
    (tmp_path / METRICS).touch()
    Fence(tmp_path).begin()
    worker = known(tmp_path)
    if over:
        Fence(tmp_path).begin()
    with pytest.raises(WorkerError, match="nobody is there"), reporting_failures(0, worker):
        raise WorkerError("nobody is there")
    assert [event["event"] for event in read(tmp_path)] == ["failed"] * (not over)


def test_all_workers_of_a_run_know_their_attempt(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: dict[int, tuple[str | None, bool]] = {}
    step = Trainer._step

    def look(self: Trainer, number: int) -> Any:
        found[current_transport().rank] = self.fence.mark, self.saver._over()
        return step(self, number)

    monkeypatch.setattr(Trainer, "_step", look)
    train(train__steps=2)
    assert len(found) == 2
    (mark,) = {mark for mark, _ in found.values()}
    assert mark
    assert not any(over for _, over in found.values())
    assert not (tmp_path / "run" / ATTEMPT).exists()
    assert (tmp_path / "run" / SUMMARY).exists()
    assert not (tmp_path / "run" / LIVE).exists()


def test_a_worker_learns_which_folder_it_is(tmp_path: Path) -> None:
    """Without ``train.out`` the first worker takes a name that is free, with a number."""
    began = Fence(tmp_path / "run-2")
    began.folder.mkdir()
    began.begin()
    worker = Fence(tmp_path / "run")
    worker.join(began.folder, began.current())
    assert not worker.over()
    began.end()
    assert worker.over()
