"""Mini-batches and passes of a worker that are in flight.

Invariant: it is empty whenever the pipeline is. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from counterflow.common.tensors.graphs import pointers

from ..messages.compression import Compression
from ..messages.message_queue import MessageQueue
from ..mini_batch.batch import Batch, Key
from ..stages.passes import StagePass
from ..stages.saved_bytes import SavedBytes
from ..transport.base import Transport
from .meters import Clock
from .skips import StepConstants


class InFlight:
    """Mini-batches and passes in flight of one worker.

    Args:
        transport: how messages travel.
        slots: mini-batches that are in flight at once.
        clock: notes when ops run.
        compression: makes messages smaller; None: they go as they are.
        saved: counts what is saved for backward.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        slots: int,
        clock: Clock,
        compression: Compression | None,
        saved: SavedBytes,
    ) -> None:
        self.transport = transport
        self.clock = clock
        self.saved = saved
        self.period_offset = 0
        """Offset in periods by which the current list runs later than it says."""
        self.batches: list[Batch] = []
        """Mini-batches by slot."""
        self.passes: dict[Key, StagePass] = {}
        """Passes whose forward has run and whose last backward op has not."""
        self.ended: list[tuple[StagePass, Sequence[Tensor]]] = []
        """Passes to settle after the send and before the next op, and buffers to reuse then."""
        self.messages = MessageQueue(transport, compression, self.end_ops)
        self.once = StepConstants()
        self._slots = slots
        self._newest = 0

    def admit(self, batch: Batch) -> None:
        """Give a mini-batch the slot after the last one's, in place of one that is over."""
        batches = self.batches
        if len(batches) < self._slots:
            self._newest = len(batches)
            batches.append(batch)
        else:
            self._newest = (self._newest + 1) % self._slots
            batches[self._newest] = batch
        if self.saved.counting:
            feeds = [feed for mini_batch in batches for feed in mini_batch.feeds]
            self.saved.exclude(tensor for feed in feeds for tensor in feed.tensors())
            for feed in feeds:
                feed.on_copy = self.saved.exclude_also

    def release(self, batch: Batch) -> None:
        """Let go of the inputs and targets of a mini-batch whose ops are over: the user may change them."""
        feeds = batch.feeds
        batch.inputs = batch.targets = None
        if feeds:
            self.messages.release(pointers(tensor for feed in feeds for tensor in feed.tensors()))

    def end_later(self, unit_pass: StagePass, buffers: Sequence[Tensor] = ()) -> None:
        """Settle a pass before the next op, when the results of the current one were sent.

        Args:
            unit_pass: the pass.
            buffers: receive buffers to reuse.
        """
        self.ended.append((unit_pass, buffers))

    def end_ops(self) -> None:
        """Settle the passes of the last op, which frees graphs that were traversed."""
        for unit_pass, buffers in self.ended:
            unit_pass.settle()
            if buffers:
                self.messages.return_buffers(buffers)
        self.ended.clear()
