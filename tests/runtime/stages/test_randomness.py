"""Random draws: the same for a micro-batch as a whole and in halves."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.runtime.stages.randomness import RandomStreams, Rows


class Sometimes(nn.Module):
    """Drops only where the first value is positive; counts its runs."""

    runs = 0

    def forward(self, value: Tensor) -> Tensor:
        self.runs += 1
        return functional.dropout(value, 0.5) if value.flatten()[0] > 0 else value


def output(streams: RandomStreams, layer: nn.Module, value: Tensor, start: int, stop: int) -> Tensor:
    made = streams.run(layer, value[start:stop], index=3, step=7, rows=Rows(0, 4, start, stop))
    assert isinstance(made, Tensor)
    return made


def test_a_layer_that_begins_to_draw_draws_the_same_in_halves() -> None:
    streams, layer = RandomStreams(5, torch.device("cpu")), Sometimes()
    quiet, drawing = -torch.ones(4, 6), torch.ones(4, 6)
    for value in (quiet, quiet, drawing, quiet, drawing):
        whole = output(streams, layer, value, 0, 4)
        halves = [output(streams, layer, value, 0, 2), output(streams, layer, value, 2, 4)]
        assert torch.equal(torch.cat(halves), whole)
    assert layer.runs == 15 + 1  # of the first half that drew after quiet ones, twice


def test_running_statistics_are_taken_once() -> None:
    streams, layer = RandomStreams(5, torch.device("cpu")), nn.BatchNorm1d(6)
    for _ in range(3):
        output(streams, layer, torch.randn(4, 6), 0, 2)
    assert layer.num_batches_tracked is not None
    assert int(layer.num_batches_tracked) == 3


class Attention(nn.Module):
    """Draws as CUDA's fused attention does: it gives an int and a seed of no dimensions beside its output."""

    def forward(self, value: Tensor) -> Tensor:
        output, size, seed = torch.ops.counterflow_tests.fused(value)
        assert (size, seed.shape) == (len(value), ())
        return output  # type: ignore[no-any-return]


def test_a_fused_operator_draws_for_each_half_from_a_stream_of_its_own() -> None:
    library = torch.library.Library("counterflow_tests", "FRAGMENT")
    seeded = (torch.Tag.nondeterministic_seeded,)
    library.define("fused(Tensor value) -> (Tensor, SymInt, Tensor)", tags=seeded)
    library.impl(
        "fused",
        lambda value: (value * torch.rand(value.shape), len(value), torch.tensor(3)),
        "CompositeExplicitAutograd",
    )
    streams, layer, value = RandomStreams(5, torch.device("cpu")), Attention(), torch.ones(4, 6)
    first, second = output(streams, layer, value, 0, 2), output(streams, layer, value, 2, 4)
    assert not torch.equal(first, second)
    assert torch.equal(output(streams, layer, value, 0, 2), first)  # as when it is computed again
    assert torch.equal(output(streams, layer, value, 2, 4), second)
