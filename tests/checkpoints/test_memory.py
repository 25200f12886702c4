"""Copies in memory: one is whole at every moment, and only this user's folder holds them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from torch import nn

import counterflow as cf
from counterflow.checkpoints.memory import Memory, folder_of
from counterflow.checkpoints.memory_file import Slot
from counterflow.errors import ConfigError
from counterflow.runtime.workers.world import current_transport

from .test_pipelines import adamw, loss, run


class Killed(BaseException):
    """As if the worker had been."""


def made() -> cf.Pipeline:
    schedule = cf.schemes.gpipe(1, 2)
    return cf.Pipeline([nn.Linear(2, 2)], loss, schedule, optimizer=adamw)


def keep_and_die(root: str, steps: list[int]) -> list[int | None]:
    """Which step is found after copies of some steps, and once a worker that found it died at its first."""
    pipeline, transport = made(), current_transport()

    def at(step: int) -> cf.Pipeline:
        pipeline.steps = step
        return pipeline

    before = Memory(transport, "run", [], root=Path(root))
    for step in steps:
        before.keep(at(step), [])
    before.settle()
    again = Memory(transport, "run", [], root=Path(root))
    found = [again.find()]

    def die(self: Slot, *_: object) -> None:
        self.remove()  # as it does before it makes the file anew
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Slot, "_lay_out", die)
        again.keep(at(steps[-1] + 1), [])
        with pytest.raises(Killed):
            again.settle()
    found.append(Memory(transport, "run", [], root=Path(root)).find())
    return [one.step if one is not None else None for one in found]


@pytest.mark.parametrize("steps", [[3], [3, 4], [3, 4, 5]])
def test_what_was_found_stays_until_there_is_a_newer_one(tmp_path: Path, steps: list[int]) -> None:
    """Whichever of both files has it: the first copy after a restart is written to the other one."""
    assert run(keep_and_die, str(tmp_path), steps, workers=1) == [[steps[-1], steps[-1]]]


def make(root: str) -> str:
    memory = Memory(current_transport(), "run", [], root=Path(root))
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
