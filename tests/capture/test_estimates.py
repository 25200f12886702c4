"""What layers cost: counted operations against closed forms, measured seconds, and a model left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from counterflow.capture.estimates import estimated_costs
from counterflow.errors import ConfigError
from counterflow.models import (
    BERTConfig,
    GPTConfig,
    ResNeXtConfig,
)
from counterflow.schedule.cuts import balance

GPT = GPTConfig(layers=2, hidden=16, heads=2, vocabulary=40, positions=8)


def test_operations_of_a_gpt() -> None:
    samples, positions, hidden = 3, GPT.positions, GPT.hidden
    rows = samples * positions
    inputs, _ = GPT.sample(samples)
    embedding, block, _, head = estimated_costs(GPT.build(), inputs)
    assert embedding == rows * hidden
    # Four matrices of hidden² and two of 4·hidden², then queries × keys and weights × values.
    assert block == rows * 2 * 12 * hidden**2 + 2 * 2 * samples * positions**2 * hidden + rows * hidden
    assert head == rows * 2 * hidden * GPT.vocabulary + rows * GPT.vocabulary


def test_operations_without_a_sample() -> None:
    embedding, block, _, head = estimated_costs(GPT.build())
    hidden = GPT.hidden
    assert embedding == 2 * hidden
    assert block == 2 * 12 * hidden**2 + 13 * hidden
    assert head == 2 * hidden * GPT.vocabulary + 2 * hidden


def test_convolutions_are_counted_by_resolution() -> None:
    config = ResNeXtConfig((1, 1), groups=2, width=4, planes=8)
    layers = config.build()
    small, large = (estimated_costs(layers, config.sample(1, pixels)[0]) for pixels in (32, 64))
    assert [b / a for a, b in zip(small[:-1], large[:-1], strict=True)] == [4, 4, 4]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tuples_and_devices(device: str) -> None:
    config = BERTConfig(layers=2, hidden=16, heads=2, vocabulary=40, positions=8)
    with torch.device(device):
        layers = config.build()
        (tokens, segments), _ = config.sample(2)
        mask = torch.ones(2, 8, dtype=torch.bool)
    plain = estimated_costs(layers, (tokens, segments))
    masked = estimated_costs(layers, (tokens, segments, mask))
    assert plain[1] == plain[2]
    assert masked[1] == plain[1] + mask.numel()
    assert masked[-1] == plain[-1]


def test_embedding_and_head_count_in_the_cut() -> None:
    config = GPTConfig(layers=6, hidden=16, heads=2, vocabulary=12 * 16, positions=8)
    layers = config.build()
    # The head costs about one block, the embedding nothing: 0 1 1 1 | 1 1 1 1.
    assert balance(estimated_costs(layers, config.sample(1)[0]), 2) == (4,)
    assert balance(estimated_costs(layers), 2) == (4,)


def test_a_layer_that_does_not_run_on_meta() -> None:
    class Peeks(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value * value.sum().item()

    with pytest.raises(ConfigError, match=r"layer 1 \(Peeks\) does not run on the meta device"):
        estimated_costs([nn.Linear(2, 2), Peeks()], torch.zeros(1, 2))


def test_of_layers_of_one_kind_one_is_run() -> None:
    """Unless its input has another shape."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    sample = torch.empty(3, 4)
    expected = estimated_costs(layers, sample)
    calls = [0]
    for layer in layers:
        layer.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    assert estimated_costs(layers, sample, kinds=["a", "a", "b", "a", "a"]) == expected
    assert calls == [3]
