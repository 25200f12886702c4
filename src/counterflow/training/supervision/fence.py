"""Whether an attempt at a run is over, for workers that cannot know: those that were frozen or cut off.

Each attempt has a mark in a file of the run's folder; the next attempt replaces it, and the end of the run
removes it. A worker that is about to write checks that the mark is still that of its own attempt.

Invariant: an attempt is over as soon as another has begun, or the run has ended; storage that cannot be read
says nothing. Time passes between the check and the write, so drafts have names of their own and are checked
again once they exist, and each attempt has a new file of metrics.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from counterflow.errors import WorkerError

ATTEMPT = ".attempt"


class Fence:
    """Keeps one attempt at a run from writing after the next one has begun.

    Args:
        folder: folder of the run, on storage that all workers share; until ``join`` the one that this worker
            expects.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark: str | None = None
        """Mark of this attempt; None: unknown, and never over."""

    @property
    def _path(self) -> Path:
        return self.folder / ATTEMPT

    def join(self, folder: Path, mark: str | None) -> None:
        """Take folder and mark from rank 0, which may have numbered the folder."""
        self.folder, self.mark = folder, mark

    def begin(self) -> None:
        """Begin an attempt, which ends those before; only the process that holds the folder's lock may call
        it.
        """
        self.mark = secrets.token_hex(8)
        draft = self._path.with_name(f"{ATTEMPT}.{self.mark}")
        try:
            draft.write_text(self.mark, encoding="ascii")
            draft.replace(self._path)
        except OSError:  # on a full disk: without a mark earlier attempts are over too
            self.mark = None
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        finally:  # also if a signal ends the process here
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def found(self) -> str | None:
        """The mark in the folder; None if there is none, or storage cannot be read."""
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
        """Raise an error if the attempt is over.

        Raises:
            WorkerError: the attempt is over.
        """
        if self.over():
            if not self.folder.is_dir():
                raise WorkerError(
                    f"{self.folder} was removed while the run writes there; start the run again"
                )
            raise WorkerError(
                f"this attempt at the run in {self.folder} is over: another one has begun, or the run "
                "has ended; nothing more is written"
            )

    def end(self) -> None:
        """Remove the mark, unless it is another attempt's."""
        if self.mark is not None and not self.over():
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
