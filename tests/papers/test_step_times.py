"""The papers' closed forms of a step beside the planner's prediction of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from counterflow.papers.reproduction_report import FormShown, plan_shown
from counterflow.papers.step_times import ClosedForm, planned_closed_form
from counterflow.planning import Cluster, Configuration, LayerProfile, Link, Model, Predictor, Profile
from counterflow.planning.search.search_result import Plan


def block(forward: float, weights: float) -> LayerProfile:
    """Seconds of the forward of a sample; the backward takes twice as long."""
    sizes = (1.0, 2.0, 4.0)
    return LayerProfile(
        sizes,
        tuple(forward * n for n in sizes),
        tuple(2 * forward * n for n in sizes),
        tuple(10.0 * n for n in sizes),
        weights,
        4.0,
    )


PROFILE = Profile("p", "a device", "2026-01-01", {"block": block(0.5, 100.0), "big": block(1.0, 300.0)})
MODEL = Model("m", ("block",) * 8, optimizer_states=2.0)
CLUSTER = Cluster("c", 8, 1, 1e6, Link(0.0, 0.0), Link(0.0, 0.0))


def difference(model: Model, cluster: Cluster, configuration: Configuration) -> float:
    """How far the form is from the simulated step."""
    play = Predictor(model, PROFILE, cluster).play(configuration)
    form = planned_closed_form(play)
    assert form is not None
    found = form.difference(play.seconds)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("gpipe", {"stages": 4, "micro_batches": 8}),
        ("dapple", {"stages": 4, "micro_batches": 6}),
        ("gems", {"stages": 4, "micro_batches": 4}),
        ("chimera", {"stages": 4, "micro_batches": 4}),
        ("chimera", {"stages": 8, "micro_batches": 24}),
        ("mixpipe", {"stages": 4, "micro_batches": 4, "injected": 2, "early_forwards": 1}),
        ("hanayo", {"workers": 4, "micro_batches": 4, "waves": 1}),
        ("pipedream-2bw", {"stages": 4, "micro_batches": 8}),
        ("pipedream", {"stages": 4}),
        ("wpipe", {"workers": 4, "micro_batches": 8}),
    ],
)
def test_closed_forms_agree_where_their_assumptions_hold(scheme: str, options: dict[str, Any]) -> None:
    assert difference(MODEL, CLUSTER, Configuration.of(scheme, options, 1, 1)) == pytest.approx(0)


def test_they_agree_with_messages_and_the_sum_of_gradients() -> None:
    slow = replace(CLUSTER, between=Link(0.25, 0.5))
    dapple = Configuration.of("dapple", {"stages": 4, "micro_batches": 1}, 2, 1)
    assert difference(MODEL, slow, dapple) == pytest.approx(0)


def test_they_take_all_stages_to_be_as_slow_as_the_slowest() -> None:
    uneven = Model("m", ("big", *["block"] * 7))
    dapple = Configuration.of("dapple", {"stages": 4, "micro_batches": 4}, 1, 1, cuts=(2, 4, 6))
    assert difference(uneven, CLUSTER, dapple) > 0.1


def test_they_know_nothing_of_a_step_s_overhead() -> None:
    """Two blocks a stage and sample: F = 1, B = 2; each op takes 0.5 more, and so does the step."""
    profile = replace(PROFILE, op_overhead_seconds=0.5, step_overhead_seconds=0.5)
    dapple = Configuration.of("dapple", {"stages": 4, "micro_batches": 4}, 1, 1)
    play = Predictor(MODEL, profile, CLUSTER).play(dapple)
    assert play.seconds == (4 + 3) * (1.5 + 2.5) + 0.5
    assert planned_closed_form(play) == ClosedForm((4 + 3) * (1.5 + 2.5), "Chimera, Table 2")


def test_a_plan_as_data_has_the_form_or_none() -> None:
    predictor = Predictor(MODEL, PROFILE, CLUSTER)
    dapple = predictor.play(Configuration.of("dapple", {"stages": 4, "micro_batches": 4}, 1, 1))
    shown = plan_shown(Plan(dapple.seconds, 0, dapple))
    assert shown is not None
    assert shown.closed_form == FormShown(seconds=21.0, source="Chimera, Table 2", difference=0.0)
    assert shown.step_seconds == 21.0
    chunks = {"workers": 4, "micro_batches": 4, "chunks": 2}
    interleaved = predictor.play(Configuration.of("interleaved", chunks, 1, 1))
    shown = plan_shown(Plan(interleaved.seconds, 0, interleaved))
    assert shown is not None
    assert shown.closed_form is None
