"""The memory that is available, and what optimizers will need of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from counterflow.runtime.footprint import available


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (torch.optim.AdamW, 2),
        (torch.optim.SGD, 0),
        (partial(torch.optim.SGD, momentum=0.9), 1),
        (partial(torch.optim.RMSprop, momentum=0.9), 2),
    ],
)
def test_states_are_those_of_the_first_update(make: Any, states: int) -> None:
    weight, frozen = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(8), requires_grad=False)
    optimizer = make([weight, frozen])
    expected = available.future_state_bytes([optimizer])
    assert expected == states * weight.nbytes
    weight.grad = torch.zeros(64)
    optimizer.step()
    made = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    assert sum(value.nbytes for value in made if value.dim()) == expected
    assert available.future_state_bytes([optimizer]) == (0 if states else expected)


def test_the_machine_is_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(available, "_CGROUP", tmp_path / "cgroup")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4096 kB\n")
    monkeypatch.setattr(available, "_MEMINFO", tmp_path / "meminfo")
    assert available.available_bytes_on(torch.device("cpu"), 4) == 2**20
    assert available.available_bytes_on(torch.device("cpu"), 4, allocated=2**10) == 2**20 + 2**10
    monkeypatch.setenv(available.WORKER_BYTES, "1000")
    assert available.available_bytes_on(torch.device("cpu"), 4) == 1000
    assert available.available_bytes_on(torch.device("meta"), 4) == 1000


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job/task", "job", ("memory.max", "memory.current", "inactive_file")),
        ("0::/not/here", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/job",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_container_is_a_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, folder: str, files: tuple[str, str, str]
) -> None:
    monkeypatch.delenv(available.WORKER_BYTES, raising=False)
    (tmp_path / "cgroup").write_text(f"9:cpuset:/\n{line}\n")
    (tmp_path / "job" / "task").mkdir(parents=True)
    (tmp_path / "job" / "task" / "memory.max").write_text("max\n")  # of the group above
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    limit, used, freeable = files
    (tmp_path / folder / limit).write_text(f"{2**20}\n")
    (tmp_path / folder / used).write_text(f"{2**19}\n")
    (tmp_path / folder / "memory.stat").write_text(f"anon 7\n{freeable} {2**10}\n")
    monkeypatch.setattr(available, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(available, "_CGROUPS", tmp_path)
    assert available.available_bytes_on(torch.device("cpu"), 1) == 2**19 + 2**10
