"""Running statistics and counters of a stage's copies: averaged, and added up, once a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..stages.stage import LocalStage
from ..transport.base import Group, Pending, Transport
from .mutation_check import InPlaceMutationCheck


class _StatisticsSum(NamedTuple):
    """Running statistics and counters on their way: all of them in one tensor, and its sum.

    ``counted`` has the counters, and what they were before the mini-batch.
    """

    means: list[Tensor]
    counted: list[tuple[Tensor, Tensor]]
    flat: Tensor
    pending: Pending
    copies: int


class Statistics:
    """A worker's part.

    Args:
        stages: the worker's.
        groups: by stage, those who hold copies of it; None: nobody else.
        mutations: has the counters before the mini-batch.
        transport: how to reach the others.
    """

    def __init__(
        self,
        stages: Mapping[int, LocalStage],
        groups: Mapping[int, Group | None],
        mutations: InPlaceMutationCheck,
        transport: Transport,
    ) -> None:
        self._stages, self._groups, self._mutations, self._transport = stages, groups, mutations, transport
        self._sums: dict[int, _StatisticsSum] = {}
        """In flight, by stage."""

    def defer(self, *, deferring: bool) -> None:
        """Let running statistics wait for the end of a mini-batch, or not any more."""
        for local_stage in self._stages.values():
            for norm in local_stage.deferred:
                norm.deferring = deferring

    def commit(self) -> None:
        """Update the running statistics that wait for the end of a mini-batch; all its sums are there."""
        for local_stage in self._stages.values():
            for norm in local_stage.deferred:
                norm.commit()

    def update_balances(self) -> None:
        """Move the biases of routers by the tokens of their experts, after an update; all sums are there."""
        for stage in self._stages.values():
            for balance in stage.balances:
                balance.update()

    def start(self, stage: int) -> None:
        """Begin to make running statistics the mean of those of the stage's copies, and add up counters."""
        group, local_stage = self._groups[stage], self._stages[stage]
        assert group is not None  # only then a list asks for it
        counted = [] if local_stage.versions is not None else self._counters(stage)
        sums = (norm.sums_of_mini_batch for norm in local_stage.deferred)
        counted += [(sums_of_norm, torch.zeros_like(sums_of_norm)) for sums_of_norm in sums]
        buffers = [*local_stage.statistics, *(buffer for buffer, _ in counted)]
        # In float64, in which counts are exact.
        nothing = torch.zeros(1, device=self._transport.device)
        flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers] or [nothing])
        pending = self._transport.all_reduce(flat, group)
        self._sums[stage] = _StatisticsSum(local_stage.statistics, counted, flat, pending, len(group.ranks))

    def _counters(self, stage: int) -> list[tuple[Tensor, Tensor]]:
        buffers = self._stages[stage].buffers
        counters = []
        for place in buffers.summed:
            module, name = buffers.places[place]
            then = self._mutations.buffer_contents[stage][place]
            assert then is not None
            counters.append((module.get_buffer(name), then))
        return counters

    def end(self, stage: int) -> None:
        """Take the mean of what is averaged, rounded up if it is a count, and the sum of what was added."""
        sums = self._sums.pop(stage)
        sums.pending.wait()
        sizes = [b.numel() for b in (*sums.means, *(buffer for buffer, _ in sums.counted))]
        parts = iter(sums.flat.split(sizes) if sizes else ())
        for buffer in sums.means:
            mean = next(parts) / sums.copies
            buffer.copy_((mean if buffer.is_floating_point() else mean.ceil()).view_as(buffer))
        for buffer, before in sums.counted:
            total = next(parts).view_as(buffer) - (sums.copies - 1) * before.double()
            buffer.copy_(total)  # of counts it is exact
