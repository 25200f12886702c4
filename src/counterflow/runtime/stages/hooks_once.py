"""Hooks of activations in backwards that are split: called once a micro-batch, as in one process.

A split backward enters some nodes of a graph twice: for the input gradient, and later for weights. Both times
autograd calls the hooks of the tensors that these nodes returned, with the same gradient. So the second time
the hook's first result is returned, and the hook itself, which may count, log, draw or change its state, is
not called.

Not intercepted: hooks of nodes (``tensor.grad_fn.register_hook``), hooks within compiled layers, whose nodes
are entered once, and hooks that forwards begin to register after a step's first one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from counterflow.common.tensors.torch_private import whole_call

from ..messages.values import Value
from .named_layer import LOSS, NamedLayer
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper

_NOTHING = nullcontext()

_NODE_OF = cast("Any", Tensor.grad_fn).__get__
"""Function that is called where a forward reads ``tensor.grad_fn``."""


class Half(Enum):
    """Half of a split backward that runs now."""

    NEITHER = auto()
    INPUT_GRADIENT = auto()
    WEIGHT_GRADIENTS = auto()


class HooksOnce(TorchFunctionMode, StageWrapper):
    """Wraps the forwards and the loss of a stage whose backwards are split, and intercepts hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.half = Half.NEITHER
        self.has_hooks = False
        """True if a forward has registered a hook, or read a node, on which it may have registered one: then
        all forwards are intercepted, and autograd makes all weight gradients.
        """
        self._step = -1
        self._watching: AbstractContextManager[object] = _NOTHING
        """Context of the loss of the current forward."""

    @override
    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        self._watching = self if torch.is_grad_enabled() and self.watches(step) else _NOTHING
        with self._watching:
            return run(value, step, rows)

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        """Wrap the loss function alone: ``wrap_stage`` wraps the stage's layers."""
        with self._watching if layer.index == LOSS and torch.is_grad_enabled() else _NOTHING:
            return run(value, step, rows)

    def watches(self, step: int) -> bool:
        """True if hooks are intercepted in this forward: the first of a step, or all if any hook exists."""
        first, self._step = step != self._step, step
        return first or self.has_hooks

    def making(self, half: Half) -> _HalfContext:
        """Context of one half of a backward."""
        return _HalfContext(self, half)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is Tensor.register_hook and len(args) == 2 and args[0].grad_fn is not None:
            self.has_hooks = True
            args = args[0], _CalledOnce(args[1], self)
        elif func is Tensor.retain_grad and args[0].grad_fn is not None and not args[0].retains_grad:
            self.has_hooks = True
            args[0].register_hook(_RetainGradReset(args[0], self))
        elif func == _NODE_OF:
            self.has_hooks = True
        return func(*args, **whole_call(func, kwargs or {}))


class _HalfContext:  # a generator's context takes four times as long
    __slots__ = ("_half", "_hooks")

    def __init__(self, hooks: HooksOnce, half: Half) -> None:
        self._hooks, self._half = hooks, half

    def __enter__(self) -> None:
        self._hooks.half = self._half

    def __exit__(self, *error: object) -> None:
        self._hooks.half = Half.NEITHER


class _CalledOnce:
    __slots__ = ("_called", "_hook", "_hooks", "_result")

    def __init__(self, hook: Callable[[Tensor], Tensor | None], hooks: HooksOnce) -> None:
        self._hook, self._hooks = hook, hooks
        self._called = False
        self._result: Tensor | None = None

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if self._called and self._hooks.half is Half.WEIGHT_GRADIENTS:
            result, self._result, self._called = self._result, None, False
            return result
        result = self._hook(gradient)
        if self._hooks.half is Half.INPUT_GRADIENT:
            self._called, self._result = True, result
        return result


class _RetainGradReset:
    """Clears a retained gradient before the next one is received, which would be added to it."""

    __slots__ = ("_hooks", "_tensor")

    def __init__(self, tensor: Tensor, hooks: HooksOnce) -> None:
        self._tensor, self._hooks = weakref.ref(tensor), hooks

    def __call__(self, gradient: Tensor) -> None:
        del gradient
        tensor = self._tensor()
        if tensor is not None and self._hooks.half is Half.WEIGHT_GRADIENTS:
            tensor.grad = None
