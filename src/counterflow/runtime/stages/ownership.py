"""The modules that a worker trains are the user's own.

Workers that are processes have a model each. Workers that are threads may have been given one model, and even
models that each made for itself may reach objects that all of them have (a configuration of transformers).
Then the first worker that reaches an object runs the user's modules, and a later one runs copies of its
layers. The copies hold the user's own parameters and buffers, but for those that an earlier worker holds: of
these (copies of a stage, weights that stages share) they have copies.

Invariant: no two threads use one module, one tensor, or one other object that can change; and each weight of
the user's that some worker here holds is trained itself. What the user sets in his modules (modes, freezing,
numbers, hooks, contents of weights and buffers) counts for the copies from the next call on, and so does what
another pipeline of his modules made of them.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError

from ..torch_private import hooks_of
from ..transport.base import Transport
from .remote import leave, tables
from .twins import Twin

_CONSTANT = (torch.device, torch.Size, frozenset, partial)
"""Kinds of objects that ``copy.deepcopy`` copies and nobody changes; what they are made of is looked at."""


_FIRST_CALLS = 4
"""Calls after which contents are noted too, as torch does not count changes through ``.data``; then calls 4,
8, 16, ..., and every call after which such a change was seen."""


class _Held(NamedTuple):
    """What a worker has in this process, by identity: what it holds, and all modules of its user's model."""

    objects: set[int]
    model: set[int]


