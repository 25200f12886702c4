"""Predictions: literal steps, memory by hand, parts that add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow import ConfigError
from counterflow.planning import (
    Arrangement,
    Cluster,
    Configuration,
    Cutting,
    LayerProfile,
    LayerSkip,
    LayerTie,
    Link,
    Model,
    Predictor,
    Profile,
    predict,
)
from counterflow.planning.cost.stages import cut, stage_costs
from counterflow.schedule.modes import Recompute, Sync
from counterflow.schedule.op import B, F

FREE = Link(0.0, 0.0)


def block(forward: float = 0.5, weights: float = 100.0, output: float = 4.0) -> LayerProfile:
    """One second a sample and stage of two blocks forward, two backward; 10 bytes a sample saved."""
    sizes = (1.0, 2.0, 4.0)
    return LayerProfile(
        sizes,
        tuple(forward * n for n in sizes),
        tuple(2 * forward * n for n in sizes),
        tuple(10.0 * n for n in sizes),
        weights,
        output,
    )


PROFILE = Profile("p", "a device", "2026-01-01", {"block": block(), "big": block(1.0, 300.0)})
MODEL = Model("m", ("block",) * 8, optimizer_states=2.0)
CLUSTER = Cluster("c", 8, 1, 1e6, FREE, FREE)


def configured(scheme: str, replicas: int = 1, samples: int = 1, **options: Any) -> Configuration:
    more = {k: options.pop(k) for k in ("recompute", "sync", "arrangement", "cuts") if k in options}
    return Configuration.of(scheme, options, replicas, samples, **more)


def test_the_seconds_are_those_of_the_micro_batch_at_hand() -> None:
    curved = Profile("p", "d", "", {"block": replace(block(), forward_seconds=(0.5, 0.6, 0.8))})
    one = predict(MODEL, curved, CLUSTER, configured("dapple", stages=4, micro_batches=4, samples=1))
    two = predict(MODEL, curved, CLUSTER, configured("dapple", stages=4, micro_batches=4, samples=2))
    assert one.step_seconds == pytest.approx(7 * (1 + 2))
    assert two.step_seconds == pytest.approx(7 * (1.2 + 4))
    assert two.samples_per_second == pytest.approx(8 / (7 * 5.2))


def test_messages_and_the_sum_of_gradients() -> None:
    slow = replace(CLUSTER, between=Link(0.25, 0.5))
    found = predict(MODEL, PROFILE, slow, configured("dapple", replicas=2, stages=4, micro_batches=1))
    # Down and up: 6 messages of 4 bytes; then stage 0's 200 bytes over two copies.
    assert found.step_seconds == pytest.approx(4 * 3 + 6 * (0.25 + 2) + 2 * 0.25 + 0.5 * 200)


@pytest.mark.parametrize(
    ("pipeline", "share"),
    [
        ({}, 1.0),
        ({"compress": True}, 0.5),
        ({"compress": True, "autocast": "bfloat16"}, 1.0),  # such floats are not compressed
        ({"compress": True, "compute_dtype": "bfloat16"}, 1.0),
    ],
)
def test_compressed_messages_are_half_as_long(pipeline: dict[str, Any], share: float) -> None:
    slow = replace(CLUSTER, between=Link(0.25, 0.5))
    model = replace(
        MODEL, config={"pipeline": pipeline}, skips=(LayerSkip(1, (2,), 4.0), LayerSkip(0, (7,), 60.0))
    )
    one = configured("dapple", stages=4, micro_batches=1)
    play = Predictor(model, PROFILE, slow).play(one)
    assert play.costs.message_bytes == (8 * share, 4 * share, 4 * share, 4 * share)
    assert play.costs.skip_bytes == (60 * share,)
    assert (
        play.order_independent_bytes
        == Predictor(replace(model, config={}), PROFILE, slow).play(one).order_independent_bytes
    )
    plain = replace(model, skips=())
    found = predict(plain, PROFILE, slow, one)
    assert found.step_seconds == pytest.approx(4 * 3 + 6 * (0.25 + 0.5 * 4 * share))


@pytest.mark.parametrize(("form", "share"), [("bfloat16", 0.5), ("int8", 65 / 256)])
def test_compressed_sums_are_shorter_and_leave_residuals(form: str, share: float) -> None:
    slow = replace(CLUSTER, between=Link(0.0, 0.5))
    model = replace(MODEL, config={"pipeline": {"gradient_compression": form}})
    for scheme, sizes in (("dapple", {"stages": 4}), ("chimera", {"stages": 2})):
        one = Configuration.of(scheme, {**sizes, "micro_batches": 2}, 2, 1)
        plain, compressed = (Predictor(each, PROFILE, slow).play(one) for each in (MODEL, model))
        assert plain.costs.sync
        assert compressed.costs.sync == pytest.approx([share * full for full in plain.costs.sync])  # type: ignore[union-attr]
        more = [b.weights - a.weights for a, b in zip(plain.memory, compressed.memory, strict=True)]
        assert more == [200.0 if scheme == "dapple" else 800.0] * len(more)
    alone = configured("dapple", stages=4, micro_batches=1)  # there is nothing to sum
    found = [Predictor(each, PROFILE, slow).play(alone).memory for each in (MODEL, model)]
    assert found[0] == found[1]


def test_skips_travel_beside_the_stages_and_are_kept_for_their_users() -> None:
    slow = replace(CLUSTER, between=Link(0.0, 0.5))
    one = configured("dapple", stages=4, micro_batches=1, recompute="stage")
    plain = predict(MODEL, PROFILE, slow, one)
    # To the next stage it goes with the output: 8 bytes in place of 4, down and up. In a stage it is free.
    beside = replace(MODEL, skips=(LayerSkip(1, (2,), 4.0), LayerSkip(4, (5,), 4.0)))
    assert predict(beside, PROFILE, slow, one).step_seconds == pytest.approx(plain.step_seconds + 2 * 2)
    # Past the others it takes 50 seconds from worker 0 to 3, and its gradient 50 back.
    past = predict(replace(MODEL, skips=(LayerSkip(0, (6, 7), 100.0),)), PROFILE, slow, one)
    # Both leave worker 0 by one way, the 4 bytes to worker 1 first, and worker 3 likewise.
    # Worker 0 computes its stage again while it waits for the gradient.
    assert past.step_seconds == pytest.approx(1 + 2 + 50 + 1 + 3 + 2 + 50 + 2)
    assert [m.buffers - p.buffers for m, p in zip(past.memory, plain.memory, strict=True)] == [100, 0, 0, 100]
    assert past.memory[3].activations == plain.memory[3].activations + 100
    once = predict(replace(MODEL, skips=(LayerSkip(0, (7,), 100.0, once=True),)), PROFILE, slow, one)
    assert once.step_seconds == pytest.approx(1 + 2 + 50 + 1 + 3 + 3 * 2 + 3 * 2)  # no gradient
    with pytest.raises(ConfigError, match="a skip connection leads to layer 8, but the last one is 7"):
        replace(MODEL, skips=(LayerSkip(0, (8,), 1.0),))
    with pytest.raises(
        ConfigError, match=r"skips: from layer 3 to \[3\]: a skip leads from a layer to one or"
    ):
        LayerSkip(3, (3,), 1.0)


def test_memory_by_hand() -> None:
    found = predict(MODEL, PROFILE, CLUSTER, configured("dapple", stages=4, micro_batches=4, samples=2))
    worker = found.memory[0]
    assert worker.weights == 200 * (1 + 1 + 2)  # weights, gradients, Adam's two states
    assert worker.activations == 4 * 2 * 2 * 10  # 4 micro-batches of 2 samples in 2 blocks
    assert worker.buffers == 2 * 2 * 4  # a message of 2 samples each way
    assert [w.activations for w in found.memory] == [160, 120, 80, 40]


def test_communicators_take_memory_where_the_cluster_says_so() -> None:
    """Two a neighbour, and one a set of workers that sum."""
    asked = configured("dapple", replicas=2, stages=4, micro_batches=4)
    told = replace(CLUSTER, communicator_bytes=1000.0)
    without, found = (predict(MODEL, PROFILE, cluster, asked) for cluster in (CLUSTER, told))
    assert [worker.communicators for worker in found.memory] == [3000.0, 5000.0, 5000.0, 3000.0]
    assert [w.total - w.communicators for w in found.memory] == [w.total for w in without.memory]
    assert found.memory[1].parts()["communicators"] == 5000.0
    least = max(found.peak_bytes)
    assert predict(MODEL, PROFILE, replace(told, memory_bytes=least), asked).fits
    assert not predict(MODEL, PROFILE, replace(told, memory_bytes=least - 1), asked).fits


def test_gradients_of_weights_in_bfloat16_take_twice_their_bytes() -> None:
    """They are added up, and summed over copies, in float32; Adam's state is in bfloat16 too."""
    low = Profile("p", "d", "", {"block": replace(block(), low_precision_bytes=100.0)})
    slow = replace(CLUSTER, between=Link(0.0, 0.5))
    found = predict(MODEL, low, slow, configured("dapple", replicas=2, stages=4, micro_batches=1))
    assert [w.weights for w in found.memory] == [2 * (100 + 200 + 2 * 100)] * 4
    # Down and up: 6 messages of 4 bytes; then stage 0's 400 bytes of gradients over two copies.
    assert found.step_seconds == pytest.approx(4 * 3 + 6 * 2 + 0.5 * 400)
    with pytest.raises(ConfigError, match="low_precision_bytes=101: is a part of trained_bytes=100"):
        replace(block(), low_precision_bytes=101.0)
    tied = replace(MODEL, ties=(LayerTie((0, len(MODEL.layers) - 1), 40.0, low_precision=True),))
    found = predict(tied, low, CLUSTER, configured("dapple", stages=1, micro_batches=1))
    blocks = len(MODEL.layers)
    assert found.memory[0].weights == blocks * 500 - 40 * (1 + 2 + 2)


