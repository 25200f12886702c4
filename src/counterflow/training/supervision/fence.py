"""Whether an attempt at a run is over, for its workers that cannot know: those that were frozen or cut off.

Each attempt has a mark in a file of the run's folder; the next one puts its own there, the end of the run
takes it away. Whoever is about to write asks whether the mark is still that of its own attempt.

Invariant: an attempt is over as soon as another has begun, or the run has ended; storage that cannot be asked
says nothing. Between the answer and what is written there is a moment: so drafts have names of their own and
are asked about again once they are there, and metrics are a new file in each attempt.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from counterflow.errors import WorkerError

ATTEMPT = ".attempt"


class Fence:
    """Between one attempt at a run and those after it.

    Args:
        folder: of the run, on storage that all workers share; until ``join`` what this worker takes it for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark: str | None = None
        """Of this attempt; None: not known yet, and never over."""

    @property
    def _path(self) -> Path:
        return self.folder / ATTEMPT

    def join(self, folder: Path, mark: str | None) -> None:
        """Learn from who began the attempt where it is, and its mark: a name may have got a number there."""
        self.folder, self.mark = folder, mark

    def begin(self) -> None:
        """Begin an attempt, with which those before are over; only who holds the folder's lock may."""
        self.mark = secrets.token_hex(8)
        draft = self._path.with_name(f"{ATTEMPT}.{self.mark}")
        try:
            draft.write_text(self.mark, encoding="ascii")
            draft.replace(self._path)
        except OSError:  # a full disk: without a mark those before are over too
            self.mark = None
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        finally:  # also if a signal ends it here
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def found(self) -> str | None:
        """The mark that is there; None if there is none, or storage does not tell."""
        try:
            return self._path.read_text(encoding="ascii")
        except (OSError, ValueError):
            return None

    def over(self) -> bool:
        """Whether another attempt has begun, or the run has ended."""
        if self.mark is None:
            return False
        try:
            return self._path.read_bytes() != self.mark.encode()
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def check(self) -> None:
        """Refuse to write for an attempt that is over.

        Raises:
            WorkerError: it is.
        """
        if self.over():
            raise WorkerError(
                f"this attempt at the run in {self.folder} is over: another one has begun, or the run "
                "has ended; nothing more is written"
            )

    def end(self) -> None:
        """Take the mark away, unless it is another attempt's."""
        if self.mark is not None and not self.over():
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
