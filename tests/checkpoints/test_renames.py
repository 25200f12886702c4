"""At no moment is there neither the old checkpoint nor the new one."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterflow.checkpoints import renames
from counterflow.checkpoints.index import INDEX, complete, draft_of, remove_drafts
from counterflow.checkpoints.renames import exchange, put, rename


class Killed(BaseException):
    """As if the process had been."""


def folder(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.mkdir()
    (path / INDEX).write_text(text)
    return path


def read(root: Path) -> list[tuple[str, str]]:
    return [(path.name, (path / INDEX).read_text()) for path in complete(root)]


@pytest.fixture(params=["exchange", "rename"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """With and without names that are exchanged in one call."""
    if request.param == "rename":
        monkeypatch.setattr(renames, "exchange", lambda *_: False)
    else:
        first, second = tmp_path / "one", tmp_path / "other"
        first.mkdir()
        second.mkdir()
        if not exchange(first, second):
            pytest.skip("this file system exchanges no names")
        first.rmdir()
        second.rmdir()
    return str(request.param)


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call(way: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each call that changes a name, or after it, until none is left."""
    remaining = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted_(*arguments: Any, **options: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining == 0 and not after:
                raise Killed
            result = call(*arguments, **options)
            if remaining == 0:
                raise Killed
            return result

        return counted_

    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(renames, "exchange", counted(renames.exchange))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    moments = 0
    for moment in range(1, 20):
        remaining, root = 0, tmp_path / f"at-{moment}"
        root.mkdir()
        folder(root, "step-5", "old")
        draft = folder(root, draft_of(5, "0a1b"), "new")
        remaining = moment
        try:
            put(draft, root / "step-5")
        except Killed:
            moments += 1
        over, remaining = remaining > 0, 0
        ((_, text),) = read(root)  # what a run that begins now goes on from
        assert text in ("old", "new")
        remove_drafts(root)
        assert read(root) == [("step-5", text)]
        assert [path.name for path in root.iterdir()] == ["step-5"]
        if over:
            assert text == "new"
            break
    assert moments == {"exchange": 2, "rename": 5}[way]


def test_of_two_that_are_there_the_one_with_the_name_counts(tmp_path: Path) -> None:
    folder(tmp_path, "step-5", "new")
    folder(tmp_path, ".step-5.old", "old")
    folder(tmp_path, ".step-7.old", "seven")
    (tmp_path / ".step-9.old").mkdir()  # without its index
    folder(tmp_path, draft_of(11, "0a1b"), "eleven")
    assert read(tmp_path) == [("step-5", "new"), (".step-7.old", "seven")]
    remove_drafts(tmp_path)
    assert read(tmp_path) == [("step-5", "new"), ("step-7", "seven")]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_draft_that_cannot_have_the_name_leaves_it_to_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renames, "exchange", lambda *_: False)
    folder(tmp_path, "step-5", "old")
    draft = folder(tmp_path, draft_of(5, "0a1b"), "new")
    call = Path.rename

    def rename_(self: Path, target: Path) -> Path:
        if self == draft:
            raise OSError(errno.EIO, "Input/output error")
        return call(self, target)

    monkeypatch.setattr(Path, "rename", rename_)
    with pytest.raises(OSError, match="Input/output"):
        put(draft, tmp_path / "step-5")
    assert read(tmp_path) == [("step-5", "old")]


def test_a_server_that_is_asked_twice_has_renamed_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: the answer to the first request was lost; the second one does not find what was renamed."""
    call = Path.rename

    def rename_(self: Path, target: Path) -> Path:
        call(self, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))

    monkeypatch.setattr(Path, "rename", rename_)
    draft = folder(tmp_path, draft_of(5, "0a1b"), "new")
    put(draft, tmp_path / "step-5")
    assert read(tmp_path) == [("step-5", "new")]


def test_what_is_really_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "none", tmp_path / "step-5")
    draft = folder(tmp_path, draft_of(5, "0a1b"), "new")

    def gone(self: Path, _: Path) -> Path:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))

    monkeypatch.setattr(Path, "rename", gone)
    with pytest.raises(FileNotFoundError):
        rename(draft, tmp_path / "step-5")
