"""Private names of torch that the reference needs: hooks of parameters, the class of torch's losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def is_torch_loss(module: nn.Module) -> bool:
    """True if a module is one of torch's own losses."""
    return isinstance(module, nn.modules.loss._Loss)  # noqa: SLF001 - torch exports no base class


def hook_tables(parameter: nn.Parameter) -> Iterator[dict[int, Any]]:
    """Tables of the hooks of a parameter's gradient, and of those after it was accumulated."""
    yield parameter._backward_hooks or {}  # noqa: SLF001 - torch has no public list of them
    yield getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
