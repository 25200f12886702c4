"""Inputs of layers that run twice: the second run has the input of the first one.

Invariant: inputs that nothing changes in place are not copied; torch counts such changes (``_version``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.common.tensors.torch_private import same_memory
from counterflow.common.trees import mapped, versions

from ..messages.values import Value
from .named_layer import NamedLayer
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper


def same_tensors(value: Any) -> Any:
    """A copy of a value's trees with the same tensors, as a layer may remove entries from its input."""
    return mapped(_itself, value)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class InputGuard(StageWrapper):
    """Guard of an input that a stage or layer may change in place.

    The first run shows whether it does; if not, later runs do nothing for it.
    """

    changes: bool | None = None
    """True if the input is changed in place; None: unknown before the first run."""

    @override
    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        if self.changes is False:
            return run(value, step, rows)
        value_in = self.as_input(value)
        same = same_tensors(value_in)
        before = versions(same)
        output = run(value_in, step, rows)
        self.learn(same, before)
        return output

    def as_input(self, value: Any) -> Any:
        """Return the value to run on: autograd lets nobody change a leaf that needs a gradient."""
        return value if self.changes is False else mapped(non_leaf, value)

    def saved_copy(self, value: Any) -> Any:
        """Return the value to save for another run."""
        return value if self.changes is False else mapped(copied, value)

    def learn(self, value_in: Any, before: list[int]) -> None:
        """Note whether the first run changed its input."""
        if self.changes is None:
            self.changes = versions(value_in) != before


class InputCopies(StageWrapper):
    """Copies of the inputs of layers that a diagnosis runs.

    What such a layer changes in place is its copy: neither the input of the step, nor that of a further run,
    nor a leaf of which the diagnosis computes the gradient.
    """

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        return run(mapped(torch.clone, value), step, rows)


def copied(tensor: Tensor) -> Tensor:
    """A leaf of its own with the same content, and the same strides: kernels save what fits these."""
    plain = tensor.detach()
    same = plain.clone()
    if same.stride() != plain.stride() and plain.layout is torch.strided and not is_dtensor(plain):
        same = _with_strides(plain, same)
    return same.requires_grad_(tensor.requires_grad)


def _with_strides(tensor: Tensor, dense: Tensor) -> Tensor:
    """``dense`` in memory with the gaps of ``tensor``; ``dense`` itself if elements of that share memory."""
    distinct = tuple(
        slice(0, 1) if size > 1 and not stride else slice(None)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    part = tensor[distinct]  # without what an expand repeats
    gaps = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
    try:
        return gaps.copy_(part).expand(tensor.shape)
    except RuntimeError:
        return dense


def non_leaf(tensor: Tensor) -> Tensor:
    """A tensor with the same memory and its own version counter: parts of a mini-batch share a counter."""
    if not tensor.is_leaf:
        return tensor
    return same_memory(tensor)
