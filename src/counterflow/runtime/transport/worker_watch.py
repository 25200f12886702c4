"""Failure detection: every worker posts its status, and ends its waits if another one failed.

In process mode every worker has a watch: a daemon thread that posts the worker's status to the store of
the process group and looks whether another one has posted a failure. Then it breaks the worker's waits,
gives the worker some time to end by itself, and otherwise ends the process: whatever started the
workers, none is left running. It carries no tensors, and it never decides that a worker is too slow:
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

from .base import PeerLost, PeerReturned, Status, TimedOut, Transport
from .liveness import NextWorker, is_unsupervised
from .returns import Posted, Returns
from .side_thread import SideThread

_T = TypeVar("_T")
_P = ParamSpec("_P")

_GRACE_SECONDS = 10.0
"""Maximum time in which a worker notices that its waits were broken."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's report that it cannot continue."""

    rank: int
    why: str


def blame(statuses: Sequence[Status | None], me: int) -> Status | None:
    """The worker that ``me`` finally waits for, through the workers that wait themselves.

    >>> waiting = [Status(0, "receive", waiting_for=1), Status(1, "receive", waiting_for=2)]
    >>> blame([*waiting, Status(2, "Forward F3.2")], me=0).doing
    'Forward F3.2'

    Args:
        statuses: status of every rank; None if unknown.
        me: the rank from which to start.

    Returns:
        The status of a worker that waits for nobody; of several that a collective waits for, the one whose
        action began first. None if the workers wait for each other.
    """
    seen: set[int] = set()
    rank = me
    while rank not in seen:
        seen.add(rank)
        status = statuses[rank]
        if status is None:
            return Status(rank, since=min((s.since for s in statuses if s), default=time.monotonic()))
        if status.waiting_for is None:
            return status
        if status.waiting_for >= 0:
            rank = status.waiting_for
            continue
        # A collective waits for a worker outside of it: one that computes, else one that waits elsewhere.
        outside = [s for s in statuses if s and s.waiting_for != -1 and s.rank not in seen]
        if not outside:
            return None
        rank = min(outside, key=lambda s: (s.waiting_for is not None, s.since)).rank
    return None


def culprit(transport: Transport) -> str:
    """A clause about the worker that this one finally waits for; empty if none can be named."""
    statuses = transport.statuses()
    status = blame(statuses, transport.rank)
    if status is None or status.rank == transport.rank:
        return ""
    if statuses[status.rank] is None:  # it never started, or the store is cut off
        return f"nothing is heard of worker {status.rank}"
    return f"worker {status.rank} has been in {status.doing} for {time.monotonic() - status.since:.1f} s"


_StoreCall = tuple[Callable[[], Any], Future[Any]]


