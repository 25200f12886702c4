"""Parts of torch without a public name that users' layers need: carried states, attention, losses.

The runtime's own needs are in ``runtime/torch_private.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

_Function = TypeVar("_Function", bound=Callable[..., Any])

FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
"""Attention on the CPU that also returns the log-sum-exp of each row."""

FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def in_backward() -> bool:
    """True if this thread runs a backward. Without: a hook on the loss that notes it."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def in_checkpoint() -> bool:
    """True in the first run of torch's non-reentrant checkpoint. Without: it looks like a plain run."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def never_compiled(function: _Function) -> _Function:
    """A function that torch.compile leaves alone, with all it calls, when a compiled layer calls it.

    Otherwise torch.compile treats a value it once found, such as a tensor's version, as a constant.
    ``torch.compiler.disable`` has the same effect, with one more call around each.
    """
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001
    skip = frames._FrameAction.SKIP  # noqa: SLF001
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # noqa: SLF001
    return function


def grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor | None:
    """Product of each group of rows with its matrix in one kernel; None if there is no kernel for it.

    Kernels are of bfloat16 on GPUs, for rows and matrices of whole 16 bytes.

    Args:
        rows: [R, in], by group.
        matrices: [groups, in, out].
        counts: [groups], rows of each.
    """
    fits = rows.dtype is matrices.dtype is torch.bfloat16 and not any(size % 8 for size in matrices.shape[1:])
    if not (fits and rows.device.type == "cuda" and rows.shape[0] and hasattr(functional, "grouped_mm")):
        return None
    ends = counts.cumsum(0).to(torch.int32)
    product: Tensor = functional.grouped_mm(rows.contiguous(), matrices, offs=ends)
    if product.requires_grad:
        product.register_hook(Tensor.contiguous)  # a gradient that is expanded has no strides for the kernel
    return product


def is_abstract(tensor: Tensor) -> bool:
    """True for a tensor without values: on the meta device, or of a recording."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"
