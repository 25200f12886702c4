"""What modules took and returned in a run, and where two runs part.

Invariant: what is recorded is copied, so that what changes it in place later does not change the record.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.runtime.messages.mappings import know
from counterflow.runtime.torch_private import TorchDispatchMode, drops_nothing

from .nearness import difference


@dataclass(slots=True)
class Call:
    """A module's call.

    Attributes:
        name: of the module in the model.
        layer: the number of the layer that called it; -1: the model did.
        shared: whether model and layers both have the module.
        takes: its arguments by name, copied.
        returns: likewise what it returned.
    """

    name: str
    layer: int
    shared: bool
    takes: Any
    returns: Any = None


@dataclass(slots=True)
class Run:
    """A run, forward and backward.

    Attributes:
        output: of the last layer or the model, copied.
        loss: likewise; None: there was nothing to differentiate.
        gradients: the model's and the loss function's, by name, of those that have one.
        buffers: of the model, by name, as the run left them.
        draws: the random numbers drawn: by operator, shapes and numbers how often.
        events: the calls of modules that the model has, as they began (False) and ended (True).
        failure: what failed, in words; empty: nothing.
        error: what was raised.
    """

    output: Any = None
    loss: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    draws: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    events: list[tuple[Call, bool]] = field(default_factory=list)
    failure: str = ""
    error: Exception | None = None

    @property
    def calls(self) -> list[Call]:
        """All calls, as they began."""
        return [call for call, ended in self.events if not ended]

    def calls_by_name(self) -> dict[str, list[Call]]:
        """Each module's calls."""
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.name, []).append(call)
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest floating-point dtype of what modules took and returned."""
        found = [
            t.dtype
            for t in pytree.tree_leaves([self.output, *((c.takes, c.returns) for c in self.calls)])
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
        return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


class Watch(TorchDispatchMode):
    """Records into a run what modules take and return, and what is drawn, in a forward.

    While it is entered each draw begins at the same random state: equal draws are equal in whatever order
    model and layers draw, and a checkpoint that computes again in the backward draws what its forward drew.

    Args:
        run: where to.
        modules: those of the model, by name, as they are in the copy that runs.
        shared: the names of those that layers have too.
        seed: sets the random state.
    """

    layer = -1
    recording = True

    def __init__(
        self, run: Run, modules: Mapping[str, nn.Module], shared: set[str], seed: Callable[[], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._shared = shared
        self._seed = seed
        self._open: list[Call] = []
        for name, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            module.register_forward_pre_hook(self._before(name), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after(name))

    def _before(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.recording:
                return  # a checkpoint computes again, in the backward
            call = Call(name, self.layer, name in self._shared, copied(_by_name(module, args, kwargs)))
            self._run.events.append((call, False))
            self._open.append(call)

        return note

    def _after(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            if not self.recording:
                return
            while self._open:  # above it are those that raised
                call = self._open.pop()
                if call.name == name:
                    call.returns = copied(output)
                    self._run.events.append((call, True))
                    return

        return note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        seeded = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if seeded and not drops_nothing(func, args, kwargs):
            self._seed()
            if self.recording:
                told = [
                    tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
                    for leaf in pytree.tree_leaves((args, kwargs))
                ]
                self._run.draws[str(func), *told] += 1
        return func(*args, **kwargs)


def copied(tree: Any) -> Any:
    """A tree with tensors of its own, without graphs."""
    know(tree)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def _by_name(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Arguments by the names that the module's forward gives them."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {"args": args, **kwargs}
    bound.apply_defaults()
    return dict(bound.arguments)


def place_of(layers: Sequence[nn.Module], index: int) -> str:
    """A layer in words.

    >>> place_of([nn.ReLU()], 0)
    'layer 0 (ReLU)'
    """
    return f"layer {index} ({type(layers[index]).__name__})"


def first_parting(layers: Sequence[nn.Module], ours: Run, theirs: Run, limit: float) -> str:
    """Where the layers' run parts from the model's, by what modules of both take and return.

    A module that takes something else and returns the same (a mask that hides nothing) is no parting, and one
    that layers call again with what the model called it with is compared with that call.

    Args:
        layers: of the pipeline.
        ours: the model's run.
        theirs: the layers' run.
        limit: what is rounding.

    Returns:
        A sentence that says where and what to change; empty where outputs of model and layers do not differ.
    """
    calls, seen = ours.calls_by_name(), Counter[str]()
    suspects: dict[
        int, str
    ] = {}  # calls that have begun, and what is wrong with them if they return something else
    twins: dict[int, Call | None] = {}
    agreed = ""
    for call, ended in theirs.events:
        if not call.shared or call.name not in calls:
            continue
        if not ended:
            seen[call.name] += 1
            twins[id(call)] = twin = _twin(calls[call.name], call, seen[call.name] - 1, limit)
            if wrong := _begins(call, twin, seen[call.name], len(calls[call.name]), limit):
                suspects[id(call)] = f"{place_of(layers, call.layer)}: {wrong}"
            continue
        twin = twins[id(call)]
        error = 0.0 if twin is None else _parted(twin.returns, call.returns)
        if twin is not None and error <= limit:
            suspects.pop(id(call), None)
            agreed = f" (what {call.name!r} of layer {call.layer} returns is the same)"
            continue
        here = (
            f"{place_of(layers, call.layer)}: {call.name!r} takes the same and returns something else than "
            f"in the model{_by(error)}; call it in the mode and with the options that the model gives it"
        )
        return next(iter(suspects.values()), here) + agreed
    if difference(ours.output, theirs.output) <= limit:
        return ""
    if suspects:
        return next(iter(suspects.values()))
    last = max((call.layer for call in theirs.calls if call.shared), default=len(layers) - 1)
    return (
        f"{place_of(layers, last)} or after it: all that modules take and return before is the same; let the "
        "last layers return what the model returns"
    )


def _begins(call: Call, twin: Call | None, number: int, times: int, limit: float) -> str:
    """What is wrong with a layer's call of a module as it begins, in words; empty: nothing.

    Args:
        call: the layer's.
        twin: the model's; None: it has no such call.
        number: of the layers' calls of the module up to this one.
        times: how often the model calls it.
        limit: what is rounding.
    """
    if twin is None:
        return (
            f"it calls {call.name!r} {number} times up to here, the model {times} in all; leave this call "
            "out, or the layer that is in the list twice"
        )
    error = _parted(twin.takes, call.takes)
    if error <= limit:
        return ""
    return (
        f"{call.name!r} takes another input than in the model{_by(error)}; let this layer or the one before "
        f"do what the model does just before it calls {call.name!r}"
    )


def _by(error: float) -> str:
    return f" (by {error:.2g} of the largest value)" if error < float("inf") else ""


def _twin(calls: Sequence[Call], call: Call, number: int, limit: float) -> Call | None:
    """The model's call that a layer's is to be compared with; None: the model has no such call."""
    if number < len(calls):
        return calls[number]
    return next((other for other in calls if _parted(other.takes, call.takes) <= limit), None)


def _parted(one: Any, other: Any) -> float:
    """As ``difference``, of the tensors alone; a tensor on one side only is one."""
    first, second = _tensors(one), _tensors(other)
    if first.keys() != second.keys():
        common = [difference(first[path], second[path]) for path in first.keys() & second.keys()]
        return max(common) if any(common) else float("inf")
    return max((difference(first[path], second[path]) for path in first), default=0.0)


def _tensors(tree: Any) -> dict[str, Tensor]:
    """Tensors by where they are; the only one of a tree, as of a tuple of one, has no place."""
    leaves = [(str(n), leaf) for n, leaf in enumerate(pytree.tree_leaves(tree)) if isinstance(leaf, Tensor)]
    return {"": leaves[0][1]} if len(leaves) == 1 else dict(leaves)
