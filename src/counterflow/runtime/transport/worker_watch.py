"""What the workers of a run know of each other: what each is doing, and whether one has failed.

In process mode every worker has a watch: a daemon thread that posts the worker's status to the store of
the process group and looks whether another one has posted a failure. Then it breaks the worker's waits,
gives the worker some time to end by itself, and otherwise ends the process: whatever started the
workers, none is left behind. It carries no tensors, and it never decides that a worker is too slow:
the waits have a timeout, a computation may take as long as it likes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch.distributed.distributed_c10d import Store

from counterflow.errors import CounterflowError, WorkerError

from .base import Lost, Returned, Status, TimedOut, Transport
from .neighbour import Neighbour, nobody_else_looks
from .returns import Posted, Returns
from .side_thread import SideThread

_T = TypeVar("_T")
_P = ParamSpec("_P")

_GRACE_SECONDS = 10.0
"""How long a worker whose waits were broken may take to notice."""


@dataclass(frozen=True, slots=True)
class Failure:
    """That a worker cannot go on, as it posted it."""

    rank: int
    why: str


def blame(statuses: Sequence[Status | None], me: int) -> Status | None:
    """The worker that ``me`` finally waits for, through the workers that wait themselves.

    >>> waiting = [Status(0, "receive", waiting_for=1), Status(1, "receive", waiting_for=2)]
    >>> blame([*waiting, Status(2, "Forward F3.2")], me=0).doing
    'Forward F3.2'

    Args:
        statuses: what every rank does, by rank; None if nothing is known of it.
        me: the rank from which to start.

    Returns:
        The status of a worker that waits for nobody; of those that keep a collective waiting, the one that
        has been at it longest. None if the workers wait for each other.
    """
    seen: set[int] = set()
    rank = me
    while rank not in seen:
        seen.add(rank)
        status = statuses[rank]
        if status is None:
            return Status(rank, since=min((one.since for one in statuses if one), default=time.monotonic()))
        if status.waiting_for is None:
            return status
        if status.waiting_for >= 0:
            rank = status.waiting_for
            continue
        # A collective waits for a worker outside of it: one that computes, else one that waits elsewhere.
        others = [one for one in statuses if one and one.waiting_for != -1 and one.rank not in seen]
        if not others:
            return None
        rank = min(others, key=lambda one: (one.waiting_for is not None, one.since)).rank
    return None


def culprit(transport: Transport) -> str:
    """A clause about the worker that this one finally waits for; empty if none can be named."""
    statuses = transport.statuses()
    found = blame(statuses, transport.rank)
    if found is None or found.rank == transport.rank:
        return ""
    if statuses[found.rank] is None:  # it never came, or the store is cut off
        return f"nothing is heard of worker {found.rank}"
    return f"worker {found.rank} has been in {found.doing} for {time.monotonic() - found.since:.1f} s"


_Asked = tuple[Callable[[], Any], Future[Any]]


class _Line(SideThread[_Asked]):
    """A connection to the store, used by a thread of its own: a store that is cut off answers no call.

    Args:
        patience_seconds: how long an answer is waited for.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        super().__init__("counterflow store", _answer)

    def ask(self, call: Callable[[], _T]) -> _T:
        """What a call gives; raises its error, or ``TimeoutError``."""
        answer: Future[_T] = Future()
        self.give((call, answer))
        return answer.result(self._patience_seconds)


def _answer(asked: _Asked) -> None:
    call, answer = asked
    try:
        answer.set_result(call())
    except BaseException as error:  # passed to the caller
        answer.set_exception(error)


