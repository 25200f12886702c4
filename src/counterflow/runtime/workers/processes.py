"""Workers as processes of this machine; for ``launch``.

Invariant: no process is left when the launch is over, however it ends; and what it raises is the cause, not
what follows from it.
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
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from counterflow.errors import ConfigError, WorkerError

from ..transport import gpu_environment
from ..transport.kinds import TransportKind
from . import world
from .children import Children, Meanwhile, stay
from .failures import Failed, cause, failed_by
from .forking import Surroundings, end_with_the_launch, let_signals_through, start_method
from .outside import end_server
from .place import Place
from .scratch import launch_folder

_LOG = logging.getLogger(__name__)

_HERE = "127.0.0.1"
"""Where workers that are processes meet: only this machine reaches it."""

_POLL_SECONDS = 0.1
"""How soon it is seen that a worker ended."""

_LINGER_SECONDS = 0.4
"""How long a failed worker stays, so a worker that died without a report is seen first."""

_CONSEQUENCE_SECONDS = 1.0
"""How long a worker stays that failed only because another did, so the cause is reported first."""

_SHUTDOWN_SECONDS = 30.0
"""How long workers may take to end when another one has failed, or when all have done their work."""


@dataclass(frozen=True, slots=True)
class ProcessLaunch:
    """A launch of processes. Each leaves its result, or how it failed, as a file."""

    workers: int
    task: bytes
    defaults: world.Defaults
    threads: int
    meanwhile: Meanwhile | None

    def run(self) -> list[Any]:
        """The results by rank; raises what the first worker that failed raised."""
        with _cleaned_up(), launch_folder() as directory:
            (directory / "task").write_bytes(self.task)
            codes = self._run(directory)
            if not codes:
                return [_read(directory / f"result-{rank}") for rank in range(self.workers)]
            failed = cause(_told(directory), codes)
        raised = failed.error()
        if failed.trace:
            raised.add_note(f"\nIn worker {failed.rank}:\n{failed.trace}")
        raise raised

    def _run(self, directory: Path) -> Mapping[int, int]:
        """Start workers and wait for them; the exit codes of those that failed, by rank."""
        with _store() as port:
            try:
                children = Children(start_method(self.defaults))
            except BaseException:  # an interrupt as soon as the process to fork from was there
                end_server()
                raise
            listens = self.meanwhile is not None
            sent = _Sent(str(directory), Surroundings(), self.defaults, self.threads, listens)
            try:
                children.start(_work, ((sent, self._variables(rank, port)) for rank in range(self.workers)))
                codes = self._wait(children, directory)
            except BaseException:
                children.abandon()
                raise
            # The first failed worker is known; the others may be about to report what they saw of it.

            def tell(ranks: list[int]) -> None:
                names = f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                _LOG.warning(
                    "%s; waiting for %s to end, %g s at most",
                    cause(_told(directory), codes).message,
                    names,
                    _SHUTDOWN_SECONDS,
                )

            if codes:
                children.end(_SHUTDOWN_SECONDS, signal.SIGTERM, tell)
            else:
                children.end(_SHUTDOWN_SECONDS)
        return codes

    def _wait(self, children: Children, directory: Path) -> Mapping[int, int]:
        left = {rank: directory / f"result-{rank}" for rank in range(self.workers)}
        while left:
            if self.meanwhile is not None:
                self.meanwhile(children.tell)
            codes = children.ended(_POLL_SECONDS)
            if codes:
                return codes
            left = {rank: path for rank, path in left.items() if not path.exists()}
        return {}

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        """The variables by which a worker knows its place."""
        here = Place("launch", rank, self.workers, rank, _HERE, port, keeps_store=True)
        return here.variables() | gpu_environment.of_workers()


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """The port of a store where workers meet, which nobody on another machine reaches."""
    listening = socket.create_server((_HERE, 0))
    port = listening.getsockname()[1]
    store = TCPStore(_HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    try:
        yield port
    finally:
        del store


class _Sent(NamedTuple):
    """What each worker process gets; its surroundings are read before what is after them."""

    folder: str
    surroundings: Surroundings
    defaults: world.Defaults
    threads: int
    listens: bool


def _work(sent: _Sent, variables: Mapping[str, str], line: Connection) -> None:
    """What a worker process runs."""
    folder, _, defaults, threads, listens = sent
    end_with_the_launch()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher ends it, without tracebacks
    if not listens:
        let_signals_through()
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
        _give_up(Path(folder), error, rank)
    transport = world.existing_transport()
    if transport is not None:
        transport.has_returned()
    _leave(Path(folder), f"result-{rank}", result)
    stay(line)


def _give_up(folder: Path, error: BaseException, rank: int) -> NoReturn:
    """Report how this worker failed, and end without waiting for anything that may hang."""
    transport = world.existing_transport()
    failed = failed_by(error, rank, transport)
    _leave(folder, f"failure-{rank}", pickle.dumps(failed))
    if transport is not None:
        transport.fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_CONSEQUENCE_SECONDS if failed.consequence else _LINGER_SECONDS)
    os._exit(1)


def _leave(folder: Path, name: str, data: bytes) -> None:
    """Write a file for this worker's launcher, which finds it complete."""
    draft = folder / f"draft-{name}"
    draft.write_bytes(data)
    draft.rename(folder / name)


def check_processes(workers: int, kind: TransportKind) -> None:
    """Refuse a number of workers that cannot be started here.

    Raises:
        ConfigError: this process is a worker itself, or there are fewer GPUs than workers.
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
                f"{workers} workers, and {count} GPUs here: {kind} needs one a worker; choose gloo"
            )


def _told(directory: Path) -> list[Failed]:
    """Reports that workers left before they ended."""
    return [_read(path) for path in sorted(directory.glob("failure-*"))]


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # noqa: S301 - this launch and its workers wrote it


def pickled(value: object, function: Callable[..., object] | None) -> bytes:
    """A pickle; ``function`` is what another process will have to find by its name."""
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
            'use a function at the top level of a module, or transport="local"'
        ) from error


class _Ended(BaseException):
    """A signal that would end this process where it is."""


@contextlib.contextmanager
def _cleaned_up() -> Iterator[None]:
    """Clean up before a signal ends this process, unless its user handles that."""
    ended: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        ended.append(number)
        raise _Ended

    numbers = [signal.SIGTERM, signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {n: signal.signal(n, end) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    except _Ended:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if ended:
        signal.raise_signal(ended[0])
        raise KeyboardInterrupt  # if it is blocked
