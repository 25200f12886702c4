"""Values at the boundaries of a model's layers, without memory and without computing.

Invariant: they have the structure, shapes, types and needs of gradients that the layers before give them in a
step; of their numbers only those that are the model's inputs are right, as costs do not depend on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import added_losses
from counterflow.common.tensors.fake_layers import fake_layers, saved_storages, shapes_alone, storages_of
from counterflow.common.trees import tensors_in


@dataclass(frozen=True, slots=True)
class LayerPass:
    """A forward of a layer.

    Attributes:
        output: its output, without memory.
        saved_bytes: bytes that autograd saves for its backward, apart from weights and buffers.
    """

    output: Any
    saved_bytes: int


def passes_of(
    layers: Sequence[nn.Module], inputs: Any, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], list[LayerPass]]:
    """Run layers without memory.

    Args:
        layers: the layers, on any device.
        inputs: input of the first one.
        dtype: precision to which weights are cast while layers run; None: their own.

    Returns:
        The tensors of the inputs, without memory, and the pass of each layer.
    """
    devices = [tensor.device for tensor in tensors_in(inputs)]
    device = devices[0] if devices and devices[0].type != "meta" else torch.device("cpu")
    passes = []
    with shapes_alone(), added_losses():
        copies, value, weights = fake_layers(layers, inputs, device, dtype)
        constant = storages_of(weights)
        tensors = [*tensors_in(value)]
        for layer in copies:
            with saved_storages() as storages:
                value = layer(value)
            saved = sum(storage.nbytes() for key, storage in storages.items() if key not in constant)
            passes.append(LayerPass(value, saved))
    return tensors, passes


@dataclass(frozen=True, slots=True)
class _Template:
    """A tensor at a boundary.

    Attributes:
        shape: its shape.
        dtype: its type.
        graded: True if it has a gradient.
        input: number of the model's input that it is; None: a layer computes it.
    """

    shape: torch.Size
    dtype: torch.dtype
    graded: bool
    input: int | None

    def value(self, inputs: Sequence[Tensor]) -> Tensor:
        """Tensor of a micro-batch."""
        if self.input is not None:
            return inputs[self.input]
        device = inputs[0].device
        if not self.graded:
            return torch.full(self.shape, self.dtype is torch.bool, dtype=self.dtype, device=device)
        return self._numbers(inputs[0]) + torch.zeros((), dtype=self.dtype, requires_grad=True, device=device)

    @torch.no_grad()
    def _numbers(self, source: Tensor) -> Tensor:
        """Numbers of each position, or of each sample, that follow from the input's as those of an embedding.

        So slices of a sequence get those of the whole, and experts get different tokens.
        """
        dims = 0
        while dims < min(2, source.dim(), len(self.shape) - 1) and source.shape[dims] == self.shape[dims]:
            dims += 1
        rest = self.shape[dims:].numel()
        frequencies = torch.rand(rest, generator=torch.Generator().manual_seed(rest)).to(source.device)
        if not dims:
            return frequencies.reshape(self.shape[dims:]).to(self.dtype)
        keys = source.float().reshape(*source.shape[:dims], -1).sum(-1, keepdim=True)
        return torch.cos(keys * frequencies + math.tau * frequencies).reshape(self.shape).to(self.dtype)


class BoundaryValues:
    """Values before some layers, by the inputs of a micro-batch; those of each shape are made once.

    Args:
        layers: the model's layers that are measured.
        dtype: precision to which weights are cast while layers run; None: their own.
    """

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
        self._layers, self._dtype = layers, dtype
        self._values: dict[tuple[object, ...], list[tuple[list[Any], pytree.TreeSpec]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of layers share it

    def before(self, number: int, inputs: Any) -> Any:
        """The value that a layer takes.

        Args:
            number: number of the layer, 1 or more.
            inputs: input of the first layer.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        shapes = ((tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else str(x) for x in leaves)
        key = (str(spec), *shapes)
        if key not in self._values:
            self._values[key] = self._templates(inputs)
        templates, spec = self._values[key][number - 1]
        tensors = [*tensors_in(inputs)]
        made = (leaf.value(tensors) if isinstance(leaf, _Template) else leaf for leaf in templates)
        return pytree.tree_unflatten(made, spec)

    def _templates(self, inputs: Any) -> list[tuple[list[Any], pytree.TreeSpec]]:
        tensors, passes = passes_of(self._layers, inputs, self._dtype)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

        def template(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return _Template(leaf.shape, leaf.dtype, leaf.requires_grad, numbers.get(id(leaf)))

        flat = [pytree.tree_flatten(layer_pass.output) for layer_pass in passes]
        return [([template(leaf) for leaf in leaves], spec) for leaves, spec in flat]
