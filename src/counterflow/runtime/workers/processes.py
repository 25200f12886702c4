"""Workers as processes of this machine; for ``launch``.

Processes are forked from one process that has imported torch, which takes seconds each time.

Invariant: no process remains when the launch is over, however it ends; and it raises the cause, not a
consequence. A worker has what a new process would have: the environment, the standard streams and the folder
of its launch as they are then, and its own random states. It ends when its launch does, however that ends.
The process that workers are forked from computes nothing and ends with the one that launches.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from counterflow.common.external_signals import EXTERNAL_SIGNALS, end_fork_server, safe_path, signals_blocked
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError, WorkerError

from ..transport import gpu_environment
from ..transport.kinds import TransportKind
from . import scratch, world
from .children import Children, Supervisor, stay
from .failures import WorkerFailure, cause, describe_failure
from .rank_info import RankInfo
from .scratch import launch_folder

_LOG = logging.getLogger(__name__)

_HERE = "127.0.0.1"
"""Host where the worker processes meet: only this machine reaches it."""

_POLL_SECONDS = 0.1
"""Interval at which ended workers are detected."""

_LINGER_SECONDS = 0.4
"""Time before a failed worker ends, so that a worker that died without a report is seen first."""

_CONSEQUENCE_SECONDS = 1.0
"""Time before a worker ends that failed only because another did, so that the cause is reported first."""

_SHUTDOWN_SECONDS = 30.0
"""Maximum time in which workers end after another one has failed, or after all have done their work."""


_IMPORTED = ["counterflow.runtime.pipeline", "torch._dynamo", "torch.distributed.checkpoint"]
"""Modules that workers have imported at their start; an optimiser imports torch._dynamo at its first call."""

_STREAMS = (1, 2)
"""File descriptors of the workers' output."""


@dataclass(frozen=True, slots=True)
class ProcessLaunch:
    """A launch of processes. Each writes its result, or its failure, to a file."""

    workers: int
    task: bytes
    defaults: world.Defaults
    threads: int
    supervisor: Supervisor | None

    def run(self) -> list[Any]:
        """Results by rank; raises the error of the first worker that failed."""
        with _cleaned_up(), launch_folder() as directory:
            (directory / "task").write_bytes(self.task)
            codes = self._run(directory)
            if not codes:
                return [_read(directory / f"result-{rank}") for rank in range(self.workers)]
            failed = cause(_reports(directory), codes)
        raised = failed.error()
        if failed.trace:
            raised.add_note(f"\nIn worker {failed.rank}:\n{failed.trace}")
        raise raised

    def _run(self, directory: Path) -> Mapping[int, int]:
        with _store() as port:
            try:
                children = Children(start_method(self.defaults))
            except BaseException:  # an interrupt as soon as the process to fork from was there
                end_fork_server()
                raise
            has_supervisor = self.supervisor is not None
            worker_input = _WorkerInput(
                *(str(directory), Surroundings(), self.defaults, self.threads, has_supervisor),
                multiprocessing.get_start_method(allow_none=True),
            )
            try:
                children.start(
                    _work, ((worker_input, self._variables(rank, port)) for rank in range(self.workers))
                )
                codes = self._wait(children, directory)
            except BaseException:
                children.abandon()
                raise
            # The first failed worker is known; the others may be about to report what they saw of it.

            def warn(ranks: list[int]) -> None:
                names = f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                _LOG.warning(
                    "%s; waiting for %s to end, %g s at most",
                    cause(_reports(directory), codes).message,
                    names,
                    _SHUTDOWN_SECONDS,
                )

            if codes:
                children.end(_SHUTDOWN_SECONDS, signal.SIGTERM, warn)
            else:
                children.end(_SHUTDOWN_SECONDS)
        return codes

    def _wait(self, children: Children, directory: Path) -> Mapping[int, int]:
        pending = {rank: directory / f"result-{rank}" for rank in range(self.workers)}
        while pending:
            if self.supervisor is not None:
                self.supervisor(children.signal_once)
            codes = children.ended(_POLL_SECONDS)
            if codes:
                return codes
            pending = {rank: path for rank, path in pending.items() if not path.exists()}
        return {}

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        info = RankInfo("launch", rank, self.workers, rank, _HERE, port, hosts_store=True)
        return info.variables() | gpu_environment.of_workers()