def test_frozen_weights_have_no_gradients_no_states_and_no_sum() -> None:
    """LoRA: 90 of a block's 100 bytes are frozen."""
    adapted = Profile(
        "p", "d", "", {"block": replace(block(), frozen_bytes=90.0)}, update_seconds_per_byte=1.0
    )
    slow = replace(CLUSTER, between=Link(0.0, 0.5))
    found = predict(MODEL, adapted, slow, configured("dapple", replicas=2, stages=4, micro_batches=1))
    assert [w.weights for w in found.memory] == [2 * (100 + 10 * (1 + 2))] * 4
    # Down and up: 6 messages of 4 bytes; then stage 0's 20 trained bytes over two copies, and their update.
    assert found.step_seconds == pytest.approx(4 * 3 + 6 * 2 + 0.5 * 20 + 20)
    frozen = replace(adapted, layers={"block": replace(block(), frozen_bytes=100.0)})
    slower = replace(CLUSTER, between=Link(0.25, 0.0))
    found = predict(MODEL, frozen, slower, configured("dapple", replicas=2, stages=4, micro_batches=1))
    assert found.step_seconds == pytest.approx(4 * 3 + 6 * 0.25)  # nothing to sum
    with pytest.raises(
        ConfigError, match="frozen_bytes=101: is a part of weights_bytes=100; must be no more"
    ):
        replace(block(), frozen_bytes=101.0)


