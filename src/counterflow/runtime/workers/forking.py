"""How worker processes begin: forked from one process that has imported torch, which takes seconds each time.

Invariant: a worker has what it would have if it were started anew: the environment, the standard streams and
the folder of its launch as they are then, and random states of its own. It ends when its launch does, however
that ends. The process that workers are forked from computes nothing and ends with the one that launches.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from typing import Any, Literal

import numpy as np

from ..transport.base import TransportKind
from .world import Defaults

_IMPORTED = ["counterflow.runtime.pipeline", "torch._dynamo", "torch.distributed.checkpoint"]
"""What workers find imported; an optimiser imports torch._dynamo with its first call."""

_STREAMS = (1, 2)
"""Where workers print to."""

FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What a terminal or a batch system sends to all processes of a command, whoever is meant to act on it."""


def start_method(defaults: Defaults) -> Literal["forkserver", "spawn"]:
    """How ``multiprocessing`` is to start workers: CUDA allows no fork, and macOS's libraries do not."""
    on_gpu = defaults.kind is TransportKind.NCCL or (
        defaults.device is not None and defaults.device.type != "cpu"
    )
    if on_gpu or sys.platform != "linux":
        return "spawn"
    forkserver.set_forkserver_preload(_IMPORTED)
    resource_tracker.ensure_running()  # by itself it would let interrupts through again
    with _undisturbed():
        forkserver.ensure_running()
    return "forkserver"


class Surroundings:
    """What a worker takes over from its launch before it imports anything; it is sent to be read there."""

    def __reduce__(self) -> Any:
        return _adopt, (dict(os.environ), [DupFd(stream) for stream in _STREAMS])


def _adopt(environment: dict[str, str], streams: list[Any]) -> Surroundings:
    os.environ.clear()
    os.environ.update(environment)
    for stream, given in zip(_STREAMS, streams, strict=True):
        os.dup2(given.detach(), stream)
    np.random.seed()  # noqa: NPY002 - it is this generator that was forked
    return Surroundings()


def end_with_the_launch() -> None:
    """From now on this worker is killed as soon as its launch's process is gone; let signals through."""
    threading.Thread(target=_wait_for_the_end, name="counterflow launch", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_OUTSIDE)


def _wait_for_the_end() -> None:
    launch = multiprocessing.parent_process()
    assert launch is not None
    launch.join()
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """What is started in here takes no signal from outside: who started it says when it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
