"""Starts workers on this machine: processes, or threads of this process.

Invariant: whatever happens, ``launch`` returns or raises with no worker running but threads that do not
respond; and it raises the cause, not a consequence. It does not restart workers and knows one machine only;
torchrun and Slurm start workers on several.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError, CounterflowError

from ..transport.kinds import GLOO, TransportKind, kind_of
from . import world
from .children import SendSignal, Supervisor
from .failures import describe_failure
from .processes import ProcessLaunch, check_processes, pickled
from .threads import ThreadLaunch

__all__ = ["SendSignal", "Supervisor", "launch", "launch_error", "launch_watched"]

_T = TypeVar("_T")

_MOST_WORKERS = 1_024
"""Maximum on one machine."""


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

    Under torchrun, Slurm or another launcher, whose processes are the workers, nothing is started: each
    process calls the function and returns the results of all. So one script serves ``python`` and
    ``torchrun``.

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
        workers: number of workers, at least 1.
        transport: name of a transport: ``gloo`` or ``nccl`` of processes, ``local`` of threads of this
            process, or an instrument of `counterflow.testing` (``strict-nccl``, threads with NCCL's rules: a
            program that would hang on GPUs is reported).
        device: device of the workers; ``"cuda"`` is a GPU each. None: that for nccl, else the CPU.
        timeout_seconds: maximum time that a worker waits for another.
        threads: number of torch's threads in each worker; None: this machine's cores, divided.

    Raises:
        ConfigError: the request is wrong, or a worker raised it.
        WorkerError: a worker died, hung or raised; the message names it. Threads that do not end
            within the timeout (at most 5 s) after a failure remain as daemons.
    """
    info = world.rank_info()
    if info is not None and _are_workers(info, workers, kind_of(transport)):
        defaults = world.Defaults(
            kind_of(transport), None if device is None else torch.device(device), timeout_seconds
        )
        return _call_here(function, args, kwargs, defaults, threads)
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
    supervisor: Supervisor | None,
    function: Callable[..., _T],
    *args: object,
    workers: int,
    transport: str = GLOO.name,
    device: torch.device | str | None = None,
    timeout_seconds: float = 300.0,
    threads: int | None = None,
    **kwargs: object,
) -> list[_T]:
    """``launch`` with a supervisor of the workers.

    Args:
        supervisor: called about ten times a second, in this thread. An error that it raises ends all workers
            at once. The function has to unblock signals itself then, once it has its handlers. None: as
            ``launch``.
        function: see ``launch``.
        *args: its arguments.
        **kwargs: its arguments by name.
        workers: number of workers.
        transport: name of a transport.
        device: device of the workers.
        timeout_seconds: maximum time that a worker waits for another.
        threads: number of torch's threads in each worker.

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
        world.refuse_missing_gpu(None if device is None else torch.device(device), kind)
        hub = kind.load()(workers, timeout_seconds=timeout_seconds)
        return ThreadLaunch(hub, call, torch.device(device or "cpu"), threads, supervisor).run()
    check_processes(workers, kind)
    task = pickled((function, args, kwargs), function)
    defaults = world.Defaults(kind, None if device is None else torch.device(device), timeout_seconds)
    return ProcessLaunch(workers, task, defaults, threads, supervisor).run()


def _are_workers(info: world.RankInfo, workers: int, kind: TransportKind) -> bool:
    """True if this process is one of the workers of a launch, since a launcher has started as many.

    Raises:
        ConfigError: it has started another number of processes.
    """
    if kind.threads or info.launcher == "launch":
        return False
    if info.world_size != workers and info.launcher != "slurm":  # a task of Slurm may start its own workers
        raise ConfigError(
            f"workers={workers}, and {info.launcher} has started {plural(info.world_size, 'process')}; start "
            f"{workers}, or give launch workers={info.world_size}"
        )
    return info.world_size == workers


def _call_here(
    function: Callable[..., _T],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    defaults: world.Defaults,
    threads: int | None,
) -> list[_T]:
    if threads is not None:
        torch.set_num_threads(threads)
    world.set_defaults(defaults)
    result = pickled(function(*args, **kwargs), None)
    rows = cast("list[bytes]", world.current_transport().gather_objects(result))
    return [pickle.loads(row) for row in rows]  # noqa: S301 - the workers of this run wrote them


def launch_error(error: BaseException) -> CounterflowError:
    """Make the error that a launch raises for an error of this worker."""
    return describe_failure(error, world.rank() or 0, world.existing_transport()).error()
