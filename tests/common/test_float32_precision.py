"""Precision of float32 products: both of torch's interfaces, which do not mix, are read and set back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.common.tensors.float32_precision import Float32Precision

backends: Any = torch.backends


@pytest.fixture(autouse=True)
def precision() -> Iterator[Float32Precision]:
    before = Float32Precision.current()
    yield before
    before.restore()


def test_both_interfaces_are_restored(precision: Float32Precision) -> None:
    torch.set_float32_matmul_precision("medium")
    assert Float32Precision.current().matmul == "medium"
    precision.restore()
    assert Float32Precision.current() == precision
    backends.cuda.matmul.fp32_precision = "tf32"
    assert Float32Precision.current().matmul is None
    precision.restore()
    assert Float32Precision.current() == precision
    assert torch.get_float32_matmul_precision() == "highest"


class Sets(nn.Module):
    """A model whose forward sets the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        backends.mkldnn.matmul.fp32_precision = "bf16"
        return self.blocks(x)  # type: ignore[no-any-return]


def test_layers_are_found_under_either_interface() -> None:
    backends.cuda.matmul.fp32_precision = "tf32"
    expected = Float32Precision.current()
    assert len(cf.layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(2, 4))) == 2
    with pytest.raises(cf.ConfigError, match="its forward changes a setting of the process"):
        cf.layers(Sets(), torch.rand(2, 4))
    assert Float32Precision.current() == expected
