"""Profiles: a model's layers and a machine's links, measured and written for the planner."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from counterflow.errors import ConfigError
from counterflow.measure.cluster_costs import fitted
from counterflow.measure.links import Travel, measure_allreduces, measure_messages
from counterflow.measure.survey import _pairs, _workers_of_each_node
from counterflow.planning import Configuration, predict
from counterflow.planning.inputs import input_files
from counterflow.runtime.stages.stage import LocalStage
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.rank_info import RankInfo
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.op import B, F
from counterflow.training.profiling import measure

from .conftest import Configure


def test_a_profile_is_a_readable_file_that_reads_back(config: Configure, tmp_path: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    found = measure(
        config(model__layers=3),
        sizes=(2, 1),
        workers=1,
        repeats=1,
        progress=lambda *part: reported.append(part),
    )
    assert reported == [
        *(("layers", done, 2) for done in (0, 1, 2)),
        *((part, done, 1) for part in ("sequences", "steps", "links") for done in (0, 1)),
    ]
    assert found.model.runs() == [("gpt-embedding", 1), ("gpt-block", 3), ("gpt-head", 1)]
    assert found.cluster.size == 1
    assert found.messages == ()
    for name, load in (
        ("model", input_files.load_model),
        ("profile", input_files.load_profile),
        ("cluster", input_files.load_cluster),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text(input_files.dumps(getattr(found, name)))
        assert load(path) == getattr(found, name)
    block = found.profile.layer("gpt-block")
    assert block.samples == (1.0, 2.0)
    assert min(block.forward_seconds + block.backward_seconds) > 0
    assert found.profile.op_overhead_seconds > 0
    assert found.profile.step_overhead_seconds >= 0
    assert block.saved_bytes[1] == 2 * block.saved_bytes[0]
    hidden, positions = 16, 16
    assert block.output_bytes == 4 * hidden * positions
    assert block.weights_bytes == 4 * (12 * hidden**2 + 13 * hidden)
    assert found.model.input_bytes == 8 * positions
    assert found.profile.positions == positions
    assert block.state_bytes == 2 * positions * hidden * 4  # keys and values
    for layer in found.profile.layers.values():
        assert 0 <= layer.attention_share + layer.fixed_share <= 1
        assert layer is block or layer.attention_share == layer.state_bytes == 0
    assert found.model.optimizer_states == 2.0


def test_a_model_that_slices_do_not_divide_has_no_positions(config: Configure) -> None:
    """A BERT sees later positions too: its slices are refused, and nothing else is."""
    found = measure(config(model__kind="bert", model__layers=1), sizes=(1,), workers=1, repeats=1)
    assert found.profile.positions == 0
    layers = found.profile.layers.values()
    assert {(each.attention_share, each.fixed_share, each.state_bytes) for each in layers} == {(0, 0, 0)}


def test_what_was_measured_is_what_is_predicted_with(config: Configure) -> None:
    """A pipeline of one worker and micro-batch takes what its layers and two ops take, and the update."""
    found = measure(config(), sizes=(2,), workers=1, repeats=1)
    alone = Configuration.of("gpipe", {"stages": 1, "micro_batches": 1}, replicas=1, samples=2)
    step = predict(found.model, found.profile, found.cluster, alone)
    layers = [found.profile.layer(kind) for kind in found.model.layers]
    ops = sum(layer.seconds(kind, 2) for layer in layers for kind in (F, B))
    weights = sum(layer.weights_bytes for layer in layers)
    profile = found.profile
    update = profile.update_seconds_per_byte * weights + profile.step_overhead_seconds
    assert step.step_seconds == pytest.approx(ops + 2 * profile.op_overhead_seconds + update)


def test_what_is_timed_is_what_will_run(config: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(LocalStage, "compile", lambda self, _: compiled.extend(self.layers))
    measure(config(model__layers=2), sizes=(1,), workers=1, repeats=1)
    assert not compiled
    measure(config(model__layers=2, pipeline__compile=True), sizes=(1,), workers=1, repeats=1)
    # embedding, two small blocks, head: as one stage, as stages, with shorter sequences, between ops
    assert len(compiled) == 4 * 4


def test_sizes_below_one_are_refused(config: Configure) -> None:
    with pytest.raises(ConfigError, match=r"sizes = \[0, 2\]: give one size of a micro-batch or more"):
        measure(config(), sizes=(2, 0))


def _links(
    pair: tuple[int, int] = (0, 1), ranks: tuple[int, ...] | None = None
) -> tuple[tuple[Travel, ...], tuple[Travel, ...]]:
    transport = current_transport()
    sizes = (4, 4096)
    return (
        measure_messages(transport, sizes, repeats=3, pair=pair),
        measure_allreduces(transport, sizes, repeats=3, ranks=ranks),
    )


def test_links_are_measured_between_workers() -> None:
    all_three = launch(_links, workers=3, transport="local")
    for found in chain(all_three, launch(_links, (0, 2), (0, 2), workers=3, transport="local")):
        for travels in found:
            assert [travel.size_bytes for travel in travels] == [4, 4096]
            assert all(travel.seconds > 0 for travel in travels)
            assert fitted(travels).latency_seconds >= 0


def test_two_of_one_node_and_two_of_different_nodes_are_measured() -> None:
    assert _pairs(2, 2) == ((0, 1), (0, 2))
    assert _pairs(1, 4) == ((0, 1),)
    assert _pairs(4, 1) == ((0, 1),)
    assert _pairs(1, 1) == ()
    placed = RankInfo("torchrun", 0, 8, 0, "node0", 1, machines=2)
    assert _workers_of_each_node(placed, None) == 4
    with pytest.raises(ConfigError, match="workers=3: torchrun has started 4 on each machine; omit it"):
        _workers_of_each_node(placed, 3)
    with pytest.raises(ConfigError, match="8 workers on 3 machines: all nodes need the same number"):
        _workers_of_each_node(replace(placed, machines=3), None)