class _StoreClient(SideThread[_StoreCall]):
    """A thread that uses the store, so that a caller can give up: a store that is cut off answers no call.

    Args:
        patience_seconds: maximum time of a call.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        super().__init__("counterflow store", _answer)

    def call(self, call: Callable[[], _T]) -> _T:
        """Result of a call; raises its error, or ``TimeoutError``."""
        answer: Future[_T] = Future()
        self.put((call, answer))
        return answer.result(self._patience_seconds)


def _answer(store_call: _StoreCall) -> None:
    call, answer = store_call
    try:
        answer.set_result(call())
    except BaseException as error:  # passed to the caller
        answer.set_exception(error)


class Watch:
    """One worker's detection of the failures of all workers.

    Args:
        store: a store that all workers share, under a prefix of this run.
        status: status of this worker; read, never written.
        world_size: number of workers.
        timeout_seconds: the run's timeout.
        break_waits: ends the waits of the worker's main thread with an error.
        look: returns the error of a device that waits too long, or None.
        device_status: returns the status of a device that runs behind its host.
        end: ends the process, for the reason that it is called with.
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
        self._reported_loss = False
        """True if this worker was the first to report that the next one's process is gone."""
        self.error_raised = False
        """True if the main thread has met an error of the transport."""
        self._store = store
        # A store is one connection with one lock: the thread has its own, so that nobody waits for it.
        self._thread_store: Store = store.clone() if hasattr(store, "clone") else store
        self._main_client = _StoreClient(min(_GRACE_SECONDS, timeout_seconds))
        self._thread_client = _StoreClient(timeout_seconds)
        self._rank = status.rank
        self._host_status = status
        self._device_status = device_status or (lambda: status)
        self._look = look
        self.device_error: WorkerError | None = None
        """Error that the device answered with when it was queried."""
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._break_waits = break_waits
        self._end = end or _end
        self._post_seconds = min(5.0, timeout_seconds / 5)
        # All workers query one store: the more workers, the less often.
        self._look_seconds = min(self._post_seconds, max(0.25, world_size / 2000))
        self._failure: Failure | None = None
        self._returns = Returns(status.rank)
        self.returned: PeerReturned | None = None
        """Error of this worker's wait for one whose function has returned; None if there is no such wait."""
        self._store_gone = False
        self._stop = threading.Event()
        self._began = time.monotonic()
        # An elastic agent starts the workers itself; one whose agent is gone is orphaned.
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._next_worker: NextWorker | None = None
        if world_size > 1 and is_unsupervised():
            silent = max(3 * self._post_seconds, timeout_seconds / 5)
            self._next_worker = NextWorker(status.rank, world_size, silent)
            self._next_worker.publish_process(store)
        self._post(store)
        self._thread = threading.Thread(target=self._run, name="counterflow watch", daemon=True)
        if world_size > 1 or self._agent is not None:  # else, after an error, the process is its user's
            self._thread.start()

    def start_clock(self) -> None:
        """Start the clock that all workers share, whatever their machines' clocks say: all have started."""
        self._began = time.monotonic()
        self._query(self._main_client, lambda: self._post(self._store), None)

    def post_failure(self, error: BaseException) -> None:
        """Report to the others that this worker cannot continue; only the first failure of a run counts."""
        self.error_raised = True
        is_described = isinstance(error, CounterflowError | PeerLost | TimedOut)
        why = str(error) if is_described else f"{type(error).__name__}: {error}"
        report = json.dumps([self._rank, why])
        posted = self._query(self._main_client, lambda: self._store.compare_set("failure", "", report), None)
        self._failure = Failure(*json.loads(posted or report))

    def post_return(self) -> None:
        """Report to the others that this worker's function has returned."""
        self._host_status.now("its end")
        self._host_status.returned = True
        self._query(self._main_client, lambda: self._post(self._store), None)
        self._query(self._main_client, lambda: self._store.set("returned", "1"), None)

    def failure(self, within_seconds: float = 0.0) -> Failure | None:
        """The failure that another worker posted, within a number of seconds; None if there is none."""
        deadline = time.monotonic() + within_seconds
        while self._failure is None:
            self._failure = self._query(self._main_client, lambda: _posted(self._store), None)
            if self._failure is not None or self._store_gone or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return self._failure if self._failure and self._failure.rank != self._rank else None

    @property
    def is_first(self) -> bool:
        """True if this worker reports the failure: none failed before it, as far as is known here, or the
        other one's process is gone, which reports nothing.
        """
        return self._failure is None or self._failure.rank == self._rank or self._reported_loss

    def leave(self, *, hosts: bool) -> None:
        """Note the end of the worker; the one that hosts the store waits for the end of all."""
        ended = self._query(self._main_client, lambda: self._store.add("left", 1), self._world_size)
        deadline = time.monotonic() + self._timeout_seconds
        while hosts and ended < self._world_size and self._failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
            ended = self._query(self._main_client, lambda: self._store.add("left", 0), self._world_size)
            self.failure()

    def statuses(self) -> list[Status | None]:
        """Last post of every rank. One that has long posted nothing is reported as stuck, not as waiting."""
        me = self._rank
        return [self._status() if rank == me else self._read(rank) for rank in range(self._world_size)]

    def stop(self) -> None:
        """End the thread; the worker does not need to be watched any more."""
        self._stop.set()
        if self._next_worker is not None and self._failure is None:
            publish_end = self._next_worker.publish_end
            self._query(self._main_client, lambda: publish_end(self._store), None)
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._main_client.close()
        self._thread_client.close()

    def _post(self, store: Store) -> None:
        status = self._status()
        now = time.monotonic()
        over = self._host_status.returned
        posted = [str(status.doing), status.waiting_for, now - status.since, now - self._began, over]
        store.set(f"status/{self._rank}", json.dumps(posted))

    def _read(self, rank: int) -> Status | None:
        key = f"status/{rank}"
        post = self._query(
            self._main_client, lambda: self._store.get(key) if self._store.check([key]) else None, None
        )
        if post is None:
            return None
        doing, waiting_for, age, posted, _ = json.loads(post)
        now = time.monotonic()
        silent = max(0.0, now - self._began - posted)
        if silent > 2 * self._post_seconds + 1:
            doing, waiting_for = f"{doing}, silent for {silent:.1f} s,", None
        return Status(rank, doing, waiting_for, now - age - silent)

    def _query(self, client: _StoreClient, call: Callable[[], _T], otherwise: _T) -> _T:
        # Not once the store is gone: each call would let torch log a trace.
        if self._store_gone:
            return otherwise
        try:
            return client.call(call)
        except (RuntimeError, TimeoutError):
            self._store_gone = True
            return otherwise

    def _run(self) -> None:
        posted = time.monotonic()
        while not self._sleep(self._look_seconds):
            failure = self._query(self._thread_client, lambda: _posted(self._thread_store), None)
            device_error = self._check_device()
            someone_returned = self._someone_returned()
            if someone_returned or time.monotonic() - posted >= self._post_seconds:
                posted = time.monotonic()
                self._query(self._thread_client, lambda: self._post(self._thread_store), None)
                failure = self._check_next_worker() or failure
                if someone_returned:
                    self._end_vain_wait()
            if self._store_gone:
                return self._without_store()
            if failure is None and device_error is not None:
                self.post_failure(device_error)
                failure = self._failure
                self._break_waits()
            if failure is not None:
                self._failure = failure
                return self._await_end(failure)
        return None

    def _someone_returned(self) -> bool:
        # Only a worker that has waited for a moment needs to know.
        status = self._status()
        waits = status.waiting_for is not None and time.monotonic() - status.since > 1.0
        if not waits or self.returned is not None or self._failure is not None:
            return False
        return self._query(
            self._thread_client, lambda: self._thread_store.check(["returned"]), otherwise=False
        )

    def _end_vain_wait(self) -> None:
        posted = {rank: post for rank in range(self._world_size) if (post := self._posted(rank)) is not None}
        rank = self._returns.awaited(posted) if self._rank in posted else None
        if rank is not None:
            self.returned = PeerReturned(rank)
            self._break_waits()

    def _posted(self, rank: int) -> Posted | None:
        key = f"status/{rank}"
        store = self._thread_store
        post = self._query(self._thread_client, lambda: store.get(key) if store.check([key]) else None, None)
        if post is None:
            return None
        doing, waiting_for, age, at, returned = json.loads(post)
        return Posted(doing, waiting_for, at - age, at, returned)

    def _status(self) -> Status:
        try:
            return self._device_status()
        except RuntimeError as error:  # of CUDA: any question to a device is answered with its first error
            self._note_device(error)
            return self._host_status

    def _check_device(self) -> CounterflowError | None:
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

    def _check_next_worker(self) -> Failure | None:
        if self._next_worker is None:
            return None
        rank, loss_reason = self._next_worker.next, self._next_worker.loss_reason
        why = self._query(self._thread_client, lambda: loss_reason(self._thread_store), None)
        if why is None:
            return None
        report = json.dumps([rank, why])
        posted = self._query(
            self._thread_client, lambda: self._thread_store.compare_set("failure", "", report), None
        )
        self._reported_loss = posted is None or posted.decode() == report
        return Failure(*json.loads(posted or report))

    def _await_end(self, failure: Failure) -> None:
        if failure.rank == self._rank:
            self.error_raised = True
        else:
            self._break_waits()
        seen = time.monotonic()
        # A worker that knows of the failure may have something to save; any other is stuck.
        while not self._sleep(0.1):
            patience = (
                self._timeout_seconds if self.error_raised else min(_GRACE_SECONDS, self._timeout_seconds)
            )
            if time.monotonic() - seen > patience:
                return self._end(f"worker {failure.rank} failed: {failure.why}")
        return None

    def _without_store(self) -> None:
        """End the process if the worker waits: the store's host is gone or cut off, or has merely finished
        first.
        """
        patience = min(_GRACE_SECONDS, self._timeout_seconds)
        fine = time.monotonic()
        while not self._sleep(0.25):
            if self._status().waiting_for is None:
                fine = time.monotonic()
            if time.monotonic() - fine > patience:
                return self._end("the process that hosts the workers' store is gone, or cannot be reached")
        return None

    def _sleep(self, seconds: float) -> bool:
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
        worker_failure = WorkerError(f"{place}: {error}" + (f"; {who}" if who else ""))
    elif isinstance(error, PeerLost):
        worker_failure = WorkerError(f"{place}: {error}")
    else:
        return WorkerError(f"{place}: {type(error).__name__}: {error}")
    worker_failure.consequence = True
    return worker_failure


def raises_worker_error(construct: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate a constructor that communicates: a lost or late worker raises a ``WorkerError``."""

    @wraps(construct)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            construct(*args, **kwargs)
        except (PeerLost, TimedOut) as error:
            instance: Any = args[0]
            place = f"rank {instance.transport.rank}, making its {type(instance).__name__}"
            raise worker_error(place, error, instance.transport) from error

    return wrapper
