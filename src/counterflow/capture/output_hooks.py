"""Hooks by which models of transformers collect router logits, hidden states and attentions of their layers.

transformers registers them in the first forward that collects something. A recording keeps them, unlike other
hooks: what they collect is among the tensors of the recorded steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

_LIBRARY = "transformers.utils.output_capturing"


def is_output_hook(hook: Callable[..., Any]) -> bool:
    """Check if transformers registered a hook of a module to collect the module's outputs."""
    return getattr(hook, "__module__", None) == _LIBRARY


def register_output_hooks(model: nn.Module, options: Collection[str]) -> None:
    """Register the hooks of the models that collect outputs, as their first forward does.

    Args:
        model: a model with any number of models of transformers in it.
        options: names of the arguments of its forward, such as ``output_hidden_states``; a model's config may
            ask for outputs as well.
    """
    register: Any = getattr(sys.modules.get(_LIBRARY), "maybe_install_capturing_hooks", None)
    for module in model.modules() if register is not None else ():
        flags = [f"output_{name}" for name in getattr(module, "_can_record_outputs", None) or ()]
        if any(flag in options or getattr(module.config, flag, False) for flag in flags):
            register(module)
