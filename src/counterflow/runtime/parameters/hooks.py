"""Hooks that users register on parameters, called once an update.

One process calls them with the gradient of a whole mini-batch; autograd would call them here with that of
each micro-batch, on each copy. So they are kept from autograd while a step runs, and are called on the
gradient that is summed over all micro-batches, copies and replicas: before it is clipped and the optimizer
steps, on every copy alike.

Invariant: between steps, and while they are called, parameters have their hooks as the user left them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from counterflow.common.tensors.torch_private import hook_tables


class Hooks:
    """Hooks of some parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._removed: list[tuple[dict[int, object], dict[int, object]]] = []

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """True if a parameter has hooks that autograd would call."""
        return any(hook_tables(parameter))

    def first(self) -> nn.Parameter | None:
        """One that has any; None: none has."""
        return next((parameter for parameter in self._parameters if parameter in self), None)

    def take(self) -> None:
        """Keep them from autograd."""
        for parameter in self._parameters:
            for hooks in hook_tables(parameter):
                if hooks:
                    self._removed.append((hooks, dict(hooks)))
                    hooks.clear()

    def give_back(self) -> None:
        """Let the parameters have them again, before those that were registered meanwhile."""
        while self._removed:
            hooks, saved = self._removed.pop()
            added = dict(hooks)
            hooks.clear()
            hooks.update(saved | added)


def called(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Gradient of a parameter after its hooks, called as by a backward; None if they remove it.

    Raises:
        RuntimeError: a hook gives a gradient of another shape or dtype.
    """
    before, after = hook_tables(parameter)
    with torch.no_grad():
        for hook in list(before.values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
        parameter.grad = gradient
        for hook in list(after.values()):
            hook(parameter)
    return parameter.grad
