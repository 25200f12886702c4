"""Shells of a model: copies that share its modules, except some that stand-ins replace.

Invariant: the model itself stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn


def shell_of(model: nn.Module, replaced: Mapping[str, nn.Module]) -> Any:
    """A copy of a model that shares all its modules except those at some paths.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> shell = shell_of(model, {"1": nn.Tanh()})
    >>> shell[0] is model[0], shell[1], model[1]
    (True, Tanh(), ReLU())
    """
    shell = copy.copy(model)
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        shell.__dict__[name] = copy.copy(model.__dict__[name])
    below: dict[str, dict[str, nn.Module]] = {}
    for path, module in replaced.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = module
        else:
            shell._modules[name] = module
    for name, parts in below.items():
        child = model._modules[name]
        assert child is not None
        shell._modules[name] = shell_of(child, parts)
    return shell


def disable_extras(shell: nn.Module) -> None:
    """Disable outputs that the next layer does not need: caches and copies of intermediate values.

    The shells within a shell get configs of their own.
    """
    for module in shell.modules():
        config = vars(module).get("config")
        if config is None:
            continue
        module.config = config = copy.deepcopy(config)
        for name, value in (
            ("use_cache", False),
            ("output_hidden_states", False),
            ("return_dict", True),
            ("output_router_logits", False),
        ):
            if getattr(config, name, value) != value:
                setattr(config, name, value)


def has(module: nn.Module, path: str) -> bool:
    """Check whether a module contains one at a path."""
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return False
        module = child
    return True


def has_weights(module: nn.Module) -> bool:
    """Check whether a module, or one within it, has parameters."""
    return any(True for _ in module.parameters())
