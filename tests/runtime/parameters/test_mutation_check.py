"""What a layer may change in training, by hand: which weights and buffers are seen, and what is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.runtime.parameters import mutation_check
from counterflow.runtime.parameters.mutation_check import InPlaceMutationCheck
from counterflow.runtime.stages.versions import Versions
from counterflow.runtime.transport.base import Group

from .by_hand import names_of, stage_of

COPIES = Group((0, 2, 3))


class Notes(nn.Module):
    """Has buffers: a counter that copies add up, a number, and one that may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.last: Tensor
        self.cache: Tensor | None
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("cache", None)
        cf.sum_over_copies(self, "count")


def changes(*modules: nn.Module, group: Group | None = None, first: int = 4) -> InPlaceMutationCheck:
    stage = stage_of(0, modules, first)
    return InPlaceMutationCheck({0: stage}, names_of(stage), {0: group})


def changed(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def test_what_no_layer_changed_is_no_matter() -> None:
    layer, notes = nn.Linear(2, 2), Notes()
    check = changes(layer, notes, group=COPIES)
    changed(layer.weight)
    check.check()  # nothing was noted yet
    check.refuse_overwritten()
    check.note_parameters()
    check.note_buffers()
    check.check()
    check.refuse_overwritten()
    assert not check.mutated_weights


def test_a_weight_of_one_copy_may_change_and_is_known() -> None:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    check = changes(*layers)
    check.note_parameters()
    changed(layers[1].weight)
    check.check()
    assert check.mutated_weights == {"5.weight"}
    changed(layers[0].bias)
    check.check()
    assert check.mutated_weights == {"4.bias", "5.weight"}


def test_a_weight_that_is_changed_before_its_backward_is_refused() -> None:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    check = changes(*layers)
    check.note_parameters()
    changed(layers[1].bias)
    with pytest.raises(ConfigError) as refused:
        check.refuse_overwritten()
    assert str(refused.value) == (
        "layer 5 (Linear) changes its weight 'bias' in training, and the backwards of the micro-batches "
        "before need it as it was; let only the optimizer change it (in a hook after its step, say)"
    )


def test_a_weight_of_several_copies_is_refused() -> None:
    layer = nn.Linear(2, 2)
    check = changes(layer, group=COPIES)
    check.note_parameters()
    changed(layer.weight)
    with pytest.raises(ConfigError) as refused:
        check.check()
    assert str(refused.value) == (
        "layer 4 (Linear) changes its weight 'weight' in training (max_norm of an embedding does), and "
        "each of the 3 copies of stage 0 would change its own; take a scheme with one copy of a stage and "
        "one replica, or let only the optimizer change it"
    )
    assert not check.mutated_weights


def test_a_weight_of_several_stages_is_refused() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    stages = stage_of(0, [first]), stage_of(1, [last], 1)
    check = InPlaceMutationCheck({1: stages[1]}, names_of(*stages), {1: None})
    check.note_parameters()
    changed(last.weight)
    with pytest.raises(ConfigError) as refused:
        check.check()
    assert str(refused.value) == (
        "layer 1 (Linear) changes its weight 'weight' in training, which is one of other stages too, where "
        "it would stay; let only the optimizer change it (in a hook after its step, say)"
    )


def test_a_weight_with_several_versions_is_refused() -> None:
    layer = nn.Linear(2, 2)
    stage = stage_of(0, [layer])
    stage.versions = Versions(0, stage.parameters, lambda _: None)
    check = InPlaceMutationCheck({0: stage}, names_of(stage), {0: None})
    check.note_parameters()
    changed(layer.weight)
    with pytest.raises(ConfigError) as refused:
        check.check()
    assert str(refused.value) == (
        "layer 0 (Linear) changes its weight 'weight' in training, and an asynchronous schedule keeps "
        "several versions of it, of which one would be changed; let only the optimizer change it (in a "
        "hook after its step, say), or take a synchronous scheme"
    )


def test_a_buffer_of_several_copies_is_refused() -> None:
    layer, notes = nn.Linear(2, 2), Notes()
    check = changes(layer, nn.Sequential(notes), group=COPIES)
    check.note_buffers()
    notes.last += 1
    with pytest.raises(ConfigError) as refused:
        check.check()
    assert str(refused.value) == (
        "layer 5 (Sequential) changes its buffer 'last' in training, and each of the 3 copies of stage 0 "
        "would change its own; take a scheme with one copy of a stage and one replica, let training keep "
        "the buffer, or declare a counter with counterflow.sum_over_copies (in synchronous schemes)"
    )


def test_a_measurement_records_stages_that_need_one_copy() -> None:
    notes, layer, counters = Notes(), nn.Linear(2, 2), Notes()
    modules = nn.Sequential(notes), layer, counters
    stages = {number: stage_of(number, [module], number) for number, module in enumerate(modules)}
    groups = {0: COPIES, 1: COPIES, 2: None}
    check = InPlaceMutationCheck(stages, names_of(*stages.values()), groups)
    check.record()
    check.note_parameters()
    check.note_buffers()
    counters.count += 1  # copies would add it up
    check.check()
    assert check.single_stages == set()
    notes.last += 1
    check.check()
    assert check.single_stages == {0}
    changed(layer.weight)
    check.check()
    assert check.single_stages == {0, 1}
    counters.last += 1  # of the only copy
    check.check()
    assert check.single_stages == {0, 1, 2}


def test_buffers_that_may_change_and_those_after_them() -> None:
    notes = Notes()
    check = changes(notes, group=COPIES)
    check.note_buffers()
    notes.count += 1  # it is added up
    notes.cache = torch.ones(3)  # was none
    check.check()
    check.note_buffers()
    notes.cache = torch.ones(4)  # has another shape: a cache
    notes.last = notes.last.clone()  # another object that is equal
    check.check()
    check.note_buffers()
    notes.cache = None
    check.check()
    notes.last = notes.last + 1
    with pytest.raises(ConfigError, match="'last'"):
        check.check()


def test_what_comes_after_a_buffer_that_may_change_is_seen() -> None:
    first, notes = Notes(), Notes()
    check = changes(first, notes, group=COPIES)
    for may_change in ("count", "last", "cache"):
        check.note_buffers()
        if may_change == "count":
            first.count += 1
        elif may_change == "last":
            first.last = torch.zeros(5)
        else:
            first.cache = torch.zeros(5)
        notes.last += 1
        with pytest.raises(ConfigError, match="layer 5"):
            check.check()


def test_a_counter_is_no_counter_without_a_flush() -> None:
    notes = Notes()
    stage = stage_of(0, [notes])
    stage.versions = Versions(0, stage.parameters, lambda _: None)
    check = InPlaceMutationCheck({0: stage}, names_of(stage), {0: COPIES})
    check.note_buffers()
    notes.count += 1
    with pytest.raises(ConfigError, match="'count'"):
        check.check()


def test_buffers_of_one_copy_are_its_own() -> None:
    notes = Notes()
    check = changes(notes)
    check.note_buffers()
    assert check.buffer_contents == {}
    notes.last += 1
    check.check()
    without = changes(nn.Linear(2, 2), group=COPIES)
    without.note_buffers()
    assert without.buffer_contents == {}


def test_what_is_sharded_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    monkeypatch.setattr(mutation_check, "is_dtensor", lambda one: one is layer.weight)
    check = changes(layer)
    check.note_parameters()
    changed(layer.weight)
    check.check()
    assert not check.mutated_weights
    changed(layer.bias)
    check.check()
    assert check.mutated_weights == {"4.bias"}


def test_each_stage_is_looked_at() -> None:
    stages = [stage_of(number, [nn.Linear(2, 2), Notes()], 2 * number) for number in range(3)]
    group = {0: None, 1: COPIES, 2: COPIES}
    check = InPlaceMutationCheck(dict(enumerate(stages)), names_of(*stages), group)
    check.note_parameters()
    check.note_buffers()
    assert [*check.buffer_contents] == [1, 2]
    notes = stages[2].with_weights[1].module
    assert isinstance(notes, Notes)
    notes.last += 1
    with pytest.raises(ConfigError, match=r"layer 5 .* stage 2"):
        check.check()
    check.note_buffers()
    changed(stages[2].with_weights[0].module.get_parameter("bias"))
    with pytest.raises(ConfigError, match=r"layer 4 .* 'bias' .* stage 2"):
        check.check()
