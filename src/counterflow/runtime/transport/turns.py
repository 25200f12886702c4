"""Threads that are workers share the process's random generators: the thread that uses them has the turn.

Invariant: outside of the engine each worker's thread draws from states of its own, as a process does. It has
the turn from the moment it leaves the engine until it enters it again or waits in it; torch's, Python's and
NumPy's global generators then hold its states. All threads of a launch begin with those of its caller. What
layers draw from Python's and NumPy's in the engine comes from states of the engine, so no turn repeats it.

What it does not do: take the turn from a thread that draws all the time. A thread that has the turn and
computes nothing waits for another one behind the engine's back: from then on the launch's threads share the
generators, and a warning says so.
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
"""Held by the thread that has the turn, in the engine or out of it."""

_LOOK_SECONDS = 0.5
_IDLE_LOOKS = 6
"""Number of looks at a thread that computes nothing, after which its turn is over."""

_LEAST_SECONDS = 1e-3
"""Less processor time than this between two looks is nothing."""

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
        """Give them to the generators."""
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
        """Give them to the generators."""
        torch.set_rng_state(self.host)
        for index, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, index)
        self.python.restore()


class Turns:
    """The turns of one launch's threads.

    Args:
        timeout_seconds: how long the engine may keep the generators.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.begin = RandomStates.now()
        """States with which all threads begin."""
        self.engine = self.begin.python
        """States from which layers draw in the engine; torch's draws there come from streams."""
        self.over = False
        """Whether the threads wait for each other outside of the engine, so that there are no turns."""

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Around all that one thread does."""
        turn = _thread.turn = _Turn(self)
        turn.take()
        try:
            yield
        finally:
            turn.leave()
            _thread.turn = None


_holder: _Turn | None = None


class _Turn:
    """One thread's."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.held = False
        self._states = turns.begin
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def take(self) -> None:
        """Wait for the turn, and have one's own random states."""
        global _holder
        settle()
        if self.turns.over or not self._acquired():
            return
        _holder, self.held = self, True
        self.turns.engine = PythonStates.now()
        self._states.restore()

    def leave(self) -> None:
        """Let others have the turn."""
        global _holder
        if self.held:
            self._states = RandomStates.now()
            self.turns.engine.restore()
            _holder, self.held = None, False
            process_lock.release()

    def _acquired(self) -> bool:
        deadline = time.monotonic() + self.turns.timeout_seconds
        seen: _Turn | None = None
        seconds, idle = 0.0, 0
        while not process_lock.acquire(timeout=_LOOK_SECONDS):
            holder = _holder
            if self.turns.over or time.monotonic() > deadline:
                return False
            now = 0.0 if holder is None else holder.computed_seconds()
            idle = idle + 1 if holder is not None and holder is seen and now - seconds < _LEAST_SECONDS else 0
            if holder is not None and idle >= _IDLE_LOOKS:
                holder.turns.over = self.turns.over = True
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
def elsewhere() -> Iterator[None]:
    """Around the engine and its waits: a thread that is a worker lets others have the turn."""
    turn: _Turn | None = getattr(_thread, "turn", None)
    if turn is None or not turn.held:
        yield
        return
    turn.leave()
    try:
        yield
    finally:
        turn.take()


@contextmanager
def settled_by(wait: Callable[[], None]) -> Iterator[None]:
    """Around a worker's thread whose stream waits for others behind its back; ``wait`` makes up for it."""
    _thread.settle = wait
    try:
        yield
    finally:
        _thread.settle = None


def settle() -> None:
    """Wait for what the thread's stream waits for: before the turn, and not while others wait for that."""
    wait: Callable[[], None] | None = getattr(_thread, "settle", None)
    if wait is not None:
        wait()


def my_worker() -> object:
    """The worker that the thread is; None: it is none, or a process."""
    return getattr(_thread, "turn", None)


def has_turn() -> bool:
    """Whether the thread that asks has the turn outside of the engine."""
    turn: _Turn | None = getattr(_thread, "turn", None)
    return turn is not None and turn.held
