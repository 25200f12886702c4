"""Progress of measuring workers: they append to a file, and the process that started them reads its
length.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_POLL_SECONDS = 0.2
"""Seconds between checks of the workers' progress."""

Progress = Callable[[str, int, int], None]
"""Called with the current part, the number of things done in it, and their total."""


@contextmanager
def reported(parts: Sequence[tuple[str, int]], progress: Progress) -> Iterator[Path]:
    """Yield a file that grows by a byte per thing done, and report the progress meanwhile, part by part.

    Args:
        parts: names and numbers of things to do; the last one is done when the context ends.
        progress: called for each part from 0 to its number.
    """
    due = deque[tuple[int, str, int, int]]()
    before = 0
    for part, count in parts:
        due += [(before + done, part, done, count) for done in range(count + 1)]
        before += count

    def report(known: int) -> None:
        while due and due[0][0] <= known:
            progress(*due.popleft()[1:])

    ended = threading.Event()
    with TemporaryDirectory(prefix="counterflow-") as folder:
        path = Path(folder) / "done"
        path.touch()

        def watch() -> None:
            while not ended.wait(_POLL_SECONDS):
                report(path.stat().st_size)

        watcher = threading.Thread(target=watch, name="counterflow profile", daemon=True)
        report(0)
        watcher.start()
        try:
            yield path
        finally:
            ended.set()
            watcher.join()
        report(before)
