"""How a worker failed, and which of several failures is the cause.

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

from ..transport.base import Lost, TimedOut, Transport
from ..transport.worker_watch import blame, culprit

_DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Signals that end a process from outside or by its own fault, never because another worker failed."""

_OF_DEVICES: tuple[type[BaseException], ...] = (
    dist.DistError,
    torch.AcceleratorError,
)
"""Errors of a device or of its links."""


@dataclass(frozen=True, slots=True)
class Failed:
    """How a worker failed, as reported to its launch.

    Attributes:
        rank: rank of the worker.
        when: seconds of ``time.time``.
        message: message for the user.
        kind: class of the error to raise.
        consequence: whether it failed only because another worker did.
        trace: its traceback.
        lost: whether a device, a link or the worker itself is gone, and not the run's own doing.
        worker: rank of the worker that caused the failure.
        action: action of that worker, if known.
        heard: for a consequence: the last known actions of the others, by rank.
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
    heard: Mapping[int, str] = field(default_factory=dict)

    def error(self) -> CounterflowError:
        """The error to raise for it."""
        made = self.kind(self.message)
        if isinstance(made, WorkerError):
            made.lost = self.lost
            made.worker = self.rank if self.worker is None else self.worker
            made.action = self.action
        return made


def failed_by(error: BaseException, rank: int, transport: Transport | None) -> Failed:
    """How a worker failed that met an error."""
    kind: type[CounterflowError] = WorkerError
    consequence = isinstance(error, Lost | TimedOut) or bool(getattr(error, "consequence", False))
    if isinstance(error, CounterflowError):
        kind, message = type(error), str(error)
    elif isinstance(error, TimedOut):
        named = f"worker {error.rank}" if error.rank is not None else "the others"
        message = f"worker {rank} waited for {named}, and {error}"
        found = culprit(transport) if transport is not None else ""
        if found:
            message = f"{found}; {message}"
    else:
        message = f"worker {rank}: {type(error).__name__}: {error}"
        if isinstance(error, Lost):
            message = f"worker {rank}: {error}"
        elif isinstance(error, RuntimeError) and _breaks_connection(str(error)):
            consequence = True
    worker, action, heard = rank, "" if transport is None else str(transport.status.doing), {}
    if consequence and transport is not None:
        statuses = transport.statuses()
        heard = {one.rank: str(one.doing) for one in statuses if one is not None}
        gone = next((one.rank for one in _causes(error) if isinstance(one, Lost)), None)
        stuck = blame(statuses, rank) if gone is None else None
        worker = gone if gone is not None else stuck.rank if stuck is not None else rank
        action = heard.get(worker, "")
    trace = "".join(traceback.format_exception(error))
    lost = consequence or any(isinstance(one, _OF_DEVICES) for one in _causes(error))
    return Failed(rank, time.time(), message, kind, consequence, trace, lost, worker, action, heard)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _breaks_connection(text: str) -> bool:
    """Whether an error is torch.distributed's own about a worker that is gone."""
    return "gloo" in text and (
        "Connection closed" in text or "pair closure" in text or "Socket closed" in text
    )


def root(failures: Sequence[Failed]) -> Failed:
    """The first failure that does not follow from another."""
    return min(failures, key=lambda failed: (failed.consequence, failed.when))


def cause(told: Sequence[Failed], seen: Mapping[int, int]) -> Failed:
    """The cause, from the workers' reports and from the exit codes of ranks that ended without a report."""
    spoke = {failed.rank for failed in told}
    silent = [_died(rank, code, told) for rank, code in seen.items() if rank not in spoke]
    killed = [died for died in silent if -seen[died.rank] in _DEADLY]
    causes = [failed for failed in told if not failed.consequence]
    return root(killed or causes or silent or told)


def _died(rank: int, code: int, told: Sequence[Failed]) -> Failed:
    """That a worker ended without telling why."""
    message = f"worker {rank} ended with exit code {code} without an error message; see its output"
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = "; perhaps the machine ran out of memory" if name == "SIGKILL" else ""
            message = f"worker {rank} was killed by {name}{hint}"
    action = next((failed.heard[rank] for failed in told if rank in failed.heard), "")
    return Failed(rank, 0.0, message, WorkerError, False, "", lost=True, worker=rank, action=action)
