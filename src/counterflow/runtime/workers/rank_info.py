"""Rank of a process among those that one command started, from the environment of torchrun or Slurm.

Other launchers state it in torchrun's variables (``RankInfo.variables``), for whatever reads these.

Invariant: this module only reads the environment, and starts or joins nothing (``world.py`` does).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from counterflow.errors import ConfigError

_FIRST_PORT, _PORTS = 15_000, 15_000
"""Slurm's jobs meet at a port below those that systems assign automatically."""

_FIRST_SPECIAL_STEP = 0xFFFFFF00
"""Slurm numbers its batch, interactive and external steps from here; srun's count from 0."""

_STARTED_BY = "COUNTERFLOW_STARTED_BY"
"""Variable with the name of the launcher that set torchrun's variables, unless that is torchrun."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank of a process among those that one command started.

    Attributes:
        launcher: name of the launcher of the processes.
        rank: number of this process, from 0.
        world_size: number of processes.
        local_rank: number of this process on its machine.
        address: host where they meet.
        port: port where they meet.
        machines: number of machines, if the launcher reports it; else 1.
        restarts: number of times that the launcher started the processes before, as far as this one knows.
        most_restarts: maximum restarts by the launcher.
        hosts_store: True if the launcher hosts the store where they meet, and notices when one of them ends.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    machines: int = 1
    restarts: int = 0
    most_restarts: int = 0
    hosts_store: bool = False

    def variables(self) -> dict[str, str]:
        """Environment of a process of this rank: the variables of torchrun."""
        local_world_size = self.world_size // self.machines
        return {
            _STARTED_BY: self.launcher,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "GROUP_RANK": str(self.rank // local_world_size),
            "GROUP_WORLD_SIZE": str(self.machines),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.most_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.hosts_store),
        }


def rank_info() -> RankInfo | None:
    """Rank of this process, from torchrun's variables, or else from Slurm's; None without them."""
    of = os.environ
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= of.keys():
        return RankInfo(
            of.get(_STARTED_BY, "torchrun"),
            number("RANK"),
            number("WORLD_SIZE"),
            number("LOCAL_RANK", 0),
            of["MASTER_ADDR"],
            number("MASTER_PORT"),
            number("GROUP_WORLD_SIZE", 1),
            number("TORCHELASTIC_RESTART_COUNT", 0),
            number("TORCHELASTIC_MAX_RESTARTS", 0),
            of.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
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
    return RankInfo(
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
        ConfigError: the list has no host.
    """
    # Up to the first comma outside brackets, and of each bracket its first number.
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if match is None:
        raise ConfigError(f'no host in Slurm\'s node list "{nodes}"; set MASTER_ADDR to the host of rank 0')
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group())


def number(name: str, default: int | None = None) -> int:
    """A whole number from the environment.

    Raises:
        ConfigError: its value is no whole number.
    """
    value = os.environ.get(name, default)
    try:
        return int(value)  # type: ignore[arg-type]
    except ValueError:
        raise ConfigError(f'{name} is "{value}"; it has to be a whole number') from None
