"""Bytes that this worker allocates for tensors: what torch's allocator gave it, kernels' scratch included.

On the CPU every allocation and every free of the calling thread is noted, so the peak is exact and the same
each time; workers that are threads are told apart. On a GPU torch's allocator tells, of all that a process
does on it. What libraries allocate for themselves (Gloo's and NCCL's buffers, oneDNN's) is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from counterflow.runtime.torch_private import allocations, errors_alone, start_allocations


class Allocated:
    """What is allocated now, and was at most, beside what was there before.

    Attributes:
        current: bytes since the beginning; below 0 where more was freed.
        peak: the most that there were at once.
    """

    __slots__ = ("current", "peak")

    def __init__(self, current: int = 0) -> None:
        self.current = self.peak = current

    @property
    def rise(self) -> int:
        """The peak, beside what stays."""
        return self.peak - self.current

    def note(self, sizes: Iterator[int]) -> None:
        """Go through what was allocated, and freed (below 0)."""
        for size in sizes:
            self.current += size
            self.peak = max(self.peak, self.current)


@contextmanager
def allocated(device: torch.device | str = "cpu", *, since: int = 0) -> Iterator[Allocated]:
    """Notes what the block allocates; read it after the block. Blocks do not nest.

    Args:
        device: where.
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
