"""Which device and transport a machine gives."""

from __future__ import annotations

import pytest
import torch

from counterflow.training.config import RunConfig
from counterflow.training.transport_choice import with_transport


@pytest.mark.parametrize(
    ("gpus", "transport", "here", "chosen", "said"),
    [
        (0, "auto", None, "gloo", "on the CPU, messages by gloo"),
        (4, "auto", None, "nccl", "on a GPU each (a GPU), messages by nccl"),
        (3, "auto", None, "gloo", "on the CPU, and not on the 3 GPUs here, messages by gloo"),
        (2, "auto", "2", "nccl", "on a GPU each (a GPU), messages by nccl"),
        (1, "gloo", None, "gloo", "on the CPU, and not on the 1 GPU here, messages by gloo"),
        (0, "nccl", None, "nccl", "on a GPU each, messages by nccl; this machine has 0 GPUs for 4 workers"),
        (1, "local", None, "local", "on the CPU, and not on the 1 GPU here, messages by local"),
    ],
)
def test_auto_is_a_gpu_each_or_the_cpu(
    gpus: int,
    transport: str,
    here: str | None,
    chosen: str,
    said: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    config = RunConfig.model_validate({"pipeline": {"transport": transport}})
    found, where = with_transport(config, 4)
    assert (found.pipeline.transport, where) == (chosen, said)
