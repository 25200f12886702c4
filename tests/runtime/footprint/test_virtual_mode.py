"""Operators on tensors without numbers: the shapes, storages and graphs of real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.errors import ConfigError
from counterflow.runtime.footprint.kernel_memory import KernelMemory
from counterflow.runtime.footprint.ledger import Ledger
from counterflow.runtime.footprint.virtual_mode import SMALL_BYTES, VirtualMode

SIDE = 128
assert SIDE * SIDE * 4 > SMALL_BYTES


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    with VirtualMode(ledger, KernelMemory()):
        yield ledger


def large() -> Tensor:
    return torch.empty(SIDE, SIDE)


def test_results_have_the_shapes_and_graphs_of_real_ones(ledger: Ledger) -> None:
    weight = large().requires_grad_()
    output = functional.gelu(large() @ weight)
    assert output.shape == (SIDE, SIDE)
    output.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert ledger.live_bytes >= 3 * SIDE * SIDE * 4


def test_views_and_in_place_operators_share_storages(ledger: Ledger) -> None:
    tensor = large()
    before = ledger.live_bytes
    view = tensor.t().view(-1, SIDE, 1).add_(1.0)
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert ledger.live_bytes == before
    assert tensor._version == 1


@pytest.mark.usefixtures("ledger")
def test_small_tensors_are_computed() -> None:
    assert (torch.arange(4) * 2).tolist() == [0, 2, 4, 6]


@pytest.mark.usefixtures("ledger")
def test_small_results_of_large_tensors_are_one() -> None:
    assert large().sum().item() == 1.0
    assert bool(large().isfinite().all())
    assert torch.zeros(2).copy_(large()[0, :2]).tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("ledger")
def test_shapes_that_depend_on_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="nonzero makes tensors whose shapes depend on values"):
        large().nonzero()


@pytest.mark.usefixtures("ledger")
def test_errors_of_users_are_those_of_torch() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        large() @ torch.empty(3, 2 * SIDE * SIDE)


def test_kernels_count_what_they_allocate_beside_their_results() -> None:
    kernels = KernelMemory()
    image, weight = torch.empty(4, 8, 32, 32), nn.Conv2d(8, 8, 3).weight.detach()
    args = (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    operator = torch.ops.aten.convolution.default
    first = kernels.size("key", operator, args, {}, operator(*args).nbytes)
    assert first >= 0
    assert kernels.size("key", operator, (), {}, 0) == first, "equal calls are measured once"
    assert not kernels.unknown
    assert kernels.size("other", operator, (image,), {}, 0) == 0
    assert list(kernels.unknown) == ["aten::convolution"]
