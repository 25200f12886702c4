"""Messages in half precision: "automatic precision compression" (APC).

The sender divides each float32 or float64 tensor by a power of two, so its largest finite value lies near the
top of float16's range, and converts it. The exponents are the first tensor of the message. Both sides compute
with them where the tensors are: no host waits for a value.

Invariant: a value that is 2**-28 of its tensor's largest or more is restored to 2**-11 of itself, a smaller
one to 2**-39 of the largest; infinities and NaN are restored as they are (a value within 2**-12 of the type's
largest may become infinite). A tensor that is zero everywhere stays so, one that is not does not become so.

Source: Yang et al., WPipe (ICLR 2022), appendix A.3, Figure 12.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .values import BufferPool, TensorSpec

_TOP = 14
"""The largest value of a tensor is brought to between 2**14 and 2**15; float16 ends before 2**16."""

_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
"""Integer type of equal size, bits of the mantissa and the exponent's bias, by each compressed dtype."""

_HEAD = torch.int16


class Compression:
    """Compresses tensors to messages and back; counts bytes.

    Args:
        device: device of the worker's computation; a GPU's worker sends host tensors uncompressed.

    Attributes:
        plain_bytes: bytes of all tensors that were sent.
        sent_bytes: bytes of their messages.
    """

    def __init__(self, device: torch.device) -> None:
        self._all_on_host = device.type == "cpu"
        self.plain_bytes = 0
        self.sent_bytes = 0

    def _converts(self, dtype: torch.dtype, *, on_host: bool) -> bool:
        return dtype in _BITS and (self._all_on_host or not on_host)

    def message(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Tensors of the message of some tensors."""
        message = []
        converted = 0
        for spec in specs:
            if self._converts(spec.dtype, on_host=spec.on_host):
                converted += 1
                message.append(
                    TensorSpec(spec.shape, torch.float16, requires_grad=False, on_host=spec.on_host)
                )
            else:
                message.append(spec)
        head = TensorSpec(torch.Size((converted,)), _HEAD, requires_grad=False, on_host=self._all_on_host)
        return [head, *message] if converted else message

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The message of some tensors."""
        exponents: list[Tensor] = []
        message: list[Tensor] = []
        for tensor in tensors:
            if not self._converts(tensor.dtype, on_host=tensor.device.type == "cpu"):
                message.append(tensor)
                continue
            exponent = _exponent(tensor)
            message.append(_half(tensor, exponent))
            exponents.append(exponent)
        if exponents:
            message.insert(0, torch.stack(exponents).to(_HEAD))
        self.plain_bytes += sum(tensor.nbytes for tensor in tensors)
        self.sent_bytes += sum(tensor.nbytes for tensor in message)
        return message

    def round(self, tensor: Tensor) -> Tensor:
        """Return the tensor that a compressed message restores, for a message that is not compressed."""
        plain = tensor.detach()
        if not self._converts(tensor.dtype, on_host=tensor.device.type == "cpu"):
            return tensor
        exponent = _exponent(plain)
        first, second = _powers(exponent, tensor.dtype)
        restored = _half(plain, exponent).to(tensor.dtype).mul_(first).mul_(second)
        return restored.requires_grad_(tensor.requires_grad)

    def unpack(
        self, message: Sequence[Tensor], specs: Sequence[TensorSpec], pool: BufferPool
    ) -> list[Tensor]:
        """Restore the tensors that were packed.

        Args:
            message: the received message.
            specs: specs of the tensors.
            pool: provides their buffers; buffers of the message that are no longer needed return to it.
        """
        if len(message) == len(specs):
            return [*message]
        head, *parts = message
        exponents = iter(head.to(torch.int32).unbind())
        tensors = []
        done = [head]
        for spec, part in zip(specs, parts, strict=True):
            if not self._converts(spec.dtype, on_host=spec.on_host):
                tensors.append(part)
                continue
            first, second = _powers(next(exponents), spec.dtype)
            tensor = pool.take(spec)
            with torch.no_grad():
                tensor.copy_(part).mul_(first).mul_(second)
            tensors.append(tensor)
            done.append(part)
        pool.put(done)
        return tensors


def _half(tensor: Tensor, exponent: Tensor) -> Tensor:
    first, second = _powers(-exponent, tensor.dtype)
    half = torch.empty_like(tensor, dtype=torch.float16)
    return torch.mul(tensor * first, second, out=half)


def _exponent(tensor: Tensor) -> Tensor:
    """Exponent of the power of two that a tensor is divided by, on the tensor's device.

    >>> _exponent(torch.tensor([1.5, -3.0, float("inf")]))
    tensor(-13, dtype=torch.int32)
    """
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int32, device=tensor.device)
    finite = torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0)
    largest = torch.stack(torch.aminmax(finite)).abs().amax()
    return (torch.frexp(largest).exponent - 1 - _TOP).masked_fill(largest == 0, 0)


def _powers(exponent: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers whose product is a power of two that the type may not represent; exact to the bit.

    >>> _powers(torch.tensor(140), torch.float32) == (2.0**70, 2.0**70)
    True
    """
    integers, mantissa, bias = _BITS[dtype]
    first = exponent.to(integers) >> 1
    second = exponent.to(integers) - first
    return ((first + bias) << mantissa).view(dtype), ((second + bias) << mantissa).view(dtype)
