"""Attributes that a run sets are as before after it, and so is what they contain."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterflow.runtime.stages.attributes import restored_attributes


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.count, self.values, self.by_name = 0, [1, 2], {"a": 1}
        self.mean = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = x
        self.values.append(3)
        self.by_name["a"] = 2
        self.mean += 1
        if self.count == 1:
            self.linear.register_forward_hook(lambda *_: None)
        y: Tensor = self.linear(x)
        return y


def test_attributes_are_restored() -> None:
    layer = Keeps()
    values, mean = layer.values, layer.mean
    kept = layer.register_forward_hook(lambda *_: None)
    with restored_attributes(layer.modules()):
        layer(torch.ones(1, 2))
        assert layer.count == 1
        assert len(layer.linear._forward_hooks) == 1
        kept.remove()
    assert layer.count == 0
    assert not hasattr(layer, "last")
    assert (len(layer._forward_hooks), len(layer.linear._forward_hooks)) == (1, 0)
    assert layer.values is values
    assert values == [1, 2]
    assert layer.by_name == {"a": 1}
    assert layer.mean is mean
    assert torch.equal(mean, torch.zeros(2))


def test_what_torch_keeps_is_left() -> None:
    layer = Keeps()
    with restored_attributes(layer.modules()):
        layer.eval()
        layer.register_buffer("table", torch.ones(1))
    assert not layer.training
    assert "table" in dict(layer.named_buffers())