def test_tied_weights_are_there_once_a_worker_and_summed_over_all_who_hold_them() -> None:
    tied = replace(MODEL, ties=(LayerTie((0, 7), 60.0),))
    slow = replace(CLUSTER, between=Link(0.0, 0.5))
    one = configured("dapple", stages=4, micro_batches=1)
    # Apart: each of both holds all of it; 60 bytes over the two after everything else.
    apart = predict(tied, PROFILE, slow, one)
    assert [w.weights for w in apart.memory] == [200 * 4] * 4
    assert apart.step_seconds == pytest.approx(4 * 3 + 6 * 2 + 0.5 * 60)
    # With two replicas, stage 0's sum is of the 140 bytes that it does not share; then 60 over four copies.
    twice = predict(tied, PROFILE, slow, replace(one, replicas=2))
    assert twice.step_seconds == pytest.approx(4 * 3 + 6 * 2 + 0.5 * 140 + 2 * 3 / 4 * 0.5 * 60)
    # In one stage it is there once; nothing is summed.
    together = predict(replace(tied, ties=(LayerTie((0, 1), 60.0),)), PROFILE, slow, one)
    assert [w.weights for w in together.memory] == [140 * 4, 800, 800, 800]
    assert together.step_seconds == pytest.approx(4 * 3 + 6 * 2)
    # In two stages of one worker, too.
    wave = predict(tied, PROFILE, slow, configured("hanayo", workers=2, waves=1, micro_batches=1))
    assert [w.weights for w in wave.memory] == [400 * 4 - 60 * 4, 400 * 4]
    untrained = predict(replace(tied, ties=(LayerTie((0, 7), 60.0, trained=False),)), PROFILE, slow, one)
    assert untrained.step_seconds == pytest.approx(4 * 3 + 6 * 2)
    with pytest.raises(ConfigError, match="layer 8 shares a weight, but the last one is 7"):
        replace(MODEL, ties=(LayerTie((0, 8), 1.0),))
    with pytest.raises(ConfigError, match=r"ties: \[3\]: must be two layers or more, ascending"):
        LayerTie((3,), 1.0)


