"""What holds for all tests.

One thread for these small tensors: more only wait for each other where the machine is busy. And examples
that are the same in every run, however long one takes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

_CACHE = tempfile.TemporaryDirectory()  # of datasets that tests read
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": _CACHE.name}

settings.register_profile("counterflow", deadline=None, derandomize=True)
settings.load_profile("counterflow")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_world_is_left() -> Iterator[None]:
    """A process group of one test would be another one's world."""
    yield
    assert not torch.distributed.is_initialized()
