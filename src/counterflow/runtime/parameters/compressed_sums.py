"""Sums of gradients that travel in bfloat16 or in 8 bits, with error feedback.

Each worker of a group adds to its gradients what it lost before (its residual), quantises them, and keeps
what is lost now. The sum has two exchanges of shares, as an all-reduce has: each worker receives one share of
all workers' gradients and adds these up in float32 in the order of the ranks; then it quantises the total,
adds what that loses to its own residual, and sends it to all.

Invariant: all workers restore the totals from the same bytes, so copies get bitwise equal sums. The totals of
all steps so far and the residuals of all workers together are the gradients of all steps so far, up to
rounding in float32: what is lost in one step is sent in a later one. A value that is not finite arrives as
one that is not finite, in 8 bits with all of its block, and leaves residuals as they were.

Source: Seide et al., 1-bit stochastic gradient descent (Interspeech 2014), for error feedback; Tang et al.,
1-bit Adam (ICML 2021), for the all-reduce in two exchanges. There the second one has residuals of its own;
here they are part of those of the worker that adds up the share, so a weight has one on each worker.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.errors import ConfigError
from counterflow.execution import Execution, why_in_full
from counterflow.schedule.ir import Schedule

from ..transport.base import Group, Pending, Transport

BLOCK = 256
"""Values with one scale in 8 bits."""

_LEVELS = 127
"""Largest value in 8 bits; the range is symmetric."""

_SCALE_BYTES = 4


class Codec(Protocol):
    """A smaller form of rows of float32 values, as bytes."""

    multiple: int
    """Number of which a row's length is a multiple."""

    def encode(self, rows: Tensor) -> Tensor:
        """Bytes ``[k, n]`` of rows of values ``[k, m]``."""

    def decode(self, rows: Tensor) -> Tensor:
        """Values ``[k, m]`` of rows of bytes ``[k, n]``."""


class Halves(Codec):
    """bfloat16: rounded to 8 bits of mantissa.

    >>> Halves().decode(Halves().encode(torch.tensor([[1.0, 1.00390625, -3.0]])))
    tensor([[ 1.,  1., -3.]])
    """

    multiple = 1

    @override
    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).view(torch.uint8)

    @override
    def decode(self, rows: Tensor) -> Tensor:
        return rows.view(torch.bfloat16).to(torch.float32)


class Bytes(Codec):
    """8-bit whole numbers, and for each block of 256 values the largest one divided by 127 as its scale.

    A value is off by at most half its block's scale.

    >>> block = torch.zeros(1, 256)
    >>> block[0, :3] = torch.tensor([127.0, 1.4, -0.5])
    >>> Bytes().decode(Bytes().encode(block))[0, :3]
    tensor([127.,   1.,   0.])
    """

    multiple = BLOCK

    @override
    def encode(self, rows: Tensor) -> Tensor:
        blocks = rows.view(len(rows), -1, BLOCK)
        scales = blocks.abs().amax(-1) / _LEVELS
        numbers = (blocks / scales.unsqueeze(-1)).round_()
        numbers = numbers.nan_to_num_(0.0, _LEVELS, -_LEVELS).clamp_(-_LEVELS, _LEVELS).to(torch.int8)
        return torch.cat([numbers.view(len(rows), -1).view(torch.uint8), scales.view(torch.uint8)], 1)

    @override
    def decode(self, rows: Tensor) -> Tensor:
        count = rows.shape[1] // (BLOCK + _SCALE_BYTES)
        numbers = rows[:, : count * BLOCK].view(torch.int8).to(torch.float32).view(len(rows), count, BLOCK)
        scales = rows[:, count * BLOCK :].contiguous().view(torch.float32)
        return numbers.mul_(scales.unsqueeze(-1)).view(len(rows), -1)


CODECS: dict[str, Codec] = {"bfloat16": Halves(), "int8": Bytes()}
"""Codecs by the value of ``gradient_compression``."""


class SumCompression:
    """A form in which a worker's gradients are summed; counts bytes.

    Args:
        name: one of ``CODECS``.

    Attributes:
        plain_bytes: bytes that all-reduces would have sent from this worker.
        sent_bytes: bytes that were sent instead.
    """

    def __init__(self, name: str) -> None:
        self.codec = CODECS[name]
        self.plain_bytes = 0.0
        self.sent_bytes = 0.0


class CompressedSum:
    """A sum in flight.

    Args:
        numbers: float32 gradients, one dimension; they become the sum in ``wait``.
        residual: what this worker has lost of them so far; changed.
        compression: their form.
        group: workers that sum.
        transport: transport to them.
    """

    def __init__(
        self,
        numbers: Tensor,
        residual: Tensor,
        compression: SumCompression,
        group: Group,
        transport: Transport,
    ) -> None:
        self._numbers, self._residual, self._codec = numbers, residual, compression.codec
        self._group, self._transport = group, transport
        workers, count = len(group.ranks), numbers.numel()
        multiple = workers * self._codec.multiple
        self._share = -(-count // multiple) * self._codec.multiple
        with torch.no_grad():
            wanted = numbers + residual
            padded = wanted.new_zeros(workers * self._share)
            padded[:count] = wanted
            message = self._codec.encode(padded.view(workers, self._share))
            lost = wanted - self._codec.decode(message).view(-1)[:count]
            torch.where(lost.isfinite(), lost, residual, out=residual)
        part = (workers - 1) / workers
        compression.plain_bytes += 2 * part * numbers.nbytes
        compression.sent_bytes += 2 * part * message.nbytes
        self._pending = self._exchange(message)

    def _exchange(self, message: Tensor) -> Pending:
        self._received = torch.empty_like(message)
        return self._transport.all_to_all(self._received, message, self._group)

    def add_up(self) -> None:
        """Add up this worker's share, once all have sent it, and begin to send the total."""
        self._pending.wait()
        workers, place = len(self._group.ranks), self._group.ranks.index(self._transport.rank)
        with torch.no_grad():
            shares = self._codec.decode(self._received)
            total = shares[0]
            for share in shares[1:]:
                total += share
            message = self._codec.encode(total.unsqueeze(0))
            lost = total - self._codec.decode(message)[0]
            residual = self._residual[place * self._share : (place + 1) * self._share]
            lost = lost[: len(residual)]
            residual += lost.masked_fill_(~lost.isfinite(), 0.0)
            message = message.expand(workers, -1).contiguous()
        self._pending = self._exchange(message)

    def wait(self) -> None:
        """Put the sum in the place of the gradients."""
        self._pending.wait()
        with torch.no_grad():
            self._numbers.copy_(self._codec.decode(self._received).view(-1)[: self._numbers.numel()])


def refuse_uncompressed(execution: Execution, schedule: Schedule, *, parallelized: bool) -> None:
    """Refuse what sums of gradients are not compressed for.

    Args:
        execution: how it is run.
        schedule: what is run.
        parallelized: True if the mesh has further dimensions.

    Raises:
        ConfigError: compressed sums do not go with the rest.
    """
    why = why_in_full(execution, schedule.scheme, synchronous=schedule.synchronous)
    if why is None and parallelized and execution.gradient_compression is not None:
        why = (
            f'gradient_compression = "{execution.gradient_compression}" does not go with parallelize: '
            "residuals are saved for whole weights; use only one of them"
        )
    if why is not None:
        raise ConfigError(why)
