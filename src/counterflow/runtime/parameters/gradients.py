"""Gradients of one worker: kept in flat buffers, summed over a stage's copies in buckets.

Invariant: every parameter of the worker is in exactly one ``GradientGroup``, also one that several stages
share (tied embeddings); a group is what is summed, measured and updated together. A parameter that no copy of
its stage used has no gradient when it is updated (``grad is None``), as in one process: no optimiser
decays it or keeps state for it. Gradients of parameters in bfloat16 or float16 are added up in float32, over
micro-batches, copies and replicas, and are in the parameter's dtype once hooks or an optimiser see them. Of a
parameter that is cut over further dimensions of the mesh, the buffers have this rank's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite, nan

import torch
from torch import Tensor, nn

from counterflow.common.tensors import devices
from counterflow.common.tensors.dtensors import like, local, part_of
from counterflow.common.tensors.dtypes import sum_dtype
from counterflow.errors import ConfigError

from ..mini_batch.losses import added
from ..transport.base import Group, Pending, Transport
from .compressed_sums import CompressedSum, SumCompression
from .hooks import Hooks, called

BUCKET_BYTES = 25 * 1024 * 1024
"""The size of the pieces in which gradients are summed, as in torch's DistributedDataParallel."""


_NORM_PIECE = 2**20
"""Values of which a norm is taken at once."""


