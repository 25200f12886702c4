"""Failures of workers, and the cause among several.

Invariant: the cause is reported, never its consequences; with the failed worker and its action, if known.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from counterflow.errors import CounterflowError, WorkerError

from ..transport.base import PeerLost, TimedOut, Transport
from ..transport.worker_watch import blame, culprit

_DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Signals that end a process by its own fault or from outside, never because another worker failed."""

_DEVICE_ERRORS: tuple[type[BaseException], ...] = (
    dist.DistError,
    torch.AcceleratorError,
)
"""Errors of a device or of its links."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Failure of a worker, as reported to its launch.

    Attributes:
        rank: rank of the worker.
        when: seconds of ``time.time``.
        message: message for the user.
        kind: class of the error to raise.
        consequence: True if it failed only because another worker did.
        trace: its traceback.
        lost: True if a device, a link or the worker itself was lost, and the run is not at fault.
        worker: rank of the worker that caused the failure.
        action: action of that worker, if known.
        statuses: for a consequence, the last known actions of all workers, by rank.
    """

    rank: int
    when: float
    message: str
    kind: type[CounterflowError]
    consequence: bool
    trace: str
    lost: bool = False
    worker: int | None = None
    action: str = ""
    statuses: Mapping[int, str] = field(default_factory=dict)

    def error(self) -> CounterflowError:
        """Make the error to raise for it."""
        error = self.kind(self.message)
        if isinstance(error, WorkerError):
            error.lost = self.lost
            error.worker = self.rank if self.worker is None else self.worker
            error.action = self.action
        return error


def describe_failure(error: BaseException, rank: int, transport: Transport | None) -> WorkerFailure:
    """Describe the failure of a worker by its error."""
    kind: type[CounterflowError] = WorkerError
    consequence = isinstance(error, PeerLost | TimedOut) or bool(getattr(error, "consequence", False))
    if isinstance(error, CounterflowError):
        kind, message = type(error), str(error)
    elif isinstance(error, TimedOut):
        named = f"worker {error.rank}" if error.rank is not None else "the others"
        message = f"worker {rank} waited for {named}, and {error}"
        cause_clause = culprit(transport) if transport is not None else ""
        if cause_clause:
            message = f"{cause_clause}; {message}"
    else:
        message = f"worker {rank}: {type(error).__name__}: {error}"
        if isinstance(error, PeerLost):
            message = f"worker {rank}: {error}"
        elif isinstance(error, RuntimeError) and _breaks_connection(str(error)):
            consequence = True
    worker, action, doing = rank, "" if transport is None else str(transport.status.doing), {}
    if consequence and transport is not None:
        statuses = transport.statuses()
        doing = {status.rank: str(status.doing) for status in statuses if status is not None}
        gone = next((e.rank for e in _causes(error) if isinstance(e, PeerLost)), None)
        stuck = blame(statuses, rank) if gone is None else None
        worker = gone if gone is not None else stuck.rank if stuck is not None else rank
        action = doing.get(worker, "")
    trace = "".join(traceback.format_exception(error))
    lost = consequence or any(isinstance(e, _DEVICE_ERRORS) for e in _causes(error))
    return WorkerFailure(rank, time.time(), message, kind, consequence, trace, lost, worker, action, doing)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _breaks_connection(text: str) -> bool:
    return "gloo" in text and (
        "Connection closed" in text or "pair closure" in text or "Socket closed" in text
    )


def root(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The first failure that does not follow from another."""
    return min(failures, key=lambda failure: (failure.consequence, failure.when))


def cause(reports: Sequence[WorkerFailure], codes: Mapping[int, int]) -> WorkerFailure:
    """Find the cause in the workers' reports and the exit codes of ranks that ended without a report."""
    reported = {failure.rank for failure in reports}
    silent = [_died(rank, code, reports) for rank, code in codes.items() if rank not in reported]
    killed = [failure for failure in silent if -codes[failure.rank] in _DEADLY]
    causes = [failure for failure in reports if not failure.consequence]
    return root(killed or causes or silent or reports)


def _died(rank: int, code: int, reports: Sequence[WorkerFailure]) -> WorkerFailure:
    message = f"worker {rank} ended with exit code {code} without an error message; see its output"
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = "; perhaps the machine ran out of memory" if name == "SIGKILL" else ""
            message = f"worker {rank} was killed by {name}{hint}"
    action = next((failure.statuses[rank] for failure in reports if rank in failure.statuses), "")
    return WorkerFailure(rank, 0.0, message, WorkerError, False, "", lost=True, worker=rank, action=action)