def test_two_directions_hold_two_copies_and_no_flush_holds_versions() -> None:
    both = predict(MODEL, PROFILE, CLUSTER, configured("chimera", stages=4, micro_batches=4))
    assert [w.weights for w in both.memory] == [2 * 200 * 4] * 4
    late = predict(MODEL, PROFILE, CLUSTER, configured("pipedream-2bw", stages=4, micro_batches=4))
    assert [w.weights for w in late.memory] == [200 * 5] * 4
    stashed = predict(MODEL, PROFILE, CLUSTER, configured("pipedream", stages=4))
    assert [w.weights for w in stashed.memory] == [200 * (4 + 3 - s) for s in range(4)]
    assert [w.activations for w in stashed.memory] == [80, 60, 40, 20]
    layers = {
        kind: replace(layer, cast_bytes=layer.weights_bytes / 2) for kind, layer in PROFILE.layers.items()
    }
    cast = predict(MODEL, replace(PROFILE, layers=layers), CLUSTER, configured("pipedream", stages=4))
    assert [w.weights for w in cast.memory] == [200 * (4 + 3 - s) + 100 * (4 - s) for s in range(4)]
    assert [w.activations for w in cast.memory] == [80, 60, 40, 20]


def test_recomputation_keeps_less_and_takes_longer() -> None:
    whole, stage, layer = (
        predict(MODEL, PROFILE, CLUSTER, configured("dapple", stages=2, micro_batches=4, recompute=mode))
        for mode in Recompute
    )
    # F + B of two blocks take 6, and 2 more; worker 0's last layers are computed again before its gradient.
    assert [whole.step_seconds, stage.step_seconds, layer.step_seconds] == [30, 38, 40]
    other = replace(CLUSTER, recompute_ahead=False)
    behind = configured("dapple", stages=2, micro_batches=4, recompute=Recompute.STAGE)
    found = predict(MODEL, PROFILE, other, behind)
    assert (found.step_seconds, found.memory) == (40, stage.memory)
    # Stage 0 takes tokens, of which the model says nothing; stage 1 keeps its input of 4 bytes.
    assert whole.memory[1].activations == 40
    assert stage.memory[1].activations == 4 + (40 - 4)
    assert layer.memory[1].activations == 4 * 4 + (10 - 4)


