"""A process's place among those that one command started, from the environment of torchrun or Slurm.

Invariant: this module only reads the environment, and starts or joins nothing (``world.py`` does).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from counterflow.errors import ConfigError

_FIRST_PORT, _PORTS = 15_000, 15_000
"""Slurm's jobs meet at a port below those that systems hand out by themselves."""

_FIRST_SPECIAL_STEP = 0xFFFFFF00
"""Slurm numbers its batch, interactive and external steps from here; srun's count from 0."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place among those that one command started.

    Attributes:
        by: launcher of the processes.
        rank: number of this process, from 0.
        world_size: number of processes.
        local_rank: number of this process on its machine.
        address: host where they meet.
        port: port where they meet.
        machines: number of machines, if the launcher reports it; else 1.
    """

    by: Literal["torchrun", "slurm"]
    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    machines: int = 1


def place() -> Place | None:
    """The place of this process, from torchrun's variables, or else from Slurm's."""
    of = os.environ
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= of.keys():
        return Place(
            "torchrun",
            number("RANK"),
            number("WORLD_SIZE"),
            number("LOCAL_RANK", 0),
            of["MASTER_ADDR"],
            number("MASTER_PORT"),
            number("GROUP_WORLD_SIZE", 1),
        )
    # Slurm sets PROCID and NTASKS also for a batch script itself, which is one process; only a step of srun
    # has an ordinary step number.
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"} <= of.keys():
        return None
    step = number("SLURM_STEP_ID")
    tasks = number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS"))
    if step >= _FIRST_SPECIAL_STEP or tasks == 1:
        return None
    nodes = of.get("SLURM_STEP_NODELIST") or of.get("SLURM_JOB_NODELIST") or of.get("SLURM_NODELIST") or ""
    port = _FIRST_PORT + (number("SLURM_JOB_ID", 0) + 97 * step) % _PORTS
    return Place(
        "slurm",
        number("SLURM_PROCID"),
        tasks,
        number("SLURM_LOCALID", 0),
        of.get("MASTER_ADDR") or first_host(nodes),
        number("MASTER_PORT", port),
        number("SLURM_STEP_NUM_NODES", number("SLURM_NNODES", 1)),
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-009,12],login1"), first_host("rack3-n[1,4]-ib,x"), first_host("a,b")
    ('gpu007', 'rack3-n1-ib', 'a')

    Raises:
        ConfigError: it has none.
    """
    # Up to the first comma outside brackets, and of each bracket its first number.
    found = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if found is None:
        raise ConfigError(f'no host in Slurm\'s node list "{nodes}"; set MASTER_ADDR to the host of rank 0')
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found.group())


def number(name: str, default: int | None = None) -> int:
    """A whole number from the environment.

    Raises:
        ConfigError: it is none.
    """
    given = os.environ.get(name, default)
    try:
        return int(given)  # type: ignore[arg-type]
    except ValueError:
        raise ConfigError(f'{name} is "{given}"; it has to be a whole number') from None
