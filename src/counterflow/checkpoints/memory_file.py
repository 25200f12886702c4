"""A file in memory with tensors and their description: written in place, complete or not at all.

It is a safetensors file. Its first eight bytes, the length of its header, are zero until everything else is
written, and a file that begins with zeros is ignored.

Invariant: a file whose writer was killed at any moment is not read. Pipelines and runs are not used here.
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
"""Name of the description, which tensors cannot have, and of its length."""

_BLOCK = 65_536
"""The description is padded to a multiple of this size, so most copies are equally long."""


class MemoryFile:
    """A file in memory, written repeatedly in place; made anew if the tensors change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._close: Callable[[], object] = lambda: None

    def write(self, tensors: Mapping[str, Tensor], about: bytes) -> None:
        """Write a copy, which is valid once it is complete.

        Args:
            tensors: tensors on the host.
            about: their description, packed.

        Raises:
            OSError: the memory is full.
        """
        filled = bytearray(about.ljust(-(-len(about) // _BLOCK) * _BLOCK, b"\0"))
        arrays = {**tensors, _ABOUT: torch.frombuffer(filled, dtype=torch.uint8)}
        sizes = files.sizes_of(arrays)
        if self._handle is None or sizes != self._sizes:
            # Never into an earlier process's file: a worker that was frozen may write there. Never into a
            # longer one, cutting it: a process that has it mapped would be killed.
            self.remove()
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._close, self._sizes = weakref.finalize(self, os.close, self._handle), sizes
        pieces = files.pieces_of(sizes, arrays.__getitem__, {_ABOUT: f"{len(about):020}"})
        length = next(pieces)
        with open(self._handle, "wb", closefd=False) as file:
            file.seek(0)
            file.write(bytes(len(length)))
            for piece in pieces:
                file.write(piece)
        os.pwrite(self._handle, length, 0)

    def remove(self) -> None:
        """Free the memory."""
        self._close()
        self._handle = None
        self.path.unlink(missing_ok=True)


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Description and tensors of a file, mapped; None if it is incomplete."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            length = int(file.metadata()[_ABOUT])
    except (OSError, SafetensorError):
        return None
    return files.unpacked(tensors.pop(_ABOUT).numpy().data[:length]), tensors
