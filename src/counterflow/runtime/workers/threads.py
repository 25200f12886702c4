"""Workers as threads of this process; for ``launch``.

Invariant: when the launch is over, this process draws and computes as before, and no thread runs but those
that do not end within their grace period.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..transport import gpu_environment
from ..transport.local import Hub
from ..transport.rng_lock import RngLock, rng_released
from . import world
from .children import Supervisor
from .failures import WorkerFailure, describe_failure, root

_GRACE_SECONDS = 5.0
"""Maximum time in which the threads of a failed launch notice the failure."""

_EXIT_SECONDS = 30.0
"""Maximum time for which the end of the process waits for them."""

_LATE: list[threading.Thread] = []
"""Threads that were running when their launch had ended."""


@atexit.register
def _join_late() -> None:
    """Join late threads: one that returns from torch while Python ends would abort the process."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in _LATE:
        thread.join(max(0.0, deadline - time.monotonic()))


@dataclass
class ThreadLaunch:
    """A launch of threads."""

    hub: Hub
    call: Callable[[], Any]
    device: torch.device
    threads: int
    supervisor: Supervisor | None
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[WorkerFailure] = field(default_factory=list)
    causes: dict[int, BaseException] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = RngLock(self.hub.timeout_seconds)

    def run(self) -> list[Any]:
        """Results by rank; raises the error of the first worker that failed."""
        before = torch.get_num_threads()
        running = [
            threading.Thread(target=self._work, args=(rank,), name=f"counterflow worker {rank}", daemon=True)
            for rank in range(self.hub.world_size)
        ]
        torch.set_num_threads(self.threads)  # what new threads begin with
        try:
            with rng_released():  # these may be threads of a thread
                for thread in running:
                    thread.start()
                self._join(running)
        except BaseException as error:  # such as a KeyboardInterrupt: the threads' waits end with it
            self.hub.transport(0).fail(error)
            raise
        finally:
            torch.set_num_threads(before)
            late = [thread for thread in running if thread.is_alive()]
            if late:
                _LATE.extend(late)
            else:
                self.rng.initial_states.restore()  # workers' draws do not affect the caller, as in processes
        if self.failures:
            failed = root(self.failures)
            raise failed.error() from self.causes[failed.rank]
        self.hub.ended()
        return [self.results[rank] for rank in range(self.hub.world_size)]

    def _work(self, rank: int) -> None:
        device = self.device
        if device.type == "cuda":
            gpu_environment.before_cuda()
            index = rank % torch.cuda.device_count() if device.index is None else device.index
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)
        transport = self.hub.transport(rank, device)
        world.enter(transport)
        try:
            with self.rng.worker(), transport.running():
                self.results[rank] = self.call()
            transport.has_returned()
        except BaseException as error:  # reported to the launcher
            self.causes[rank] = error
            self.failures.append(describe_failure(error, rank, transport))
            transport.fail(error)
        finally:
            world.enter(None)

    def _join(self, running: Sequence[threading.Thread]) -> None:
        patience = min(self.hub.timeout_seconds, _GRACE_SECONDS)
        deadline = None
        while any(thread.is_alive() for thread in running):
            for thread in running:
                thread.join(0.05 if thread.is_alive() else 0.0)
            if self.supervisor is not None:
                self.supervisor(lambda _: None)
            if self.failures and deadline is None:
                deadline = time.monotonic() + patience
            if deadline is not None and time.monotonic() > deadline:
                return
