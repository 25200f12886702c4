"""Running statistics and counters of copies, by hand: averaged, and added up, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.runtime.parameters.mutation_check import InPlaceMutationCheck
from counterflow.runtime.parameters.statistics import Statistics
from counterflow.runtime.stages.deferred import defer
from counterflow.runtime.stages.versions import Versions
from counterflow.runtime.transport.base import Group
from counterflow.runtime.transport.local import Hub

from .by_hand import names_of, stage_of


class Counter(nn.Module):
    """Has counters of whole and of other numbers, and something that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: Tensor
        self.parts: Tensor
        self.register_buffer("other", torch.full((3,), 7.0))
        self.register_buffer("whole", torch.tensor([[10, 20]]))
        self.register_buffer("parts", torch.tensor([0.5]))
        cf.sum_over_copies(self, "whole", "parts")


class Copies:
    """A stage that two or more workers hold: the modules of each, and its part."""

    def __init__(self, count: int, make: Callable[[], list[nn.Module]], *, versions: bool = False) -> None:
        hub = Hub(count)
        transports = [hub.transport(rank) for rank in range(count)]
        self.modules = [make() for _ in range(count)]
        self.stages = [stage_of(1, modules) for modules in self.modules]
        self.changes, self.parts = [], []
        for stage, transport in zip(self.stages, transports, strict=True):
            if versions:
                stage.versions = Versions(1, stage.parameters, lambda _: None)
            groups: dict[int, Group | None] = {1: transport.group(range(count))}
            self.changes.append(InPlaceMutationCheck({1: stage}, [[], *names_of(stage)], groups))
            self.parts.append(Statistics({1: stage}, groups, self.changes[-1], transport))

    def note(self) -> None:
        for changes in self.changes:
            changes.note_buffers()

    def sum(self) -> None:
        for part in self.parts:
            part.start(1)
        for part in self.parts:
            part.end(1)


def test_statistics_become_their_mean_and_counts_are_rounded_up() -> None:
    copies = Copies(2, lambda: [nn.BatchNorm1d(2), nn.Identity(), nn.BatchNorm1d(1)])
    for at, (first, _, last) in enumerate(copies.modules):
        first.get_buffer("running_mean").copy_(torch.tensor([1.0 + at, -2.0]))
        first.get_buffer("running_var").copy_(torch.tensor([1.0, 4.0 + 2 * at]))
        first.get_buffer("num_batches_tracked").fill_(4 + 3 * at)
        last.get_buffer("running_mean").fill_(10.0 * at)
    copies.sum()
    for first, _, last in copies.modules:
        assert first.get_buffer("running_mean").tolist() == [1.5, -2.0]
        assert first.get_buffer("running_var").tolist() == [1.0, 5.0]
        assert first.get_buffer("num_batches_tracked").item() == 6  # 11 / 2, up
        assert last.get_buffer("running_mean").tolist() == [5.0]
        assert last.get_buffer("running_var").tolist() == [1.0]
        assert last.get_buffer("num_batches_tracked").item() == 0


def test_counters_are_what_they_were_and_what_every_copy_added() -> None:
    copies = Copies(3, lambda: [nn.BatchNorm1d(2), Counter()])
    for step in (1, 2):
        copies.note()
        for at, (_, counter) in enumerate(copies.modules):
            counter.get_buffer("whole").add_(torch.tensor([[1, at]]))
            counter.get_buffer("parts").add_(0.25)
        copies.sum()
        for norm, counter in copies.modules:
            assert counter.get_buffer("whole").tolist() == [[10 + 3 * step, 20 + 3 * step]]
            assert counter.get_buffer("parts").tolist() == [0.5 + 0.75 * step]
            assert counter.get_buffer("other").tolist() == [7.0] * 3
            assert norm.get_buffer("running_var").tolist() == [1.0, 1.0]


def test_a_whole_counter_is_exact_where_float32_is_not() -> None:
    copies = Copies(2, lambda: [Counter()])
    for (counter,) in copies.modules:
        counter.get_buffer("whole").fill_(2**24)
    copies.note()
    for (counter,) in copies.modules:
        counter.get_buffer("whole").add_(1)
    copies.sum()
    for (counter,) in copies.modules:
        assert counter.get_buffer("whole").tolist() == [[2**24 + 2] * 2]


def test_counters_stay_as_they_are_without_a_flush() -> None:
    copies = Copies(2, lambda: [nn.BatchNorm1d(1), Counter()], versions=True)
    for at, (norm, counter) in enumerate(copies.modules):
        norm.get_buffer("running_mean").fill_(at)
        counter.get_buffer("whole").add_(at)
    copies.sum()
    for at, (norm, counter) in enumerate(copies.modules):
        assert norm.get_buffer("running_mean").tolist() == [0.5]
        assert counter.get_buffer("whole").tolist() == [[10 + at, 20 + at]]


def test_a_stage_without_any_is_summed_too() -> None:
    copies = Copies(2, lambda: [nn.Linear(1, 1)])
    copies.sum()
    copies.sum()


def deferred(*numbers: float) -> list[nn.Module]:
    norms = [nn.BatchNorm1d(1, momentum=0.5) for _ in numbers]
    defer(norms)
    return [*norms]


def test_deferred_statistics_wait_and_are_those_of_all_samples() -> None:
    copies = Copies(2, lambda: deferred(1.0))
    samples = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [10.0]])]
    for part, (norm,), x in zip(copies.parts, copies.modules, samples, strict=True):
        part.defer(deferring=True)
        norm(x)
        part.defer(deferring=False)
        assert norm.get_buffer("running_mean").tolist() == [0.0]
    copies.sum()
    for part, (norm,) in zip(copies.parts, copies.modules, strict=True):
        assert norm.get_buffer("sums_of_mini_batch").tolist() == [[16.0], [114.0], [4.0]]
        part.commit()
        assert norm.get_buffer("running_mean").tolist() == [2.0]  # half of 16 / 4
        torch.testing.assert_close(norm.get_buffer("running_var"), torch.tensor([0.5 + (114 - 64) / 3 / 2]))
        assert norm.get_buffer("sums_of_mini_batch").tolist() == [[0.0]] * 3
        norm(samples[0])  # not deferred: at once
        assert norm.get_buffer("running_mean").tolist() == [1.75]


def test_all_norms_of_all_stages_wait() -> None:
    stages = {number: stage_of(number, deferred(1.0, 2.0), 2 * number) for number in range(2)}
    groups: dict[int, Group | None] = dict.fromkeys(stages)
    transport = Hub(1).transport(0)
    changes = InPlaceMutationCheck(stages, names_of(*stages.values()), groups)
    part = Statistics(stages, groups, changes, transport)
    norms = [norm for stage in stages.values() for norm in stage.deferred]
    assert len(norms) == 4
    part.defer(deferring=True)
    assert all(norm.deferring for norm in norms)
    for norm in norms:
        norm(torch.tensor([[1.0], [3.0]]))
    part.commit()
    assert [norm.get_buffer("running_mean").item() for norm in norms] == [1.0] * 4
    part.defer(deferring=False)
    assert not any(norm.deferring for norm in norms)