class _Flat:
    """Gradients of some parameters of one dtype and device, one after another.

    Whether a parameter was used is seen from the version counter of its gradient, which every view has for
    itself: autograd adds to gradients in place (to a DTensor, and FSDP to what it wraps). Where others hold
    copies, one number a parameter follows that says so and is summed with the gradients.
    """

    __slots__ = (
        "_clean", "_dtype", "_shown", "_used", "gradients", "parameters", "residual", "residuals", "tail",
        "views", "whole",
    )  # fmt: skip

    def __init__(self, parameters: Sequence[nn.Parameter], *, shared: bool, compressed: bool) -> None:
        tensors = [local(parameter) for parameter in parameters]
        size = sum(tensor.numel() for tensor in tensors)
        tail = len(parameters) if shared else 0
        self.parameters = parameters
        self._dtype = tensors[0].dtype
        self.whole = torch.zeros(size + tail, dtype=sum_dtype(self._dtype), device=tensors[0].device)
        self.gradients = self.whole[:size]
        self.tail = self.whole[size:]
        self.views: list[Tensor] = []
        at = 0
        for tensor in tensors:
            view = self.whole[at : at + tensor.numel()].view(tensor.shape)
            self.views.append(view.data)  # .data: with a version counter of its own
            at += tensor.numel()
        self.residual: Tensor | None = None
        """What was lost of the gradients when they were sent; None: they are sent in full."""
        self.residuals: list[Tensor] = []
        """Its part of each parameter, in the parameter's shape."""
        if compressed and shared and self.whole.dtype is torch.float32:
            self.residual = torch.zeros_like(self.gradients)
            parts = self.residual.split([tensor.numel() for tensor in tensors])
            self.residuals = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        self._shown = [like(parameter, view) for parameter, view in zip(parameters, self.views, strict=True)]
        self._clean = self._changes()
        self._used: list[bool] | None = None

    def attach(self) -> None:
        """Let autograd add to the gradients."""
        for parameter, shown in zip(self.parameters, self._shown, strict=True):
            if parameter.grad is not shown:
                _put(parameter, shown)

    def show(self) -> None:
        """Let the parameters have their gradients, in their dtypes; None where there is none.

        Those of low precision are cast where they are: the sums are not there any more.
        """
        shown = self._shown
        if self.whole.dtype is not self._dtype:
            cast, at = _cast_in_place(self.gradients, self._dtype), 0
            shown = []
            for parameter, view in zip(self.parameters, self.views, strict=True):
                shown.append(like(parameter, cast[at : at + view.numel()].view(view.shape)))
                at += view.numel()
        for parameter, gradient, used in zip(self.parameters, shown, self.used(), strict=True):
            if not used:
                parameter.grad = None
            elif parameter.grad is not gradient:
                _put(parameter, gradient)

    def detach(self) -> None:
        """Let the parameters have no gradients that anybody could change."""
        for parameter in self.parameters:
            parameter.grad = None
            if self.whole.dtype is not self._dtype:
                parameter.grad_dtype = self._dtype

    def collect(self) -> None:
        """See which parameters were used; take in gradients that somebody put in place of these."""
        if self._used is not None:
            return
        self._used = used = [now != then for now, then in zip(self._changes(), self._clean, strict=True)]
        for index, (parameter, shown) in enumerate(zip(self.parameters, self._shown, strict=True)):
            grad = parameter.grad
            if grad is not shown:
                with torch.no_grad():
                    if grad is None:
                        self.views[index].zero_()
                    else:
                        self.views[index].copy_(part_of(grad, parameter))
                used[index] = grad is not None
        if not len(self.tail):
            return
        if all(used):
            self.tail.fill_(1)
        else:
            self.tail.copy_(torch.tensor(used))

    def _changes(self) -> list[int]:
        """How often each gradient was changed."""
        return [
            view._version if shown is view else view._version + shown._version  # noqa: SLF001 - documented as it
            for view, shown in zip(self.views, self._shown, strict=True)
        ]

    def used(self) -> list[bool]:
        """Which parameters were used, here or, once the sum is there, on any copy."""
        self.collect()
        assert self._used is not None
        if len(self.tail) and not all(self._used):
            self._used = [abs(number) > 0 for number in self.tail.tolist()]
        return self._used

    def call_hooks(self, hooks: Hooks) -> None:
        """Take what the parameters' hooks make of the gradients."""
        used = self.used()
        for index, (parameter, shown) in enumerate(zip(self.parameters, self._shown, strict=True)):
            if not used[index] or parameter not in hooks:
                continue
            low = self.whole.dtype is not self._dtype
            gradient = shown.to(self._dtype) if low else shown
            before = gradient._version  # noqa: SLF001 - documented as it
            if low:
                _put(parameter, None, self._dtype)
            result = called(parameter, gradient)
            same = result is gradient and (not low or gradient._version == before)  # noqa: SLF001 - as above
            _put(parameter, shown)
            if result is None:
                self.views[index].zero_()
                used[index] = False
                if len(self.tail):
                    self.tail[index] = 0
            elif not same:
                self.views[index].copy_(part_of(result.detach(), parameter))

    def clear(self) -> None:
        self.whole.zero_()
        self._clean = self._changes()
        self._used = None


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
        self._flats: list[_Flat] = []
        self._frozen: dict[str, nn.Parameter] = {}
        self._pending: list[Pending] = []
        self._compression = compression
        self._compressed: list[CompressedSum] = []
        self.make()

    @property
    def nbytes(self) -> int:
        """Size of the buffers in bytes."""
        residuals = sum(flat.residual.nbytes for flat in self._flats if flat.residual is not None)
        return residuals + sum(flat.whole.nbytes for flat in self._flats)

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
            _Flat(parameters, shared=shared, compressed=compressed) for parameters in by_kind.values()
        ]
        for name, residual in self.residuals.items():
            if name in before:
                residual.copy_(before[name])
        self._frozen = {name: p for name, p in self.parameters.items() if not p.requires_grad}

    def attach(self) -> None:
        """Let autograd add to the gradients: from here to ``detach`` nobody else touches them.

        Raises:
            ConfigError: a parameter was unfrozen, and the others do not know of its gradient.
        """
        if self._frozen:
            unfrozen = next((name for name, p in self._frozen.items() if p.requires_grad), None)
            if unfrozen is not None:
                raise ConfigError(
                    f"{unfrozen} of stage {self.stage} requires a gradient and did not when the pipeline was "
                    "made; let pipeline.set_trainable() unfreeze it, on all workers"
                )
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
            numbers = real(flat.whole)
            size = max(1, BUCKET_BYTES // numbers.element_size())
            for bucket in numbers.split(size):
                self._pending.append(transport.all_reduce(bucket, self.group))

    def _start_compressed(self, flat: _Flat, residual: Tensor, transport: Transport) -> None:
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
            numbers = real(flat.gradients)
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


class SquaredNorms:
    """Sum of squares of each group's gradients, in transfer to the host.

    Args:
        groups: groups of gradients.
    """

    def __init__(self, groups: Iterable[GradientGroup]) -> None:
        norms = [group.norms() for group in groups]
        self._pieces = [len(of_group) for of_group in norms]
        norms_of_all = [norm for of_group in norms for norm in of_group]
        self._norms = (
            None
            if not norms_of_all
            else norms_of_all[0]
            if len(norms_of_all) == 1
            else torch.stack(norms_of_all)
        )
        """Norms of all pieces (of one: a single number), on their device; None: there are no pieces."""
        self._later = None if self._norms is None else devices.HostCopy(self._norms)

    def not_finite(self) -> Tensor | None:
        """True if the square of a piece's norm is not finite, on their device; None: there are no pieces."""
        return None if self._norms is None else ~(self._norms**2).isfinite().all()

    def read(self) -> list[float]:
        """The sums; a device's host waits once, until it has come to them."""
        numbers = [] if self._later is None else self._later.read()
        values = iter([norm * norm for norm in (numbers if isinstance(numbers, list) else [numbers])])
        return [added(islice(values, pieces)) for pieces in self._pieces]


class OwnNorm:
    """A worker's part of the global gradient norm, and whether all its gradients are finite.

    Args:
        groups: groups of all its gradients.
    """

    def __init__(self, groups: Sequence[GradientGroup]) -> None:
        self._groups = groups
        self._squares = SquaredNorms(groups)

    def drop(self) -> None:
        """Set all gradients to zero if one is not finite, where they are; the host goes on."""
        dead = self._squares.not_finite()
        if dead is not None:
            for gradients in self._groups:
                gradients.drop(dead)

    def read(self) -> tuple[float, int | None]:
        """The squared norm that is counted here; the first stage with a gradient that is not finite."""
        squares = list(zip(self._squares.read(), self._groups, strict=True))
        odd = [gradients.stage for square, gradients in squares if not isfinite(square)]
        return sum(square for square, gradients in squares if gradients.counted), min(odd, default=None)


class StageNorm:
    """A worker's part of the norm of a stage's gradients, and whether they are finite.

    Args:
        stage: number of the stage.
        counted: squared norm counted on this worker, on the gradients' device.
        alive: whether all gradients of the stage so far were finite, on the gradients' device.
    """

    def __init__(self, stage: int, counted: Tensor, alive: Tensor) -> None:
        self._stage, self._later = stage, devices.HostCopy(torch.stack([counted, alive.double()]))

    def read(self) -> tuple[float, int | None]:
        """The squared norm that is counted here; the stage, if a gradient was not finite."""
        counted, alive = self._later.read()
        return (counted, None) if alive else (nan, self._stage)


def squared_norms(groups: Sequence[GradientGroup], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums of squares of gradients, where they are: of all, and of what this worker counts."""
    all_norms, counted = [], []
    for group in groups:
        norms = group.norms()
        all_norms += norms
        if group.counted:
            counted += norms
    total = (
        (torch.stack(all_norms) ** 2).sum()
        if all_norms
        else torch.zeros((), dtype=torch.float64, device=device)
    )
    if len(counted) == len(all_norms):
        return total, total
    return total, (torch.stack(counted) ** 2).sum() if counted else torch.zeros_like(total)


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor of gradients with a global norm, as in ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def unique(parameters: Iterable[tuple[str, nn.Parameter]], seen: set[int]) -> dict[str, nn.Parameter]:
    """Trainable parameters that are not in ``seen`` (by identity), to which they are added."""
    parameters_by_name = {}
    for name, parameter in parameters:
        if (parameter.is_floating_point() or parameter.is_complex()) and id(parameter) not in seen:
            seen.add(id(parameter))
            parameters_by_name[name] = parameter
    return parameters_by_name


def _put(parameter: nn.Parameter, gradient: Tensor | None, dtype: torch.dtype | None = None) -> None:
    """Let a parameter have a gradient, perhaps not of its own dtype; or none, and take one of ``dtype``."""
    wanted = dtype if gradient is None else gradient.dtype
    if parameter.grad_dtype is not wanted:
        parameter.grad = None
        parameter.grad_dtype = wanted
    parameter.grad = gradient


def _cast_in_place(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers in a dtype of half the size, in the first half of their own memory.

    Each piece is as long as all before it, so what is written lies before what is read; the first piece goes
    through memory of its own.
    """
    size = numbers.numel()
    cast = numbers.view(dtype)[:size]
    done = min(size, _FIRST)
    cast[:done] = numbers[:done].to(dtype)
    while done < size:
        end = min(size, 2 * done)
        cast[done:end].copy_(numbers[done:end])
        done = end
    return cast


_FIRST = 2**16
"""Values of the first piece."""


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs: sums and norms are the same."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
