"""Liveness of the next worker's process, for runs that no launcher supervises: plain srun, or started by
hand.

A killed process reports nothing, and over NCCL no connection breaks. So each worker checks the next one: on
its own machine the process itself, on another machine whether its watch still posts.

Invariant: a worker that ends by itself publishes so first, and is never reported as lost.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from torch.distributed.distributed_c10d import Store


def is_unsupervised() -> bool:
    """True if no launcher notices at once that a worker ended; ``cf.launch`` and torchrun do."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


class NextWorker:
    """Liveness of the worker of the next rank, as this worker sees it.

    Args:
        rank: rank of this worker.
        world_size: number of workers.
        silent_seconds: maximum time between two posts of a worker on another machine.
    """

    def __init__(self, rank: int, world_size: int, silent_seconds: float) -> None:
        self._rank = rank
        self.next = (rank + 1) % world_size
        self._silent_seconds = silent_seconds
        self._last_post = b""
        self._last_post_at = time.monotonic()

    def publish_process(self, store: Store) -> None:
        """Publish this worker's process for the worker that watches it."""
        store.set(f"process/{self._rank}", json.dumps([_machine(), os.getpid(), socket.gethostname()]))

    def publish_end(self, store: Store) -> None:
        """Publish that this worker ends by itself."""
        store.set(f"ended/{self._rank}", "")

    def loss_reason(self, store: Store) -> str | None:
        """Reason to consider the next worker lost; None if it runs, or ended by itself."""
        status_key, process_key = f"status/{self.next}", f"process/{self.next}"
        if not store.check([status_key, process_key]):
            self._last_post_at = time.monotonic()  # it has not begun
            return None
        posted = store.get(status_key)
        if posted != self._last_post:
            self._last_post, self._last_post_at = posted, time.monotonic()
        machine, process, host = json.loads(store.get(process_key))
        silent = time.monotonic() - self._last_post_at
        if machine == _machine():
            if _runs(process):
                return None
            reason = f"its process {process} on {host} is gone; perhaps it was killed"
        else:
            if silent <= self._silent_seconds:
                return None
            reason = f"nothing is heard of it on {host} for {silent:.0f} s"
        return None if store.check([f"ended/{self.next}"]) else reason


def _machine() -> str:
    # Containers of one machine may have processes of equal numbers.
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
