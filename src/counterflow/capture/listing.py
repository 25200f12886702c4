"""``layers``: a model's records, cut, as modules."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from .cutting import Cut, Living, cuts_of
from .layer import CapturedLayer, Entry, Part, Sizes, groups_in, needs_dtype
from .leaks import remove_leaks
from .opening import Records, records_of
from .record import Record, main_dtype
from .unfollowed import clear_frames
from .values import Held, Ref, Size

_CAPTURING = threading.Lock()
"""Held during a capture, because torch's symbolic sizes support only one thread at a time."""


def layers(
    model: nn.Module,
    example: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    input_dims: int | None = 0,
) -> list[CapturedLayer]:
    """Automatic layers of any model, for ``Pipeline(list_layers=...)``.

    The model's forward runs several times, in training and in evaluation mode, on tensors without values,
    which takes no memory. The layers run the model's own modules; the first one accepts the model's inputs,
    the last one returns its output. Models of transformers are called with ``use_cache=False`` by default.

    Args:
        model: any module, on a device or the meta device.
        example: a mini-batch of any number of samples, as in ``Pipeline.step``: a tensor, a tuple of
            the model's arguments, or a dict of its keyword arguments.
        kwargs: keyword arguments of the model, as in ``Pipeline.step``.
        input_dims: dimension of the samples in the tensors; None: none.

    Returns:
        The layers, each with some cost; at least one.

    Raises:
        ConfigError: the model's forward decides by values of tensors, or cannot be traced; the error names
            the line.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> [layer.title for layer in layers(model, torch.ones(4, 2))]
    ['0', '1', '2']
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} is not a module, so no layers can be found; give a list of layers "
            "to the Pipeline directly"
        )
    with _CAPTURING:
        log = logging.getLogger("torch._subclasses.fake_tensor")
        before, log.disabled = log.disabled, True  # it logs each failed attempt
        try:
            records = records_of(model, example, dict(kwargs or {}), input_dims)
        except ConfigError as error:
            clear_frames(error)
            raise
        finally:
            log.disabled = before
            remove_leaks()
    cuts = cuts_of(records)
    total = records.training.costs.get("", 0.0)
    edges = [
        Cut(0, 0, 0, 0.0),
        *cuts,
        Cut(len(records.training.steps), len(records.evaluation.steps), 0, total),
    ]
    both = [
        _parts(records, record, edges, model, training=t)
        for t, record in ((True, records.training), (False, records.evaluation))
    ]
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    tensors |= records.evaluation.constants | records.training.constants
    found = []
    for number, parts in enumerate(zip(*both, strict=True)):
        held = {name: tensors[name] for part in parts for name in _held(part)}
        cost = edges[number + 1].cost - edges[number].cost
        found.append(CapturedLayer(model, _title(parts[0]), parts, held, cost))
    _hold_unused(model, found)
    return found


def _parts(
    records: Records, record: Record, edges: Sequence[Cut], model: nn.Module, *, training: bool
) -> list[Part]:
    """A record's steps, by layer."""
    places = [edge.training if training else edge.evaluation for edge in edges]
    living = Living(record)
    shapes = record.shapes
    entry = Entry(records.example, record.inputs)
    at_entry = _of_example(records, record)
    used = _used(records, record)
    needed: list[set[int]] = [set() for _ in places]
    for number in reversed(range(len(places) - 1)):
        last = number == len(places) - 2
        mine = record.steps[places[number] : places[number + 1]]
        needed[number] = groups_in(mine, record.output if last else None) | needed[number + 1]
    found = []
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
        part = Part(takes, sizes, steps, frees, gives, numbers, output, None, entry if first else None, used)
        if needs_dtype(steps, output):
            part = replace(part, dtype_of=_dtype_of(part, record, model))
        found.append(part)
    return found


def _of_example(records: Records, record: Record) -> dict[int, tuple[Ref, int]]:
    """An input and its dimension for each group of free sizes."""
    return {
        group: (ref, dim)
        for index, ref in record.inputs.items()
        for dim, group in records.example.free[index]
    }


def _used(records: Records, record: Record) -> frozenset[str]:
    """Names of the keyword arguments from which the model's output is computed."""
    numbers = pytree.tree_unflatten(list(range(len(records.example.leaves))), records.example.spec)
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
    """For some groups, a tensor among these with a dimension of that size."""
    return {
        size.groups[0]: (ref, dim)
        for ref in reversed(refs)
        for dim, size in enumerate(shapes[ref][0])
        if isinstance(size, Size) and len(size.groups) == 1 and size.factor == 1 and not size.more
        if size.groups[0] in groups
    }


def _dtype_of(part: Part, record: Record, model: nn.Module) -> str | Ref | None:
    """Source of the weights' dtype for a layer."""
    dtype = main_dtype(model)
    for name in _held(part):
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


def _held(part: Part) -> list[str]:
    """Names of the parameters, buffers and constants that a part's steps take."""
    templates = [step.takes for step in part.steps] + ([] if part.output is None else [part.output])
    return list(dict.fromkeys(x.name for t in templates for x in t.leaves() if isinstance(x, Held)))


def _title(part: Part) -> str:
    """First and last module of a part."""
    called = [step.module for step in part.steps if step.module is not None]
    if not called:
        return "no module"
    return called[0] if called[0] == called[-1] else f"{called[0]} to {called[-1]}"


def _hold_unused(model: nn.Module, found: Sequence[CapturedLayer]) -> None:
    """Let the last layer hold parameters and buffers that no step takes, as they belong to the model and its
    state.
    """
    listed = {id(t) for layer in found for t in (*layer.parameters(), *layer.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in listed:
            found[-1].hold_unused(name, tensor)