class Watch:
    """One worker's watch over the others.

    Args:
        store: a store all workers share, under a prefix of the run's own.
        status: what this worker does; read, never written.
        world_size: how many workers there are.
        timeout_seconds: the run's timeout.
        break_waits: ends the waits of the worker's main thread with an error.
        look: what is wrong with the worker's device, if that waits too long.
        device_status: what the device does, where that is behind its host.
        end: ends the process; given the reason.
    """

    def __init__(
        self,
        store: Store,
        status: Status,
        world_size: int,
        *,
        timeout_seconds: float,
        break_waits: Callable[[], None],
        look: Callable[[], CounterflowError | None] = lambda: None,
        device_status: Callable[[], Status] | None = None,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._witness = False  # whether this worker found the one that failed gone, before any other report
        self.told = False  # whether the main thread has met an error of the transport
        self._store = store
        # A store is one connection with one lock: the thread has its own, so that nobody waits for it.
        self._own: Store = store.clone() if hasattr(store, "clone") else store
        self._main = _Line(min(_GRACE_SECONDS, timeout_seconds))
        self._line = _Line(timeout_seconds)
        self._rank = status.rank
        self._host_status = status
        self._device_status = device_status or (lambda: status)
        self._look = look
        self.device_error: WorkerError | None = None
        """What the device answered instead of telling what it does."""
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._break_waits = break_waits
        self._end = end or _end
        self._post_seconds = min(5.0, timeout_seconds / 5)
        # Everybody asks one store: the more workers, the less often.
        self._look_seconds = min(self._post_seconds, max(0.25, world_size / 2000))
        self._failure: Failure | None = None
        self._returns = Returns(status.rank)
        self.returned: Returned | None = None
        """That this worker waits for one whose function has returned."""
        self._store_gone = False
        self._stop = threading.Event()
        self._began = time.monotonic()
        # An elastic agent starts the workers itself; one whose agent is gone has been left behind.
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._neighbour: Neighbour | None = None
        if world_size > 1 and nobody_else_looks():
            silent = max(3 * self._post_seconds, timeout_seconds / 5)
            self._neighbour = Neighbour(status.rank, world_size, silent)
            self._neighbour.introduce(store)
        self._post(store)
        self._thread = threading.Thread(target=self._run, name="counterflow watch", daemon=True)
        if world_size > 1 or self._agent is not None:  # else, after an error, the process is its user's
            self._thread.start()

    def all_are_here(self) -> None:
        """Begin the clock all workers share, whatever their machines' clocks say."""
        self._began = time.monotonic()
        self._ask(self._main, lambda: self._post(self._store), None)

    def post_failure(self, error: BaseException) -> None:
        """Report to the others that this worker cannot continue; only the first failure of a run counts."""
        self.told = True
        speaks = isinstance(error, CounterflowError | Lost | TimedOut)
        why = str(error) if speaks else f"{type(error).__name__}: {error}"
        mine = json.dumps([self._rank, why])
        posted = self._ask(self._main, lambda: self._store.compare_set("failure", "", mine), None)
        self._failure = Failure(*json.loads(posted or mine))

    def post_return(self) -> None:
        """Report to the others that this worker's function has returned."""
        self._host_status.now("its end")
        self._host_status.returned = True
        self._ask(self._main, lambda: self._post(self._store), None)
        self._ask(self._main, lambda: self._store.set("returned", "1"), None)

    def failure(self, within_seconds: float = 0.0) -> Failure | None:
        """The failure another worker posted; it may be waited for a moment."""
        deadline = time.monotonic() + within_seconds
        while self._failure is None:
            self._failure = self._ask(self._main, lambda: _posted(self._store), None)
            if self._failure is not None or self._store_gone or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return self._failure if self._failure and self._failure.rank != self._rank else None

    @property
    def is_first(self) -> bool:
        """Whether this worker is to report what failed: none failed before it, as far as is known here, or it
        found that the other one's process is gone, which reports nothing.
        """
        return self._failure is None or self._failure.rank == self._rank or self._witness

    def leave(self, *, hosts: bool) -> None:
        """End of the worker; the one that hosts the store waits until all come to theirs."""
        left = self._ask(self._main, lambda: self._store.add("left", 1), self._world_size)
        deadline = time.monotonic() + self._timeout_seconds
        while hosts and left < self._world_size and self._failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
            left = self._ask(self._main, lambda: self._store.add("left", 0), self._world_size)
            self.failure()

    def statuses(self) -> list[Status | None]:
        """What every rank posted last; one that has long posted nothing does not wait, it is stuck."""
        me = self._rank
        return [self._status() if rank == me else self._read(rank) for rank in range(self._world_size)]

    def stop(self) -> None:
        """End the thread; the worker does not need to be watched any more."""
        self._stop.set()
        if self._neighbour is not None and self._failure is None:
            leave = self._neighbour.leave
            self._ask(self._main, lambda: leave(self._store), None)
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._main.close()
        self._line.close()

    def _post(self, store: Store) -> None:
        status = self._status()
        now = time.monotonic()
        over = self._host_status.returned
        posted = [str(status.doing), status.waiting_for, now - status.since, now - self._began, over]
        store.set(f"status/{self._rank}", json.dumps(posted))

    def _read(self, rank: int) -> Status | None:
        key = f"status/{rank}"
        found = self._ask(
            self._main, lambda: self._store.get(key) if self._store.check([key]) else None, None
        )
        if found is None:
            return None
        doing, waiting_for, age, posted, _ = json.loads(found)
        now = time.monotonic()
        silent = max(0.0, now - self._began - posted)
        if silent > 2 * self._post_seconds + 1:
            doing, waiting_for = f"{doing}, silent for {silent:.1f} s,", None
        return Status(rank, doing, waiting_for, now - age - silent)

    def _ask(self, line: _Line, call: Callable[[], _T], otherwise: _T) -> _T:
        """Use the store, but not once it is gone: each time torch would show where in its code."""
        if self._store_gone:
            return otherwise
        try:
            return line.ask(call)
        except (RuntimeError, TimeoutError):
            self._store_gone = True
            return otherwise

    def _run(self) -> None:
        posted = time.monotonic()
        while not self._rest(self._look_seconds):
            found = self._ask(self._line, lambda: _posted(self._own), None)
            wrong = self._wrong()
            someone_returned = self._someone_returned()
            if someone_returned or time.monotonic() - posted >= self._post_seconds:
                posted = time.monotonic()
                self._ask(self._line, lambda: self._post(self._own), None)
                found = self._miss() or found
                if someone_returned:
                    self._end_vain_wait()
            if self._store_gone:
                return self._without_store()
            if found is None and wrong is not None:
                self.post_failure(wrong)
                found = self._failure
                self._break_waits()
            if found is not None:
                self._failure = found
                return self._after(found)
        return None

    def _someone_returned(self) -> bool:
        """Whether this worker has waited for a moment, and a worker's function has returned."""
        status = self._status()
        waits = status.waiting_for is not None and time.monotonic() - status.since > 1.0
        if not waits or self.returned is not None or self._failure is not None:
            return False
        return self._ask(self._line, lambda: self._own.check(["returned"]), otherwise=False)

    def _end_vain_wait(self) -> None:
        """End the wait of the main thread for a worker whose function has returned."""
        posted = {
            rank: found for rank in range(self._world_size) if (found := self._posted(rank)) is not None
        }
        rank = self._returns.awaited(posted) if self._rank in posted else None
        if rank is not None:
            self.returned = Returned(rank)
            self._break_waits()

    def _posted(self, rank: int) -> Posted | None:
        key = f"status/{rank}"
        found = self._ask(self._line, lambda: self._own.get(key) if self._own.check([key]) else None, None)
        if found is None:
            return None
        doing, waiting_for, age, at, returned = json.loads(found)
        return Posted(doing, waiting_for, at - age, at, returned)

    def _status(self) -> Status:
        """What the device does; the host, where the device answers with an error."""
        try:
            return self._device_status()
        except RuntimeError as error:  # of CUDA: any question to a device is answered with its first error
            self._note_device(error)
            return self._host_status

    def _wrong(self) -> CounterflowError | None:
        """What is wrong with the device: it waits too long, or it met an error."""
        try:
            late = self._look()
        except RuntimeError as error:
            self._note_device(error)
            late = None
        return self.device_error or late

    def _note_device(self, error: RuntimeError) -> None:
        if self.device_error is None:
            why = f"device of rank {self._rank}: {type(error).__name__}: {error}"
            self.device_error = WorkerError(why)
            self.device_error.lost = True

    def _miss(self) -> Failure | None:
        """Report to the others if the next worker's process is gone."""
        if self._neighbour is None:
            return None
        rank, missing = self._neighbour.next, self._neighbour.missing
        why = self._ask(self._line, lambda: missing(self._own), None)
        if why is None:
            return None
        theirs = json.dumps([rank, why])
        posted = self._ask(self._line, lambda: self._own.compare_set("failure", "", theirs), None)
        self._witness = posted is None or posted.decode() == theirs
        return Failure(*json.loads(posted or theirs))

    def _after(self, failure: Failure) -> None:
        """A worker failed: let this one end, or end it."""
        if failure.rank == self._rank:
            self.told = True
        else:
            self._break_waits()
        seen = time.monotonic()
        # A worker that knows of the failure may have something to save; any other is stuck.
        while not self._rest(0.1):
            patience = self._timeout_seconds if self.told else min(_GRACE_SECONDS, self._timeout_seconds)
            if time.monotonic() - seen > patience:
                return self._end(f"worker {failure.rank} failed: {failure.why}")
        return None

    def _without_store(self) -> None:
        """The store's host is gone or cut off. It may just have finished first: only who waits is stuck."""
        patience = min(_GRACE_SECONDS, self._timeout_seconds)
        fine = time.monotonic()
        while not self._rest(0.25):
            if self._status().waiting_for is None:
                fine = time.monotonic()
            if time.monotonic() - fine > patience:
                return self._end("the process that hosts the workers' store is gone, or cannot be reached")
        return None

    def _rest(self, seconds: float) -> bool:
        """Sleep; whether the watch is over."""
        stopped = self._stop.wait(seconds)
        if not stopped and self._agent is not None and os.getppid() != self._agent:
            self._end("the process that started it is gone")
        return stopped


def _posted(store: Store) -> Failure | None:
    return Failure(*json.loads(store.get("failure"))) if store.check(["failure"]) else None


def _end(why: str) -> NoReturn:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "?"))
    sys.stderr.write(f"counterflow: worker {rank} ends: {why}\n")
    sys.stderr.flush()
    os._exit(1)


def worker_error(place: str, error: Exception, transport: Transport) -> WorkerError:
    """The error to raise for ``error`` at ``place``; a consequence if another worker is to blame."""
    if isinstance(error, TimedOut):
        who = culprit(transport)
        found = WorkerError(f"{place}: {error}" + (f"; {who}" if who else ""))
    elif isinstance(error, Lost):
        found = WorkerError(f"{place}: {error}")
    else:
        return WorkerError(f"{place}: {type(error).__name__}: {error}")
    found.consequence = True
    return found


def tells_who(make: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that asks other workers: if one of them is gone, or silent, a ``WorkerError`` says so."""

    @wraps(make)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            make(*args, **kwargs)
        except (Lost, TimedOut) as error:
            made: Any = args[0]
            place = f"rank {made.transport.rank}, making its {type(made).__name__}"
            raise worker_error(place, error, made.transport) from error

    return told
