"""Descriptions of layers, optimizers and loss functions: equal in any process if what they compute is.

They are part of a kept profile's name, so they contain whatever changes costs: code, and the settings that it
reads. Values of tensors, paths and times do not count.

Invariant: none of the described code runs, except that of a trial optimizer.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.common.tensors.source_descriptions import OF_WORKERS, details_of, source_of_name
from counterflow.runtime.parameters.optimizers import MakeOptimizer

from .optimizer_trial import trial_optimizer

_DEPTH = 6
"""Levels of values within values that are described."""

_ITEMS = 1000
"""Maximum number of items of a value that are described."""

_PATHS = re.compile(r"[/\\:]|\d{4}")
"""Texts that may differ by run: paths, addresses and dates."""

_INDEX = re.compile(r"(?:^|_)(?:i|id|idx|index)$|^layer_number$")
"""Names of a layer's number."""


def content_of(value: object) -> object:
    """Description of a value, such as a loss function: its code, attributes, arguments and closure.

    >>> content_of(partial(sorted, reverse=True))
    [['sorted'], (), (('reverse', True),)]
    >>> content_of(torch.ones(2, 3))
    ((2, 3), torch.float32, False)
    """
    return _Content().of(value, _DEPTH)


class _Content:
    def __init__(self) -> None:
        self._known: set[int] = set()

    def of(self, value: object, depth: int) -> object:
        match value:
            case None | bool() | int() | float() | complex() | bytes() | torch.dtype() | Enum():
                content: object = value
            case str():
                content = "" if _PATHS.search(value) else value
            case Tensor():
                content = tuple(value.shape), value.dtype, value.requires_grad
            case _ if not depth:
                content = type(value).__qualname__
            case Mapping():
                content = self._items(((str(name), item) for name, item in value.items()), depth)
            case tuple() | list():
                content = tuple(self.of(item, depth - 1) for item in value[:_ITEMS])
            case _ if id(value) in self._known:
                content = type(value).__qualname__
            case _:
                content = self._of_object(value, depth - 1)
        return content

    def _items(self, items: Iterable[tuple[str, object]], depth: int) -> tuple[object, ...]:
        return tuple((name, self.of(item, depth - 1)) for name, item in islice(items, _ITEMS))

    def _of_object(self, value: Any, depth: int) -> object:
        if not isinstance(value, MethodType):  # which lives no longer than its description
            self._known.add(id(value))
        content: list[Any]
        match value:
            case partial():
                content = [self.of(part, depth) for part in (value.func, value.args, value.keywords)]
            case nn.Module():
                tensors = [*value.named_parameters(), *value.named_buffers()]
                content = [*details_of(value).items(), self.of(settings_of(value), depth)]
                content.append(self._items(tensors, depth))
                content.append(self._items(_read_by_forwards(value), depth))
            case MethodType():
                content = [value.__qualname__, self.of(value.__self__, depth)]
            case FunctionType():
                content = [source_of_name(value)]
                if "(source " in content[0]:  # no package's, whose version is in the text
                    content.append(self.of(_values_read_by(value), depth))
            case type():
                content = [source_of_name(value)]
            case _ if isinstance(value, ModuleType | logging.Logger) or not hasattr(value, "__dict__"):
                content = [getattr(value, "__qualname__", type(value).__qualname__)]
            case _:
                named = ((name, item) for name, item in vars(value).items() if not OF_WORKERS.search(name))
                content = [source_of_name(type(value)), self._items(named, depth)]
        return content


def _read_by_forwards(module: nn.Module) -> list[tuple[str, object]]:
    # Numbers, functions and operators alone: of other objects much differs by process.
    kinds = {type(part): None for part in module.modules()}
    forwards = [(kind, kind.forward) for kind in kinds if "(source " in source_of_name(kind)]
    return [
        (f"{kind.__qualname__}.{name}", read)
        for kind, forward in forwards
        if isinstance(forward, FunctionType)
        for name, read in _values_read_by(forward).items()
        if isinstance(read, int | float | str | tuple) or callable(read)
    ]


def _values_read_by(function: FunctionType) -> dict[str, object]:
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable of the closure has no value yet
        return {}
    values = {**variables.globals, **variables.nonlocals}
    return dict(sorted(values.items())) | {"": (function.__defaults__, function.__kwdefaults__)}


def settings_of(module: nn.Module) -> dict[str, object]:
    """Numbers, switches and words among the attributes of a module and its parts; no number of a layer.

    >>> list(settings_of(nn.Dropout(0.1)).items())
    [('.training', True), ('.p', 0.1), ('.inplace', False)]
    """
    return {
        f"{place}.{name}": value
        for place, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str) and not name.startswith("_") and not _INDEX.search(name)
    }


def optimizer_content(make: MakeOptimizer) -> object:
    """Description of an optimizer: its class and options, of a matrix and of a vector.

    Of numbers such as a rate counts whether they are 0, as nothing else changes the work of an update.
    """
    return [_optimizer_of(make, shape) for shape in ((1, 1), (1,))]


def _optimizer_of(make: MakeOptimizer, shape: tuple[int, ...]) -> object:
    try:
        optimizer = trial_optimizer(make, shape=shape)
    except Exception as error:  # some accept matrices alone
        return type(error).__name__
    groups = [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]
    return content_of([type(optimizer), _switches(optimizer.defaults), _switches(groups)])


def _switches(value: Any) -> Any:
    match value:
        case Mapping():
            return {name: _switches(item) for name, item in value.items()}
        case tuple() | list():
            return [_switches(item) for item in value]
        case float():
            return value != 0
    return value
