"""Workers as threads of this process; for ``launch``.

Invariant: when the launch is over, this process draws and computes as before, and no thread is left but those
that do not come back within the time they have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..transport import gpu_environment
from ..transport.local import Hub
from ..transport.turns import Turns, elsewhere
from . import world
from .children import Meanwhile
from .failures import Failed, failed_by, root

_GRACE_SECONDS = 5.0
"""How long the threads of a failed launch may take to notice, at most."""


@dataclass
class ThreadLaunch:
    """A launch of threads."""

    hub: Hub
    call: Callable[[], Any]
    device: torch.device
    threads: int
    meanwhile: Meanwhile | None
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    causes: dict[int, BaseException] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = Turns(self.hub.timeout_seconds)

    def run(self) -> list[Any]:
        """The results by rank; raises what the first worker that failed raised."""
        before = torch.get_num_threads()
        running = [
            threading.Thread(target=self._work, args=(rank,), name=f"counterflow worker {rank}", daemon=True)
            for rank in range(self.hub.world_size)
        ]
        torch.set_num_threads(self.threads)  # what new threads begin with
        try:
            with elsewhere():  # these may be threads of a thread
                for thread in running:
                    thread.start()
                self._join(running)
        except BaseException as error:  # such as a KeyboardInterrupt: the threads' waits end with it
            self.hub.transport(0).fail(error)
            raise
        finally:
            torch.set_num_threads(before)
            if not any(thread.is_alive() for thread in running):
                self.turns.begin.restore()  # what workers draw is theirs, as in processes
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
            with self.turns.worker(), transport.running():
                self.results[rank] = self.call()
            transport.has_returned()
        except BaseException as error:  # reported to the launcher
            self.causes[rank] = error
            self.failures.append(failed_by(error, rank, transport))
            transport.fail(error)
        finally:
            world.enter(None)

    def _join(self, running: Sequence[threading.Thread]) -> None:
        patience = min(self.hub.timeout_seconds, _GRACE_SECONDS)
        deadline = None
        while any(thread.is_alive() for thread in running):
            for thread in running:
                thread.join(0.05 if thread.is_alive() else 0.0)
            if self.meanwhile is not None:
                self.meanwhile(lambda _: None)
            if self.failures and deadline is None:
                deadline = time.monotonic() + patience
            if deadline is not None and time.monotonic() > deadline:
                return