def test_an_asynchronous_step_with_messages_and_skips_is_the_mean_of_what_repeats() -> None:
    """D=4, F + B = 3, messages of 1.5 seconds: 5.25, and not the 6 of the first periods."""
    slow = replace(CLUSTER, nodes=1, devices=8, inside=Link(1.5, 0.0))
    pipedream = configured("pipedream", stages=4)
    assert predict(MODEL, PROFILE, slow, pipedream).step_seconds == pytest.approx(5.25)
    skipping = replace(MODEL, skips=(LayerSkip(0, (7,), 0.0),))
    assert predict(skipping, PROFILE, slow, pipedream).step_seconds == pytest.approx(5.25)


def test_an_asynchronous_step_is_a_steady_period() -> None:
    late = predict(MODEL, PROFILE, CLUSTER, configured("pipedream-2bw", stages=4, micro_batches=6))
    assert late.step_seconds == pytest.approx(6 * 3)
    assert late.bubble_ratio == pytest.approx(0)
    # PipeDream updates after each micro-batch: a mini-batch of 8 is 8 updates.
    each = predict(MODEL, PROFILE, CLUSTER, configured("pipedream", stages=4), mini_batch=8)
    assert each.updates == 8
    assert each.step_seconds == pytest.approx(8 * 3)
    waves = predict(MODEL, PROFILE, CLUSTER, configured("wpipe", workers=4, micro_batches=4))
    assert waves.step_seconds == pytest.approx(4 * 3)


def test_workers_that_share_a_core_are_told() -> None:
    shared = replace(CLUSTER, nodes=1, devices=4, cores=2)
    found = predict(MODEL, PROFILE, shared, configured("dapple", stages=4, micro_batches=4))
    # At least the work of all workers over two cores, 24, above the 21 of the order; some of it waits.
    assert found.step_seconds == pytest.approx(27)
    assert "4 workers of a node share 2 cores" in found.notes[0]
    alone = replace(shared, cores=4)
    assert predict(MODEL, PROFILE, alone, configured("dapple", stages=4, micro_batches=4)).notes == ()


@pytest.mark.parametrize(("replicas", "seconds"), [(1, 48 + 6 + 2), (2, 96 + 12 + 4 + 4)])
def test_updates_messages_and_sums_share_a_core(replicas: int, seconds: float) -> None:
    """24 messages of a replica take 0.25, 4 updates 0.5; with two replicas 8 holders send 2 messages each."""
    profile = replace(PROFILE, step_overhead_seconds=0.5, message_core_seconds=0.25)
    shared = replace(CLUSTER, nodes=1, devices=8, cores=1)
    plan = configured("dapple", stages=4, micro_batches=4, replicas=replicas)
    found = predict(MODEL, profile, shared, plan)
    assert found.step_seconds == pytest.approx(seconds)
    assert found.notes == ("8 workers of a node share 1 core, in equal shares",)
    play = Predictor(MODEL, profile, shared).play(plan)
    assert play.timing.core_work == pytest.approx(seconds - (2 if replicas == 1 else 8))
    parts = play.parts()
    assert sum(getattr(parts, name) for name in type(parts).__slots__) == pytest.approx(seconds)


