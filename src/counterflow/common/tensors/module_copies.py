"""Copies of modules with what ``copy.deepcopy`` omits: attributes and hooks of parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .torch_private import hooks_of


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module with attributes and hooks of its parameters, which ``copy.deepcopy`` omits.

    Args:
        module: the module.
        memo: replacement of an object in copies, by identity; copies with one memo share it.
    """
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # a hook before the forward recomputes it
    known = set(memo)
    duplicate = copy.deepcopy(module, memo)
    for parameter in module.parameters():
        if id(parameter) not in known:
            attached = copy.deepcopy((parameter.__dict__, *hooks_of(parameter)), memo)
            attach_to_parameter(memo[id(parameter)], *attached)
    return duplicate


def attach_to_parameter(
    parameter: nn.Parameter, attributes: Mapping[str, Any], before: list[Any], after: list[Any]
) -> None:
    """Set attributes and hooks of a parameter."""
    for name, value in attributes.items():
        setattr(parameter, name, value)
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one accepts no hooks, though it keeps its present ones
    for hook in before:
        parameter.register_hook(hook)
    for hook in after:
        parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trains)
