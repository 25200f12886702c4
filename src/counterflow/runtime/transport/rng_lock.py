"""Lock on the process's random generators, which workers that are threads share: one thread uses them at a
time.

Invariant: outside of the engine each worker's thread draws from states of its own, as a process does. It
holds the lock from the moment it leaves the engine until it enters it again or waits in it; torch's, Python's
and NumPy's global generators then have its states. All threads of a launch begin with those of its caller.
Numbers that layers draw from Python's and NumPy's in the engine come from states of the engine, so no thread
repeats them.

It does not interrupt a thread that draws all the time. A thread that holds the lock and computes nothing
waits for another one behind the engine's back: from then on the launch's threads share the generators, and a
warning says so.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

process_lock = threading.Lock()
"""Held by the thread that uses the generators, in the engine or out of it."""

_LOOK_SECONDS = 0.5
_IDLE_LOOKS = 6
"""Number of looks at an idle holder of the lock, after which the threads stop excluding each other."""

_LEAST_SECONDS = 1e-3
"""Processor time between two looks below which a thread is idle."""

_log = logging.getLogger(__name__)
_thread = threading.local()


@dataclass(frozen=True)
class PythonStates:
    """States of Python's and NumPy's global generators."""

    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> PythonStates:
        """Current states of the generators."""
        return cls(random.getstate(), np.random.get_state())  # noqa: NPY002

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


@dataclass(frozen=True)
class RandomStates:
    """States of the process's global generators."""

    host: Tensor
    devices: list[Tensor]
    python: PythonStates

    @classmethod
    def now(cls) -> RandomStates:
        """Current states of the generators."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), devices, PythonStates.now())

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.host)
        for index, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, index)
        self.python.restore()


class RngLock:
    """Exclusive use of the generators by the threads of one launch.

    Args:
        timeout_seconds: maximum time for which the engine may use the generators.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.initial_states = RandomStates.now()
        """States with which all threads begin."""
        self.engine_states = self.initial_states.python
        """States from which layers draw in the engine; torch's draws there come from streams."""
        self.disabled = False
        """True if the threads wait for each other outside of the engine, so they share the generators."""

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Run one worker's thread."""
        client = _thread.client = _LockClient(self)
        client.acquire()
        try:
            yield
        finally:
            client.release()
            _thread.client = None


_holder: _LockClient | None = None


class _LockClient:
    def __init__(self, lock: RngLock) -> None:
        self.lock = lock
        self.is_holder = False
        self._states = lock.initial_states
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def acquire(self) -> None:
        """Wait for the generators and set them to this thread's states."""
        global _holder
        synchronize_stream()
        if self.lock.disabled or not self._acquired():
            return
        _holder, self.is_holder = self, True
        self.lock.engine_states = PythonStates.now()
        self._states.restore()

    def release(self) -> None:
        """Save this thread's states and let another thread use the generators."""
        global _holder
        if self.is_holder:
            self._states = RandomStates.now()
            self.lock.engine_states.restore()
            _holder, self.is_holder = None, False
            process_lock.release()

    def _acquired(self) -> bool:
        deadline = time.monotonic() + self.lock.timeout_seconds
        seen: _LockClient | None = None
        seconds, idle = 0.0, 0
        while not process_lock.acquire(timeout=_LOOK_SECONDS):
            holder = _holder
            if self.lock.disabled or time.monotonic() > deadline:
                return False
            now = 0.0 if holder is None else holder.computed_seconds()
            idle = idle + 1 if holder is not None and holder is seen and now - seconds < _LEAST_SECONDS else 0
            if holder is not None and idle >= _IDLE_LOOKS:
                holder.lock.disabled = self.lock.disabled = True
                _log.warning(
                    "workers that are threads wait for each other outside of the pipeline: from here on "
                    "their random draws mix; draw what must be equal from generators of its own"
                )
                return False
            seen, seconds = holder, now
        return True

    def computed_seconds(self) -> float:
        """The thread's processor time."""
        return time.clock_gettime(self._clock)


@contextmanager
def rng_released() -> Iterator[None]:
    """Run the engine, or one of its waits: a worker's thread lets another one use the generators."""
    client: _LockClient | None = getattr(_thread, "client", None)
    if client is None or not client.is_holder:
        yield
        return
    client.release()
    try:
        yield
    finally:
        client.acquire()


@contextmanager
def stream_synchronized_by(wait: Callable[[], None]) -> Iterator[None]:
    """Run a worker's thread whose stream waits for others while its host goes on; ``wait`` waits for the
    stream.
    """
    _thread.synchronize = wait
    try:
        yield
    finally:
        _thread.synchronize = None


def synchronize_stream() -> None:
    """Wait for the thread's stream before the lock is acquired: others may need the lock to make progress."""
    wait: Callable[[], None] | None = getattr(_thread, "synchronize", None)
    if wait is not None:
        wait()


def current_worker() -> object:
    """The worker that runs in this thread; None if it is a process, or no worker."""
    return getattr(_thread, "client", None)


def holds_rng() -> bool:
    """True if the calling thread holds the lock outside of the engine."""
    client: _LockClient | None = getattr(_thread, "client", None)
    return client is not None and client.is_holder
