"""What a loss function computes of its targets alone: noted once, it tells what counts before outputs are.

Invariant: of the loss function's code nothing is run a second time, only the torch functions it called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .losses import added

_RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal_", "uniform_", "exponential_")


class _Value(NamedTuple):
    """In place of a value that comes of the targets: its number."""

    number: int


class _Step(NamedTuple):
    """A call of a torch function, and the numbers of what it gave."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    given: tuple[int, ...]
    writes: bool


class Tape(NamedTuple):
    """How to compute a number of a unit's targets.

    Attributes:
        steps: the calls.
        found: the number of what they are for.
    """

    steps: tuple[_Step, ...]
    found: int

    def of(self, targets: Sequence[Any]) -> Tensor | float:
        """The sum over several units' targets; raises what the calls raise for targets of another kind."""
        with torch.no_grad():
            found = [self._of(target) for target in targets]
            if any(isinstance(value, Tensor) for value in found):
                return torch.stack([torch.as_tensor(value).double().reshape(()) for value in found]).sum()
        return added(map(float, found))

    def _of(self, target: Any) -> Tensor | float:
        copied = any(step.writes for step in self.steps)
        leaves = _tensors(target)
        values: dict[int, Any] = dict(enumerate(t.clone() for t in leaves) if copied else enumerate(leaves))

        def put(leaf: Any) -> Any:
            return values[leaf.number] if type(leaf) is _Value else leaf

        for step in self.steps:
            args, kwargs = pytree.tree_map(put, (step.args, step.kwargs), is_leaf=_is_value)
            given = pytree.tree_leaves(step.function(*args, **kwargs))
            values.update(zip(step.given, given, strict=True))
        return values[self.found]  # type: ignore[no-any-return]


class Recorder:
    """Notes what a loss function computes of its targets.

    Args:
        output: what it is given; what is computed of it is not noted.
        target: its targets.
    """

    def __init__(self, output: Any, target: Any) -> None:
        self._target = target
        self._kept: list[Any] = [output]  # so that no other tensor has the id of one
        self._others = {id(tensor) for tensor in _tensors(output)}
        self._known: dict[int, int] = {}
        self._numbers: list[tuple[float, int]] = []
        self._steps: list[_Step] = []
        self._count = 0
        self._sound = True
        for tensor in _tensors(target):
            self._note(tensor)

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A call of a torch function, after it was made."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = getattr(function, "__name__", "")
        writes = "out" in kwargs or name == "__setitem__" or (name[-1:] == "_" != name[-2:-1])
        if any(id(t) in self._others or t.requires_grad for t in tensors):
            self._sound = self._sound and not (writes and id(tensors[0]) in self._known)
            for leaf in _tensors(result):
                self._kept.append(leaf)
                self._others.add(id(leaf))
        elif writes and tensors and id(tensors[0]) not in self._known:
            self._kept.append(tensors[0])
            self._others.add(id(tensors[0]))
        elif any(id(t) in self._known for t in tensors):
            self._sound = self._sound and not any(word in name for word in _RANDOM)
            args, kwargs = pytree.tree_map(self._placed, (args, kwargs), is_leaf=_is_value)
            given = tuple(self._note(leaf) for leaf in pytree.tree_leaves(result))
            self._steps.append(_Step(function, args, kwargs, given, writes))

    def tape(self, weight: Tensor | float) -> Tape | None:
        """How ``weight`` comes of the targets; None if it comes of something else, too."""
        if isinstance(weight, Tensor):
            found = self._known.get(id(weight))
        else:
            found = next((number for value, number in reversed(self._numbers) if value == weight), None)
        if found is None or not self._sound:
            return None
        tape = Tape(_needed(self._steps, found), found)
        try:
            again = float(tape.of([self._target]))
        except Exception:
            return None
        return tape if abs(again - float(weight)) <= 1e-9 * abs(again) else None

    def _note(self, leaf: Any) -> int:
        number, self._count = self._count, self._count + 1
        if isinstance(leaf, Tensor):
            self._kept.append(leaf)
            self._known[id(leaf)] = number
        elif isinstance(leaf, (int, float)):
            self._numbers.append((leaf, number))
        return number

    def _placed(self, leaf: Any) -> Any:
        known = isinstance(leaf, Tensor) and id(leaf) in self._known
        return _Value(self._known[id(leaf)]) if known else leaf


def _needed(steps: Sequence[_Step], found: int) -> tuple[_Step, ...]:
    """Those that a value comes of; all of them where some write into others' memory."""
    if any(step.writes for step in steps):
        return tuple(steps)
    wanted, kept = {found}, list[_Step]()
    for step in reversed(steps):
        if wanted.intersection(step.given):
            kept.append(step)
            leaves = pytree.tree_leaves((step.args, step.kwargs), is_leaf=_is_value)
            wanted.update(leaf.number for leaf in leaves if type(leaf) is _Value)
    return tuple(reversed(kept))


def _is_value(node: object) -> bool:
    return type(node) is _Value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
