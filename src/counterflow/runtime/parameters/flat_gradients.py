"""Flat buffers of gradients of one dtype and device.

Invariant: gradients of parameters in bfloat16 or float16 are added up in float32, and are in the parameter's
dtype once hooks or an optimiser see them. Of a parameter that is cut over further dimensions of the mesh, a
buffer has this rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from counterflow.common.tensors.dtensors import like, local, part_of
from counterflow.common.tensors.dtypes import sum_dtype
from counterflow.common.tensors.unknown_values import values_unknown

from .hooks import Hooks, called


class FlatGradients:
    """Gradients of some parameters of one dtype and device, one after another.

    Whether a parameter was used is seen from the version counter of its gradient, which every view has for
    itself: autograd adds to gradients in place (to a DTensor, and FSDP to what it wraps). Where others hold
    copies, one number a parameter follows that says so and is summed with the gradients.
    """

    __slots__ = (
        "_clean",
        "_dtype",
        "_shown",
        "_used",
        "buffer",
        "gradients",
        "parameters",
        "residual",
        "residuals",
        "tail",
        "views",
    )  # fmt: skip

    def __init__(self, parameters: Sequence[nn.Parameter], *, shared: bool, compressed: bool) -> None:
        tensors = [local(parameter) for parameter in parameters]
        size = sum(tensor.numel() for tensor in tensors)
        tail = len(parameters) if shared else 0
        self.parameters = parameters
        self._dtype = tensors[0].dtype
        self.buffer = torch.zeros(size + tail, dtype=sum_dtype(self._dtype), device=tensors[0].device)
        self.gradients = self.buffer[:size]
        self.tail = self.buffer[size:]
        self.views: list[Tensor] = []
        at = 0
        for tensor in tensors:
            view = self.buffer[at : at + tensor.numel()].view(tensor.shape)
            self.views.append(view.data)  # .data: with a version counter of its own
            at += tensor.numel()
        self.residual: Tensor | None = None
        """What was lost of the gradients when they were sent; None: they are sent in full."""
        self.residuals: list[Tensor] = []
        """Its part of each parameter, in the parameter's shape."""
        if compressed and shared and self.buffer.dtype is torch.float32:
            self.residual = torch.zeros_like(self.gradients)
            parts = self.residual.split([tensor.numel() for tensor in tensors])
            self.residuals = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        self._shown = [like(parameter, view) for parameter, view in zip(parameters, self.views, strict=True)]
        self._clean = self._changes()
        self._used: list[bool] | None = None
        self.detach()  # steps begin with none, whatever trained the parameters before

    def foreign(self) -> nn.Parameter | None:
        """The first parameter with a gradient that is not here and not zero."""
        for parameter, shown in zip(self.parameters, self._shown, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient is not shown and not values_unknown() and gradient.any():
                return parameter
        return None

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
        if self.buffer.dtype is not self._dtype:
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
            if self.buffer.dtype is not self._dtype:
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
        return [
            view._version if shown is view else view._version + shown._version  # noqa: SLF001 - documented as it
            for view, shown in zip(self.views, self._shown, strict=True)
        ]

    def used(self) -> list[bool]:
        """True for each parameter that was used, here or, once the sum exists, on any copy."""
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
            low = self.buffer.dtype is not self._dtype
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
        """Set the gradients to zero; no parameter was used."""
        self.buffer.zero_()
        self._clean = self._changes()
        self._used = None


def _put(parameter: nn.Parameter, gradient: Tensor | None, dtype: torch.dtype | None = None) -> None:
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
