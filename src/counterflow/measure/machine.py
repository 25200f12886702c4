"""The machine of this process: its cores, processor and memory, as the system reports them."""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
from pathlib import Path

import torch

from counterflow.runtime.counted_memory import worker_limit


def cores() -> int:
    """Number of CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(device: str, workers: int) -> float:
    """Bytes of memory of a worker."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / workers


def worker_bytes(device: str, workers: int) -> float:
    """Bytes that a worker may use: its memory, or ``$COUNTERFLOW_WORKER_BYTES`` if that is less."""
    limit = worker_limit(torch.device(device))
    return min(memory_bytes(device, workers), math.inf if limit is None else float(limit))


def peak_bytes(device: torch.device) -> int:
    """Maximum memory in use: allocated by torch on a GPU, otherwise resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return peak if sys.platform == "darwin" else 1024 * peak


def beside_torch_bytes(device: torch.device) -> int:
    """GPU memory in use outside torch's allocator; 0 on the CPU.

    It is that of CUDA, NCCL's communicators, other libraries and other processes, for which ``reserve_bytes``
    stands.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def reset_peak_bytes(device: torch.device) -> None:
    """Reset the maximum on a GPU; for a process the system counts it from its start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_name(device: str, threads: int) -> str:
    """The workers' device in words."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    used = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{cores()} cores of {processor()}, {used} per worker, torch {torch.__version__}"


def processor() -> str:
    """The processor's name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
