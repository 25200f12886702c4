"""Modules that a worker trains: the user's modules, or copies of them if threads share a model.

Workers that are processes have a model each. Workers that are threads may have received one model, and even
separate models may share objects (a configuration of transformers). Then the first worker that reaches an
object runs the user's modules, and a later one runs copies of its layers. The copies contain the user's
parameters and buffers, except those that an earlier worker has: of these (copies of a stage, weights that
stages share) they contain copies.

Invariant: no two threads use the same module, tensor or mutable object; and each weight of the user's that a
worker in this process has is trained itself. Changes by the user (modes, freezing, numbers, hooks, contents
of weights and buffers) apply to the copies from the next call on, and so do those by another pipeline.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from counterflow.common.tensors.module_copies import copy_module
from counterflow.errors import ConfigError

from ..transport.base import Transport
from .module_mirrors import ModuleMirror
from .remote import leave, tables

_CONSTANT = (torch.device, torch.Size, frozenset, partial)
"""Kinds of immutable objects that ``copy.deepcopy`` copies; their contents are examined."""


_FIRST_CALLS = 4
"""Number of calls after which contents are compared too, as torch does not count changes through ``.data``;
then calls 4, 8, 16, ..., and every call after which such a change was seen."""


class _LocalObjects(NamedTuple):
    objects: set[int]  # identities of what the layers reach
    model: set[int]  # identities of the model's modules


class ThreadLocalModules:
    """Modules that a worker trains, used by no other thread; constructed by all workers at the same time.

    Args:
        layers: name in messages and user's module of each layer on this worker.
        model_modules: all modules of the user's model.
        transport: transport to the other workers.

    Attributes:
        modules: modules to train, in the order of ``layers``.
        shared: True if several threads received one model.

    Raises:
        ConfigError: threads share a model, and a layer that several of them use cannot be copied.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        model_modules: Sequence[nn.Module],
        transport: Transport,
    ) -> None:
        self._model_modules = tuple(model_modules)
        self._transport = transport
        self._in_use = {id(part) for _, module in layers for part in _objects(module)}
        self._mirrors: list[ModuleMirror] = []
        self._calls = 0
        self.shared = False
        self.modules = [module for _, module in layers]
        if transport.shares_process and transport.world_size > 1:
            self._separate(layers)

    def _separate(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        local = _LocalObjects(self._in_use, {id(module) for module in self._model_modules})
        rows = cast("list[_LocalObjects]", self._transport.gather_objects(local))
        rank, models = self._transport.rank, [row.model for row in rows]
        self.shared = sum(map(len, models)) > len(set().union(*models))
        earlier = set().union(*(row.objects for row in rows[:rank]))
        refusal: ConfigError | None = None
        memo, copies, place = self._memo(earlier), list[nn.Module](), ""
        try:
            for place, module in layers:  # noqa: B007 - named if it fails
                copies.append(copy_module(module, memo))
            reached = local.objects | _changeable(memo)
        except Exception as error:
            refusal = ConfigError(
                f"{place} cannot be copied ({error}), and threads that are given one model copy what several "
                "of them use; make the model in the function that launch() runs, or launch processes "
                "(transport='gloo')"
            )
            refusal.__cause__ = error
            reached = local.objects | reachable(self.modules)[0]
        before = cast("list[set[int]]", self._transport.gather_objects(reached))[:rank]
        common = not reached.isdisjoint(set().union(*before))
        if common and refusal is not None and self.shared:
            raise refusal
        if common and refusal is None:
            pairs = [(child, memo.get(id(child))) for module in self.modules for child in module.modules()]
            self._mirrors = [
                ModuleMirror(module, duplicate, memo)
                for module, duplicate in pairs
                if isinstance(duplicate, nn.Module)
            ]
            self.modules = copies
        self._in_use = set().union(*(row.objects for row in rows))

    def _memo(self, earlier: Container[int]) -> dict[int, Any]:
        """Objects that copies share with originals, by identity: tensors of no earlier thread, and locks."""
        memo: dict[int, Any] = {
            id(tensor): tensor
            for module in self.modules
            for tensor in (*module.parameters(), *module.buffers())
            if id(tensor) not in earlier
        }
        for module in self.modules:
            for child in module.modules():
                for table in tables(child) if id(child) not in earlier else ():
                    if all(id(tensor) in memo for tensor in table.values() if tensor is not None):
                        memo[id(table)] = table  # entries set in one are set in both
        return memo | {id(lock): lock for lock in reachable(self.modules)[1]}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context of each call of all workers that runs the modules.

        Threads that share a model begin and end it together, so that none reads or changes an object with
        which another thread still computes.
        """
        self._synchronise()
        for mirror in self._mirrors:
            mirror.follow()
        self._synchronise()  # evaluation sets modes, which copies follow until here
        yield
        self._note()

    def _note(self) -> None:
        """Record the user's tensors after the calls of all threads, before the user may change any."""
        self._synchronise()
        if self.shared:
            contents = self._calls < _FIRST_CALLS or not self._calls & (self._calls - 1)
            for mirror in self._mirrors:
                mirror.note(contents=contents)
            self._calls += 1
            self._synchronise()

    def _synchronise(self) -> None:
        if self.shared:
            self._transport.gather([])

    @contextmanager
    def rebinding(self) -> Iterator[None]:
        """Context that replaces tensors of the modules; every module of the user's that shares one has the
        new one after it.

        Tensors on the meta device are replaced, buffers on another device, and weights that are sharded.
        """
        # Weak, so that a weight that nothing else has is freed as soon as it is sharded.
        before = [
            (table, name, weakref.ref(tensor))
            for module in self.modules
            for child in module.modules()
            for table in tables(child)
            for name, tensor in table.items()
            if tensor is not None
        ]
        yield
        new: dict[int, tuple[Tensor, Tensor]] = {}
        for table, name, reference in before:
            old, tensor = reference(), table.get(name)
            if old is not None and tensor is not None and tensor is not old:
                new.setdefault(id(old), (old, tensor))
        for module in self._model_modules if new else ():
            for table in tables(module):
                entries = list(table.items())  # another thread may add to it
                table.update({name: new[id(old)][1] for name, old in entries if id(old) in new})

    def leave(self, remote_layers: Iterable[tuple[str, nn.Module, Sequence[int]]]) -> None:
        """Free the layers of other workers when the pipeline is constructed; see ``remote.leave``."""
        self._synchronise()
        leave(remote_layers, self._model_modules, self._in_use, self._transport.rank)
        self._model_modules, self._in_use = (), set()
        self._note()


def _objects(module: nn.Module) -> list[object]:
    return [*module.modules(), *module.parameters(), *module.buffers()]


def _changeable(memo: Mapping[int, Any]) -> set[int]:
    originals = cast("Collection[object]", memo.get(id(memo), ()))  # deepcopy stores them under this key
    constant = [value for value in originals if isinstance(value, _CONSTANT) or _is_frozen(value)]
    immutable = {id(value) for value in constant} | {
        id(vars(value)) for value in constant if hasattr(value, "__dict__")
    }
    return {id(value) for value in originals} - immutable


def reachable(modules: Iterable[nn.Module]) -> tuple[set[int], list[object]]:
    """Return the objects that copies of some modules would contain, without a copy.

    Returns:
        The mutable objects, by identity; and objects for use by several threads, such as locks.
    """
    changeable, locks = set[int](), list[object]()
    pending: list[Any] = list(modules)
    seen = set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen.add(id(value))
        if isinstance(value, _OF_THREADS):
            locks.append(value)
            continue
        if not (isinstance(value, (tuple, *_CONSTANT)) or _is_frozen(value)):
            changeable.add(id(value))
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            pending += value
        pending += getattr(value, "__dict__", {}).values()
    return changeable, locks


_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    NoneType,
    Tensor,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
)
"""Kinds of objects that copies share, or that are examined elsewhere."""

_OF_THREADS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
    threading.local,
    queue.Queue,
    queue.SimpleQueue,
)


def _is_frozen(value: object) -> bool:
    return is_dataclass(value) and bool(cast("Any", value).__dataclass_params__.frozen)
