"""The metrics of a run as lines of JSON: read while they are written, and cut at a step.

Invariant: incomplete lines are ignored, and lines that no run can have written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .training_report import Numbers


class Tail:
    """Reads lines that were added to a file of metrics since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._read = 0
        self._rest = b""

    def read(self) -> tuple[bool, list[Numbers]]:
        """The new lines, and whether the file was read from its beginning because it was replaced."""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            replaced = status.st_ino != self._file or status.st_size < self._read
            if replaced:
                self._file, self._read, self._rest = status.st_ino, 0, b""
            file.seek(self._read)
            text = self._rest + file.read()
            self._read = file.tell()
        lines, _, self._rest = text.rpartition(b"\n")
        return replaced, lines_of(lines)


def last_step(metrics: bytes) -> int:
    """The last step that has a line."""
    return max((int(line["step"]) for line in lines_of(metrics)), default=0)


def lines_of(metrics: bytes) -> list[Numbers]:
    """The lines of metrics, without damaged and incomplete ones."""
    records = []
    for line in metrics.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            read = json.loads(line)
            if _is_line(read):
                records.append(read)
    return records


_LARGEST = 1e300
"""Maximum of a step's number and time; no run writes larger ones."""


def _is_line(read: Any) -> bool:
    if not isinstance(read, dict) or any(type(value) not in (int, float) for value in read.values()):
        return False
    return all(0 <= read.get(name, -1) < _LARGEST for name in ("step", "seconds"))


_EVALUATED = "validation_loss"
"""What only an evaluation's line contains; a skipped step's line may have no loss."""


def with_records(metrics: bytes, step: int, records: Sequence[Numbers]) -> bytes:
    """The metrics until a step, with lines of that step that were made but perhaps not written."""
    lines = [line for line in lines_of(metrics) if line["step"] <= step]
    known = {(line["step"], _EVALUATED in line) for line in lines}
    lines += [line for line in records if (line["step"], _EVALUATED in line) not in known]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
