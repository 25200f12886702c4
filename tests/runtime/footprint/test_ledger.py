"""Blocks of memory, their parts and their maximum."""

from __future__ import annotations

import pytest
import torch

from counterflow.runtime.footprint.ledger import Ledger, Part


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_a_storage_counts_once_until_it_is_freed(ledger: Ledger) -> None:
    ledger.open_window()
    tensor = torch.empty(100)
    view = tensor.view(10, 10)
    ledger.add(tensor)
    ledger.add(view)
    assert ledger.live_bytes == 400
    del tensor
    assert ledger.live_bytes == 400, "the view has the storage"
    del view
    assert ledger.live_bytes == 0
    assert ledger.peak().total == 400


def test_the_peak_is_divided_by_part(ledger: Ledger) -> None:
    weight, saved = torch.empty(10), torch.empty(20)
    ledger.assign([weight], Part.WEIGHTS)
    ledger.open_window()
    ledger.add(saved)
    ledger.mark()
    passing = torch.empty(30)
    ledger.add(passing)
    ledger.pulse(8)
    del passing
    ledger.mark()
    later = torch.empty(1)
    ledger.add(later)
    peak = ledger.peak()
    assert peak.total == 40 + 80 + 120 + 8
    assert {part: size for part, size in peak.parts.items() if size} == {
        Part.WEIGHTS: 40,
        Part.ACTIVATIONS: 80,
        Part.WORKSPACE: 128,
    }


def test_what_outlives_the_op_is_no_workspace(ledger: Ledger) -> None:
    ledger.open_window()
    ledger.mark()
    first = torch.empty(10)
    ledger.add(first)
    ledger.mark()
    del first
    assert ledger.peak().parts[Part.ACTIVATIONS] == 40


def test_the_users_tensors_are_excluded(ledger: Ledger) -> None:
    batch = torch.empty(10)
    ledger.exclude([batch])
    ledger.add(batch.view(2, 5))
    assert ledger.live_bytes == 0
