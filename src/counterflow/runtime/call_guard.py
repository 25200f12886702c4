"""Refusals of calls that a pipeline cannot run now, and reports of failed calls to the other workers.

Invariant: a call that would leave other workers waiting is refused before it sends anything, and an error
within one reaches them all. A call that fails in the midst closes the pipeline: gradients, buffers and
messages of it may be left, and no later call uses them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from counterflow.errors import ConfigError, CounterflowError, WorkerError
from counterflow.program.actions import Matching

from .assembly.partition import PartitionedModel
from .execution.runner import Runner
from .mini_batch.agreement import agreed_call
from .mini_batch.refusal import Refusal
from .mini_batch.step_report import CallKind, CallReport
from .transport.base import Transport
from .transport.rng_lock import current_worker, rng_released
from .transport.worker_watch import worker_error
from .workers.lease import Lease


class TransportUser(Protocol):
    """A pipeline, as another one on the same transport sees it."""

    @property
    def in_flight(self) -> bool:
        """True if mini-batches or evaluations are in flight."""

    def layer_in_use(self, model: PartitionedModel) -> str | None:
        """First layer of ``model`` whose earlier weights the mini-batches in flight need; None: no layer."""


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    consequence: bool
    lost: bool

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        """The failure that an error reports; the error itself would hold all tensors of the call."""
        spoken = isinstance(error, CounterflowError)
        message = str(error) if spoken else f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, WorkerError):
            return cls(message, error.consequence, error.lost)
        return cls(message, consequence=False, lost=False)

    def error(self) -> WorkerError:
        """The error of a later call."""
        error = WorkerError(
            f"the pipeline is closed, because an earlier call failed: {self.message}; start the workers "
            "again, from a checkpoint if there is one"
        )
        error.consequence, error.lost = self.consequence, self.lost
        return error


class CallGuard:
    """The calls of one pipeline on one worker.

    Args:
        worker: its number in its group.
        transport: how to reach the others.
        run: what the calls make.
        lease: of the transport.
    """

    def __init__(self, worker: int, transport: Transport, run: Runner, lease: Lease[TransportUser]) -> None:
        self._worker, self._transport, self._run, self._lease = worker, transport, run, lease
        self._thread, self._process = current_worker(), os.getpid()
        self._failure: _Failure | None = None
        self.steps = 0
        """Number of steps that were made."""
        self.streams = False
        """Whether not all was taken that ``stream_weights`` gives here."""
        self.averaged = False
        """Whether the weights are their averages now."""

    @property
    def failed(self) -> bool:
        """True if a call failed in the midst, which closed the pipeline."""
        return self._failure is not None

    def require_working(self) -> None:
        """Refuse any call after one that failed in the midst, or in a fork of the worker's process.

        Raises:
            WorkerError: one did; the message repeats its error.
            ConfigError: the process is a fork, which has none of the threads that carry messages.
        """
        if os.getpid() != self._process:
            raise ConfigError(
                f"the pipeline is of process {self._process}, and this one is a fork of it, whose calls "
                "would wait for threads that it does not have; use the pipeline there, or start processes by "
                "spawn"
            )
        if self._failure is not None:
            raise self._failure.error()

    def require_exclusive(self) -> None:
        """Refuse a step of a closed pipeline, and one that would get among another pipeline's messages."""
        if self._lease.closed:
            raise ConfigError("the pipeline is closed; make another one")
        by_order = self._transport.matching is Matching.ORDER
        if by_order and any(pipeline.in_flight for pipeline in self._lease.other_owners()):
            raise ConfigError(
                "another pipeline of these workers has mini-batches in flight, and over "
                f"{self._transport.kind} its messages would be taken for this one's; flush() it before"
            )

    def require_sole_trainer(self, model: PartitionedModel) -> None:
        """Refuse a step where another pipeline has several versions of some layers' weights in use."""
        for pipeline in self._lease.other_owners():
            shared = pipeline.layer_in_use(model)
            if shared is not None:
                raise ConfigError(
                    f"{shared} is trained by another pipeline too, whose mini-batches in flight need earlier "
                    "versions of its weights; call that pipeline's flush() before this one's step"
                )

    def require_original_weights(self, call: str) -> None:
        """Refuse ``call`` where the weights are their averages, or the pipeline is closed."""
        self.require_working()
        if self.averaged:
            raise ConfigError(
                f"{call} within averaged(), where the weights are their averages; leave it before (the state "
                "of the average is model_state_dict(ema=True))"
            )

    def require_no_pending_gradients(self, call: str) -> None:
        """Refuse ``call`` where gradients wait for an update."""
        self.require_original_weights(call)
        if self._run.waiting:
            raise ConfigError(f"{call} while gradients wait for an update; make a step with one before")

    def require_stream_consumed(self) -> None:
        """Refuse any call where others wait until a stream of weights is taken, or the pipeline is closed."""
        self.require_working()
        if self.streams:
            raise ConfigError(
                "stream_weights() is not at its end, and other workers wait in it; take all that it gives "
                "before the next call"
            )

    def require_idle(self, call: str) -> None:
        """Refuse ``call`` where mini-batches are in flight."""
        self.require_stream_consumed()
        self.require_original_weights(call)
        if self._run.in_flight:
            raise ConfigError(f"{call} while mini-batches are in flight; call flush() before, on all workers")

    def agree(self, call: CallKind) -> None:
        """Check that all workers make a call, each of which begins with this.

        Args:
            call: this worker's call.

        Raises:
            ConfigError: another worker makes another one.
        """
        agreed_call(CallReport(call, self.steps), self._transport)

    @contextmanager
    def reported(self, *, taking: bool = False) -> Iterator[None]:
        """Report an error to the other workers, so none of them waits in vain, and close the pipeline.

        Tensors made meanwhile are used in later steps, so they are not made in the user's inference mode.
        A ``Refusal`` is raised as its error, and the pipeline is as before the call.

        Args:
            taking: whether the call reads a stream of weights.
        """
        if not taking:
            self.require_stream_consumed()
        try:
            if current_worker() is not self._thread:
                raise ConfigError(
                    "workers are threads, and one's pipeline was called in another thread, for which that "
                    "worker may wait; call it where it was made, or launch processes (transport='gloo')"
                )
            with rng_released(), torch.inference_mode(mode=False):
                yield
        except Refusal as refusal:
            error = refusal.error
            if isinstance(error, CounterflowError):
                raise error from error.__cause__
            raise worker_error(f"worker {self._worker}, step {self.steps}", error, self._transport) from error
        except CounterflowError as error:
            self._fail(error)
            raise
        except Exception as error:
            place = f"worker {self._worker}, step {self.steps}: {self._transport.status.doing}"
            failure = worker_error(place, error, self._transport)
            self._fail(failure)
            raise failure from error
        except BaseException as error:  # interrupted: the others must know too
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = _Failure.of(error)
        self._transport.fail(error)
