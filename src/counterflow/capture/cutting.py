"""Cuts of a model's steps into layers: between modules, where few bytes cross.

Invariant: a layer's steps are consecutive, in training as in evaluation, and most modules are in the same
layer in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch
from torch.utils import _pytree as pytree

from .opening import Records
from .placeholders import Ref
from .record import Record

_SMALLEST = 1 / 96
"""Minimum share of a model's cost of a layer."""

_WINDOW = 1 / 12
"""Maximum share of a model's cost between two places for which a wider one between them is dropped."""

_WIDER = 1.2


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place to cut.

    Attributes:
        training: number of steps before it in training.
        evaluation: number of steps before it in evaluation.
        bytes: bytes that cross in training, for the example.
        cost: cost of the modules before it.
    """

    training: int
    evaluation: int
    bytes: int
    cost: float


class Living:
    """For each number of steps, tensors that later steps take from earlier ones.

    Args:
        record: record of the steps.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        steps = len(record.steps)
        last: dict[Ref, int] = {}
        for number, step in enumerate(record.steps):
            for ref in step.takes.refs:
                last[ref] = number
        for ref in record.output.refs:
            last[ref] = steps
        self.last = last
        """The last step that takes each tensor; the number of steps if it is an output."""
        born: list[list[Ref]] = [[] for _ in range(steps + 1)]
        for ref in last:
            born[ref.step + 1].append(ref)
        self._across: list[tuple[Ref, ...]] = []
        alive: set[Ref] = set()
        for place in range(steps + 1):
            alive = {ref for ref in alive if last[ref] >= place}
            alive |= {ref for ref in born[place] if last[ref] >= place}
            self._across.append(tuple(sorted(alive)))
        self._forbidden = self._split_memory() | self._split_gradients()

    def across(self, place: int) -> tuple[Ref, ...]:
        """Tensors that cross after this number of steps."""
        return self._across[place]

    def bytes(self, place: int) -> int:
        """Bytes that cross, including gradients."""
        record = self._record
        return sum(
            record.bytes[ref] * (2 if record.shapes[ref][1].is_floating_point else 1)
            for ref in self._across[place]
        )

    def allowed(self, place: int) -> bool:
        """Tell whether a cut is allowed.

        It is not where several names of the same memory cross before it is changed, and not between a tensor
        and the gradient with respect to it that the forward takes: each stage has a graph of its own.
        """
        return place not in self._forbidden and bool(self._across[place])

    def _split_memory(self) -> set[int]:
        memory = self._record.memory
        positions: set[int] = set()
        for number, changed in self._record.changes.items():
            for place in range(number + 1):
                names = [ref for ref in self._across[place] if memory.get(ref) in changed]
                if len(names) > 1:
                    positions.add(place)
        return positions

    def _split_gradients(self) -> set[int]:
        forbidden: set[int] = set()
        for number, step in enumerate(self._record.steps):
            if step.function is torch.autograd.grad:
                args, kwargs = pytree.tree_unflatten(step.takes.parts, step.takes.spec)
                inputs = pytree.tree_leaves(args[1] if len(args) > 1 else kwargs["inputs"], is_leaf=_is_ref)
                first = min(leaf.step if _is_ref(leaf) else -1 for leaf in inputs)
                forbidden |= set(range(max(first + 1, 1), number + 1))
        return forbidden


def _is_ref(leaf: object) -> bool:
    return isinstance(leaf, Ref)


def cuts_of(records: Records) -> list[CutPoint]:
    """All places at which a model is cut."""
    pairs = _between(records.training, records.evaluation)
    training, evaluation = Living(records.training), Living(records.evaluation)
    costs = _costs(records.training)
    cuts = []
    for (first, after), (start, end) in pairs:
        training_places = [p for p in range(first, after + 1) if training.allowed(p)]
        evaluation_places = [p for p in range(start, end + 1) if evaluation.allowed(p)]
        if training_places and evaluation_places:
            place = min(training_places, key=lambda p: (training.bytes(p), -p))
            twin = min(evaluation_places, key=lambda p: (evaluation.bytes(p), -p))
            cuts.append(CutPoint(place, twin, training.bytes(place), costs[place]))
    return _chosen(cuts, costs[-1])


def _costs(record: Record) -> list[float]:
    sums = [0.0]
    for step in record.steps:
        cost = record.costs.get(step.module, 0.0) if step.module is not None else 0.0
        calls = sum(1 for second in record.steps if second.module == step.module) if cost else 1
        sums.append(sums[-1] + cost / calls)
    return sums


def _between(first: Record, second: Record) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Steps between two modules that both records call one after the other, for each record.

    They are pairs of the minimum and maximum number of steps.
    """
    first_calls = [number for number, step in enumerate(first.steps) if step.module is not None]
    second_calls = [number for number, step in enumerate(second.steps) if step.module is not None]
    called = [first.steps[n].module for n in first_calls], [second.steps[n].module for n in second_calls]
    spans = []
    for block in SequenceMatcher(None, *called, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            i, j = block.a + k, block.b + k
            if i + 1 < len(first_calls) and j + 1 < len(second_calls):
                spans.append(
                    ((first_calls[i] + 1, first_calls[i + 1]), (second_calls[j] + 1, second_calls[j + 1]))
                )
    return spans


def _chosen(cuts: Sequence[CutPoint], total: float) -> list[CutPoint]:
    narrow = []
    for cut in cuts:
        near = [c for c in cuts if abs(c.cost - cut.cost) <= total * _WINDOW]
        before = min((c.bytes for c in near if c.cost <= cut.cost and c is not cut), default=cut.bytes)
        after = min((c.bytes for c in near if c.cost >= cut.cost and c is not cut), default=cut.bytes)
        if cut.bytes <= _WIDER * max(before, after):
            narrow.append(cut)
    chosen: list[CutPoint] = []
    for cut in narrow:
        done = chosen[-1].cost if chosen else 0.0
        if cut.cost - done < total * _SMALLEST:
            if chosen and cut.bytes <= chosen[-1].bytes and cut.cost - done == 0.0:
                chosen[-1] = cut
            continue
        if total - cut.cost >= total * _SMALLEST:
            chosen.append(cut)
    return chosen
