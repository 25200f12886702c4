"""Messages in half precision where that loses little: "automatic precision compression" (APC).

The sender divides a tensor by a power of two so that its largest value lies near the top of float16's range,
and converts it. Where that cannot be (a value is not finite, or so small or large that the power of two
would not be a number of the tensor's own type), the tensor follows in full, in a message of its own; the
receiver learns it from the head of the first one.

Invariant: a value that is 2**-28 of its tensor's largest or more is restored to 2**-11 of itself, a smaller
one to 2**-39 of the largest; a tensor that is zero everywhere stays so, one that is not does not become so.

Source: Yang et al., WPipe (ICLR 2022), appendix A.3, Figure 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .values import BufferPool, TensorSpec

_TOP = 14
"""The largest value of a tensor is brought to between 2**14 and 2**15; float16 ends before 2**16."""

_MOST = 120
"""Powers of two up to this one, and their inverses, are normal numbers of every type that is compressed."""

_COMPRESSED = (torch.float32, torch.float64)

_HEAD = torch.int16
"""A message begins with two numbers a compressed tensor: whether it follows in full, and the exponent."""


class Compression:
    """Makes smaller messages of tensors, and tensors of these; counts bytes.

    Args:
        device: where the worker computes: what is on the host beside it goes as it is.

    Attributes:
        plain_bytes: of all that was given to be sent.
        sent_bytes: of what was sent instead.
        sent_full: tensors that could not be converted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._all_on_host = device.type == "cpu"
        self.plain_bytes = 0
        self.sent_bytes = 0
        self.sent_full = 0

    def _converts(self, dtype: torch.dtype, *, on_host: bool) -> bool:
        return dtype in _COMPRESSED and (self._all_on_host or not on_host)

    def message(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """What a message of some tensors consists of."""
        converted = sum(self._converts(spec.dtype, on_host=spec.on_host) for spec in specs)
        head = TensorSpec(torch.Size((converted, 2)), _HEAD, requires_grad=False, on_host=self._all_on_host)
        return [
            head,
            *(
                TensorSpec(spec.shape, torch.float16, requires_grad=False, on_host=spec.on_host)
                if self._converts(spec.dtype, on_host=spec.on_host)
                else spec
                for spec in specs
            ),
        ]

    def pack(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The message, and what follows it in full because it cannot be converted."""
        head: list[tuple[int, int]] = []
        message: list[Tensor] = []
        full: list[Tensor] = []
        for tensor in tensors:
            if not self._converts(tensor.dtype, on_host=tensor.device.type == "cpu"):
                message.append(tensor)
                continue
            exponent = _exponent(tensor)
            if exponent is None:
                full.append(tensor)
                message.append(torch.zeros_like(tensor, dtype=torch.float16))
            else:
                half = torch.empty_like(tensor, dtype=torch.float16)
                message.append(torch.mul(tensor, 2.0**-exponent, out=half))
            head.append((exponent is None, exponent or 0))
        message.insert(0, torch.tensor(head, dtype=_HEAD, device=self._device).reshape(-1, 2))
        self.sent_full += len(full)
        self.plain_bytes += sum(tensor.nbytes for tensor in tensors)
        self.sent_bytes += sum(tensor.nbytes for tensor in (*message, *full))
        return message, full

    def unpack(
        self,
        message: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        pool: BufferPool,
        rest: Callable[[], Sequence[Tensor]],
    ) -> list[Tensor]:
        """The tensors that were packed.

        Args:
            message: what came.
            specs: of the tensors.
            pool: where they are taken from; what is not kept of the message is given to it.
            rest: receives what follows in full.
        """
        head = message[0].tolist()
        full = iter(rest() if any(whole for whole, _ in head) else ())
        each = iter(head)
        found = []
        done = [message[0]]
        for spec, part in zip(specs, message[1:], strict=True):
            if not self._converts(spec.dtype, on_host=spec.on_host):
                found.append(part)
                continue
            whole, exponent = next(each)
            tensor = pool.take(spec)
            with torch.no_grad():
                if whole:
                    tensor.copy_(next(full))
                else:
                    tensor.copy_(part).mul_(2.0**exponent)
            found.append(tensor)
            done.append(part)
        pool.give(done)
        return found


def _exponent(tensor: Tensor) -> int | None:
    """Of the power of two that the tensor is divided by; None if it cannot be converted."""
    if not tensor.numel():
        return 0
    least, most = torch.stack(torch.aminmax(tensor.detach())).tolist()  # from a GPU both at once
    largest = max(-least, most)
    if largest == 0.0:
        return 0
    if not (math.isfinite(least) and math.isfinite(most)):
        return None
    exponent = math.frexp(largest)[1] - 1 - _TOP
    return exponent if abs(exponent) <= _MOST else None
