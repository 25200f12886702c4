"""Memory that workers of this machine can use: what is free, within the limits of a container or a user.

Invariant: nothing is guessed. What the system does not report is no limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.optim import Optimizer

WORKER_BYTES = "COUNTERFLOW_WORKER_BYTES"
"""Environment variable with the bytes of a worker's memory, if it is to use less than there are."""

_MEMINFO = Path("/proc/meminfo")
"""Linux's table of memory."""

_CGROUP = Path("/proc/self/cgroup")
"""Linux's list of the control groups of this process."""

_CGROUPS = Path("/sys/fs/cgroup")
"""Folder of control groups."""

_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1}
"""States that optimizers of torch make of each trained weight in their first update."""


def available_bytes_here(workers: int) -> int | None:
    """Memory of a worker of this machine; None: unknown.

    Args:
        workers: workers that share the machine's memory, if it has no GPU.
    """
    if torch.cuda.is_available():
        return available_bytes_on(torch.device("cuda", torch.cuda.current_device()), workers)
    return available_bytes_on(torch.device("cpu"), workers)


def available_bytes_on(device: torch.device, workers: int, allocated: int = 0) -> int | None:
    """Memory of a worker on a device: what is free, and what it has allocated there; None: unknown.

    Args:
        device: device of the worker.
        workers: workers that share it.
        allocated: bytes that the worker has allocated; of a GPU what torch has reserved counts instead.
    """
    free, limit = free_bytes_on(device), worker_limit(device)
    if free is not None and device.type == "cuda":
        free += torch.cuda.memory_reserved(device)
    elif free is not None:
        free = free // workers + allocated
    return min((amount for amount in (free, limit) if amount is not None), default=None)


def free_bytes_on(device: torch.device) -> int | None:
    """Free memory of a device, of which the CPU's is the machine's or the container's; None: unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_free_bytes(), default=None) if device.type == "cpu" else None


def worker_limit(device: torch.device) -> int | None:
    """Bytes that a worker may use by ``$COUNTERFLOW_WORKER_BYTES``, or by torch's limit on a GPU.

    None: it has no limit of its own.
    """
    known = [int(text)] if (text := os.environ.get(WORKER_BYTES)) else []
    if device.type == "cuda":
        share = torch.cuda.get_per_process_memory_fraction(device)
        known.append(int(share * torch.cuda.get_device_properties(device).total_memory))
    return min(known, default=None)


def _free_bytes() -> Iterator[int]:
    """Free memory of the machine, and of the control groups of this process that have a limit."""
    yield from _machine_bytes()
    try:
        rows = [line.split(":", 2) for line in _CGROUP.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in (row for row in rows if len(row) == 3):
        names = {"": ("memory.max", "memory.current", "inactive_file")}
        names["memory"] = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        key = "memory" if "memory" in controllers.split(",") else controllers
        if key not in names:
            continue
        root = _CGROUPS / key
        group = root / path.strip("/")
        # In a container the path may be that of the host, and its own group is the root.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            yield from _room(folder, *names[key])


def _room(folder: Path, limit: str, used: str, freeable: str) -> Iterator[int]:
    try:
        most, in_use = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
        table = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return
    files = next((int(line.split()[1]) for line in table if line.split()[:1] == [freeable]), 0)
    yield max(0, most - in_use + files)


def _machine_bytes() -> Iterator[int]:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        amounts = [line.split() for line in lines if line.startswith("MemAvailable:")]
        yield int(amounts[0][1]) * 1024
    except (OSError, ValueError, IndexError):
        if "SC_PHYS_PAGES" in os.sysconf_names:
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def future_state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of states that optimizers make in their first update, as far as torch's own are known."""
    total = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups if not optimizer.state else ():
            states = _STATES.get(type(optimizer).__name__, 0)
            states += int(type(optimizer).__name__ in {"SGD", "RMSprop"} and bool(group.get("momentum")))
            total += states * sum(p.nbytes for p in group["params"] if p.requires_grad)
    return total
