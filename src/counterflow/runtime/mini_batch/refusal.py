"""Refusals of calls before any work: the pipeline is as it was, and is called again.

Invariant: a refusal is raised on all workers, and none of them has sent a message or computed an op of the
call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from counterflow.errors import CounterflowError


class Refusal(Exception):  # noqa: N818 - internal: the call raises its error
    """A call that all workers refuse.

    Args:
        error: the error that the user sees.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def refusing() -> Iterator[None]:
    """Raise an error as a refusal, where all workers raise it alike without asking each other."""
    try:
        yield
    except CounterflowError as error:
        raise Refusal(error) from error