@contextlib.contextmanager
def _store() -> Iterator[int]:
    listening = socket.create_server((_HERE, 0))  # no other machine reaches it
    port = listening.getsockname()[1]
    store = TCPStore(_HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    try:
        yield port
    finally:
        del store


class _WorkerInput(NamedTuple):
    folder: str
    surroundings: Surroundings  # unpickled before the later fields
    defaults: world.Defaults
    threads: int
    has_supervisor: bool
    start_method: str | None
    """Start method of the launching process's children; None: Python's default."""


def _work(worker_input: _WorkerInput, variables: Mapping[str, str], line: Connection) -> None:
    folder, _, defaults, threads, has_supervisor, method = worker_input
    # Python would start a worker's children, as those of a DataLoader, as the worker was started.
    multiprocessing.set_start_method(method, force=True)
    end_with_the_launch()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher ends it, without tracebacks
    if not has_supervisor:
        unblock_signals()
    os.environ.update(variables)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all workers are here, whatever the host's name
    rank = int(os.environ["RANK"])
    torch.set_num_threads(threads)
    world.set_defaults(defaults)
    try:
        function, args, kwargs = _read(Path(folder) / "task")
        result = pickled(function(*args, **kwargs), None)
    except BaseException as error:  # reported to the launcher
        _report_failure(Path(folder), error, rank)
    transport = world.existing_transport()
    if transport is not None:
        transport.has_returned()
    _publish(Path(folder), f"result-{rank}", result)
    stay(line)


def _report_failure(folder: Path, error: BaseException, rank: int) -> NoReturn:
    transport = world.existing_transport()
    failed = describe_failure(error, rank, transport)
    _publish(folder, f"failure-{rank}", pickle.dumps(failed))
    if transport is not None:
        transport.fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_CONSEQUENCE_SECONDS if failed.consequence else _LINGER_SECONDS)
    os._exit(1)


def _publish(folder: Path, name: str, data: bytes) -> None:
    # The launcher sees only complete files.
    draft = folder / f"draft-{name}"
    draft.write_bytes(data)
    draft.rename(folder / name)


def check_processes(workers: int, kind: TransportKind) -> None:
    """Check that a number of workers can be started here.

    Raises:
        ConfigError: this process is a worker, or there are fewer GPUs than workers.
    """
    if world.started_by() not in (None, "slurm"):
        raise ConfigError("this process is already a worker (RANK is set); call the function itself")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "launch was called while a worker imported the script it is in; "
            'put the call under if __name__ == "__main__":'
        )
    if kind.gpu_each:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count < workers:
            raise ConfigError(
                f"{workers} workers, and {plural(count, 'GPU')} here: {kind} needs one a worker; choose gloo"
            )


def _reports(directory: Path) -> list[WorkerFailure]:
    return [_read(path) for path in sorted(directory.glob("failure-*"))]


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # noqa: S301 - this launch and its workers wrote it


def pickled(value: object, function: Callable[..., object] | None) -> bytes:
    """Pickle a value; ``function`` is one that another process has to import by its name."""
    main = sys.modules["__main__"]
    if getattr(function, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise ConfigError(
            "workers that are processes cannot find a function of a notebook or prompt; "
            'put it into a file, or use transport="local"'
        )
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if function is None:
            raise WorkerError(f"the result cannot be pickled: {error}") from error
        raise ConfigError(
            f"the function and its arguments have to be pickled for other processes: {error}; "
            f'{_advice(function)}, or transport="local"'
        ) from error


def _advice(function: Callable[..., object]) -> str:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return "use a function at the top level of a module"
    return "give other arguments (open files, locks and generators cannot be sent)"


class _FatalSignal(BaseException):
    pass


@contextlib.contextmanager
def _cleaned_up() -> Iterator[None]:
    """Exit the context before a signal ends this process, unless a handler of the user's is set."""
    ended: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        ended.append(number)
        raise _FatalSignal

    numbers = [signal.SIGTERM, signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {n: signal.signal(n, end) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    except _FatalSignal:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if ended:
        signal.raise_signal(ended[0])
        raise KeyboardInterrupt  # if it is blocked


# Beginning of a worker process


def start_method(defaults: world.Defaults) -> Literal["forkserver", "spawn"]:
    """Start method of ``multiprocessing`` for workers: neither CUDA nor macOS's libraries allow a fork."""
    on_gpu = (defaults.kind is not None and defaults.kind.gpu_each) or (
        defaults.device is not None and defaults.device.type != "cpu"
    )
    with (
        signals_blocked(),
        safe_path(),
    ):  # it lets interrupts through again when it starts: so before the workers
        resource_tracker.ensure_running()
    if on_gpu or sys.platform != "linux":
        return "spawn"
    forkserver.set_forkserver_preload(_IMPORTED)
    with signals_blocked(), safe_path():
        forkserver.ensure_running()
    scratch.lock(Path(util.get_temp_dir()))
    return "forkserver"


class Surroundings:
    """Environment and output of a launch, which a worker adopts as it unpickles them, before it imports
    anything.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)

    def __reduce__(self) -> Any:
        return _adopt, (self._environment, [DupFd(stream) for stream in _STREAMS])


def _adopt(environment: dict[str, str], streams: list[Any]) -> Surroundings:
    os.environ.clear()
    os.environ.update(environment)
    for stream, duplicate in zip(_STREAMS, streams, strict=True):
        os.dup2(duplicate.detach(), stream)
    np.random.seed()  # noqa: NPY002 - it is this generator that was forked
    return Surroundings()


def end_with_the_launch() -> None:
    """Kill this worker as soon as its launch's process is gone."""
    threading.Thread(target=_wait_for_the_end, name="counterflow launch", daemon=True).start()


def unblock_signals() -> None:
    """Unblock external signals; pending ones are delivered."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EXTERNAL_SIGNALS)


def _wait_for_the_end() -> None:
    launch = multiprocessing.parent_process()
    assert launch is not None
    launch.join()
    os.kill(os.getpid(), signal.SIGKILL)
