"""What of a worker's mini-batches is in flight, and what is counted of it.

Invariant: it is empty whenever the pipeline is. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from ..graphs import graph_of, pointers
from ..messages.compression import Compression
from ..messages.message_queue import MessageQueue
from ..mini_batch.batch import Batch, Key
from ..stages.joints import Joints
from ..transport.base import Transport
from .meters import Clock, Kept, SavedBytes
from .skips import Once
from .stash import Stash, Waiting


class InFlight:
    """One worker's.

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
        self.stashes: dict[Key, Stash] = {}
        self.waiting: dict[Key, Waiting] = {}
        self.over: list[Stash] = []
        """Stashes of finished ops with pending work, which is done after the send and before the next op."""
        self.messages = MessageQueue(transport, compression)
        self.once = Once()
        self._slots = slots
        self._newest = 0

    def take_in(self, batch: Batch) -> None:
        """Give a mini-batch the slot after the last one's, in place of one that is over."""
        batches = self.batches
        if len(batches) < self._slots:
            self._newest = len(batches)
            batches.append(batch)
        else:
            self._newest = (self._newest + 1) % self._slots
            batches[self._newest] = batch
        if self.saved.counting:
            feeds = [feed for one in batches for feed in one.feeds]
            self.saved.leave_out(tensor for feed in feeds for tensor in feed.tensors())
            for feed in feeds:
                feed.made = self.saved.leave_out_also

    def release(self, batch: Batch) -> None:
        """Let go of the inputs and targets of a mini-batch whose ops are over: the user may change them."""
        feeds = batch.feeds
        batch.inputs = batch.targets = None
        if feeds:
            self.messages.release(pointers(tensor for feed in feeds for tensor in feed.tensors()))

    def end_ops(self) -> None:
        """Do what the last op left to be done; graphs that were gone through go as well."""
        for stash in self.over:
            if stash.outputs:
                stash.release_outputs()
            if stash.done:
                self.messages.give_back(stash.done)
        self.over.clear()

    def graph_made(
        self, inputs: list[Tensor], outputs: list[Tensor], held: list[Kept], *, joints: Joints | None
    ) -> None:
        """Count what a graph keeps for its backward, if that is counted; see where it may be joined."""
        if self.saved.counting:
            self.saved.note(graph_of(outputs, more=joints.ends if joints is not None else ()), held)
        if joints is not None:
            joints.learn(outputs, inputs)

    def hold(self, tensors: Sequence[Tensor], held: list[Kept]) -> None:
        """Count what is kept for a backward, if that is counted."""
        if self.saved.counting:
            for tensor in tensors:
                self.saved.hold(tensor, held)


NOTHING = nullcontext()
