"""What layers of users need of torch and torch has no public name for: carried states and attention by parts.

The runtime's own needs are in ``runtime/torch_private.py``.
"""

from __future__ import annotations

from typing import Any

import torch

FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
"""Attention on the CPU that also returns the log-sum-exp of each row."""

FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def in_backward() -> bool:
    """Whether this thread runs a backward. Without: a hook on the loss that notes it."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001
