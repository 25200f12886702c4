"""Copies in memory: one is whole at every moment, and only this user's folder holds them."""

from __future__ import annotations

import itertools
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import counterflow as cf
from counterflow.checkpoints import files
from counterflow.checkpoints.files import packed, pieces_of
from counterflow.checkpoints.memory_copies import MemoryCopies, folder_of
from counterflow.checkpoints.memory_file import MemoryFile, opened
from counterflow.errors import ConfigError
from counterflow.runtime.workers.world import current_transport

from .test_pipelines import adamw, counting, loss, model, run


class Killed(BaseException):
    """As if the worker had been."""


def made() -> cf.Pipeline:
    schedule = cf.schemes.gpipe(1, 2)
    return cf.Pipeline([nn.Linear(2, 2)], loss, schedule, optimizer=adamw)


def keep_and_die(root: str, steps: list[int], pieces: int) -> list[int | None]:
    """Which step is found after copies of some steps, and once a worker that found it died in its first."""
    pipeline, transport = made(), current_transport()

    def at(step: int) -> cf.Pipeline:
        pipeline.steps = step
        return pipeline

    before = MemoryCopies(transport, "run", [], root=Path(root))
    for step in steps:
        before.keep(at(step), [])
    before.settle()
    reopened = MemoryCopies(transport, "run", [], root=Path(root))
    points = [reopened.find()]

    def die(*arguments: Any) -> Iterator[memoryview]:
        yield from itertools.islice(pieces_of(*arguments), pieces)
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "pieces_of", die)
        reopened.keep(at(steps[-1] + 1), [])
        with pytest.raises(Killed):
            reopened.settle()
    points.append(MemoryCopies(transport, "run", [], root=Path(root)).find())
    return [point.step if point is not None else None for point in points]


@pytest.mark.parametrize("pieces", [0, 1, 2, 4])
@pytest.mark.parametrize("steps", [[3], [3, 4], [3, 4, 5]])
def test_what_was_found_stays_until_there_is_a_newer_one(
    tmp_path: Path, steps: list[int], pieces: int
) -> None:
    """Whichever of both files has it: the first copy after a restart is written to the other one."""
    assert run(keep_and_die, str(tmp_path), steps, pieces, workers=1) == [[steps[-1], steps[-1]]]


def _dies(*_: object) -> Iterator[memoryview]:
    yield memoryview(bytes(8))
    yield memoryview(bytes(100_000))
    raise Killed


def test_a_file_is_whole_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a copy, after one of less, and once its writer died in a third."""
    slot = MemoryFile(tmp_path / "slot")
    for number, size in enumerate((5, 3)):
        tensors = {
            "a": torch.full((size,), float(number)),
            "none": torch.zeros(0, 2),
            "step": torch.tensor(2),
        }
        slot.write(tensors, packed({"of": number}))
        torch.testing.assert_close(opened(slot.path), ({"of": number}, tensors), rtol=0, atol=0)
    monkeypatch.setattr(files, "pieces_of", _dies)
    with pytest.raises(Killed):
        slot.write({}, packed({}))
    assert opened(slot.path) is None
    slot.remove()
    assert opened(slot.path) is None


def test_a_writer_of_before_writes_into_no_others_file(tmp_path: Path) -> None:
    """One that was frozen while another worker took its place."""
    before, after = MemoryFile(tmp_path / "slot"), MemoryFile(tmp_path / "slot")
    for number, slot in enumerate((before, after, before)):
        slot.write({}, packed({"of": number}))
    assert opened(tmp_path / "slot") == ({"of": 1}, {})


def test_a_file_that_has_no_room_is_none(tmp_path: Path) -> None:
    slot, limits = MemoryFile(tmp_path / "slot"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            slot.write({"a": torch.ones(10_000)}, packed({}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert opened(slot.path) is None
    slot.write({}, packed({"of": 2}))
    assert opened(slot.path) == ({"of": 2}, {})


def restored(root: str) -> list[dict[str, Any]]:
    """The state after two steps, and that of another pipeline which found the copy of it."""
    first, second = (
        cf.Pipeline(model(), loss, cf.schemes.chimera(2, 4), optimizer=counting, zero_stage=1)
        for _ in range(2)
    )
    for _ in range(2):
        first.step(*torch.ones(2, 8, 4, dtype=torch.float64))
    before = MemoryCopies(first.transport, "run", first.cuts, root=Path(root))
    before.keep(first, [{"loss": 1.0}])
    before.settle()
    reopened = MemoryCopies(first.transport, "run", first.cuts, root=Path(root))
    point = reopened.find()
    assert point is not None
    assert point.records == [{"loss": 1.0}]
    reopened.restore(point, second)
    return [first.state_dict(), second.state_dict()]


def test_what_is_restored_is_what_was_there(tmp_path: Path) -> None:
    """What an optimiser keeps that is no tensor too; each worker has a part of its state."""
    expected, here = run(restored, str(tmp_path))[0]
    assert (here["step"], expected["step"]) == (2, 2)
    torch.testing.assert_close(here["model"], expected["model"], rtol=0, atol=0)
    for name, slots in expected["optimizer"].items():
        assert slots["state"]["count"] == 2
        torch.testing.assert_close(here["optimizer"][name]["state"], slots["state"], rtol=0, atol=0)


def make(root: str) -> str:
    memory = MemoryCopies(current_transport(), "run", [], root=Path(root))
    memory.keep(made(), [])
    memory.settle()
    return oct(memory.folder.stat().st_mode)


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    assert run(make, str(tmp_path), workers=1) == ["0o40700"]
    assert run(make, str(tmp_path), workers=1) == ["0o40700"]  # it may be there


@pytest.mark.parametrize("kind", ["open to others", "another user's", "a link", "a file"])
def test_a_folder_that_others_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = folder_of("run", tmp_path)
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
    if kind == "open to others":
        folder.chmod(0o770)
    if kind == "another user's":
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        folder.rename(folder_of("run", tmp_path))
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(tmp_path))}/counterflow-.*: is .*; remove it"):
        run(make, str(tmp_path), workers=1)