def test_beyond_the_profile_is_told() -> None:
    found = predict(MODEL, PROFILE, CLUSTER, configured("dapple", stages=4, micro_batches=1, samples=8))
    assert "exceed the profile of block (at most 4)" in found.notes[0]


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 workers · 4 replicas need 16 devices, but cluster c has 8"):
        predict(MODEL, PROFILE, CLUSTER, configured("dapple", stages=4, micro_batches=1, replicas=4))
    with pytest.raises(ConfigError, match="no layers of kind 'tail'"):
        Predictor(Model("m", ("tail",)), PROFILE, CLUSTER)
    with pytest.raises(ConfigError, match="samples=0"):
        predict(MODEL, PROFILE, CLUSTER, configured("dapple", stages=4, micro_batches=1, samples=0))
    with pytest.raises(ConfigError, match="a model of 8 layers for 9 stages"):
        predict(MODEL, PROFILE, replace(CLUSTER, nodes=9), configured("dapple", stages=9, micro_batches=1))


def test_layers_are_cut_by_cost_or_evenly() -> None:
    model = Model("m", ("big", *["block"] * 6, "big"))
    assert cut(model, PROFILE, Cutting.BALANCED, 2, samples=1) == (4,)
    assert cut(model, PROFILE, Cutting.EVEN, 3, samples=1) == (3, 5)
    assert cut(model, PROFILE, (1, 2), 3, samples=1) == (1, 2)
    with pytest.raises(ConfigError, match="has 6 of kind 'block'"):
        cut(model, PROFILE, Cutting.EVEN, 7, samples=1)
    stages = stage_costs(model, PROFILE, (3, 5), samples=2)
    assert stages.seconds(F) == [2 + 1 + 1, 2, 1 + 1 + 2]
    assert (stages.weights, stages.cuts) == ((500, 200, 500), (3, 5))
    assert stages.seconds(F, 4)[1] == 2 * stages.seconds(B, 1)[1] == 4


def test_an_op_and_a_step_have_their_overhead() -> None:
    """Two blocks a stage and sample: F = 1, B = 2; each op and the step take 0.5 more."""
    profile = replace(PROFILE, op_overhead_seconds=0.5, step_overhead_seconds=0.5)
    found = predict(MODEL, profile, CLUSTER, configured("dapple", stages=4, micro_batches=4))
    assert found.step_seconds == (4 + 3) * (1.5 + 2.5) + 0.5


@pytest.mark.parametrize(
    ("concat", "recompute", "forward"),
    [
        ("forward-doubling", "none", 2 * 2 + 0.5),  # two graphs
        ("forward-doubling", "stage", 3 + 0.5),
        ("backward-halving", "none", 2 * 1.5 + 0.5),
        ("backward-halving", "stage", 2 + 0.5),
    ],
)
def test_units_with_a_graph_of_their_own_run_in_turn(concat: str, recompute: str, forward: float) -> None:
    """One, two, four samples take 1.5, 2 and 3."""
    layer = LayerProfile((1.0, 2.0, 4.0), (1.5, 2.0, 3.0), (1.5, 2.0, 3.0), (1.0, 2.0, 4.0), 1.0, 0.0)
    profile = Profile("p", "a device", "2026-01-01", {"block": layer}, op_overhead_seconds=0.5)
    predictor = Predictor(Model("m", ("block",) * 2), profile, CLUSTER)
    options: dict[str, Any] = {"stages": 2, "micro_batches": 4, "concat": concat}
    play = predictor.play(Configuration.of("chimera", options, 1, 2, recompute=Recompute(recompute)))
    lasts = {s.end - s.start for s in play.simulation.timeline if s.op.kind.value == "F"}
    assert lasts == {forward}


@pytest.mark.parametrize("recompute", [Recompute.STAGE, Recompute.LAYER])
def test_what_is_recomputed_has_no_overhead(recompute: Recompute) -> None:
    """One stage, one micro-batch, layers that cost nothing and 1 s around an op: of two ops, not of three."""
    nothing = replace(PROFILE, layers={"block": block(0.0)}, op_overhead_seconds=1.0)
    one = configured("dapple", stages=1, micro_batches=1, recompute=recompute)
    assert predict(MODEL, nothing, CLUSTER, one).step_seconds == 2
    halves = configured("chimera", stages=2, micro_batches=2, concat="backward-halving", recompute=recompute)
    play = Predictor(MODEL, nothing, CLUSTER).play(halves)
    alone = {0} if recompute is Recompute.STAGE else set()  # a recomputation, which has layers alone
    assert {s.end - s.start for s in play.simulation.timeline} == {1} | alone


