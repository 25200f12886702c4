"""Batch norms with running statistics of the whole mini-batch.

A batch norm in a pipeline sees one micro-batch at a time, and its running statistics are updated as often, by
the statistics of each micro-batch. A deferred one sums its inputs over the micro-batches of a step; the sums
are added over copies and replicas, and the running statistics are updated once, like in one process that runs
the mini-batch at once. A micro-batch is still normalised by the mean and variance of that micro-batch.

Invariant: the sums do not depend on the order of micro-batches. A norm that a user's checkpoint runs twice
counts each value twice: the same mean, and a variance that differs by its correction alone.

Source: Kim et al. 2020, torchgpipe, section 3.4 (``DeferredBatchNorm``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.common.tensors.torch_private import keeps_statistics
from counterflow.errors import ConfigError

SUMS = "sums_of_mini_batch"
"""Buffer of a deferred norm: by feature the sums of values and of squares, and the number of values."""


class Deferred(nn.Module):
    """Mixin of deferred batch norms, before a batch norm class of torch."""

    deferring = False
    """True while a pipeline's step runs: forwards do not update the running statistics."""
    sums_of_mini_batch: Tensor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Normalise the input by its mean and variance."""
        if not (self.deferring and self.training):
            output: Tensor = super().forward(input)
            return output
        norm: Any = self  # a batch norm of torch too
        norm._check_input_dim(input)  # noqa: SLF001 - it is made for subclasses
        with torch.no_grad():
            values = input.detach()
            if values.element_size() < 4:
                values = values.float()
            var, mean = torch.var_mean(values, [0, *range(2, values.dim())], correction=0)
            mean, var = mean.double(), var.double()
            count = values.numel() // values.shape[1]
            norm.sums_of_mini_batch += count * torch.stack([mean, var + mean**2, torch.ones_like(mean)])
        return nn.functional.batch_norm(
            input, None, None, norm.weight, norm.bias, training=True, momentum=0.0, eps=norm.eps
        )

    def commit(self) -> None:
        """Update the running statistics by the sums, if there are any, and reset them."""
        norm: Any = self
        total, squares, count = self.sums_of_mini_batch
        seen = count > 0
        mean = total / count
        var = (squares / count - mean**2).clamp(min=0) * (count / (count - 1))
        norm.num_batches_tracked += seen[0]
        factor = 1 / norm.num_batches_tracked.double() if norm.momentum is None else norm.momentum
        for running, now in ((norm.running_mean, mean), (norm.running_var, var)):
            running.copy_(torch.where(seen, running + factor * (now - running), running))
        self.sums_of_mini_batch.zero_()


class DeferredBatchNorm1d(Deferred, nn.BatchNorm1d):
    """A ``BatchNorm1d`` with the running statistics of mini-batches."""


class DeferredBatchNorm2d(Deferred, nn.BatchNorm2d):
    """A ``BatchNorm2d`` with the running statistics of mini-batches."""


class DeferredBatchNorm3d(Deferred, nn.BatchNorm3d):
    """A ``BatchNorm3d`` with the running statistics of mini-batches."""


_KINDS: dict[type[nn.Module], type[Deferred]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def defer(modules: Iterable[nn.Module]) -> None:
    """Turn the batch norms among modules and their submodules into deferred ones, in place.

    Raises:
        ConfigError: another kind of norm keeps running statistics.
    """
    for norm in {id(child): child for module in modules for child in module.modules()}.values():
        if isinstance(norm, Deferred) or not keeps_statistics(norm):
            continue
        kind = _KINDS.get(type(norm))
        if kind is None:
            raise ConfigError(
                f"deferred_batch_norm: running statistics of a {type(norm).__name__} cannot be summed over a "
                "mini-batch, those of BatchNorm1d, 2d and 3d can; take one of them, or omit the option"
            )
        mean = norm.get_buffer("running_mean")
        sums = torch.zeros(3, len(mean), dtype=torch.float64, device=mean.device)
        norm.register_buffer(SUMS, sums, persistent=False)
        norm.__class__ = kind
