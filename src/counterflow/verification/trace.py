"""Inputs and outputs of modules in a run, and the first difference between two runs.

Invariant: records are copies, so later changes in place do not affect them.
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

from counterflow.common.mappings import register_mapping_classes
from counterflow.common.tensors.torch_private import TorchDispatchMode, drops_nothing
from counterflow.verification.diagnosis.comparison import difference


@dataclass(slots=True)
class TracedCall:
    """A call of a module.

    Attributes:
        name: name of the module in the model.
        layer: number of the layer that called it; -1: the model.
        shared: whether model and layers both have the module.
        takes: copies of its arguments by name.
        returns: copies of its results.
    """

    name: str
    layer: int
    shared: bool
    takes: Any
    returns: Any = None


@dataclass(slots=True)
class ModuleTrace:
    """A run, forward and backward.

    Attributes:
        output: copy of the output of the last layer or the model.
        loss: copy of the loss; None: nothing to differentiate.
        gradients: existing gradients of the model and the loss function, by name.
        buffers: buffers of the model by name, as the run left them.
        draws: number of random draws by operator, shapes and numbers.
        events: calls of the model's modules, in the order in which they began (False) and ended (True).
        failure: failure in words; empty: none.
        error: exception that was raised.
    """

    output: Any = None
    loss: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    draws: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    events: list[tuple[TracedCall, bool]] = field(default_factory=list)
    failure: str = ""
    error: Exception | None = None

    @property
    def calls(self) -> list[TracedCall]:
        """All calls, in the order in which they began."""
        return [call for call, ended in self.events if not ended]

    def calls_by_name(self) -> dict[str, list[TracedCall]]:
        """Calls of each module."""
        calls_of: dict[str, list[TracedCall]] = {}
        for call in self.calls:
            calls_of.setdefault(call.name, []).append(call)
        return calls_of

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest floating-point dtype among inputs and outputs of modules."""
        dtypes = [
            t.dtype
            for t in pytree.tree_leaves([self.output, *((c.takes, c.returns) for c in self.calls)])
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


class TraceRecorder(TorchDispatchMode):
    """Records inputs and outputs of modules, and random draws, of a forward into a run.

    Within the context each draw begins at the same random state: equal draws are equal in whatever order
    model and layers draw, and a checkpoint that recomputes in the backward repeats the draws of its forward.

    Args:
        run: the run to record.
        modules: modules of the model by name, in the copy that runs.
        shared: names of modules that layers contain too.
        seed: function that sets the random state.
    """

    layer = -1
    recording = True

    def __init__(
        self, run: ModuleTrace, modules: Mapping[str, nn.Module], shared: set[str], seed: Callable[[], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._shared = shared
        self._seed = seed
        self._open: list[TracedCall] = []
        for name, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            module.register_forward_pre_hook(self._before(name), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after(name))

    def _before(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.recording:
                return  # a checkpoint recomputes in the backward
            call = TracedCall(name, self.layer, name in self._shared, copied(_by_name(module, args, kwargs)))
            self._run.events.append((call, False))
            self._open.append(call)

        return note

    def _after(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            if not self.recording:
                return
            while self._open:  # calls above it on the stack have raised
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
                arguments = [
                    tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
                    for leaf in pytree.tree_leaves((args, kwargs))
                ]
                self._run.draws[str(func), *arguments] += 1
        return func(*args, **kwargs)


def copied(tree: Any) -> Any:
    """A tree with copies of its tensors, without graphs."""
    register_mapping_classes(tree)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def _by_name(module: nn.Module, args: Any, kwargs: Any) -> Any:
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


def first_parting(
    layers: Sequence[nn.Module], model_trace: ModuleTrace, layer_trace: ModuleTrace, limit: float
) -> str:
    """The first difference between the runs of layers and model, by inputs and outputs of shared modules.

    A module with another input but the same output (a mask that hides nothing) is not a difference, and a
    repeated call with the same input as a call of the model is compared with that call.

    Args:
        layers: layers of the pipeline.
        model_trace: the model's run.
        layer_trace: the layers' run.
        limit: maximum difference that counts as rounding.

    Returns:
        A sentence that says where and what to change; empty if outputs of model and layers do not differ.
    """
    calls, seen = model_trace.calls_by_name(), Counter[str]()
    suspects: dict[int, str] = {}  # calls that have begun, and the problem if they return something else
    twins: dict[int, TracedCall | None] = {}
    agreed = ""
    for call, ended in layer_trace.events:
        if not call.shared or call.name not in calls:
            continue
        if not ended:
            seen[call.name] += 1
            twins[id(call)] = twin = _twin(calls[call.name], call, seen[call.name] - 1, limit)
            if wrong := _begins(call, twin, seen[call.name], len(calls[call.name]), limit):
                suspects[id(call)] = f"{place_of(layers, call.layer)}: {wrong}"
            continue
        twin = twins[id(call)]
        error = 0.0 if twin is None else _largest_difference(twin.returns, call.returns)
        if twin is not None and error <= limit:
            suspects.pop(id(call), None)
            agreed = f" (what {call.name!r} of layer {call.layer} returns is the same)"
            continue
        here = (
            f"{place_of(layers, call.layer)}: {call.name!r} has the same input but another output than "
            f"in the model{_by(error)}; call it in the mode and with the options that the model uses"
        )
        return next(iter(suspects.values()), here) + agreed
    if difference(model_trace.output, layer_trace.output) <= limit:
        return ""
    if suspects:
        return next(iter(suspects.values()))
    last = max((call.layer for call in layer_trace.calls if call.shared), default=len(layers) - 1)
    return (
        f"{place_of(layers, last)} or after it: all earlier inputs and outputs of modules are equal; let the "
        "last layers return what the model returns"
    )


def _begins(call: TracedCall, twin: TracedCall | None, number: int, times: int, limit: float) -> str:
    """The problem with a layer's call of a module as it begins, in words; empty if there is none.

    Args:
        call: call of the layer.
        twin: call of the model; None: it has no such call.
        number: number of the layers' calls of the module up to this one.
        times: number of the model's calls of it.
        limit: maximum difference that counts as rounding.
    """
    if twin is None:
        return (
            f"it calls {call.name!r} {number} times up to here, the model {times} in total; leave this call "
            "out, or the layer that is in the list twice"
        )
    error = _largest_difference(twin.takes, call.takes)
    if error <= limit:
        return ""
    return (
        f"{call.name!r} has another input than in the model{_by(error)}; let this layer or the one before "
        f"do what the model does just before it calls {call.name!r}"
    )


def _by(error: float) -> str:
    return f" (by {error:.2g} of the largest value)" if error < float("inf") else ""


def _twin(calls: Sequence[TracedCall], call: TracedCall, number: int, limit: float) -> TracedCall | None:
    if number < len(calls):
        return calls[number]
    return next(
        (candidate for candidate in calls if _largest_difference(candidate.takes, call.takes) <= limit), None
    )


def _largest_difference(expected: Any, got: Any) -> float:
    first, second = _tensors_by_place(expected), _tensors_by_place(got)
    if first.keys() != second.keys():  # a tensor on one side only is a difference
        common = [difference(first[path], second[path]) for path in first.keys() & second.keys()]
        return max(common) if any(common) else float("inf")
    return max((difference(first[path], second[path]) for path in first), default=0.0)


def _tensors_by_place(tree: Any) -> dict[str, Tensor]:
    # The only tensor of a tree is the same as that of a tuple of one: without a place.
    leaves = [(str(n), leaf) for n, leaf in enumerate(pytree.tree_leaves(tree)) if isinstance(leaf, Tensor)]
    return {"": leaves[0][1]} if len(leaves) == 1 else dict(leaves)
