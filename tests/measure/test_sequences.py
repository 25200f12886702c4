"""How seconds grow with the length of a sequence: three times in, shares out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import counterflow as cf
from counterflow.common.laps import Reading
from counterflow.execution import Batching
from counterflow.measure.layer_times import AtLengths
from counterflow.measure.sequences import LENGTHS, Growth, at_lengths, positions_of_batch
from counterflow.measure.stages.stage_record import StageCost
from counterflow.measure.stages.subject import StageSubject
from counterflow.measure.stages.timing import measure_stages
from counterflow.schedule import schemes


@pytest.mark.parametrize(
    ("fixed", "linear", "attention"), [(1, 2, 5), (0, 3, 1), (0, 0, 2), (4, 0, 0), (0, 7, 0), (0.5, 0, 0.5)]
)
@pytest.mark.parametrize("lengths", [LENGTHS, (1.0, 6 / 13, 3 / 13)])
def test_three_times_give_the_shares(
    fixed: float, linear: float, attention: float, lengths: tuple[float, ...]
) -> None:
    whole = fixed + linear + attention
    found = Growth.of(lengths, [fixed + linear * s + attention * s**2 for s in lengths])
    assert found.fixed == pytest.approx(fixed / whole, abs=1e-6)
    assert found.attention == pytest.approx(attention / whole, abs=1e-6)


def test_what_no_growth_explains_has_no_negative_parts() -> None:
    assert Growth.of(LENGTHS, [4.0, 3.9, 2.0]).attention == 0  # grows less than in proportion
    assert Growth.of(LENGTHS, [9.0, 1.0, 0.1]) == Growth(1.0, 0.0)  # more than its square
    assert Growth.of(LENGTHS, [1.0, 2.0, 3.0]) == Growth(0.0, 1.0)  # is shorter for more
    assert Growth.of(LENGTHS, [8.0, 3.0, 1.625], attends=False).attention == 0
    assert Growth.of((1.0,), [1.0]) == Growth.of(LENGTHS, [1.0, 0.0, 1.0]) == Growth()


@given(st.lists(st.floats(1e-7, 10.0), min_size=3, max_size=3))
def test_noise_gives_shares_of_a_whole(seconds: list[float]) -> None:
    found = Growth.of(LENGTHS, seconds)
    assert min(found.attention, found.fixed) >= 0
    assert found.attention + found.fixed <= 1


def test_a_kind_of_layer_grows_as_its_layers_together_without_what_ops_take() -> None:
    """Two layers of 1 + 1 s + 6 s² together, and 2 · 0.125 around each; a third that leaves nothing."""
    seconds = ((4.25, 4.25, 2.0), (1.5 + 0.25, 1.5 + 0.25, 1.0), (0.8125 + 0.25, 0.8125 + 0.25, 0.5))
    found = AtLengths(16, LENGTHS, seconds, ((64.0, 0.0), (64.0, 0.0), (0.0, 0.0)))
    assert found.growth([0, 1], 0.125) == Growth(0.75, 0.125)
    assert found.growth([2], 0.0) == Growth()


def test_a_sequence_ends_after_a_half_and_a_quarter() -> None:
    inputs, targets = torch.arange(26).view(2, 13), torch.arange(26).view(2, 13)
    found = at_lengths(inputs, targets, Batching())
    assert [share for share, *_ in found] == [1.0, 6 / 13, 3 / 13]
    assert [its.shape for _, its, _ in found] == [(2, 13), (2, 6), (2, 3)]
    assert found[2][2].tolist() == [[0, 1, 2], [13, 14, 15]]
    assert positions_of_batch(inputs, targets, Batching()) == 13
    for other in (torch.zeros(2), torch.zeros(2, 12), torch.zeros(2, 13, 4)[:, :3]):
        assert positions_of_batch(inputs, other, Batching()) == 0
    assert at_lengths(inputs, torch.zeros(2), Batching())[1:] == []


_CLOCK = [0.0]


class _Slow(nn.Linear):
    """A layer that takes 1 + 2 s + 5 s² seconds of a clock, for a share s of 16 positions."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.carry = cf.Carry()

    def forward(self, value: Tensor) -> Tensor:
        share = value.shape[1] / 16
        _CLOCK[0] += 1 + 2 * share + 5 * share**2
        before = self.carry.take(None)
        sums = value.cumsum(1) if before is None else value.cumsum(1) + before
        self.carry.leave(sums[:, -1:].clone())
        return super().forward(sums)


def _measured(slices: int) -> StageCost:
    pipeline = cf.Pipeline(
        [_Slow()],
        nn.functional.mse_loss,
        schemes.dapple(stages=1, micro_batches=2, slices=slices),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    (cost,) = measure_stages(pipeline, torch.ones(6, 16, 4), torch.ones(6, 16, 4), repeats=1)
    return cost


def test_stages_in_slices_are_timed_at_three_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageSubject, "_now", lambda _: Reading(_CLOCK[0], _CLOCK[0], 0))
    whole, cost = (cf.launch(_measured, n, workers=1, transport="local")[0] for n in (1, 2))
    assert (whole.forward_seconds, whole.profile.attention_share, whole.profile.fixed_share) == (
        8.0,
        0.0,
        0.0,
    )
    assert (cost.forward_seconds, cost.profile.attention_share, cost.profile.fixed_share) == (
        8.0,
        0.625,
        0.125,
    )
    assert (whole.profile.slice_state_bytes, cost.profile.state_bytes) == (0, 0)
    assert cost.profile.slice_state_bytes == 3 * 4 * 4
