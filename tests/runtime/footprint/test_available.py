"""The memory that is available, and what optimizers will need of it."""

from __future__ import annotations

import logging
from functools import partial
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


def test_states_that_exceed_the_memory_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, device = torch.optim.AdamW([nn.Parameter(torch.zeros(1024))]), torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        available.warn_of_states([optimizer], device, 3)
        assert not caplog.records
        monkeypatch.setattr(available, "available_bytes_on", lambda _, workers: 2**12 * workers)
        available.warn_of_states([optimizer], device, 3)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "worker 3 needs 8 KiB more for its optimizer's states, and 4 KiB are available to it; "
    )


def test_saved_tensors_that_exceed_the_memory_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, device = torch.optim.AdamW([nn.Parameter(torch.zeros(1024))]), torch.device("cpu")
    monkeypatch.setattr(available, "available_bytes_on", lambda _, workers: 2**15 // workers)
    with caplog.at_level(logging.WARNING):
        available.warn_of_step([optimizer], device, 3, saved_bytes=2**13, workers=2)
        assert not caplog.records
        available.warn_of_step([optimizer], device, 3, saved_bytes=2**14, workers=2)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "worker 3 needs 24 KiB more in its first step (8 KiB of optimizer states, 16 KiB saved for "
        "backward), and 16 KiB are available to it; "
    )
