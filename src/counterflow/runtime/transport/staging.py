"""Two background threads for sends over Gloo: one copies and posts them, one waits until they are sent.

The stager takes CUDA tensors through pinned host memory. The reaper exists because Gloo reports that
a send is done only to a thread that waits for it, and a worker returns memory without waiting.

Both have to end before the interpreter does: Python kills a thread that comes back from torch later, and
that ends the process with an abort.

Invariant: a stager sends in the order of its calls; a tensor and its copy live until they are sent.
The threads do not receive: the caller that needs a tensor waits for it and copies it to the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import Work
from typing_extensions import override

from .base import Pending
from .side_thread import SideThread

Post: TypeAlias = Callable[[Tensor, int, int], Work]
"""Begin to send a host tensor to a peer under a tag."""

CopyOut: TypeAlias = Callable[[Sequence[Tensor]], tuple[list[Tensor], Callable[[], None]]]
"""Begin to copy device tensors to the host; the copies, and what waits until they are made."""

_NAP_SECONDS = 0.02
"""The reaper waits this long first, so that it seldom interrupts the worker and finds most sends done."""

_LONG = timedelta(days=30)
"""The reaper's own timeout: only a worker that waits can wait too long."""


class PendingSend(Pending):
    """A message in flight. The holder of the lock posts it, or waits for its works.

    Args:
        peer: rank of its receiver.
        wait: waits until it is sent.
        works: its sends that were posted.
    """

    __slots__ = ("_wait", "error", "lock", "over", "peer", "works")

    def __init__(self, peer: int, wait: Callable[[PendingSend], None], works: Sequence[Work] = ()) -> None:
        self.peer = peer
        self._wait = wait
        self.works = works
        self.lock = threading.Lock()
        self.over = False
        self.error: RuntimeError | None = None

    @override
    def done(self) -> bool:
        """True if the message was seen to be sent."""
        return self.over and self.error is None

    @override
    def wait(self) -> None:
        if not self.done():
            self._wait(self)

    def finish(self, timeout: timedelta) -> None:
        """Wait for the works; the caller holds the lock. An error is saved for the waiting caller."""
        if not self.over:
            try:
                for work in self.works:
                    work.wait(timeout)
            except RuntimeError as error:
                self.error = self.error or error
            self.works = ()
            self.over = True


class StagedSend(PendingSend):
    """A message that the stager posts.

    Attributes:
        tensors: host tensors to post, with their ``tags``.
        sources: device tensors that some of them are copies of.
        copied: waits until these copies are made.
    """

    __slots__ = ("copied", "sources", "tags", "tensors")

    def __init__(self, peer: int, wait: Callable[[PendingSend], None]) -> None:
        super().__init__(peer, wait)
        self.sources: Sequence[Tensor] = ()
        self.tensors: Sequence[Tensor] = ()
        self.tags: Sequence[int] = ()
        self.copied: Callable[[], None] | None = None

    @override
    def finish(self, timeout: timedelta) -> None:
        super().finish(timeout)
        self.tensors = ()


class SendReaper(SideThread[PendingSend]):
    """A thread that notes which messages are sent."""

    def __init__(self) -> None:
        self._naps = True
        super().__init__("counterflow reaper", self._note)

    def _note(self, send: PendingSend) -> None:
        if self._naps:
            time.sleep(_NAP_SECONDS)
        with send.lock:
            send.finish(_LONG)
        self._naps = self.is_drained


class Stager(SideThread[StagedSend]):
    """A thread that posts sends as soon as their copies to the host are made.

    Args:
        post: begins to send one host tensor.
        wait: waits until a message is sent.
        copy_out: begins to copy tensors to the host.
        reaper: waits for the sends that were posted.
    """

    def __init__(
        self, post: Post, wait: Callable[[PendingSend], None], copy_out: CopyOut, reaper: SendReaper
    ) -> None:
        self._post, self._wait = post, wait
        self._copy_out = copy_out
        self._reaper = reaper
        super().__init__("counterflow stager", self._post_copies)

    def send(
        self, tensors: Sequence[Tensor], peer: int, tag: int, preface: Sequence[tuple[Tensor, int]] = ()
    ) -> PendingSend:
        """Enqueue device tensors to be sent after a preface of host tensors, each with a tag of its own."""
        send = StagedSend(peer, self._wait)
        send.lock.acquire()  # the stager releases it
        send.sources = tensors
        copies, send.copied = self._copy_out(tensors)
        send.tensors = [*(tensor for tensor, _ in preface), *copies]
        send.tags = [*(part_tag for _, part_tag in preface), *([tag] * len(copies))]
        self.put(send)
        return send

    def _post_copies(self, send: StagedSend) -> None:
        works: list[Work] = []
        try:
            assert send.copied is not None
            send.copied()
            for tensor, tag in zip(send.tensors, send.tags, strict=True):
                works.append(self._post(tensor, send.peer, tag))
        except RuntimeError as error:
            send.error = error
        send.sources = ()
        send.works = works
        send.lock.release()
        self._reaper.put(send)


def cuda_copy_out(device: torch.device) -> CopyOut:
    """Copies into pinned memory, on a separate stream, concurrent with the worker's computation."""
    stream = torch.cuda.Stream(device)

    def copy_out(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copies = [
                # Torch's host allocator reuses pinned memory, and not before the copies out of it are made.
                torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
                    tensor.detach(), non_blocking=True
                )
                for tensor in tensors
            ]
            event = torch.cuda.Event(blocking=True)  # blocking: the stager sleeps, it does not spin
            event.record(stream)
        return copies, event.synchronize

    return copy_out
