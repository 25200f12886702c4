"""Ranges of a step from the spread of layers, and profiles that are not reliable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterflow import ConfigError
from counterflow.planning import Cluster, Configuration, LayerProfile, Link, Model, Profile, predict
from counterflow.planning.inputs import input_files
from counterflow.planning.inputs.reliability import unreliable
from counterflow.planning.prediction import seconds_text

FREE = Link(0.0, 0.0)
BLOCK = LayerProfile((1.0, 2.0), (0.5, 1.0), (1.0, 2.0), (10.0, 20.0), 100.0, 4.0)
SPREAD = replace(BLOCK, low_factors=(0.5, 0.9), high_factors=(1.5, 1.1))
CLUSTER = Cluster("c", 8, 1, 1e6, FREE, FREE)
MODEL = Model("m", ("block",) * 8)


def profile(block: LayerProfile = BLOCK, **more: Any) -> Profile:
    return Profile("p", "d", "", {"block": block}, **more)


def dapple(samples: int = 1, **more: Any) -> Configuration:
    return Configuration.of("dapple", {"stages": 4, "micro_batches": 4}, 1, samples, **more)


def test_a_step_has_the_range_of_its_layers() -> None:
    # 7 times a stage of two blocks, each 1.5 s: all of them low, or high, at once.
    found = predict(MODEL, profile(SPREAD), CLUSTER, dapple())
    assert found.step_seconds == pytest.approx(7 * 3.0)
    assert found.step_range_seconds == pytest.approx((7 * 1.5, 7 * 4.5))
    assert found.step_text == "21 ± 10 s"
    found = predict(MODEL, profile(SPREAD), CLUSTER, dapple(2))
    assert found.step_range_seconds == pytest.approx((7 * 6 * 0.9, 7 * 6 * 1.1))


def test_overheads_are_in_both_ends() -> None:
    found = predict(MODEL, profile(SPREAD, step_overhead_seconds=2.0), CLUSTER, dapple())
    assert found.step_range_seconds == pytest.approx((7 * 1.5 + 2, 7 * 4.5 + 2))


def test_a_range_of_one_kind_alone() -> None:
    both = Profile("p", "d", "", {"block": BLOCK, "head": SPREAD})
    model = Model("m", ("block", "head"))
    one = Configuration.of("dapple", {"stages": 1, "micro_batches": 1}, 1, 1)
    assert predict(model, both, CLUSTER, one).step_range_seconds == pytest.approx((1.5 + 0.75, 1.5 + 2.25))


@pytest.mark.parametrize("more", [{"recompute": "stage"}, {"zero_stage": 1}])
def test_ranges_of_other_ways_to_train(more: dict[str, Any]) -> None:
    found = predict(MODEL, profile(SPREAD), CLUSTER, dapple(**more))
    exact = predict(MODEL, profile(), CLUSTER, dapple(**more))
    assert found.step_seconds == exact.step_seconds
    assert exact.step_range_seconds is None
    assert found.step_range_seconds is not None
    low, high = found.step_range_seconds
    assert low == pytest.approx(0.5 * exact.step_seconds)
    assert high == pytest.approx(1.5 * exact.step_seconds)


def test_files_without_quantiles_stay_readable_and_those_with_them_read_back(tmp_path: Path) -> None:
    text = input_files.dumps(profile(SPREAD, waiting_share=0.25))
    assert input_files.read_profile(text, "p.toml") == profile(SPREAD, waiting_share=0.25)
    names = "low_factors", "high_factors", "waiting_share"
    old = "\n".join(line for line in text.splitlines() if not line.startswith(names))
    assert input_files.read_profile(old, "p.toml") == profile()


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"low_factors": (0.5,)}, "low_factors: 1 numbers for 2 sizes"),
        ({"low_factors": (0.5, 1.1)}, "must be at most 1"),
        ({"high_factors": (0.5, 1.1)}, "at least 1"),
        ({"high_factors": (1.0, float("inf"))}, "finite"),
    ],
)
def test_factors_that_are_none_are_refused(factors: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(BLOCK, **factors)


def block(
    forward: tuple[float, ...], samples: tuple[float, ...] = (2.0, 8.0, 16.0), **more: Any
) -> LayerProfile:
    zeros = (0.0,) * len(samples)
    return LayerProfile(samples, forward, zeros, zeros, 0.0, 0.0, **more)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (profile(block((3.2, 9.0, 18.0))), None),
        (profile(block((3.2, 3.1, 3.3))), None),  # a device that small micro-batches do not fill
        (profile(block((3.2, 38.6, 20.0))), "block takes 1.9 times as long for 8 samples as for 16"),
        (profile(block((1.0, 2.0, 3.0), low_factors=(0.9,) * 3, high_factors=(1.1,) * 3)), None),
        (
            profile(block((1.0, 2.0, 3.0), low_factors=(0.9, 0.5, 0.9), high_factors=(1.1,) * 3)),
            "repeats of block differ by 2.2 times at 8 samples",
        ),
        (profile(waiting_share=0.1), None),
        (profile(waiting_share=0.5), "its workers waited for a processor in 50% of the measured ops"),
        (  # a layer that hardly counts may do what it likes
            Profile("p", "d", "", {"block": block((3.0, 9.0, 18.0)), "view": block((0.1, 0.01, 0.1))}),
            None,
        ),
    ],
)
def test_a_profile_says_if_it_is_not_reliable(found: Profile, reason: str | None) -> None:
    expected = None if reason is None else f"not reliable, as {reason}: measure again on a quiet machine"
    assert unreliable(found) == expected


def test_a_plan_says_so_too() -> None:
    assert predict(MODEL, profile(), CLUSTER, dapple()).notes == ()
    (note,) = predict(MODEL, profile(waiting_share=0.6), CLUSTER, dapple()).notes
    assert note.startswith("the profile is not reliable, as its workers waited for a processor in 60%")


def test_ranges_in_words() -> None:
    assert seconds_text(0.283, (0.274, 0.29)) == "283 ± 9 ms"
    assert seconds_text(0.283, (0.283, 0.2831)) == "283 ms"
    assert seconds_text(0.2, (0.1, 0.9)) == "200 ± 700 ms"
    assert seconds_text(2.0, (1.9, 2.25)) == "2 ± 0.25 s"
