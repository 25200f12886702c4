"""A worker's peak: from the peaks of its layers' ops, and by walking its messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterflow.planning import (
    Cluster,
    Configuration,
    LayerProfile,
    Link,
    Model,
    Predictor,
    Profile,
    predict,
)
from counterflow.planning.cost.stage_memory import stage_bytes
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import OpKind, Saved

LAYER = LayerProfile(
    samples=(1,),
    forward_seconds=(1.0,),
    backward_seconds=(2.0,),
    saved_bytes=(30.0,),
    kept_input_bytes=(10.0,),
    forward_peak_bytes=(35.0,),
    backward_peak_bytes=(25.0,),
    weights_bytes=100.0,
    output_bytes=10.0,
    update_peak_bytes=7.0,
)
CLUSTER = Cluster("c", 2, 1, memory_bytes=1e6, inside=Link(0, 0), between=Link(0, 0))


def _backward_space(layers: list[LayerProfile], recompute: Recompute = Recompute.NONE) -> float:
    """Bytes of a backward of the layers of a stage while it runs."""
    return stage_bytes(layers, [10.0, 10.0], 1, recompute)[1][OpKind.BACKWARD]


def _predicted(layer: LayerProfile) -> tuple[object, ...]:
    model = Model("m", ("block",) * 2, optimizer_states=0.0, input_bytes=10.0)
    plan = Configuration.of("gpipe", {"stages": 2, "micro_batches": 2}, replicas=1, samples=1)
    return predict(model, Profile("p", "", "", {"block": layer}), CLUSTER, plan).memory


def test_a_worker_holds_its_state_stashes_messages_and_what_its_op_needs() -> None:
    first, second = _predicted(LAYER)
    # Worker 0 holds most in its second forward, or the first backward after it: 20 of each forward beside the
    # user's input, buffers for two gradients; and 15 more while it runs beside the first output, which was
    # sent, or 25 while the second one's gradient is used: that has arrived.
    assert (first.weights, first.gradients, first.activations) == (200.0, 100.0, 40.0)  # type: ignore[attr-defined]
    assert (first.workspace, first.buffers, first.total) == (15.0, 30.0, 285.0)  # type: ignore[attr-defined]
    # Worker 1: two inputs in their buffers belong to the activations; nothing else is in flight.
    assert (second.activations, second.workspace) == (60.0, 25.0)  # type: ignore[attr-defined]


def test_without_measured_peaks_messages_have_an_allowance() -> None:
    plain = LayerProfile((1,), (1.0,), (2.0,), (30.0,), weights_bytes=100.0, output_bytes=10.0)
    first, _ = _predicted(plain)
    assert (first.workspace, first.buffers) == (0.0, 20.0)  # type: ignore[attr-defined]


def test_an_output_that_its_layer_keeps_counts_once() -> None:
    relu = LayerProfile(
        (1,), (0,), (0,), (10,), 0.0, 10.0, kept_input_bytes=(0,), kept_output_bytes=(10,),
        forward_peak_bytes=(10,),
    )  # fmt: skip
    linear = LayerProfile((1,), (0,), (0,), (10,), 0.0, 10.0, forward_peak_bytes=(10,))
    stage = [linear, relu, linear], [10.0] * 3, 1
    assert stage_bytes(*stage)[0][Saved.ACTIVATIONS] == 20.0
    assert stage_bytes(*stage, Recompute.STAGE)[0][Saved.RECOMPUTED] == 10.0


@pytest.mark.parametrize("together", [False, True])
def test_an_update_needs_its_largest_layer_or_all_at_once(together: bool) -> None:
    layer = LayerProfile(
        (1,), (1.0,), (2.0,), (1.0,), 100.0, 0.0, forward_peak_bytes=(1.0,), update_peak_bytes=70.0
    )
    model = Model("m", ("block",) * 4, optimizer_states=0.0)
    plan = Configuration.of("gpipe", {"stages": 2, "micro_batches": 2}, replicas=1, samples=1)
    profile = Profile("p", "", "", {"block": layer}, update_together=together)
    first, _ = predict(model, profile, CLUSTER, plan).memory
    assert first.workspace == (140.0 if together else 70.0)


def test_computed_layer_by_layer_a_stage_holds_its_inputs_its_loss_and_one_layer() -> None:
    block = replace(LAYER, kept_output_bytes=(0.0,))
    head = replace(block, saved_bytes=(36.0,), kept_anyway_bytes=(6.0,), forward_peak_bytes=(41.0,))
    # The last layer's 20, and 25 of its backward; then its input is gone, and its loss.
    assert _backward_space([block, block], Recompute.LAYER) == 45.0
    assert _backward_space([block, head], Recompute.LAYER) == 45.0
    wide = replace(block, saved_bytes=(130.0,))
    assert _backward_space([wide, head], Recompute.LAYER) == 145.0 - 6.0


def test_recomputed_by_layer_the_loss_of_each_micro_batch_stays() -> None:
    head = replace(LAYER, saved_bytes=(36.0,), kept_anyway_bytes=(6.0,), forward_peak_bytes=(41.0,))
    plan = Configuration.of(
        "gpipe", {"stages": 2, "micro_batches": 3}, replicas=1, samples=1, recompute=Recompute.LAYER
    )
    model = Model("m", ("block", "head"), optimizer_states=0.0, input_bytes=10.0)
    profile = Profile("p", "", "", {"block": LAYER, "head": head})
    last = predict(model, profile, CLUSTER, plan).memory[1]
    # In the second backward: inputs of 10 in three buffers, two losses, one layer's 45, a gradient of 10.
    assert last.total == 200.0 + 3 * 10.0 + 2 * 6.0 + 45.0 + 10.0


def test_a_plan_fits_with_all_the_messages_that_it_has_in_flight() -> None:
    # Eight micro-batches' inputs wait in buffers, though no layer keeps them for its backward.
    layer = replace(LAYER, kept_input_bytes=(0.0,))
    model = Model("m", ("block",) * 16, optimizer_states=0.0, input_bytes=10.0)
    predictor = Predictor(model, Profile("p", "", "", {"block": layer}), CLUSTER)
    plan = Configuration.of("wpipe", {"workers": 2, "micro_batches": 8}, 1, 1)
    needed = max(worker.total for worker in predictor.play(plan).memory)
    for memory, fits in ((needed, True), (needed - 1, False)):
        cluster = replace(CLUSTER, memory_bytes=memory)
        assert Predictor(model, predictor.profile, cluster).play(plan).fits is fits


def test_between_the_halves_of_a_backward_layers_whose_weights_wait_hold_their_inputs() -> None:
    block = replace(
        LAYER, kept_bytes=(24.0,), kept_gradient_bytes=(12.0,), kept_output_bytes=(0.0,),
        held_input_bytes=(10.0,), input_gradient_peak_bytes=(40.0,),
    )  # fmt: skip
    tensors, space = stage_bytes([block, block], [10.0, 10.0], 1)
    # 12 saved and 12 of gradients of each, the second one's input, and the stage's own.
    assert tensors[Saved.WEIGHT_OPERANDS] == 2 * 24.0 + 10.0 + 10.0
    # When the first layer has its turn, the second one has dropped 8 of its 20, and left 12 of gradients but
    # for the output's 10, which is somebody else's; and there is the gradient of its input.
    assert space[OpKind.INPUT_GRADIENT] == 40.0 - 8.0 + 2.0 + 10.0
    # In one piece the second one's input is in no leaf, and nothing is dropped before the end.
    small = replace(block, graph_nodes=10)
    together, space = stage_bytes([small, small], [10.0, 10.0], 1)
    assert together[Saved.WEIGHT_OPERANDS] == 2 * 24.0 + 10.0
    assert space[OpKind.INPUT_GRADIENT] == 40.0 + 2.0 + 10.0
    # An output's gradient that no weight needs is not saved.
    other = replace(small, kept_output_gradient_bytes=(0.0,))
    assert stage_bytes([other, other], [10.0, 10.0], 1)[1][OpKind.INPUT_GRADIENT] == 40.0 + 12.0 + 10.0
    unused = replace(block, held_input_bytes=(0.0,), kept_bytes=(34.0,))  # its weights need the input
    operands = stage_bytes([unused, unused], [10.0, 10.0], 1)[0][Saved.WEIGHT_OPERANDS]
    assert operands == tensors[Saved.WEIGHT_OPERANDS]


def test_an_input_gradient_that_computes_layers_again_frees_no_input_and_leaves_what_weights_need() -> None:
    block = replace(
        LAYER, kept_bytes=(24.0,), kept_gradient_bytes=(12.0,), kept_output_bytes=(0.0,),
        held_input_bytes=(10.0,), input_gradient_peak_bytes=(40.0,),
    )  # fmt: skip
    spaces = [stage_bytes([block] * n, [10.0] * n, 1, Recompute.LAYER)[1] for n in (1, 2)]
    # The layer's 20 without its input, and 40 of its backward.
    assert spaces[0][OpKind.INPUT_GRADIENT] == 20.0 + 40.0
    # When the first layer has its turn, the second one has left 12, and 12 of gradients but for the output's
    # 10, which is somebody else's; and there is the gradient of its input.
    assert spaces[1][OpKind.INPUT_GRADIENT] == 60.0 + 12.0 + 2.0 + 10.0
    assert spaces[1][OpKind.BACKWARD] == 20.0 + 25.0
    # The loss of the last layer, which is not computed again, is dropped with its piece.
    head = replace(block, saved_bytes=(36.0,), kept_anyway_bytes=(6.0,))
    assert stage_bytes([block, head], [10.0] * 2, 1, Recompute.LAYER)[1][OpKind.INPUT_GRADIENT] == 84.0 - 6.0


def test_gradients_of_cast_weights_stay_to_the_end_of_a_backward() -> None:
    block = replace(LAYER, cast_bytes=50.0, kept_output_bytes=(0.0,))
    # The first layer's 25, the gradient of its output; the other one's 30 have gone, and 50 have come.
    assert _backward_space([block, block]) == 25.0 + 10.0 - 30.0 + 50.0
    frozen = replace(block, frozen_bytes=100.0)
    assert _backward_space([frozen, frozen]) == 25.0
