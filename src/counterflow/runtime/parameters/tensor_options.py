"""Options of optimisers that are tensors, as a learning rate that torch's schedulers change in place.

The user's function may give each optimiser that it makes the same tensor. Each stage has an optimiser and a
scheduler, which would change that tensor for all stages, before some of them are updated.

Invariant: no two optimisers that the engine makes share such a tensor, and none has the user's. What the user
writes into his counts in the next step, as in one process.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from counterflow.common.trees import each_tensor, mapped, version_of


class TensorOptions:
    """Copies of the tensor options of an optimiser, which replace them in its groups and defaults.

    Groups that share a tensor share its copy. Tensors with gradients remain.

    Args:
        optimizer: an optimiser that the user's function made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors of the user's function and their copies, by identity of the first."""
        for options in (*optimizer.param_groups, getattr(optimizer, "defaults", {})):
            for name, value in options.items():
                if name != "params" and each_tensor(value):
                    options[name] = self._copied(value)
        self._versions = [version_of(original) for original, _ in self._copies.values()]

    def _copied(self, value: Any) -> Any:
        def copy(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                return tensor
            return self._copies.setdefault(id(tensor), (tensor, tensor.clone()))[1]

        return mapped(copy, value)

    @property
    def originals(self) -> list[Tensor]:
        """The tensors that the user's function gave."""
        return [original for original, _ in self._copies.values()]

    def follow(self) -> None:
        """Copy what was written into the originals since the last call."""
        versions = [version_of(original) for original, _ in self._copies.values()]
        if versions != self._versions:
            pairs = zip(self._copies.values(), versions, self._versions, strict=True)
            for (original, copy), version, before in pairs:
                if version != before:
                    copy.copy_(original)
            self._versions = versions