class Owned:
    """The modules that a worker trains; all workers make theirs at the same time.

    Args:
        held: of each layer that this worker holds its name in messages, and the user's module.
        every: all modules of the user's model.
        transport: how to reach the others.

    Attributes:
        modules: those to train, in the order of ``held``.
        shared: whether several threads were given one model.

    Raises:
        ConfigError: threads were given one model, and one of its layers that several use cannot be copied.
    """

    def __init__(
        self, held: Sequence[tuple[str, nn.Module]], every: Sequence[nn.Module], transport: Transport
    ) -> None:
        self._every = tuple(every)
        self._transport = transport
        self._held = {id(found) for _, module in held for found in _objects(module)}
        self._twins: list[Twin] = []
        self._calls = 0
        self.shared = False
        self.modules = [module for _, module in held]
        if transport.shares_process and transport.world_size > 1:
            self._part(held)
        self._before = [
            (table, name, tensor)
            for module in self.modules
            for child in module.modules()
            for table in tables(child)
            for name, tensor in table.items()
        ]

    def _part(self, held: Sequence[tuple[str, nn.Module]]) -> None:
        """Run copies where an earlier thread reaches what this one's layers reach."""
        mine = _Held(self._held, {id(module) for module in self._every})
        rows = cast("list[_Held]", self._transport.gather_objects(mine))
        rank, models = self._transport.rank, [row.model for row in rows]
        self.shared = sum(map(len, models)) > len(set().union(*models))
        earlier = set().union(*(row.objects for row in rows[:rank]))
        refusal: ConfigError | None = None
        memo, copies, place = self._memo(earlier), list[nn.Module](), ""
        try:
            for place, module in held:  # noqa: B007 - that of the one that fails
                copies.append(copied(module, memo))
            reached = mine.objects | _changeable(memo)
        except Exception as error:
            refusal = ConfigError(
                f"{place} cannot be copied ({error}), and threads that are given one model copy what several "
                "of them use; make the model in the function that launch() runs, or launch processes "
                "(transport='gloo')"
            )
            refusal.__cause__ = error
            reached = mine.objects | reachable(self.modules)[0]
        before = cast("list[set[int]]", self._transport.gather_objects(reached))[:rank]
        common = not reached.isdisjoint(set().union(*before))
        if common and refusal is not None and self.shared:
            raise refusal
        if common and refusal is None:
            pairs = [(child, memo.get(id(child))) for module in self.modules for child in module.modules()]
            self._twins = [Twin(own, twin, memo) for own, twin in pairs if isinstance(twin, nn.Module)]
            self.modules = copies
        self._held = set().union(*(row.objects for row in rows))

    def _memo(self, earlier: Container[int]) -> dict[int, Any]:
        """What stands for itself in copies, by identity: tensors of no earlier thread, and locks."""
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
                        memo[id(table)] = table  # what is set in the one is set in the other
        return memo | {id(lock): lock for lock in reachable(self.modules)[1]}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around each call of all workers that runs the modules.

        Threads that were given one model begin and end it together, so that nobody reads or sets in it what
        another thread still computes with.
        """
        self._together()
        for twin in self._twins:
            twin.follow()
        self._together()  # evaluation sets modes, which others follow until here
        yield
        self._note()

    def _note(self) -> None:
        """Note the user's tensors when all threads' calls have ended, before he may change any."""
        self._together()
        if self.shared:
            contents = self._calls < _FIRST_CALLS or not self._calls & (self._calls - 1)
            for twin in self._twins:
                twin.note(contents=contents)
            self._calls += 1
            self._together()

    def _together(self) -> None:
        if self.shared:
            self._transport.gather([])

    def remade(self) -> None:
        """Put tensors that were made anew wherever the user's model had the old ones.

        Those on the meta device are, and buffers on another device.
        """
        new = {id(old): (old, table[name]) for table, name, old in self._before if table[name] is not old}
        self._before.clear()
        for module in self._every if new else ():
            for table in tables(module):
                found = list(table.items())  # another thread may add to it
                table.update({name: new[id(old)][1] for name, old in found if id(old) in new})

    def leave(self, others: Iterable[tuple[str, nn.Module, Sequence[int]]]) -> None:
        """When the pipeline is made: free what lives elsewhere; see ``remote.leave``."""
        self._together()
        leave(others, self._every, self._held, self._transport.rank)
        self._every, self._held = (), set()
        self._note()


def _objects(module: nn.Module) -> list[object]:
    return [*module.modules(), *module.parameters(), *module.buffers()]


def _changeable(memo: Mapping[int, Any]) -> set[int]:
    """Mutable objects that were copied, by identity."""
    found = cast("Collection[object]", memo.get(id(memo), ()))  # deepcopy keeps them there
    constant = [each for each in found if isinstance(each, _CONSTANT) or _is_frozen(each)]
    left = {id(each) for each in constant} | {
        id(vars(each)) for each in constant if hasattr(each, "__dict__")
    }
    return {id(each) for each in found} - left


def reachable(modules: Iterable[nn.Module]) -> tuple[set[int], list[object]]:
    """What copies of some modules would be made of, without a copy.

    Returns:
        The objects that can change, by identity; and those made for use by several threads, as locks are.
    """
    changeable, locks = set[int](), list[object]()
    left: list[Any] = list(modules)
    seen = set[int]()
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _ATOMS):
            continue
        seen.add(id(each))
        if isinstance(each, _OF_THREADS):
            locks.append(each)
            continue
        if not (isinstance(each, (tuple, *_CONSTANT)) or _is_frozen(each)):
            changeable.add(id(each))
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, (list, tuple, set, frozenset, deque)):
            left += each
        left += getattr(each, "__dict__", {}).values()
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
"""Kinds of objects that copies share, or that are looked at elsewhere."""

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


def _is_frozen(found: object) -> bool:
    return is_dataclass(found) and bool(cast("Any", found).__dataclass_params__.frozen)


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy with what the user attached to parameters, which ``copy.deepcopy`` leaves behind.

    Args:
        module: what to copy.
        memo: by identity what stands for an object in copies; those of one memo share what was shared.
    """
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # what a hook before the forward computes anew
    known = set(memo)
    found = copy.deepcopy(module, memo)
    for parameter in module.parameters():
        if id(parameter) not in known:
            attached = copy.deepcopy((parameter.__dict__, *hooks_of(parameter)), memo)
            attach(memo[id(parameter)], *attached)
    return found


def attach(
    parameter: nn.Parameter, attributes: Mapping[str, Any], before: list[Any], after: list[Any]
) -> None:
    """Give a parameter attributes and hooks."""
    for name, value in attributes.items():
        setattr(parameter, name, value)
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one takes no hooks, though it keeps those it has
    for hook in before:
        parameter.register_hook(hook)
    for hook in after:
        parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trains)