CONFIGURATIONS = st.sampled_from(
    [
        ("gpipe", {"stages": 4, "micro_batches": 4}),
        ("dapple", {"stages": 4, "micro_batches": 5}),
        ("chimera", {"stages": 4, "micro_batches": 8, "concat": "forward-doubling"}),
        ("hanayo", {"workers": 2, "micro_batches": 4, "waves": 2}),
        ("pipedream-2bw", {"stages": 4, "micro_batches": 4}),
    ]
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    CONFIGURATIONS,
    st.sampled_from(list(Recompute)),
    st.sampled_from(list(Sync)),
    st.sampled_from(list(Arrangement)),
    st.floats(0, 0.5),
)
def test_parts_add_up_to_the_step(
    of: tuple[str, dict[str, Any]], recompute: Recompute, sync: Sync, arrangement: Arrangement, slow: float
) -> None:
    cluster = replace(CLUSTER, nodes=4, devices=2, inside=Link(0.01, 0.02), between=Link(0.1, 0.05), cores=1)
    profile = replace(PROFILE, update_seconds_per_byte=0.001)
    predictor = Predictor(MODEL, profile, replace(cluster, sync_slowdown=slow))
    play = predictor.play(
        Configuration.of(of[0], of[1], 2, 2, recompute=recompute, sync=sync, arrangement=arrangement)
    )
    parts = play.parts()
    each = [getattr(parts, name) for name in type(parts).__slots__]
    assert sum(each) == pytest.approx(play.prediction().step_seconds)
    assert parts.compute > 0


HEADED = Model("eight and a head", (*["block"] * 8, "head"))
THIRDS = Profile("p", "d", "", {"block": block(1.0), "head": block(3.0, 100.0)})


def test_cuts_balance_workers() -> None:
    """Eight equal layers, a head of 3: with stages of 2, 3, 3, 3 the inner workers have 6 and begin late."""
    balanced = (2, 5, 8)
    assert cut(HEADED, THIRDS, Cutting.BALANCED, 4, 1) == balanced
    chimera = configured("chimera", stages=4, micro_batches=8)
    by_cuts = {
        cuts: predict(HEADED, THIRDS, CLUSTER, replace(chimera, cuts=cuts)).step_seconds
        for cuts in (balanced, (3, 4, 8), Cutting.BALANCED)
    }
    assert by_cuts == {balanced: 84.0, (3, 4, 8): 81.0, Cutting.BALANCED: 81.0}
    # One stage a worker: as before.
    dapple = predict(HEADED, THIRDS, CLUSTER, configured("dapple", stages=4, micro_batches=8))
    assert dapple.configuration.cuts == balanced


def test_cuts_respect_memory() -> None:
    """The first stage keeps four micro-batches: its layers move on until all fit, if that is possible."""
    kept = replace(block(), saved_bytes=(100.0, 200.0, 400.0))
    heavy = replace(PROFILE, layers={"block": kept})
    plain = replace(MODEL, optimizer_states=0.0)
    dapple = configured("dapple", stages=4, micro_batches=8)

    def planned(memory: float) -> tuple[Any, bool]:
        found = predict(plain, heavy, replace(CLUSTER, memory_bytes=memory), dapple)
        return found.configuration.cuts, found.fits

    assert planned(1250.0) == ((2, 4, 6), True)
    assert planned(1100.0) == ((1, 3, 5), True)
    assert planned(900.0) == ((2, 4, 6), False)
    again = predict(
        plain, heavy, replace(CLUSTER, memory_bytes=900.0), replace(dapple, recompute=Recompute.STAGE)
    )
    assert again.fits
