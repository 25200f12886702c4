"""Starts workers on this machine: processes, or threads of this process.

Invariant: whatever happens, ``launch`` returns or raises with nothing left running but, for threads, those
that do not come back; and what it raises is the cause, not what follows from it. It does not restart
workers and knows one machine only; torchrun and Slurm start workers on several.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from counterflow.errors import ConfigError

from ..transport.kinds import GLOO, kind_of
from . import world
from .children import Meanwhile
from .processes import ProcessLaunch, check_processes, pickled
from .threads import ThreadLaunch

_T = TypeVar("_T")

_MOST_WORKERS = 1_024
"""On one machine, whatever it is."""


def launch(
    function: Callable[..., _T],
    *args: object,
    workers: int,
    transport: str = GLOO.name,
    device: torch.device | str | None = None,
    timeout_seconds: float = 300.0,
    threads: int | None = None,
    **kwargs: object,
) -> list[_T]:
    """Run ``function(*args, **kwargs)`` in several workers on this machine; their results by rank.

    Inside, ``Pipeline`` and ``current_transport()`` find the other workers by themselves.

    >>> def rank():
    ...     from counterflow.runtime.workers.world import current_transport
    ...     return current_transport().rank
    >>> launch(rank, workers=3, transport="local")
    [0, 1, 2]

    Args:
        function: for processes, a function at the top level of a module or script, which starts under
            ``if __name__ == "__main__":``; its arguments and result are pickled.
        *args: its arguments.
        **kwargs: its arguments by name.
        workers: how many, at least 1.
        transport: the name of what carries messages: ``gloo`` or ``nccl`` of processes, ``local`` of threads
            of this process, or an instrument of `counterflow.testing` (``strict-nccl``, threads with NCCL's
            rules: what would hang on GPUs is reported).
        device: where the workers compute; ``"cuda"`` is a GPU each. None: that for nccl, else the CPU.
        timeout_seconds: how long a worker waits for another.
        threads: what torch may use in each worker; None: this machine's cores, divided.

    Raises:
        ConfigError: the request is wrong, or a worker raised it.
        WorkerError: a worker died, hung or raised; the message names it. Threads that do not come back
            within the timeout (at most 5 s) after a failure are left behind as daemons.
    """
    return launch_watched(
        None,
        function,
        *args,
        workers=workers,
        transport=transport,
        device=device,
        timeout_seconds=timeout_seconds,
        threads=threads,
        **kwargs,
    )


def launch_watched(
    meanwhile: Meanwhile | None,
    function: Callable[..., _T],
    *args: object,
    workers: int,
    transport: str = GLOO.name,
    device: torch.device | str | None = None,
    timeout_seconds: float = 300.0,
    threads: int | None = None,
    **kwargs: object,
) -> list[_T]:
    """``launch``, and look after the workers in between.

    Args:
        meanwhile: called about ten times a second, from here. What it raises ends all workers at once. The
            function lets signals through by itself then, when it has its handlers. None: as ``launch``.
        function: see ``launch``, as for all that is not said here.
        *args: its arguments.
        **kwargs: its arguments by name.
        workers: how many.
        transport: what carries messages.
        device: where the workers compute.
        timeout_seconds: how long a worker waits for another.
        threads: what torch may use in each worker.

    Raises:
        ConfigError: see ``launch``.
        WorkerError: see ``launch``.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers}; there has to be at least 1")
    if workers > _MOST_WORKERS:
        raise ConfigError(
            f"workers={workers:,}; at most {_MOST_WORKERS:,} are started on one machine: start more on "
            "several, under torchrun or Slurm"
        )
    if timeout_seconds <= 0:
        raise ConfigError(f"timeout_seconds={timeout_seconds:g}; it has to be more than 0")
    kind = kind_of(transport)
    threads = threads or max(1, (os.cpu_count() or 1) // workers)

    def call() -> _T:
        return function(*args, **kwargs)

    if kind.threads:
        hub = kind.load()(workers, timeout_seconds=timeout_seconds)
        return ThreadLaunch(hub, call, torch.device(device or "cpu"), threads, meanwhile).run()
    check_processes(workers, kind)
    task = pickled((function, args, kwargs), function)
    defaults = world.Defaults(kind, None if device is None else torch.device(device), timeout_seconds)
    return ProcessLaunch(workers, task, defaults, threads, meanwhile).run()
