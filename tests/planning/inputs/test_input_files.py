"""Clusters, profiles and models: curves, ranges, and files that read back equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow import ConfigError
from counterflow.planning.inputs import input_files
from counterflow.planning.inputs.cluster import AllReduce, Cluster, Link, allreduce_seconds
from counterflow.planning.inputs.model import LayerSkip, LayerTie, Model
from counterflow.planning.inputs.profile import LayerProfile, Profile
from counterflow.schedule.op import B, F

LAYER = LayerProfile(
    samples=(1, 2, 4),
    forward_seconds=(1.0, 1.5, 3.0),
    backward_seconds=(2.0, 3.0, 6.0),
    saved_bytes=(10.0, 20.0, 40.0),
    weights_bytes=100.0,
    output_bytes=8.0,
    sources={"samples": 'a "stated" source\nin two lines'},
)
PROFILE = Profile("p", "a device", "2026-01-01", {"block": LAYER, "odd kind": LAYER}, 1e-9, {"date": "x"})
CLUSTER = Cluster(
    "c",
    2,
    4,
    16e9,
    Link(1e-5, 1e-10),
    Link(2e-5, 1e-9),
    allreduce_between=Link(0.0, 1e-9),
    allreduce=AllReduce.RING,
    sources={"a": "b"},
)
MODEL = Model("m", ("block", "block", "odd kind"), 1.0, 4.0, {"kind": "gpt", "layers": 2, "tied": True}, "s")
SKIPPING = replace(
    MODEL,
    skips=(LayerSkip(0, (2,), 8.0), LayerSkip(0, (1, 2), 4.0, True)),
    ties=(LayerTie((0, 2), 8.0, trained=False),),
    config={"data": {"path": "x"}},
)


@pytest.mark.parametrize(
    ("value", "load"),
    [
        (PROFILE, input_files.load_profile),
        (CLUSTER, input_files.load_cluster),
        (MODEL, input_files.load_model),
        (SKIPPING, input_files.load_model),
    ],
)
def test_files_read_back_equal(value: object, load: Callable[[Path], object], tmp_path: Path) -> None:
    assert isinstance(value, Profile | Cluster | Model)
    path = tmp_path / "x.toml"
    path.write_text(input_files.dumps(value), encoding="utf-8")
    assert load(path) == value
    path = tmp_path / "x.json"
    path.write_text(json.dumps(input_files.as_data(value)), encoding="utf-8")
    assert load(path) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 1", r"x\.toml: name: input should be a valid string, got 1"),
        ('name = "x"\nnode = 1', r"node: unknown key"),
        ('name = "x"', r"nodes: is missing"),
        ("name = ", r"not TOML"),
        ("name = 2026-01-01", r"x\.toml: 2026-01-01 is a date or a time; write it in quotes"),
        (
            input_files.dumps(CLUSTER).replace("nodes = 2", "nodes = 2.5"),
            r"x\.toml: nodes: input should be a valid int",
        ),
        (
            input_files.dumps(CLUSTER).replace("nodes = 2", 'nodes = "2"'),
            r"x\.toml: nodes: input should be a valid int",
        ),
        (
            input_files.dumps(CLUSTER).replace("sync_slowdown = 0.0", "sync_slowdown = nan"),
            r"sync_slowdown: .*finite",
        ),
        (input_files.dumps(CLUSTER).replace("[between]", "[betwen]"), r"x\.toml: betwen: unknown key"),
        (
            input_files.dumps(CLUSTER).replace("[inside]", "[inside]\nwidth = 1"),
            r"inside\.width: unknown key",
        ),
        (
            input_files.dumps(CLUSTER).replace("nodes = 2", "nodes = 0"),
            r"x\.toml: nodes=0: must be 1 or more",
        ),
        (
            input_files.dumps(CLUSTER).replace("seconds_per_byte = 1e-10", "seconds_per_byte = -1.0"),
            r"x\.toml: inside\.seconds_per_byte=-1.0: must be",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        input_files.load_cluster(path)


def test_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(input_files.dumps(CLUSTER), encoding="utf-8-sig")
    assert input_files.load_cluster(path) == CLUSTER


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        input_files.load_model(tmp_path / "none.toml")


def test_layers_of_a_profile_tell_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(input_files.dumps(PROFILE).replace("[1, 2, 4]", "[1, 2, 2]", 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"layers\.block\.samples=\[1.0, 2.0, 2.0\]: must be"):
        input_files.load_profile(path)
    with pytest.raises(ConfigError, match="forward_seconds: 1 numbers for 2 sizes"):
        LayerProfile((1, 2), (1.0,), (1.0, 2.0), (1.0, 2.0), 1.0, 1.0)
    with pytest.raises(ConfigError, match="no layers of kind 'head'; kinds: block, odd kind"):
        PROFILE.layer("head")


@settings(derandomize=True, deadline=None)
@given(st.floats(0.25, 64), st.floats(0.25, 64))
def test_more_samples_never_take_less(one: float, other: float) -> None:
    few, many = sorted((one, other))
    lines = LAYER.lines()
    for curve in (lines[F].at, lines[B].at, LAYER.saved):
        assert curve(few) <= curve(many) + 1e-12


def test_curves_go_through_what_was_measured() -> None:
    assert [LAYER.seconds(F, n) for n in (1, 2, 3, 4, 8)] == [1.0, 1.5, 2.25, 3.0, 6.0]
    assert [LAYER.saved(n) for n in (0.5, 3, 8)] == [5.0, 30.0, 80.0]


def test_rabenseifner() -> None:
    assert allreduce_seconds(Link(1.0, 1.0), 100, 1) == 0
    assert allreduce_seconds(Link(1.0, 1.0), 100, 2) == 2 + 100
    assert allreduce_seconds(Link(1.0, 1.0), 128, 8) == 6 + 2 * 7 * 16


def test_a_reserve_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves nothing"):
        Cluster("c", 1, 1, 1e9, Link(0, 0), Link(0, 0), reserve_bytes=1e9)
