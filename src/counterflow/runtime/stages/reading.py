"""Sees whether layers let Python read what is in a tensor (``item()``, ``bool()``) and may decide by it."""

from __future__ import annotations

from typing import Any

import torch

from counterflow.common.tensors.torch_private import TorchDispatchMode


class Reads(TorchDispatchMode):
    """Within this context: whether anything was read; a list of all values (``tolist()``) is none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compiled layers run compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.any = self.any or torch.Tag.data_dependent_output in func.tags
        return func(*args, **(kwargs or {}))
