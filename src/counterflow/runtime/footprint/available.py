"""Memory that workers of this machine can use, and a warning if an optimizer's states exceed it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.optim import Optimizer

from counterflow.common.number_texts import byte_size

from .footprint import shortage

_LOG = logging.getLogger("counterflow.runtime.pipeline")

_MEMINFO = Path("/proc/meminfo")
"""Linux's table of memory."""

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


def available_bytes_on(device: torch.device, workers: int) -> int | None:
    """Memory of a worker on a device: what is free, and what torch has reserved there; None: unknown.

    Args:
        device: device of the worker.
        workers: workers that share it.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type != "cpu":
        return None
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        amounts = [line.split() for line in lines if line.startswith("MemAvailable:")]
        return int(amounts[0][1]) * 1024 // workers
    except (OSError, ValueError, IndexError):
        names = os.sysconf_names
        if "SC_PHYS_PAGES" not in names:
            return None
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // workers


def future_state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of states that optimizers make in their first update, as far as torch's own are known."""
    total = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups if not optimizer.state else ():
            states = _STATES.get(type(optimizer).__name__, 0)
            states += int(type(optimizer).__name__ in {"SGD", "RMSprop"} and bool(group.get("momentum")))
            total += states * sum(p.nbytes for p in group["params"] if p.requires_grad)
    return total


def warn_of_states(optimizers: Iterable[Optimizer], device: torch.device, worker: int) -> None:
    """Warn before the first step if the optimizers' states alone exceed the available memory.

    Args:
        optimizers: optimizers of the worker.
        device: its device.
        worker: its number.
    """
    needed, available = future_state_bytes(optimizers), available_bytes_on(device, 1)
    if available is not None and needed > available:
        _LOG.warning(
            "%s; pipeline.memory(inputs, targets) counts all parts; take more stages, zero_stage=1, or an "
            "optimizer with fewer states",
            shortage(worker, "more for its optimizer's states", needed, available),
        )


def warn_of_step(
    optimizers: Iterable[Optimizer], device: torch.device, worker: int, *, saved_bytes: float, workers: int
) -> None:
    """Warn before the first step if states and saved tensors exceed the memory, and states alone do not.

    Args:
        optimizers: optimizers of the worker.
        device: its device.
        worker: its number.
        saved_bytes: maximum bytes that it will save for backwards.
        workers: workers that share the device.
    """
    states, available = future_state_bytes(optimizers), available_bytes_on(device, workers)
    alone = available_bytes_on(device, 1)
    if available is None or alone is None or states > alone or states + saved_bytes <= available:
        return
    _LOG.warning(
        "%s; take fewer samples in a micro-batch, recomputation, or more stages",
        shortage(
            worker,
            f"more in its first step ({byte_size(states)} of optimizer states, {byte_size(saved_bytes)} "
            "saved for backward)",
            states + saved_bytes,
            available,
        ),
    )
