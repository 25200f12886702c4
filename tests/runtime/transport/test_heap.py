"""glibc keeps the memory that a step frees, unless the user tunes it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from counterflow.runtime.transport.heap import keep_freed_memory

print(keep_freed_memory())

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

import torch
for step in range(3):
    before = faults()
    blocks = [torch.empty(1 << 18).fill_(1.0) for _ in range(50)]
    del blocks
print(faults() - before)
"""


def run(**variables: str) -> tuple[bool, int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment = {**plain, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own parameters")
def test_a_third_step_gets_its_memory_without_the_system() -> None:
    pages = 50 * 256  # 50 blocks of 1 MiB
    kept, faults = run()
    assert kept
    assert faults < pages / 10


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}],
    ids=lambda variables: next(iter(variables)),
)
def test_a_user_who_tunes_malloc_is_left_alone(variables: dict[str, str]) -> None:
    kept, _ = run(**variables)
    assert not kept
