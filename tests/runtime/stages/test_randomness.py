"""Random draws: each part of a micro-batch has a stream of its own, the same whenever it is computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterflow.runtime.stages.randomness import RandomStreams
from counterflow.runtime.stages.sample_rows import SampleRows

WHOLE, FIRST, SECOND = SampleRows(0, 4, 0, 4), SampleRows(0, 4, 0, 2), SampleRows(0, 4, 2, 4)


def output(streams: RandomStreams, rows: SampleRows, *, index: int = 3, step: int = 7) -> Tensor:
    with streams.layer(index, step, rows):
        return nn.Dropout(0.5)(torch.ones(2, 50))  # type: ignore[no-any-return]


def test_each_part_of_each_micro_batch_layer_and_step_draws_its_own() -> None:
    streams = RandomStreams(5, torch.device("cpu"))
    found = [
        *(
            output(streams, rows)
            for rows in (WHOLE, FIRST, SECOND, SampleRows(1, 4, 0, 4), SampleRows(1, 4, 0, 2))
        ),
        output(streams, FIRST, index=4),
        output(streams, FIRST, step=8),
        output(RandomStreams(6, torch.device("cpu")), FIRST),
    ]
    assert len({tuple(made.flatten().tolist()) for made in found}) == len(found)


def test_a_part_draws_the_same_when_it_is_computed_again() -> None:
    streams = RandomStreams(5, torch.device("cpu"))
    for rows in (WHOLE, FIRST, SECOND):
        once = output(streams, rows)
        output(streams, SampleRows(1, 4, 0, 4), step=8)
        assert torch.equal(output(streams, rows), once)
        assert torch.equal(output(RandomStreams(5, torch.device("cpu"), shared=True), rows), once)
