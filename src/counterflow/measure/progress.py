"""How far workers are that measure: they append to a file, and whoever started them reads how long it is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_POLL_SECONDS = 0.2
"""How often it is looked how far the workers are."""

Progress = Callable[[str, int, int], None]
"""What is measured, how many parts of it are done, and of how many."""


@contextmanager
def reported(parts: Sequence[tuple[str, int]], progress: Progress) -> Iterator[Path]:
    """Gives a file that grows by a byte with each thing done, and tells it meanwhile, part by part.

    Args:
        parts: what is done, and how many things that is; the last is done when the context ends.
        progress: told of each from none to all.
    """
    due = deque[tuple[int, str, int, int]]()
    before = 0
    for part, count in parts:
        due += [(before + done, part, done, count) for done in range(count + 1)]
        before += count

    def tell(known: int) -> None:
        while due and due[0][0] <= known:
            progress(*due.popleft()[1:])

    ended = threading.Event()
    with TemporaryDirectory(prefix="counterflow-") as folder:
        path = Path(folder) / "done"
        path.touch()

        def watch() -> None:
            while not ended.wait(_POLL_SECONDS):
                tell(path.stat().st_size)

        watcher = threading.Thread(target=watch, name="counterflow profile", daemon=True)
        tell(0)
        watcher.start()
        try:
            yield path
        finally:
            ended.set()
            watcher.join()
        tell(before)
