"""How worker processes begin: forked from one process that has imported torch, which takes seconds each time.

Invariant: a worker has what it would have if it were started anew: the environment, the standard streams and
the folder of its launch as they are then, and random states of its own. It ends when its launch does, however
that ends. The process that workers are forked from computes nothing and ends with the one that launches.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import scratch
from .outside import FROM_OUTSIDE, safe_path, undisturbed
from .world import Defaults

_IMPORTED = ["counterflow.runtime.pipeline", "torch._dynamo", "torch.distributed.checkpoint"]
"""What workers find imported; an optimiser imports torch._dynamo with its first call."""

_STREAMS = (1, 2)
"""Where workers print to."""


def start_method(defaults: Defaults) -> Literal["forkserver", "spawn"]:
    """How ``multiprocessing`` is to start workers: CUDA allows no fork, and macOS's libraries do not."""
    on_gpu = (defaults.kind is not None and defaults.kind.gpu_each) or (
        defaults.device is not None and defaults.device.type != "cpu"
    )
    with undisturbed(), safe_path():  # it lets interrupts through again when it starts: so before the workers
        resource_tracker.ensure_running()
    if on_gpu or sys.platform != "linux":
        return "spawn"
    forkserver.set_forkserver_preload(_IMPORTED)
    with undisturbed(), safe_path():
        forkserver.ensure_running()
    scratch.lock(Path(util.get_temp_dir()))
    return "forkserver"


class Surroundings:
    """What a worker takes over from its launch before it imports anything; it is sent to be read there."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)

    def __reduce__(self) -> Any:
        return _adopt, (self._environment, [DupFd(stream) for stream in _STREAMS])


def _adopt(environment: dict[str, str], streams: list[Any]) -> Surroundings:
    os.environ.clear()
    os.environ.update(environment)
    for stream, given in zip(_STREAMS, streams, strict=True):
        os.dup2(given.detach(), stream)
    np.random.seed()  # noqa: NPY002 - it is this generator that was forked
    return Surroundings()


def end_with_the_launch() -> None:
    """From now on this worker is killed as soon as its launch's process is gone."""
    threading.Thread(target=_wait_for_the_end, name="counterflow launch", daemon=True).start()


def let_signals_through() -> None:
    """Take signals from outside from now on, and those that came before."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_OUTSIDE)


def _wait_for_the_end() -> None:
    launch = multiprocessing.parent_process()
    assert launch is not None
    launch.join()
    os.kill(os.getpid(), signal.SIGKILL)
