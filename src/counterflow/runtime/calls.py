"""Which calls of a pipeline are refused now, and how the others learn that one has failed.

Invariant: a call that would leave other workers waiting is refused before it sends anything, and an error
within one reaches them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from counterflow.errors import ConfigError, CounterflowError
from counterflow.program.actions import Matching

from .execution.runner import Runner
from .transport.base import Transport
from .transport.turns import elsewhere, my_worker
from .transport.watch import worker_error
from .workers.lease import Lease

if TYPE_CHECKING:
    from .pipeline import Pipeline


class Calls:
    """The calls of one pipeline on one worker.

    Args:
        worker: its number in its group.
        transport: how to reach the others.
        run: what the calls make.
        lease: of the transport.
    """

    def __init__(self, worker: int, transport: Transport, run: Runner, lease: Lease[Pipeline]) -> None:
        self._worker, self._transport, self._run, self._lease = worker, transport, run, lease
        self._thread = my_worker()
        self.streams = False
        """Whether not all was taken that ``stream_weights`` gives here."""
        self.shows_average = False
        """Whether the weights are their averages now."""

    def only_alone(self) -> None:
        """Refuse a step of a closed pipeline, and one that would get among another pipeline's messages."""
        if self._lease.closed:
            raise ConfigError("the pipeline is closed; make another one")
        by_order = self._transport.matching is Matching.ORDER
        if by_order and any(other.in_flight for other in self._lease.others()):
            raise ConfigError(
                "another pipeline of these workers has mini-batches in flight, and over "
                f"{self._transport.kind} its messages would be taken for this one's; flush() it before"
            )

    def only_own(self, call: str) -> None:
        """Refuse ``call`` where the weights are their averages."""
        if self.shows_average:
            raise ConfigError(
                f"{call} within averaged(), where the weights are their averages; leave it before (the state "
                "of the average is model_state_dict(ema=True))"
            )

    def only_updated(self, call: str) -> None:
        """Refuse ``call`` where gradients wait for an update."""
        self.only_own(call)
        if self._run.waiting:
            raise ConfigError(f"{call} while gradients wait for an update; make a step with one before")

    def only_taken(self) -> None:
        """Refuse any call where others wait until a stream of weights is taken."""
        if self.streams:
            raise ConfigError(
                "stream_weights() is not at its end, and other workers wait in it; take all that it gives "
                "before the next call"
            )

    def only_when_empty(self, call: str) -> None:
        """Refuse ``call`` where mini-batches are in flight."""
        self.only_taken()
        self.only_own(call)
        if self._run.in_flight:
            raise ConfigError(f"{call} while mini-batches are in flight; call flush() before, on all workers")

    @contextmanager
    def reported(self, step: int, *, taking: bool = False) -> Iterator[None]:
        """Report an error to the other workers, so none of them waits in vain.

        Tensors made meanwhile are used in later steps, so they are not made in the user's inference mode.

        Args:
            step: number of earlier steps, for the message.
            taking: whether the call reads a stream of weights.
        """
        try:
            if my_worker() is not self._thread:
                raise ConfigError(
                    "workers are threads, and one's pipeline was called in another thread, for which that "
                    "worker may wait; call it where it was made, or launch processes (transport='gloo')"
                )
            if not taking:
                self.only_taken()
            with elsewhere(), torch.inference_mode(mode=False):
                yield
        except CounterflowError as error:
            self._transport.fail(error)
            raise
        except Exception as error:
            place = f"worker {self._worker}, step {step}: {self._transport.status.doing}"
            found = worker_error(place, error, self._transport)
            self._transport.fail(found)
            raise found from error
        except BaseException as error:  # interrupted: the others must know too
            self._transport.fail(error)
            raise
