"""Groups of layers that fit into a worker: their profile is that of all layers measured together."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.measure.boundary_values import BoundaryValues, passes_of
from counterflow.measure.layer_groups import LayerGroup
from counterflow.measure.model_profile import Measurement
from counterflow.runtime.counted_memory import WORKER_BYTES

_FROM_SECONDS = {"attention_share", "fixed_share", "low_factors", "high_factors", "waiting_share"}
"""Numbers of a profile that follow from seconds, in addition to these."""


class Tokens(nn.Module):
    """An embedding that passes the tokens on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens), tokens


class Mixed(nn.Module):
    """A residual block of a width of its own, which scales by the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, tokens = value
        return hidden + self.down(self.up(hidden).relu()) / (1 + tokens[..., None]), tokens


class Head(nn.Module):
    """Logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 50)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.linear(value[0])
        return logits


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def _profile(layers: list[nn.Module] | None = None, **options: Any) -> Measurement:
    """Layers without memory, by default four different ones, profiled."""
    if layers is None:
        with torch.device("meta"):
            layers = [Tokens(), Mixed(32), Mixed(64), Head()]
    tokens = torch.arange(32).reshape(4, 8)
    options = {"workers": 1} | options
    return cf.profile(layers, _loss, example=(tokens, tokens), sizes=(1, 2), repeats=1, **options)


def _without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    """A profile's numbers that do not depend on seconds; these are finite."""
    numbers = {}
    for name, value in record.items():
        if isinstance(value, dict):
            numbers[name] = value if name == "sources" else _without_seconds(value)
        elif "seconds" in name:
            times = value if isinstance(value, tuple) else (value,)
            assert all(isfinite(time) and time >= 0 for time in times), name
        elif name not in _FROM_SECONDS:
            numbers[name] = value
    return numbers


def _groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of layers of each measured group."""
    counts: list[int] = []
    subject = LayerGroup.subject

    def counted(group: LayerGroup, *arguments: Any) -> Any:
        counts.append(group.stop - group.start)
        return subject(group, *arguments)

    monkeypatch.setattr(LayerGroup, "subject", counted)
    return counts


def test_groups_have_the_profile_of_all_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together = _profile()
    monkeypatch.setenv(WORKER_BYTES, "190000")
    counts = _groups(monkeypatch)
    grouped = _profile()
    assert counts[:-1] == [2, 1, 1]  # and steps of the largest
    assert grouped.model == together.model
    assert _without_seconds(asdict(grouped.profile)) == _without_seconds(asdict(together.profile))
    assert grouped.profile.positions == 8
    for costs in grouped.profile.layers.values():
        assert min(*costs.forward_seconds, *costs.backward_seconds) > 0
    assert grouped.profile.update_seconds_per_byte > 0


def test_layers_alone_have_the_profile_of_all_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of frozen layers and layers without weights, too."""

    def layers() -> list[nn.Module]:
        with torch.device("meta"):
            parts = [nn.Embedding(50, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 50)]
        parts[0].requires_grad_(requires_grad=False)
        return parts

    together = _profile(layers())
    monkeypatch.setattr(
        "counterflow.measure.layer_groups.cut", lambda amounts, _: [(n, n + 1) for n in range(len(amounts))]
    )
    counts = _groups(monkeypatch)
    grouped = _profile(layers())
    assert counts[:-1] == [1, 1, 1, 1]
    assert grouped.model == together.model
    assert _without_seconds(asdict(grouped.profile)) == _without_seconds(asdict(together.profile))


def test_low_precision_has_the_profile_of_all_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    execution = cf.Execution(compute_dtype="bfloat16")
    together = _profile(execution=execution)
    monkeypatch.setenv(WORKER_BYTES, "160000")
    counts = _groups(monkeypatch)
    grouped = _profile(execution=execution)
    assert len(counts) > 2
    assert _without_seconds(asdict(grouped.profile)) == _without_seconds(asdict(together.profile))


def test_workers_measure_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_BYTES, "190000")
    grouped = _profile(workers=2)
    assert len(grouped.profile.layers) == 4
    assert grouped.cluster.devices == 2


def test_a_layer_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_BYTES, "100000")
    counts = _groups(monkeypatch)
    with pytest.raises(
        ConfigError,
        match=r"^layer 2 \(mixed-2\) needs [0-9.]+ KiB to be measured with 2 samples, [0-9.]+ KiB of it for "
        r"weights, gradients and optimizer states, and a worker has 97\.66 KiB; take fewer workers, smaller ",
    ):
        _profile()
    assert not counts


def test_layers_that_exchange_values_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    skip = cf.Skip("tokens")
    layers: list[nn.Module] = [
        nn.Sequential(nn.Embedding(50, 16), skip.saver()),
        nn.Sequential(skip.loader(), _Second()),
    ]
    monkeypatch.setenv(WORKER_BYTES, "20000")
    with pytest.raises(
        ConfigError, match=r"layers, which are measured together, need .* has 19\.53 KiB; layers"
    ):
        _profile(layers)


class _Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 50)

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.linear(values[1])
        return logits


def test_two_hundred_equal_blocks_are_profiled_from_four(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        blocks = [nn.Linear(16, 16) for _ in range(200)]
        layers = [nn.Embedding(50, 16), *blocks, nn.Linear(16, 50)]
    counts = _groups(monkeypatch)
    result = _profile(layers)
    assert counts == [6]
    assert result.model.runs() == [("embedding", 1), ("linear", 200), ("linear-2", 1)]
    assert all(tensor.is_meta for layer in layers for tensor in layer.parameters())
    weights = sum(result.profile.layer(kind).weights_bytes for kind in result.model.layers)
    assert weights == 4 * (50 * 16 + 200 * (16 * 16 + 16) + 16 * 50 + 50)


def test_values_at_boundaries_are_those_of_slices_and_of_the_inputs() -> None:
    values = BoundaryValues([Tokens(), Mixed(32)], None)
    tokens = torch.arange(16).reshape(2, 8)
    hidden, passed = values.before(2, tokens)
    assert hidden.shape == (2, 8, 16)
    assert hidden.requires_grad
    assert passed is tokens
    torch.testing.assert_close(values.before(2, tokens[:, 4:])[0], hidden[:, 4:], rtol=0, atol=0)
    assert hidden.std() > 0.1


def test_saved_bytes_are_known_without_memory() -> None:
    with torch.device("meta"):
        layers = [nn.Embedding(50, 16), nn.Linear(16, 32), nn.ReLU()]
    _, passes = passes_of(layers, torch.zeros(4, dtype=torch.long))
    indices, inputs, activations = 4 * 8, 4 * 16 * 4, 4 * 32 * 4
    assert [layer_pass.saved_bytes for layer_pass in passes] == [indices, inputs, activations]
