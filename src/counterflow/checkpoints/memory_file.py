"""A file in memory with tensors and what describes them: written in place, whole or not at all.

It is a safetensors file. Its first eight bytes, the length of its header, are zero until all else is written,
and a file that begins so is none.

Invariant: a file whose writer was killed at any moment does not read. It knows nothing of pipelines and runs.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files

_ABOUT = ""
"""The name of what describes the tensors, whose own names are not empty; and of its length."""

_BLOCK = 65_536
"""What describes them is filled up to a multiple of so many bytes, so that most copies are equally long."""


class Slot:
    """A file in memory, written again and again in its pages; made anew when what is kept changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._close: Callable[[], object] = lambda: None

    def write(self, tensors: Mapping[str, Tensor], about: bytes) -> None:
        """Write a copy; whole once it is done.

        Args:
            tensors: on the host.
            about: what describes them, packed.

        Raises:
            OSError: there is no room.
        """
        filled = bytearray(about.ljust(-(-len(about) // _BLOCK) * _BLOCK, b"\0"))
        every = {**tensors, _ABOUT: torch.frombuffer(filled, dtype=torch.uint8)}
        sizes = files.sizes_of(every)
        if self._handle is None or sizes != self._sizes:
            # Never into a file of before: a worker that was frozen may write there. Never into a longer one,
            # and cut it: who has that mapped would end.
            self.remove()
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._close, self._sizes = weakref.finalize(self, os.close, self._handle), sizes
        pieces = files.pieces_of(sizes, every.__getitem__, {_ABOUT: f"{len(about):020}"})
        length = next(pieces)
        with open(self._handle, "wb", closefd=False) as file:
            file.seek(0)
            file.write(bytes(len(length)))
            for piece in pieces:
                file.write(piece)
        os.pwrite(self._handle, length, 0)

    def remove(self) -> None:
        """Give the memory back."""
        self._close()
        self._handle = None
        self.path.unlink(missing_ok=True)


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Description and tensors of a file, mapped; None if it is not whole."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            length = int(file.metadata()[_ABOUT])
    except (OSError, SafetensorError):
        return None
    return files.unpacked(tensors.pop(_ABOUT).numpy().data[:length]), tensors
