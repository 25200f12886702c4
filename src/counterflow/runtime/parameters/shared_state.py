"""Buffers and Python objects that stages share, watched around the forwards of a worker."""

from __future__ import annotations

from counterflow.errors import WorkerError

from ..stages.sharing.watch import ObjectWatch
from .shared_buffers import SharedBuffers


class SharedState:
    """A worker's watch over what its stages share with others.

    Args:
        buffers: shared buffers.
        objects: shared Python objects.
        flushes: whether all forwards of a mini-batch are run when its losses are gathered.
    """

    def __init__(self, buffers: SharedBuffers, objects: ObjectWatch, *, flushes: bool) -> None:
        self._shared_buffers, self._objects, self._flushes = buffers, objects, flushes

    def note(self, *, training: bool) -> None:
        """Note what is shared, before forwards."""
        self._shared_buffers.note(step=training)
        self._objects.note(training=training)

    def check(self) -> None:
        """Refuse a forward that changed since ``note`` what other stages have.

        Raises:
            ConfigError: one did.
        """
        self._shared_buffers.check()
        self._objects.check()

    def explain(self, error: WorkerError) -> None:
        """Refuse what a forward that failed may have read otherwise than in one process.

        Raises:
            ConfigError: there is such an object.
        """
        if isinstance(error.__cause__, Exception):
            self._objects.explain(error.__cause__)

    def end(self) -> None:
        """At the end of a step or an evaluation: compare workers, the first times; all workers call it.

        Raises:
            ConfigError: a forward changed what other stages have.
        """
        self._shared_buffers.check()
        if not self._flushes:
            self._objects.check()
        self._objects.compare()
