"""Bytes that this worker allocates for tensors from torch's allocator, including scratch memory of kernels.

On the CPU every allocation and every free of the calling thread is noted, so the peak is exact and
reproducible, and threads are separated. On a GPU torch's allocator counts everything that a process does on
it. Memory that libraries allocate themselves (buffers of Gloo, NCCL and oneDNN) is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from counterflow.common.tensors.torch_private import allocations, errors_alone, start_allocations


class Allocated:
    """Current and maximum allocation, in addition to earlier ones.

    Attributes:
        current: bytes since the beginning; negative if more was freed.
        peak: maximum bytes at once.
    """

    __slots__ = ("current", "peak")

    def __init__(self, current: int = 0) -> None:
        self.current = self.peak = current

    @property
    def rise(self) -> int:
        """The peak in excess of what stays."""
        return self.peak - self.current

    def note(self, sizes: Iterator[int]) -> None:
        """Process allocations, and frees (negative)."""
        for size in sizes:
            self.current += size
            self.peak = max(self.peak, self.current)


@contextmanager
def allocated(device: torch.device | str = "cpu", *, since: int = 0) -> Iterator[Allocated]:
    """Record the allocations of the block; read the result after the block. Blocks do not nest.

    Args:
        device: device of the tensors.
        since: bytes that were allocated before.

    >>> with allocated() as bytes:
    ...     kept = torch.ones(100) + torch.ones(100)
    >>> bytes.current, bytes.peak
    (400, 1200)
    """
    device = torch.device(device)
    found = Allocated(since)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize(device)
        found.current = since + torch.cuda.memory_allocated(device) - before
        found.peak = since + torch.cuda.max_memory_allocated(device) - before
        return
    with errors_alone():
        start_allocations()
        try:
            yield found
        finally:
            sizes = list(allocations())
    found.note(iter(sizes))
