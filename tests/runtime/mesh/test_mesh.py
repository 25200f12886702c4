"""Stages whose weights are sharded: FSDP2 and tensor parallelism on further dimensions of the mesh."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import counterflow as cf


@pytest.mark.parametrize("processes", ["four", "eight"])
def test_sharded_stages_give_the_numbers_of_one_process(processes: str) -> None:
    """All cases in the same processes: it is their start that takes long."""
    command = [sys.executable, str(Path(__file__).with_name("cases.py")), processes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_without_further_dimensions_there_is_nothing_to_shard() -> None:
    with pytest.raises(cf.ConfigError, match="parallelize needs further dimensions of the mesh"):
        cf.launch(_pipeline, workers=1, transport="local")


def _pipeline() -> None:
    schedule = cf.schemes.dapple(1, 2)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    cf.Pipeline(
        [nn.Linear(2, 2)], None, schedule, optimizer=optimizer, parallelize=lambda _stage, _mesh: None
    )
