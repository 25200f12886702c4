"""Tensors of known shapes over Gloo: from CPU memory as they are, from a GPU through pinned host memory.

Gloo matches messages by tag, and connects all workers when a group is made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from counterflow.program.actions import Matching

from .base import Group, Transport, member
from .control import ProcessControl
from .headers import PAYLOAD, lane_tag
from .heap import keep_freed_memory
from .kinds import GLOO
from .pending import DONE, Transfer, call_contiguous, receive_via
from .staging import CopyOut, PendingSend


class GlooTransport(Transport):
    """One process's transport over Gloo; all ranks make one at the same time.

    Args:
        device: device of this worker's computation.
        timeout_seconds: maximum time of any wait.
        copy_out: see ``ProcessControl``.
    """

    kind = GLOO
    matching = Matching.TAG
    control: ProcessControl

    def __init__(
        self, device: torch.device, timeout_seconds: float, *, copy_out: CopyOut | None = None
    ) -> None:
        super().__init__(ProcessControl(device, timeout_seconds, copy_out=copy_out), device)
        if device.type == "cpu":
            keep_freed_memory()
        self._spare: dict[tuple[int, ...], list[Group]] = defaultdict(list)
        self._exchanges: Counter[Group] = Counter()
        """Number of exchanges of each group so far: all its ranks begin them in one order."""

    @override
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> PendingSend:
        tag, control = lane_tag(tag, PAYLOAD), self.control
        if control.stager is not None:
            return control.carry(tensors, peer, tag)
        return control.sent(peer, control.post(tensors, peer, tag))

    @override
    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        control = self.control

        def begin(targets: Sequence[Tensor]) -> Transfer[None]:
            return control.in_flight(control.accept(targets, peer, lane_tag(tag, PAYLOAD)), peer)

        if control.stager is not None:
            return receive_via(buffers, begin, torch.device("cpu"), pinned=control.pinned)
        for buffer in buffers:
            if not buffer.is_contiguous():
                return receive_via(buffers, begin, self.device)
        return begin(buffers)

    @override
    def group(self, ranks: Sequence[int]) -> Group:
        """Groups of the same ranks are distinct: their collectives may cross.

        A released group is reused, because torch stores a name, a list and keys for each group that a process
        ever made.
        """
        spare = self._spare[tuple(ranks)]
        if spare:
            return spare.pop()
        return Group(tuple(ranks), None if len(ranks) == 1 else self.control.new_group(ranks, "gloo"))

    @override
    def release(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._spare[group.ranks].append(group)

    @override
    def all_reduce(self, tensor: Tensor, group: Group) -> Transfer[None]:
        """Gloo sums each element in one place, then spreads it."""
        if len(group.ranks) == 1:
            return DONE
        handle = member(group)
        work = self.control.collective(lambda: dist.all_reduce(tensor, group=handle, async_op=True))
        assert work is not None
        return self.control.in_flight((work,), -1)

    @override
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Transfer[None]:
        """Host tensors go as messages whose receives are posted first. Gloo's own exchange may begin with a
        send, behind which the report that the receive is ready waits, so two workers send in turn.
        """
        handle = member(group)
        if self.device.type != "cpu":
            work = self.control.collective(
                lambda: dist.all_to_all_single(received, sent, group=handle, async_op=True)
            )
            assert work is not None
            return self.control.in_flight((work,), -1)
        place = group.ranks.index(self.rank)
        peers = [rank for rank in range(len(group.ranks)) if rank != place]
        tag = self._exchanges[group] = self._exchanges[group] + 1
        received[place].copy_(sent[place])

        def begin() -> list[dist.Work]:
            receives = [handle.recv([received[rank]], rank, tag) for rank in peers]
            return receives + [handle.send([sent[rank]], rank, tag) for rank in peers]

        return self.control.in_flight(self.control.collective(begin), -1)

    @override
    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        if len(group.ranks) > 1:
            handle = member(group)

            def begin(dense: Tensor) -> None:
                self.control.collective(lambda: dist.broadcast(dense, source, group=handle))

            call_contiguous(tensor, begin, update=self.rank != source)
