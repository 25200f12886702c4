"""Hooks through which gradients of activations go, looked for where these are of another size.

What they do may depend on how large gradients are (clamping, signs are not linear), and where it is not known
before the last forward what a loss is divided by, they are of another size than in one process.

What it does not find: custom functions, hooks that only later steps register, and those of compiled layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..torch_private import has_hooks_of_backward, whole_call
from .randomness import RandomStreams

_LOG = logging.getLogger(__name__)


class GradientHooks(TorchFunctionMode):
    """Around a stage's forwards while it looks.

    Args:
        modules: its layers.
        streams: know whether layers are compiled.
    """

    def __init__(self, modules: Iterable[nn.Module], streams: RandomStreams) -> None:
        super().__init__()
        self._layers, self._streams = tuple(modules), streams
        self._changes = False
        self.looks = False
        """Whether forwards are looked at: in the step after the first one that ``tell`` was called in."""
        self._begun = self._over = False

    def tell(self, stage: int, factor: float) -> None:
        """Warn, once, if a hook gave another gradient than it got, or, as one of a module, may have.

        The first call begins to look, the next one tells what was found.

        Args:
            stage: whose hooks.
            factor: how much larger the gradients were than in one process.
        """
        if not self._begun:
            self._begun, self.looks = True, not self._streams.compiled
            return
        over, self._over, self.looks = self._over, True, False
        if over or not (self._changes or self._has_modules()):
            return
        _LOG.warning(
            "gradients of activations in stage %d go through a hook and are %g times as large as in one "
            "process: what the loss is divided by (tokens that count) does not come of the targets alone, "
            "so that it is known only when all losses are; if the hook is not linear (clamping), give the "
            "pipeline a loss function that makes its weight of its targets",
            stage,
            factor,
        )

    def _has_modules(self) -> bool:
        return any(has_hooks_of_backward(layer) for module in self._layers for layer in module.modules())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is Tensor.register_hook and len(args) == 2 and not isinstance(args[0], nn.Parameter):
            args = args[0], partial(self._called, args[1])
        return func(*args, **whole_call(func, kwargs or {}))

    def _called(self, hook: Any, gradient: Tensor) -> Any:
        found = hook(gradient)
        self._changes = self._changes or (found is not None and found is not gradient)
        return found
