"""Runs under Monarch: an actor a worker, on this host or on a mesh of hosts.

The process that calls ``train`` hosts the store where workers meet, as torchrun's agent does. A process that
ends is a failure that Monarch reports; it is passed on as an event, and all workers are started again.

Invariant: when ``train`` returns or raises, none of its processes is left.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from counterflow.common.extras import imported
from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.workers import world
from counterflow.runtime.workers.world import RankInfo
from counterflow.training.callbacks import Callback
from counterflow.training.config import RunConfig
from counterflow.training.supervision.restarts import Restarts
from counterflow.training.training_report import Summary

from .worker import run_folder, trained_at

_HERE = "127.0.0.1"
"""Where workers of one host meet."""

_NAME = "counterflow"
"""Name of the mesh of actors."""

_STOP_SECONDS = 60.0
"""Time that the processes of a failed attempt have to end."""


def train(
    config: RunConfig, *callbacks: Callback, hosts: Any = None, max_restarts: int = 3
) -> Summary | None:
    """Train as a config says, with an actor in a process for each worker.

    Args:
        config: config of the run, with ``train.out``, a folder that all hosts share.
        callbacks: called on rank 0, in its process; of failures they are informed in this one (``happened``).
        hosts: a ``HostMesh`` of Monarch; None: ``this_host()``.
        max_restarts: maximum restarts of the workers after failures.

    Returns:
        The summary; None if all steps were made before.

    Raises:
        ConfigError: the run cannot be started, or Monarch is not installed.
        WorkerError: a worker failed, and the run is not tried again.
    """
    actors = imported("monarch.actor", "monarch")
    folder = run_folder(config)
    hosts = actors.this_host() if hosts is None else hosts
    machines = hosts.size()
    if config.processes % machines:
        raise ConfigError(
            f"{machines} hosts for {config.processes} workers: each host needs as many; choose a divisor of "
            f"{config.processes}"
        )
    address = _HERE if machines == 1 else socket.getfqdn()
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    here = RankInfo("monarch", 0, config.processes, 0, address, store.port, machines, 0, max_restarts, True)
    for attempt in range(max_restarts + 1):
        with _failures_as_events(actors, callbacks):
            processes = hosts.spawn_procs(per_host={"workers": config.processes // machines})
            try:
                workers = processes.spawn(_NAME, _worker_class(), here, config, callbacks)
                results = workers.train.call().get()
                return next((summary for _, summary in results if summary is not None), None)
            except (actors.ActorError, RuntimeError) as error:  # one of Monarch's has no public name
                failure = getattr(error, "exception", error)
            finally:
                with contextlib.suppress(Exception):  # some have ended already
                    processes.stop().get(timeout=_STOP_SECONDS)
        if isinstance(failure, ConfigError):
            raise failure
        refusal = Restarts(folder.path, max_restarts).refusal()
        if refusal is None and attempt == max_restarts:
            refusal = f"restarts were limited to {max_restarts}"
        if refusal is not None:
            raise WorkerError(f"{_words(failure)}; {refusal}") from failure
    raise AssertionError  # the last attempt returned or raised


def _words(failure: object) -> str:
    return str(failure).strip().splitlines()[-1].strip()


@contextlib.contextmanager
def _failures_as_events(actors: Any, callbacks: tuple[Callback, ...]) -> Iterator[None]:
    before = actors.unhandled_fault_hook

    def report_failure(failure: Any) -> None:
        if failure.mesh_name.startswith(_NAME):
            for callback in callbacks:
                callback.happened(_words(failure.report()))

    actors.unhandled_fault_hook = report_failure
    try:
        yield
    finally:
        actors.unhandled_fault_hook = before


def _worker_class() -> Any:
    actors = imported("monarch.actor", "monarch")

    class Worker(actors.Actor):  # type: ignore[misc, name-defined]
        """Trains as the worker whose rank is that of its actor."""

        def __init__(self, first: RankInfo, config: RunConfig, callbacks: tuple[Callback, ...]) -> None:
            self.first, self.config, self.callbacks = first, config, callbacks

        @actors.endpoint  # type: ignore[untyped-decorator]
        def train(self) -> Summary | None:
            """Train; rank 0 returns the summary."""
            rank = actors.current_rank().rank
            here = place_of(self.first, rank)
            try:
                return trained_at(here, self.config, *self.callbacks)
            finally:
                world.leave()

    return Worker


def place_of(first: RankInfo, rank: int) -> RankInfo:
    """The place of the actor of a rank, from that of rank 0.

    >>> place_of(RankInfo("monarch", 0, 4, 0, "node0", 1, machines=2), 3).local_rank
    1
    """
    return replace(first, rank=rank, local_rank=rank % (first.world_size // first.machines))
