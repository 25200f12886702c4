"""Detection of layers that read a tensor in Python (``item()``, ``bool()``), and may branch on what it is."""

from __future__ import annotations

from typing import Any

import torch

from counterflow.common.tensors.torch_private import TorchDispatchMode


class HostReadDetector(TorchDispatchMode):
    """Context that notes reads of single values; a list of all values (``tolist()``) does not count.

    Attributes:
        detected: True if a value was read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.detected = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled layers run compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.detected = self.detected or torch.Tag.data_dependent_output in func.tags
        return func(*args, **(kwargs or {}))
