"""A record's steps by layer, with what each layer accepts, returns and frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from .cutting import Living
from .example_call import Example
from .layer_contents import (
    CapturedInput,
    LayerSteps,
    SequenceSteps,
    Sizes,
    groups_in,
    held_names,
    needs_dtype,
)
from .placeholders import Ref, Size
from .record import Record, RecordedCall, main_dtype
from .sequence_steps import sequence_rows


def parts_of(record: Record, example: Example, places: Sequence[int], model: nn.Module) -> list[LayerSteps]:
    """A record's steps, by layer.

    Args:
        record: record of the model's forward.
        example: example of the call.
        places: number of steps before each layer, and of all steps.
        model: the user's model.
    """
    living = Living(record)
    takes: list[tuple[Ref, ...]] = [()]
    steps, frees = [], []
    for begin, end in pairwise(places):
        steps.append(tuple(record.steps[begin:end]))
        frees.append(tuple(_freed(step, living, begin + k) for k, step in enumerate(steps[-1])))
        takes.append(living.across(end))
    takes[-1] = ()
    maker = _PartMaker(record, example, model)
    parts = maker.parts(takes, steps, frees, steps)
    rows = sequence_rows(record, example, places)
    if isinstance(rows, str):
        return [replace(part, sequence=rows) for part in parts]
    sliced = maker.parts(
        [*(row.takes for row in rows), ()],
        [row.steps for row in rows],
        [row.frees for row in rows],
        [(*row.context, *row.steps) for row in rows],
        length=rows[0].length,
    )
    return [
        replace(
            part,
            sequence=SequenceSteps(of_slice, row.length, row.context, row.inputs, row.dims, row.attentions),
        )
        for part, of_slice, row in zip(parts, sliced, rows, strict=True)
    ]


def _freed(step: RecordedCall, living: Living, number: int) -> tuple[Ref, ...]:
    refs = {*step.takes.refs, *(ref for _, ref in step.gives)}
    return tuple(ref for ref in refs if living.last.get(ref, -1) <= number)


class _PartMaker:
    def __init__(self, record: Record, example: Example, model: nn.Module) -> None:
        self._record, self._model = record, model
        self._entry = CapturedInput(example, record.inputs)
        self._used = _used(example, record)
        self._at_entry = _of_example(example, record)

    def parts(
        self,
        takes: Sequence[tuple[Ref, ...]],
        steps: Sequence[tuple[RecordedCall, ...]],
        frees: Sequence[tuple[tuple[Ref, ...], ...]],
        all_steps: Sequence[tuple[RecordedCall, ...]],
        *,
        length: int | None = None,
    ) -> list[LayerSteps]:
        """Steps by layer.

        Args:
            takes: tensors that each layer takes, and none after the last one.
            steps: steps of each layer.
            frees: by layer and step, tensors that no later step takes.
            all_steps: ``steps``, with further ones that a layer runs before.
            length: group of a size that every layer needs; None: there is none.
        """
        shapes, output = self._record.shapes, self._record.output
        count = len(steps)
        always = set() if length is None else {length}
        needed: list[set[int]] = [set() for _ in takes]
        for number in reversed(range(count)):
            here = groups_in(all_steps[number], output if number == count - 1 else None)
            needed[number] = here | needed[number + 1] | always
        parts = []
        for number in range(count):
            first, last = not number, number == count - 1
            tells = _telling(takes[number], shapes, needed[number])
            sizes = Sizes(
                self._at_entry if first else tells,
                () if first else tuple(sorted(needed[number] - tells.keys())),
            )
            after = _telling(takes[number + 1], shapes, needed[number + 1])
            part = LayerSteps(
                () if first else takes[number],
                sizes,
                steps[number],
                frees[number],
                takes[number + 1],
                () if last else tuple(sorted(needed[number + 1] - after.keys())),
                output if last else None,
                None,
                self._entry if first else None,
                self._used,
            )
            if needs_dtype(all_steps[number], part.output):
                part = replace(part, dtype_of=_dtype_of(part, self._record, self._model))
            parts.append(part)
        return parts


def _of_example(example: Example, record: Record) -> dict[int, tuple[Ref, int]]:
    return {group: (ref, dim) for index, ref in record.inputs.items() for dim, group in example.free[index]}


def _used(example: Example, record: Record) -> frozenset[str]:
    numbers = pytree.tree_unflatten(list(range(len(example.leaves))), example.spec)
    alive = set(record.output.refs)
    for step in reversed(record.steps):
        if any(ref in alive for _, ref in step.gives):
            alive |= step.takes.refs
    return frozenset(
        name
        for name, value in numbers[1].items()
        if any(record.inputs.get(n) in alive for n in pytree.tree_leaves(value))
    )


def _telling(refs: Sequence[Ref], shapes: Any, groups: set[int]) -> dict[int, tuple[Ref, int]]:
    return {
        size.groups[0]: (ref, dim)
        for ref in reversed(refs)
        for dim, size in enumerate(shapes[ref][0])
        if isinstance(size, Size) and len(size.groups) == 1 and size.factor == 1 and not size.more
        if size.groups[0] in groups
    }


def _dtype_of(part: LayerSteps, record: Record, model: nn.Module) -> str | Ref | None:
    dtype = main_dtype(model)
    for name in held_names(part):
        tensor = dict(model.named_parameters()).get(name)
        if tensor is not None and tensor.dtype == dtype:
            return name
    for step in part.steps:
        if step.module is not None and any(
            p.dtype == dtype for p in model.get_submodule(step.module).parameters()
        ):
            return step.module
    refs = part.takes or tuple(record.inputs.values())
    return next((ref for ref in refs if record.shapes[ref][1] is (record.mark or dtype)), None)
