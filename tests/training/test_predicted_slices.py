"""Predictions of a run in slices from the shares of its stages' seconds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from counterflow.measure.stages.stage_record import StageCost
from counterflow.planning import LayerProfile
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.simulation import Simulation, simulate
from counterflow.training.timeline import costs_of


def _stage(**others: float) -> StageCost:
    profile = LayerProfile(
        samples=(1.0,),
        forward_seconds=(4.0,),
        backward_seconds=(8.0,),
        saved_bytes=(80,),
        weights_bytes=0,
        output_bytes=0,
        kept_bytes=(8,),
        kept_input_bytes=(8,),
        input_gradient_seconds=(6.0,),
        weight_gradients_seconds=(2.0,),
        state_bytes=16,
        **others,  # type: ignore[arg-type]
    )
    return StageCost(profile, input_bytes=8, layer_input_bytes=8, largest_layer_bytes=72, layers=1)


def _predicted(schedule: Schedule, recompute: Recompute, **shares: float) -> Simulation:
    return simulate(schedule, costs_of([_stage(**shares)], recompute, 1))


def _seconds(schedule: Schedule, recompute: Recompute, **shares: float) -> list[float]:
    found = _predicted(schedule, recompute, **shares)
    return [round(end - start, 9) for start, end in zip(found.start, found.end, strict=True)]


def test_a_slice_takes_its_fixed_part_its_share_and_its_attention() -> None:
    two = schemes.dapple(stages=1, micro_batches=1, slices=2)
    assert _seconds(two, Recompute.NONE) == [2.0, 2.0, 4.0, 4.0]
    # Each op has an eighth of a forward, 0.5, as its overhead; of the rest, 3.5 and 7.5, all is linear.
    assert _seconds(two, Recompute.NONE, fixed_share=0.125) == [2.25, 2.25, 4.25, 4.25]
    # A backward computes the forward again: 12 in all, in which there is one overhead of 0.5.
    assert _seconds(two, Recompute.LAYER, fixed_share=0.125) == [2.25, 2.25, 6.25, 6.25]
    # Or an op of its own does, with an overhead of its own.
    assert _seconds(two, Recompute.STAGE, fixed_share=0.125) == [2.25, 2.25, 2.25, 4.25, 2.25, 4.25]
    # Half of each is attention: of the second slice it is three quarters.
    assert _seconds(two, Recompute.NONE, attention_share=0.5) == [1.5, 2.5, 5.0, 3.0]
    assert _seconds(two, Recompute.LAYER, attention_share=0.5) == [1.5, 2.5, 7.5, 4.5]
    assert _seconds(two, Recompute.STAGE, attention_share=0.5) == [1.5, 2.5, 2.5, 5.0, 1.5, 3.0]


@pytest.mark.parametrize("recompute", list(Recompute))
def test_a_whole_micro_batch_takes_what_was_measured(recompute: Recompute) -> None:
    again = 4.0 if recompute is Recompute.LAYER else 0.0
    apart = [4.0] if recompute is Recompute.STAGE else []  # a recomputation
    shares = {"attention_share": 0.5, "fixed_share": 0.125}
    whole = schemes.dapple(stages=1, micro_batches=1)
    assert _seconds(whole, recompute, **shares) == [4.0, *apart, 8.0 + again]
    split = schemes.zb_h1(stages=1, micro_batches=1)
    assert _seconds(split, recompute, **shares) == [4.0, *apart, 6.0 + again, 2.0]
    slices = schemes.dapple(stages=1, micro_batches=1, slices=4)
    backwards = _seconds(slices, recompute, **shares)[4 + len(apart) :: 1 + len(apart)]
    assert all(later > earlier for later, earlier in pairwise(backwards))


def test_states_are_saved_where_the_rest_is_computed_again() -> None:
    two = schemes.dapple(stages=1, micro_batches=1, slices=2)
    for recompute, amounts in (
        (Recompute.NONE, [40.0, 80.0, 80.0, 40.0]),
        (Recompute.STAGE, [12.0, 16.0, 52.0, 40.0]),
    ):
        (used,) = _predicted(two, recompute).memory or ()
        assert list(used.amounts)[:2] == amounts[:2]
        assert used.peak == max(amounts)
