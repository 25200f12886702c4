"""A file in memory with tensors and what describes them: written in place, whole or not at all.

Invariant: a file whose writer was killed at any moment is not whole. It knows nothing of pipelines and runs.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PREFACE = struct.Struct("<qqq")
"""One more than the step (0: not whole, as in a new file), and where the tail begins and how long it is."""

_MARK = struct.Struct("<q")

_HEAD, _ALIGNED, _SLACK = 4096, 64, 65_536
"""Bytes before the tensors, a multiple where each begins, and what the tail may grow by."""

_NOT_WHOLE = 0


class Slot:
    """A file in memory, mapped; laid out anew when what is kept changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._views: dict[str, Tensor] = {}
        self._map: mmap.mmap | None = None

    def write(self, step: int, tensors: Mapping[str, Tensor], tail: bytes) -> None:
        """Write a copy; whole once it is done.

        Args:
            step: that it is of.
            tensors: on the host.
            tail: what ``described`` gives of them.

        Raises:
            OSError: there is no room.
        """
        table = _table(tensors)
        if self._map is None or table != self._table or self._begin + len(tail) > len(self._map):
            self._lay_out(tensors, len(tail))
            self._table = table
        assert self._map is not None
        _PREFACE.pack_into(self._map, 0, _NOT_WHOLE, 0, 0)
        for key, view in self._views.items():
            view.copy_(tensors[key])
        self._map[self._begin : self._begin + len(tail)] = tail
        _PREFACE.pack_into(self._map, 0, _NOT_WHOLE, self._begin, len(tail))
        self._map[: _MARK.size] = _MARK.pack(step + 1)

    def step(self) -> int:
        """The step that is in the file; less than 0 if none."""
        with contextlib.suppress(OSError, struct.error), self.path.open("rb") as file:
            return int(_PREFACE.unpack(file.read(_PREFACE.size))[0]) - 1
        return -1

    def remove(self) -> None:
        """Give the memory back."""
        self._views, self._table, self._map = {}, {}, None
        self.path.unlink(missing_ok=True)

    def _lay_out(self, tensors: Mapping[str, Tensor], tail: int) -> None:
        self.remove()
        offsets, self._begin = _offsets({key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()})
        size = self._begin + 2 * tail + _SLACK
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)  # where there is no room, a write to a map ends the process
            self._map = mmap.mmap(handle, size)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        self._views = {key: _view(self._map, offsets[key], t.dtype, t.shape) for key, t in tensors.items()}


def described(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """The tail of a file with such tensors: what says of them all that there is to say, as it is now."""
    return packed({**about, "table": _table(tensors)})


def _table(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (str(t.dtype), tuple(t.shape)) for key, t in tensors.items()}


def _offsets(table: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[dict[str, int], int]:
    """Where each tensor begins, and where all end."""
    found, end = {}, _HEAD
    for key, (dtype, shape) in table.items():
        found[key] = end
        size = torch.Size(shape).numel() * dtype.itemsize
        end += -(-size // _ALIGNED) * _ALIGNED
    return found, end


def _view(mapped: mmap.mmap, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin).view(tuple(shape))


def opened(path: Path) -> tuple[int, dict[str, Any], dict[str, Tensor]] | None:
    """Step, description and tensors of a file; None if it is not whole."""
    try:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        mark, begin, length = _PREFACE.unpack_from(mapped, 0)
    except (OSError, ValueError, struct.error):
        return None
    if mark == _NOT_WHOLE:
        return None
    about = unpacked(mapped[begin : begin + length])
    table = {
        key: (getattr(torch, dtype.removeprefix("torch.")), tuple(shape))
        for key, (dtype, shape) in about["table"].items()
    }
    offsets, _ = _offsets(table)
    return mark - 1, about, {key: _view(mapped, offsets[key], *kind) for key, kind in table.items()}


def packed(value: object) -> bytes:
    """A value as bytes."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def unpacked(data: bytes) -> Any:
    """The value of such bytes, its tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
