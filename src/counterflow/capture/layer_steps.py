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
from .layer import CapturedInput, LayerSteps, Sizes, groups_in, held_names, needs_dtype
from .placeholders import Ref, Size
from .record import Record, main_dtype


def parts_of(record: Record, example: Example, places: Sequence[int], model: nn.Module) -> list[LayerSteps]:
    """A record's steps, by layer.

    Args:
        record: record of the model's forward.
        example: example of the call.
        places: number of steps before each layer, and of all steps.
        model: the user's model.
    """
    living = Living(record)
    shapes = record.shapes
    entry = CapturedInput(example, record.inputs)
    at_entry = _of_example(example, record)
    used = _used(example, record)
    needed: list[set[int]] = [set() for _ in places]
    for number in reversed(range(len(places) - 1)):
        last = number == len(places) - 2
        steps_here = record.steps[places[number] : places[number + 1]]
        needed[number] = groups_in(steps_here, record.output if last else None) | needed[number + 1]
    parts = []
    for number, (begin, end) in enumerate(pairwise(places)):
        first, last = not number, number == len(places) - 2
        takes = () if first else living.across(begin)
        gives = () if last else living.across(end)
        steps = tuple(record.steps[begin:end])
        output = record.output if last else None
        tells = _telling(takes, shapes, needed[number])
        sizes = Sizes(
            at_entry if first else tells,
            () if first else tuple(sorted(needed[number] - tells.keys())),
        )
        after = _telling(gives, shapes, needed[number + 1])
        numbers = () if last else tuple(sorted(needed[number + 1] - after.keys()))
        frees = tuple(
            tuple(
                ref
                for ref in {*step.takes.refs, *(ref for _, ref in step.gives)}
                if living.last.get(ref, -1) <= begin + k
            )
            for k, step in enumerate(steps)
        )
        part = LayerSteps(
            takes, sizes, steps, frees, gives, numbers, output, None, entry if first else None, used
        )
        if needs_dtype(steps, output):
            part = replace(part, dtype_of=_dtype_of(part, record, model))
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
