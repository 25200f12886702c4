"""The choice of device and transport if the config leaves it to the machine.

Invariant: all workers of a run make the same choice, which depends only on the number of GPUs and workers of
a machine: a GPU per worker with NCCL, or the CPU with Gloo. Everything else has to be asked for.
"""

from __future__ import annotations

import os
import re

import torch
import torch.distributed as dist

from counterflow.common.plurals import plural
from counterflow.runtime.transport.kinds import GLOO, NCCL, TransportKind, kind_of
from counterflow.runtime.workers import world

from .config import RunConfig
from .sections.keys import AUTO


def workers_here(workers: int) -> int:
    """Number of workers on this machine, as torchrun or Slurm report it; all workers if neither does."""
    setting = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    number = re.match(r"\d+", setting)
    return min(workers, int(number[0])) if number else workers


def named_transport(config: RunConfig) -> TransportKind | None:
    """The transport that a config names; None if it leaves it to the machine."""
    name = config.pipeline.transport
    return None if name == AUTO else kind_of(name)


def with_transport(config: RunConfig, workers: int) -> tuple[RunConfig, str]:
    """A config whose transport is chosen, and where its workers compute, in words."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here, transport = workers_here(workers), config.pipeline.transport
    if transport == AUTO:
        gpu_each = gpus == 1 and world.started_by() == "slurm"  # Slurm shows each task only its own GPU
        fits = dist.is_nccl_available() and (gpu_each or gpus >= here)
        transport = (NCCL if fits else GLOO).name
        config = config.but(pipeline={"transport": transport})
    if kind_of(transport).gpu_each:
        name = f" ({torch.cuda.get_device_name(0)})" if gpus else ""
        few = f"; this machine has {plural(gpus, 'GPU')} for {plural(here, 'worker')}"
        return config, f"on a GPU each{name}, messages by {transport}{few * (gpus < here)}"
    unused = f", and not on the {gpus} GPU{'s' if gpus > 1 else ''} here" if gpus else ""
    return config, f"on the CPU{unused}, messages by {transport}"
