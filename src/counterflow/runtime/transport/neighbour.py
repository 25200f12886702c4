"""Whether the next worker's process is still there, where no launcher looks: under plain srun, or by hand.

A process that was killed says nothing, and over NCCL nobody's connection breaks. So each worker looks at the
next one: on its own machine for the process itself, elsewhere whether its watch still posts.

Invariant: a worker that ended by itself has said so, and is not missed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from torch.distributed.distributed_c10d import Store


def nobody_else_looks() -> bool:
    """Whether no launcher sees at once that a worker ended: ``cf.launch`` and torchrun do."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


class Neighbour:
    """What one worker knows of the next.

    Args:
        rank: this worker's.
        world_size: how many workers there are.
        silent_seconds: how long the next one may post nothing.
    """

    def __init__(self, rank: int, world_size: int, silent_seconds: float) -> None:
        self._rank = rank
        self.next = (rank + 1) % world_size
        self._silent_seconds = silent_seconds
        self._heard = b""
        self._heard_at = time.monotonic()

    def introduce(self, store: Store) -> None:
        """Publish this worker's process for the worker that watches it."""
        store.set(f"process/{self._rank}", json.dumps([_here(), os.getpid(), socket.gethostname()]))

    def leave(self, store: Store) -> None:
        """Publish that this worker ends by itself."""
        store.set(f"ended/{self._rank}", "")

    def missing(self, store: Store) -> str | None:
        """Why the next worker's process is held to be gone; None: it is there, or ended by itself."""
        mine, theirs = f"status/{self.next}", f"process/{self.next}"
        if not store.check([mine, theirs]):
            self._heard_at = time.monotonic()  # it has not begun
            return None
        posted = store.get(mine)
        if posted != self._heard:
            self._heard, self._heard_at = posted, time.monotonic()
        here, process, host = json.loads(store.get(theirs))
        silent = time.monotonic() - self._heard_at
        if here == _here():
            if _runs(process):
                return None
            why = f"its process {process} on {host} is gone; perhaps it was killed"
        else:
            if silent <= self._silent_seconds:
                return None
            why = f"nothing is heard of it on {host} for {silent:.0f} s"
        return None if store.check([f"ended/{self.next}"]) else why


def _here() -> str:
    """Identifier of this machine and container, which distinguishes processes of equal numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return socket.gethostname()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's has its number now, or it cannot be asked
        return True
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
