"""The closed forms against the simulator, where they are exact; their values where they are not."""

from __future__ import annotations

from fractions import Fraction

import pytest

from counterflow import Costs, Schedule
from counterflow.papers import closed_forms as forms
from counterflow.papers import performance_models
from counterflow.papers.closed_forms import Range
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.schemes import (
    chimera,
    dapple,
    gems,
    gpipe,
    hanayo,
    pipedream,
    pipedream_2bw,
    wpipe,
)
from counterflow.simulation import simulate

from . import formulas

EVEN_DEPTHS = (2, 4, 6, 8, 12)
EQUAL_SLOTS = Costs(forward=1.0, backward=1.0)


def peaks(schedule: Schedule) -> Range:
    found = [Fraction(peak) for peak in simulate(schedule).peak_activations]
    return Range(min(found), max(found))


def idle(schedule: Schedule, costs: Costs | None = None) -> Fraction:
    (each,) = set(simulate(schedule, costs).idle)
    return Fraction(each)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("micro_batches", [8, 11, 32])
def test_gpipe_and_dapple(stages: int, micro_batches: int) -> None:
    ratio = forms.flushed_bubble_ratio(stages, micro_batches)
    for schedule in (gpipe(stages, micro_batches), dapple(stages, micro_batches)):
        assert idle(schedule) == formulas.flushed_idle(stages)
        assert idle(schedule, EQUAL_SLOTS) == formulas.flushed_idle(stages, 1, 1)
        assert ratio == formulas.flushed_idle(stages) / Fraction(simulate(schedule).makespan)
    assert peaks(gpipe(stages, micro_batches)) == forms.gpipe_activations(micro_batches)
    one_to_d = forms.one_forward_one_backward_activations(stages)
    assert peaks(dapple(stages, micro_batches)) == one_to_d


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_gpipe_groups(groups: int) -> None:
    schedule = gpipe(5, 6, groups)
    assert idle(schedule) == formulas.grouped_idle(5, groups, forward=groups, backward=2 * groups)
    ratio = idle(schedule) / Fraction(simulate(schedule).makespan)
    assert forms.flushed_bubble_ratio(5, groups * 6) == ratio


@pytest.mark.parametrize("stages", EVEN_DEPTHS)
def test_gems(stages: int) -> None:
    for n in (1, 2, 5):
        makespan = forms.gems_makespan(stages, n)
        assert simulate(gems(stages, n)).makespan == makespan
    many = 10_000
    exact = 1 - 3 * many / forms.gems_makespan(stages, many)
    assert 0 < exact - forms.gems_bubble_ratio(stages) < Fraction(1, many)


@pytest.mark.parametrize("stages", EVEN_DEPTHS)
@pytest.mark.parametrize("units", [1, 2, 3])
def test_chimera(stages: int, units: int) -> None:
    n = units * stages
    for pairs in (f for f in range(1, stages // 2 + 1) if (stages // 2) % f == 0):
        schedule = chimera(stages, n, pairs)
        makespan = Fraction(simulate(schedule, EQUAL_SLOTS).makespan)
        ratio = forms.chimera_bubble_ratio(stages, n, pairs)
        assert ratio == idle(schedule, EQUAL_SLOTS) / makespan
        assert peaks(schedule) == forms.chimera_activations(stages, pairs)
        assert set(simulate(schedule).weight_copies) == {forms.chimera_weights(pairs)}
    assert idle(chimera(stages, n)) == formulas.chimera_direct_idle(stages, units)


@pytest.mark.parametrize("stages", EVEN_DEPTHS)
def test_chimera_with_middle_bubbles(stages: int) -> None:
    basic = simulate(chimera(stages, stages))
    forwards, backwards = performance_models.chimera_critical_path(stages)
    assert basic.makespan == forwards + 2 * backwards
    ratio = forms.chimera_middle_bubble_ratio(stages, stages)
    assert ratio == Fraction(basic.idle[0]) / Fraction(basic.makespan)
    doubled = simulate(chimera(stages, 4 * stages, concat="forward-doubling"))
    ratio = forms.chimera_middle_bubble_ratio(stages, 4 * stages)
    assert ratio == Fraction(doubled.idle[0]) / Fraction(doubled.makespan)


def test_mixpipe_published_figures() -> None:
    found = {(k, g): forms.mixpipe_idle(4, k, g) for k, g in ((4, 0), (2, 0), (2, 1))}
    assert found == {(4, 0): 4, (2, 0): 10, (2, 1): 7}
    assert forms.mixpipe_idle(6, 2) == 20
    assert forms.mixpipe_idle(8, 2) == 30
    assert forms.mixpipe_bubble_ratio(4, 2, 1) == Fraction(7, 19)
    assert forms.mixpipe_activations(2, 1) == Range.of(3)
    assert forms.mixpipe_max_idle(8) == 9
    assert forms.mixpipe_max_activations(8) == Range.of(11)


@pytest.mark.parametrize("stages", EVEN_DEPTHS)
def test_mixpipe_table_i_counts_chimera_in_equal_slots(stages: int) -> None:
    ratio = forms.mixpipe_chimera_bubble_ratio(stages)
    assert ratio == forms.chimera_bubble_ratio(stages, stages)
    bubbles = Fraction(stages, 2) - 1
    assert ratio == bubbles / (stages + bubbles)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("waves", [1, 2, 4])
def test_hanayo(workers: int, waves: int) -> None:
    for units in (1, 2, 4):
        schedule = hanayo(workers, units * workers, waves)
        assert idle(schedule) == formulas.hanayo_idle(workers, units)
        assert peaks(schedule) == formulas.hanayo_activations(workers, waves)
    schedule = hanayo(workers, workers, waves)
    exact = idle(schedule) / Fraction(simulate(schedule).makespan)
    assert forms.hanayo_bubble_ratio(workers, waves) == exact
    published = forms.hanayo_published_bubble_ratio(workers, waves)
    assert performance_models.hanayo_equation_1(workers, waves) == published
    assert published > exact


def test_hanayo_messages_cost_more_with_more_waves() -> None:
    free = performance_models.hanayo_equation_1(4, 2)
    dear = performance_models.hanayo_equation_1(4, 2, message=Fraction(1, 10))
    assert dear > free


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("extra", [0, 1, 4])
def test_asynchronous_schemes(workers: int, extra: int) -> None:
    m = workers + extra
    one = formulas.one_forward_one_backward_model_activations(workers)
    two_bw = pipedream_2bw(workers, m, periods=4)
    grouped = wpipe(workers, m, periods=4)
    single = pipedream(workers, periods=4 * workers)
    for schedule in (single, two_bw):
        assert sum(simulate(schedule).peak_activations) == one * workers
        assert peaks(schedule) == forms.one_forward_one_backward_activations(workers)
    stashed = sum(simulate(grouped).peak_activations)
    assert stashed == forms.wpipe_activations(workers, m) * 2 * workers
    over = forms.wpipe_published_activations(workers, m) - forms.wpipe_activations(workers, m)
    assert over == Fraction(m - workers, 2)
    assert forms.pipedream_published_activations(workers, m) - one == m - workers
    copies = simulate(single).weight_copies
    assert Range.of(min(copies), max(copies)) == forms.pipedream_weights(workers)
    assert sum(copies) == forms.pipedream_buffers(workers) * workers


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_messages(workers: int) -> None:
    for schedule, partitions in (
        (gpipe(workers, 4), 1),
        (wpipe(workers, workers, 2), 2),
    ):
        count = Fraction(len(OpGraph(schedule).messages), schedule.total_micro_batches)
        assert count == forms.messages(workers, partitions)
