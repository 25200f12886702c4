"""A recording leaves nothing behind: no tensor in a cache, no drawn number, no changed global."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ConfigError

from .kit import losses, sample, staged


@functools.lru_cache
def cached_positions(length: int) -> Tensor:
    return torch.linspace(0, 1, length)


@functools.lru_cache
def cached_noise(length: int) -> Tensor:
    return torch.rand(length)


POSITIONS: dict[int, Tensor] = {}
COUNTS = {"forwards": 0}


def positions_of_a_dict(length: int) -> Tensor:
    if length not in POSITIONS:
        POSITIONS[length] = torch.linspace(0, 1, length)
    return POSITIONS[length]


def positions_of_a_default(length: int, cache: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006 - a habit
    return cache.setdefault(length, torch.linspace(0, 1, length))


def count(_: int) -> int:
    COUNTS["forwards"] += 1
    return COUNTS["forwards"]


class Within(nn.Module):
    """A module that is called, not traced."""

    def __init__(self, table: Callable[[int], Any]) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.shape[1])  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, table: Callable[[int], Any], *, within: bool = False) -> None:
        super().__init__()
        self.table = (lambda _: 0.0) if within else table
        self.positions = Within(table if within else lambda _: 0.0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(x + self.table(x.shape[1]))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("table", [cached_positions, positions_of_a_dict, positions_of_a_default])
def test_a_cache_that_a_recording_fills_is_emptied(table: Any, within: bool) -> None:
    getattr(table, "cache_clear", POSITIONS.clear)()
    staged_losses = staged(lambda: Net(table, within=within))
    assert type(table(8)) is Tensor
    assert type(Net(table)(sample(0))) is Tensor
    assert staged_losses == pytest.approx(losses(lambda: Net(table, within=within)), rel=1e-5)


def test_a_refused_recording_leaves_no_tensor_in_a_cache() -> None:
    class Decides(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x + cached_positions(x.shape[1]))
            return x if x.sum() > 0 else -x

    cached_positions.cache_clear()
    with pytest.raises(cf.ConfigError, match="decides by a tensor's values"):
        cf.layers(Decides(cached_positions), sample(0))
    assert type(cached_positions(8)) is Tensor


def test_a_cache_of_random_numbers_is_refused() -> None:
    cached_noise.cache_clear()
    with pytest.raises(cf.ConfigError, match=r"keeps a tensor of one forward .* the cache of cached_noise"):
        cf.layers(Net(cached_noise), sample(0))


def test_a_count_in_a_global_is_refused_in_the_model_and_runs_in_a_module() -> None:
    COUNTS["forwards"] = 0
    with pytest.raises(cf.ConfigError, match="changes the global 'COUNTS'"):
        cf.layers(Net(count), sample(0))
    cf.layers(Net(count, within=True), sample(0))
    assert COUNTS == {"forwards": 0}


def test_numbers_of_python_are_refused_in_the_model_and_not_drawn_by_a_recording() -> None:
    before = random.getstate()
    with pytest.raises(cf.ConfigError, match="draws from a random generator of Python or NumPy"):
        cf.layers(Net(lambda _: random.random()), sample(0))
    cf.layers(Net(lambda _: random.random(), within=True), sample(0))
    assert random.getstate() == before


def test_a_dict_of_the_model_that_counts_is_refused() -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__(lambda _: 0.0)
            self.counts = {"forwards": 0}

        def forward(self, x: Tensor) -> Tensor:
            self.counts["forwards"] += 1
            return super().forward(x) * self.counts["forwards"]

    with pytest.raises(cf.ConfigError, match="changes counts"):
        cf.layers(Counts(), sample(0))


def test_a_default_dtype_that_a_forward_sets_is_refused_and_restored() -> None:
    class Sets(Net):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_default_dtype(torch.float64)
            return super().forward(x)

    with pytest.raises(cf.ConfigError, match="changes a setting of the process"):
        cf.layers(Sets(lambda _: 0.0), sample(0))
    assert torch.get_default_dtype() is torch.float32


class Iterates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scales = (1.0 / number for number in range(1, 9))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * next(self.scales)
        return y


def test_a_model_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"the Iterates cannot be copied.*keep iterators, locks"):
        cf.layers(Iterates(), torch.ones(4, 2))
