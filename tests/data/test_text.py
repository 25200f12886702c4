"""Texts as bytes: what is read, in which order, and what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow import ConfigError
from counterflow.data.text import read_text, shipped_text, unigram_entropy


def test_the_shipped_text_is_the_help_topics_in_order() -> None:
    text = shipped_text()
    assert len(text) > 300_000
    assert text.startswith(b'The "assert" statement\n')
    assert 0 not in text
    order = [text.index(b'The "%s" statement\n***' % name) for name in (b"assert", b"del", b"pass")]
    assert order == sorted(order)


def test_the_end_of_the_shipped_text_does_not_stand_before_it_too() -> None:
    text = shipped_text()
    end = len(text) - len(text) // 20
    windows = [text[start : start + 64] for start in range(end, len(text) - 64, 64)]
    assert sum(window in text[:end] for window in windows) < 0.03 * len(windows)


def test_a_python_without_the_shipped_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ConfigError, match=r"ships without .*; name a text in data\.path"):
        shipped_text.__wrapped__()


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"caf\xe9\r\n")
    assert read_text(file) == read_text(str(file)) == b"caf\xe9\r\n"


def test_a_folder_is_all_its_text_files_sorted_by_path(tmp_path: Path) -> None:
    files = {"b.txt": b"2", "a/z.md": b"1", "c/d/e": b"4", "bb": b"3", "empty": b"", "image": b"\x89PNG\0\0"}
    hidden = {".git/config": b"no", "a/.swp": b"no"}
    for name, data in (files | hidden).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    assert read_text(tmp_path) == b"1\n2\n3\n4"


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing: no such file or folder"):
        read_text(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"is not a path"):
        read_text("a\0b")
    with pytest.raises(ConfigError, match=r"this folder contains no text file"):
        read_text(tmp_path)
    (tmp_path / "image").write_bytes(b"ab\0")
    with pytest.raises(ConfigError, match=r"image: is not a text file \(byte 2 is NUL\)"):
        read_text(tmp_path / "image")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"empty: the file is empty"):
        read_text(tmp_path / "empty")


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"below: cannot be read: Not a directory"):
        read_text(tmp_path / "file" / "below")

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ConfigError, match=r"file: cannot be read: Permission denied"):
        read_text(tmp_path)


def test_entropy_of_single_bytes() -> None:
    assert unigram_entropy(b"aaaa") == 0
    assert unigram_entropy(bytes(range(256))) == pytest.approx(8 * math.log(2))
    assert unigram_entropy(b"aaab") == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    with pytest.raises(ConfigError, match="no entropy"):
        unigram_entropy(b"")


@given(st.binary(min_size=1))
def test_entropy_is_that_of_the_counts_alone(data: bytes) -> None:
    entropy = unigram_entropy(data)
    assert 0 <= entropy <= math.log(min(256, len(data))) + 1e-12
    assert unigram_entropy(data[::-1] * 2) == pytest.approx(entropy)
