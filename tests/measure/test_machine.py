"""Figures of the machine at hand."""

from __future__ import annotations

import pytest
import torch

from counterflow.measure.machine import beside_torch_bytes


def test_what_a_gpu_has_in_use_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GB 50 are free and torch has 25: communicators and CUDA have the rest."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 25)
    assert beside_torch_bytes(torch.device("cuda", 1)) == 5
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 31)  # freed between the two questions
    assert beside_torch_bytes(torch.device("cuda", 1)) == 0
    assert beside_torch_bytes(torch.device("cpu")) == 0
