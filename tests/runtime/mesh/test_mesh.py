"""Stages whose weights are sharded: FSDP2 and tensor parallelism on further dimensions of the mesh."""

from __future__ import annotations

import operator
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import counterflow as cf


@pytest.mark.parametrize("processes", ["four", "eight"])
def test_sharded_stages_give_the_numbers_of_one_process(processes: str) -> None:
    """All cases in the same processes: it is their start that takes long."""
    cf.launch(Cases(processes), workers={"four": 4, "eight": 8}[processes], timeout_seconds=60, threads=1)


class Cases:
    """A function of cases.py, which other processes find by the path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return operator.getitem, (_File(), self.name)

    def __call__(self) -> None:
        """As it is read from a pickle, it is the function itself."""


class _File:
    def __reduce__(self) -> Any:
        return runpy.run_path, (str(Path(__file__).with_name("cases.py")),)


def test_without_further_dimensions_there_is_nothing_to_shard() -> None:
    with pytest.raises(cf.ConfigError, match="parallelize needs further dimensions of the mesh"):
        cf.launch(_pipeline, workers=1, transport="local")


def _pipeline() -> None:
    schedule = cf.schemes.dapple(1, 2)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    cf.Pipeline(
        [nn.Linear(2, 2)], None, schedule, optimizer=optimizer, parallelize=lambda _stage, _mesh: None
    )
