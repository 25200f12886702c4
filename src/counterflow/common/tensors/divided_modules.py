"""Attributes by which modules say how they are divided, and modules of routed experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

EXPERT_PARAMETERS = "expert_parameters"
"""Attribute of a module that dispatches tokens itself: names of its own parameters [experts, ...]."""

TENSOR_PARALLEL_PLAN = "tensor_parallel_plan"
"""Attribute of a module: ``colwise`` or ``rowwise`` by the name of a child, as in transformers' plans."""


def is_divided_whole(module: nn.Module) -> bool:
    """True if a module says how it is divided, so that no layer may have a part of it."""
    attributes = EXPERT_PARAMETERS, TENSOR_PARALLEL_PLAN
    return any(hasattr(module, name) for name in attributes) or _is_routed(module)


def expert_modules(root: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Modules of experts in a stage or a layer, with the names of their parameters [experts, ...]."""
    for module in root.modules():
        names = getattr(module, EXPERT_PARAMETERS, None)
        if names is not None:
            yield module, [*names]
        elif _is_routed(module):
            yield module, [name for name, _ in module.named_parameters(recurse=False)]


def _is_routed(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    parameters = [*module.parameters(recurse=False)]
    if (
        not isinstance(count, int)
        or not parameters
        or any(p.dim() < 2 or p.shape[0] != count for p in parameters)
    ):
        return False
    forward = type(module).forward
    places = inspect.signature(inspect.unwrap(forward)).parameters
    return len(places) == 4 and "hidden_states" in places
