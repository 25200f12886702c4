"""Gradients of one worker: kept in flat buffers, summed over a stage's copies in buckets.

Invariant: every parameter of the worker is in exactly one ``GradientGroup``, also one that several stages
share (tied embeddings); a group is what is summed, measured and updated together. A parameter that no copy of
its stage used has no gradient when it is updated (``grad is None``), as in one process: no optimiser
decays it or keeps state for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from counterflow.common.tensors.dtensors import local
from counterflow.common.tensors.dtypes import as_real
from counterflow.errors import ConfigError

from ..transport.base import Group, Pending, Transport
from .compressed_sums import CompressedSum, SumCompression
from .flat_gradients import FlatGradients
from .hooks import Hooks

BUCKET_BYTES = 25 * 1024 * 1024
"""The size of the pieces in which gradients are summed, as in torch's DistributedDataParallel."""


_NORM_PIECE = 2**20
"""Values of which a norm is taken at once."""


class GradientGroup:
    """Parameters whose gradients are summed over the same workers, in flat buffers.

    Args:
        parameters: by their names in the model; those that require no gradient have no buffer.
        group: the ranks that hold a copy; None if there is only this one.
        counted: whether this rank is the one of all that counts them in the global norm.
        stage: the stage whose update updates them.
        compression: form in which float32 gradients are summed; None: in full.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group | None,
        *,
        counted: bool,
        stage: int,
        compression: SumCompression | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.group = group
        self.counted = counted
        self.stage = stage
        self._flats: list[FlatGradients] = []
        self._frozen: dict[str, nn.Parameter] = {}
        self._pending: list[Pending] = []
        self._compression = compression
        self._compressed: list[CompressedSum] = []
        self.make()

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of the gradients, and of what was lost of them when they were sent."""
        residuals = [flat.residual for flat in self._flats if flat.residual is not None]
        return residuals + [flat.buffer for flat in self._flats]

    @property
    def nbytes(self) -> int:
        """Size of the buffers in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def summed(self) -> list[nn.Parameter]:
        """Parameters with a place in the buffers; those that were frozen since may have gradients there."""
        return [parameter for flat in self._flats for parameter in flat.parameters]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that sum these gradients; empty: there is only this one."""
        return () if self.group is None else tuple(self.group.ranks)

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Residuals of each parameter's compressed gradients, by name; empty: nothing is compressed."""
        by_parameter = {
            id(parameter): residual
            for flat in self._flats if flat.residual is not None
            for parameter, residual in zip(flat.parameters, flat.residuals, strict=True)
        }  # fmt: skip
        return {name: by_parameter[id(p)] for name, p in self.parameters.items() if id(p) in by_parameter}

    def make(self) -> None:
        """Make the buffers, for the parameters that require a gradient by now; residuals are kept."""
        before = self.residuals
        by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                tensor = local(parameter)
                by_kind.setdefault((tensor.dtype, tensor.device), []).append(parameter)
        shared, compressed = self.group is not None, self._compression is not None
        self._flats = [
            FlatGradients(parameters, shared=shared, compressed=compressed) for parameters in by_kind.values()
        ]
        for name, residual in self.residuals.items():
            if name in before:
                residual.copy_(before[name])
        self._frozen = {name: p for name, p in self.parameters.items() if not p.requires_grad}

    def refuse_foreign(self) -> None:
        """Refuse gradients that a step would overwrite.

        Raises:
            ConfigError: a parameter has one.
        """
        for flat in self._flats:
            if (parameter := flat.foreign()) is not None:
                name = next(name for name, known in self.parameters.items() if known is parameter)
                raise ConfigError(
                    f"{name} has a gradient that was computed outside the pipeline's steps, which begin with "
                    "none; add what it is of to the loss by cf.add_loss, or set the gradient to None"
                )

    def refuse_unfrozen(self) -> None:
        """Refuse parameters that were unfrozen without ``set_trainable``.

        Raises:
            ConfigError: a parameter was, and the others do not know of its gradient.
        """
        if self._frozen:
            unfrozen = next((name for name, p in self._frozen.items() if p.requires_grad), None)
            if unfrozen is not None:
                raise ConfigError(
                    f"{unfrozen} of stage {self.stage} requires a gradient and did not when the pipeline was "
                    "made; let pipeline.set_trainable() unfreeze it, on all workers"
                )

    def attach(self) -> None:
        """Let autograd add to the gradients: from here to ``detach`` nobody else touches them.

        Raises:
            ConfigError: a parameter was unfrozen without ``set_trainable``.
        """
        self.refuse_unfrozen()
        for flat in self._flats:
            flat.attach()

    def detach(self) -> None:
        """Show no gradients: what users do to them between steps (``zero_grad()``) changes nothing."""
        for flat in self._flats:
            flat.detach()

    def start(self, transport: Transport) -> None:
        """Begin to sum over the group."""
        if self.group is None or self._pending or self._compressed:
            return
        for flat in self._flats:
            flat.collect()
            if flat.residual is not None:
                self._start_compressed(flat, flat.residual, transport)
                continue
            numbers = as_real(flat.buffer)
            size = max(1, BUCKET_BYTES // numbers.element_size())
            for bucket in numbers.split(size):
                self._pending.append(transport.all_reduce(bucket, self.group))

    def _start_compressed(self, flat: FlatGradients, residual: Tensor, transport: Transport) -> None:
        assert self.group is not None
        assert self._compression is not None
        size = BUCKET_BYTES // residual.element_size()
        for numbers, lost in zip(flat.gradients.split(size), residual.split(size), strict=True):
            self._compressed.append(CompressedSum(numbers, lost, self._compression, self.group, transport))
        self._pending.append(transport.all_reduce(flat.tail, self.group))

    def wait(self) -> None:
        """Wait until the sum is complete."""
        for compressed_sum in self._compressed:
            compressed_sum.add_up()
        for compressed_sum in self._compressed:
            compressed_sum.wait()
        self._compressed.clear()
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def norms(self) -> list[Tensor]:
        """Norms of small pieces of the gradients, on their device: torch copies each piece to float64."""
        norms = []
        for flat in self._flats:
            flat.collect()
            numbers = as_real(flat.gradients)
            if numbers.numel() <= _NORM_PIECE:
                norms.append(torch.linalg.vector_norm(numbers, dtype=torch.float64))
            else:
                pieces = numbers.flatten().split(_NORM_PIECE)
                norms += [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        return norms

    def not_finite(self) -> str | None:
        """The first parameter whose gradient is not finite."""
        odd = {
            id(parameter)
            for flat in self._flats
            for parameter, view in zip(flat.parameters, flat.views, strict=True)
            if not view.isfinite().all()
        }
        return next((name for name, parameter in self.parameters.items() if id(parameter) in odd), None)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradients, by a number or by one on their device."""
        for flat in self._flats:
            flat.gradients.mul_(factor)

    def call_hooks(self, hooks: Hooks) -> None:
        """Take what the parameters' hooks make of the gradients, which are summed by now."""
        for flat in self._flats:
            flat.call_hooks(hooks)

    def drop(self, dead: Tensor) -> None:
        """Set the gradients to zero where a device says so, for which its host does not wait."""
        for flat in self._flats:
            flat.gradients.masked_fill_(dead, 0)

    def show(self) -> None:
        """Let parameters have their gradients, as an optimiser takes them: None where there is none."""
        for flat in self._flats:
            flat.show()

    def clear(self) -> None:
        """Set the gradients to zero, and let autograd add to them again."""
        for flat in self._flats:
            flat.clear()
            flat.attach()
