"""Tensors of known shapes over Gloo: from CPU memory as they are, from a GPU through pinned host memory.

Gloo matches messages by tag, and connects all workers when a group is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from counterflow.program.actions import Matching

from .base import Group
from .control import DistributedTransport
from .kinds import GLOO
from .pending import Transfer, into
from .tags import PAYLOAD, lane_tag


class GlooTransport(DistributedTransport):
    """One process's transport over Gloo."""

    kind = GLOO
    matching = Matching.TAG

    def make_data_plane(self) -> None:
        """See ``DistributedTransport``: the control plane's group carries all."""
        self._spare: dict[tuple[int, ...], list[Group]] = defaultdict(list)

    def group(self, ranks: Sequence[int]) -> Group:
        """See ``Transport.group``. One that was given back is taken again.

        Torch keeps a name, a list and keys in its store for each group that a process ever made.
        """
        spare = self._spare[tuple(ranks)]
        return spare.pop() if spare else super().group(ranks)

    def release(self, groups: Iterable[Group]) -> None:
        """See ``Transport.release``."""
        for group in groups:
            self._spare[group.ranks].append(group)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        """See ``Transport.send``."""
        tag = lane_tag(tag, PAYLOAD)
        if self._stager is not None:
            return self.carry(tensors, peer, tag)
        return self.sent(peer, self.post(tensors, peer, tag))

    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Transfer[None]:
        """See ``Transport.receive``."""

        def begin(targets: Sequence[Tensor]) -> Transfer[None]:
            return self.in_flight(self.accept(targets, peer, lane_tag(tag, PAYLOAD)), peer)

        staged = self._stager is not None
        host = torch.device("cpu") if staged else None
        return into(buffers, begin, host, pinned=staged and self._pinned)
