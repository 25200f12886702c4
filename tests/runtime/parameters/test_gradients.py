"""Norms of gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from counterflow.runtime.parameters import gradients
from counterflow.runtime.parameters.gradient_norms import SquaredNorms
from counterflow.runtime.parameters.gradients import GradientGroup


def group(*values: torch.Tensor) -> GradientGroup:
    parameters = {str(number): nn.Parameter(torch.zeros_like(value)) for number, value in enumerate(values)}
    made = GradientGroup(parameters, None, counted=True, stage=0)
    made.attach()
    for parameter, value in zip(parameters.values(), values, strict=True):
        assert parameter.grad is not None
        parameter.grad.add_(value)
    return made


def test_squared_norms_are_of_pieces_and_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_NORM_PIECE", 3)
    draw = torch.Generator().manual_seed(0)
    values = [
        torch.randn(4, 5, generator=draw),
        torch.randn(2, dtype=torch.float64, generator=draw),
        torch.randn(3, dtype=torch.complex64, generator=draw),
    ]
    expected = sum(float(value.abs().double().square().sum()) for value in values)
    every, none, odd = SquaredNorms([group(*values), group(), group(torch.tensor([1.0, math.inf]))]).read()
    assert every == pytest.approx(expected, rel=1e-6)
    assert none == 0.0
    assert odd == math.inf


def test_no_more_than_a_piece_is_copied() -> None:
    """In float64 a copy of all gradients is twice what these take."""
    whole = group(torch.ones(3 * gradients._NORM_PIECE))
    with torch.profiler.profile(profile_memory=True, record_shapes=False, acc_events=True) as found:
        SquaredNorms([whole]).read()
    events = found.events()
    assert events is not None
    largest = max((event.cpu_memory_usage for event in events), default=0)
    assert largest <= 8 * gradients._NORM_PIECE + 1024
