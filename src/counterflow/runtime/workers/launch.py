"""Starts workers on this machine: processes, or threads of this process.

Invariant: whatever happens, ``launch`` returns or raises with nothing left running but, for threads, those
that do not come back; and what it raises is the cause, not what follows from it. It does not restart
workers and knows one machine only; torchrun and Slurm start workers on several.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from counterflow.errors import ConfigError, WorkerError

from ..transport.kinds import GLOO, TransportKind, kind_of
from ..transport.local import Hub
from ..transport.turns import Turns, elsewhere
from . import gpu_environment, world
from .children import Children, stay
from .failures import Failed, cause, failed_by, root
from .forking import Surroundings, end_with_the_launch, let_signals_through, start_method
from .outside import end_server

_T = TypeVar("_T")

_MOST_WORKERS = 1_024
"""On one machine, whatever it is."""

_HERE = "127.0.0.1"
"""Where workers that are processes meet: only this machine reaches it."""

_POLL_SECONDS = 0.1
"""How soon it is seen that a worker ended."""

_LINGER_SECONDS = 0.4
"""How long a worker that failed stays, so that it is seen first who died without a word."""

_CONSEQUENCE_SECONDS = 1.0
"""How long one stays that failed only because another did, so that the cause is told first."""

_SHUTDOWN_SECONDS = 30.0
"""How long workers may take to end when another one has failed, or when all have done their work."""

Tell = Callable[[int], None]
"""Sends each worker a signal, once; to threads nothing."""

_THREADS_GRACE_SECONDS = 5.0
"""How long the threads of a failed launch may take to notice, at most."""


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
        transport: what carries messages: ``"gloo"`` or ``"nccl"`` for processes, ``"local"`` for threads of
            this process, or an instrument of `counterflow.testing` (``"strict-nccl"`` for threads with NCCL's
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
    meanwhile: Callable[[Tell], None] | None,
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
        return _Threads(hub, call, device, threads, meanwhile or _nothing).run()
    _check_processes(workers, kind)
    task = _pickled((function, args, kwargs), function)
    defaults = world.Defaults(kind, None if device is None else torch.device(device), timeout_seconds)
    return _Processes(workers, task, defaults, threads, meanwhile).run()


def _nothing(_: Tell) -> None:
    pass


# Threads


class _Threads:
    """A launch of threads."""

    def __init__(
        self,
        hub: Hub,
        call: Callable[[], Any],
        device: torch.device | str | None,
        threads: int,
        meanwhile: Callable[[Tell], None],
    ) -> None:
        self.hub = hub
        self.meanwhile = meanwhile
        self.call = call
        self.device = torch.device(device or "cpu")
        self.threads = threads
        self.results: dict[int, Any] = {}
        self.failures: list[Failed] = []
        self.causes: dict[int, BaseException] = {}
        self.turns = Turns(hub.timeout_seconds)

    def run(self) -> list[Any]:
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
            transport.status.now("its end")
        except BaseException as error:  # told to who launched it
            self.causes[rank] = error
            self.failures.append(failed_by(error, rank, transport))
            transport.fail(error)
        finally:
            world.enter(None)

    def _join(self, running: Sequence[threading.Thread]) -> None:
        patience = min(self.hub.timeout_seconds, _THREADS_GRACE_SECONDS)
        deadline = None
        while any(thread.is_alive() for thread in running):
            for thread in running:
                thread.join(0.05 if thread.is_alive() else 0.0)
            self.meanwhile(lambda _: None)
            if self.failures and deadline is None:
                deadline = time.monotonic() + patience
            if deadline is not None and time.monotonic() > deadline:
                return


# Processes


class _Processes:
    """A launch of processes. Each leaves its result, or how it failed, as a file."""

    def __init__(
        self,
        workers: int,
        task: bytes,
        defaults: world.Defaults,
        threads: int,
        meanwhile: Callable[[Tell], None] | None,
    ) -> None:
        self.workers = workers
        self.task = task
        self.defaults = defaults
        self.threads = threads
        self.meanwhile = meanwhile or _nothing
        self.listens = meanwhile is not None

    def run(self) -> list[Any]:
        with _cleaned_up(), tempfile.TemporaryDirectory(prefix="counterflow-") as folder:
            directory = Path(folder)
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
            sent = _Sent(str(directory), Surroundings(), self.defaults, self.threads, self.listens)
            try:
                children.start(_work, ((sent, self._place(rank, port)) for rank in range(self.workers)))
                codes = self._wait(children, directory)
            except BaseException:
                children.abandon()
                raise
            # Of those that failed the first is known; the others may be about to tell what they saw of it.
            children.end(_SHUTDOWN_SECONDS, signal.SIGTERM if codes else None)
        return codes

    def _wait(self, children: Children, directory: Path) -> Mapping[int, int]:
        left = {rank: directory / f"result-{rank}" for rank in range(self.workers)}
        while left:
            self.meanwhile(children.tell)
            codes = children.ended(_POLL_SECONDS)
            if codes:
                return codes
            left = {rank: path for rank, path in left.items() if not path.exists()}
        return {}

    def _place(self, rank: int, port: int) -> dict[str, str]:
        """The variables by which a worker knows its place; those of torchrun."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": _HERE,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **gpu_environment.of_workers(),
        }


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


def _work(sent: _Sent, place: Mapping[str, str], line: Connection) -> None:
    """What a worker process runs."""
    folder, _, defaults, threads, listens = sent
    end_with_the_launch()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who launched it says when it ends, without tracebacks
    if not listens:
        let_signals_through()
    os.environ.update(place)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all workers are here, whatever the host's name
    rank = int(os.environ["RANK"])
    torch.set_num_threads(threads)
    world.set_defaults(defaults)
    try:
        function, args, kwargs = _read(Path(folder) / "task")
        result = _pickled(function(*args, **kwargs), None)
    except BaseException as error:  # told to who launched it
        _give_up(Path(folder), error, rank)
    transport = world.existing_transport()
    if transport is not None:
        transport.status.now("its end")
    _leave(Path(folder), f"result-{rank}", result)
    stay(line)


def _give_up(folder: Path, error: BaseException, rank: int) -> NoReturn:
    """Tell how this worker failed, and end without waiting for anything that may hang."""
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
    """Leave a file for who launched this worker, who finds it whole."""
    draft = folder / f"draft-{name}"
    draft.write_bytes(data)
    draft.rename(folder / name)


def _check_processes(workers: int, kind: TransportKind) -> None:
    if world.started_by() == "torchrun":
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
    """What workers told before they ended."""
    return [_read(path) for path in sorted(directory.glob("failure-*"))]


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # noqa: S301 - this launch and its workers wrote it


def _pickled(value: object, function: Callable[..., object] | None) -> bytes:
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
