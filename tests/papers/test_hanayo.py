"""Hanayo (Liu et al., SC'23): Figures 5 and 6, section 3.2's chimera-wave, section 3.4's closed form.

P = workers, waves = the paper's W, N = micro-batches. F = 1 and B = 2 are the times of one stage, so a
worker's whole forward of one micro-batch takes 2·waves·F.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from counterflow import Costs, OpKind
from counterflow.schedule.placement import wave
from counterflow.schedule.schemes import chimera, hanayo
from counterflow.simulation import simulate

from .reading import EQUAL_SLOTS, PRINTED

WORKERS = (1, 2, 3, 4, 5, 8)
WAVES = (1, 2, 3, 4)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
def test_section_3_2_wave_placement(workers: int, waves: int) -> None:
    (holders,) = wave(workers, waves).pipes_stages
    assert len(holders) == 2 * workers * waves
    assert holders[0] == holders[-1] == 0
    for stage, worker in enumerate(holders):
        leg, step = divmod(stage, workers)
        assert worker == (step if leg % 2 == 0 else workers - 1 - step)


def test_figure_5_orders_of_one_wave_on_four_workers() -> None:
    schedule = hanayo(workers=4, micro_batches=4, waves=1)
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "F0.0 F1.0 F2.0 F3.0 F0.7 B0.7 F1.7 B1.7 F2.7 B2.7 F3.7 B3.7 B0.0 B1.0 B2.0 B3.0",
        "F0.1 F1.1 F2.1 F0.6 F3.1 F1.6 B0.6 F2.6 B1.6 F3.6 B2.6 B0.1 B3.6 B1.1 B2.1 B3.1",
        "F0.2 F1.2 F0.5 F2.2 F1.5 F3.2 F2.5 B0.5 F3.5 B1.5 B0.2 B2.5 B1.2 B3.5 B2.2 B3.2",
        "F0.3 F0.4 F1.3 F1.4 F2.3 F2.4 F3.3 F3.4 B0.4 B0.3 B1.4 B1.3 B2.4 B2.3 B3.4 B3.3",
    ]
    result = simulate(schedule)
    assert result.makespan == 36
    assert list(result.peak_activations) == [5, 6, 7, 8]


def published_slots(workers: int, waves: int, micro_batches: int) -> dict[tuple[OpKind, int, int], int]:
    """(kind, micro-batch, stage) -> slot; units of P are shifted by 4·P·waves slots."""
    stages = 2 * workers * waves
    slots = {}
    for m in range(micro_batches):
        offset = 4 * workers * waves * (m // workers) + 2 * (m % workers)
        for stage in range(stages):
            slots[OpKind.FORWARD, m, stage] = offset + stage
            slots[OpKind.BACKWARD, m, stage] = offset + 2 * stages - 1 - stage
    return slots


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
def test_section_3_3_no_slot_is_shared_and_the_order_is_by_slot(workers: int, waves: int) -> None:
    for micro_batches in (1, workers, 2 * workers + 1, 4 * workers):
        slots = published_slots(workers, waves, micro_batches)
        schedule = hanayo(workers, micro_batches, waves)
        for order in schedule.orders:
            taken = [slots[op.kind, op.micro_batches[0], op.stage] for op in order]
            assert taken == sorted(set(taken))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
def test_section_3_3_equal_slots_play_as_the_slots_say(workers: int, waves: int) -> None:
    slots = published_slots(workers, waves, 2 * workers)
    result = simulate(hanayo(workers, 2 * workers, waves), EQUAL_SLOTS)
    for span in result.timeline:
        slot = slots[span.op.kind, span.op.micro_batches[0], span.op.stage]
        assert span.start <= slot
        if span.op.kind is OpKind.BACKWARD:
            assert span.start == slot
    assert set(result.idle) == {2 * (workers - 1)}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
@pytest.mark.parametrize(
    ("units", "idle"), [(row["units"], row["idle"]) for row in PRINTED["hanayo_section_3_4"]]
)
def test_section_3_4_idle_is_independent_of_the_waves(
    workers: int, waves: int, units: int, idle: int
) -> None:
    """In the time of one stage: 4(P−1) at N = P, 6(P−1) at 2P, 10(P−1) at 4P."""
    result = simulate(hanayo(workers, units * workers, waves))
    assert set(result.idle) == {idle * (workers - 1)}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
def test_section_3_4_idle_in_the_papers_unit(workers: int, waves: int) -> None:
    """(P−1)·T_B/W, where T_B is a worker's whole backward of one micro-batch."""
    whole_backward = 24.0
    stage = whole_backward / (2 * waves)
    costs = Costs(forward=stage / 2, backward=stage)
    idle = set(simulate(hanayo(workers, workers, waves), costs).idle)
    assert idle == {(workers - 1) * whole_backward / waves}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
def test_section_3_4_zones(workers: int, waves: int) -> None:
    """With f and b of one stage every worker idles (P−1)·f in zone A, (P−1)(b−f) in B and (P−1)·b in C.

    A: before forwards; B: before backwards, up to the first one of the worker's first stage; C: after that.
    """
    for forward, backward in ((1.0, 2.0), (2.0, 3.0), (1.0, 1.0)):
        result = simulate(hanayo(workers, workers, waves), Costs(forward=forward, backward=backward))
        for worker in range(workers):
            own = [span for span in result.timeline if span.worker == worker]
            forwards = {span.start for span in own if span.op.kind is OpKind.FORWARD}
            turned = min(s.start for s in own if s.op.kind is OpKind.BACKWARD and s.op.stage == worker)
            zones = dict.fromkeys("ABC", 0.0)
            for gap in result.gaps:
                if gap.worker == worker:
                    zone = "A" if gap.end in forwards else "C" if gap.start >= turned else "B"
                    zones[zone] += gap.end - gap.start
            lengths = {"A": forward, "B": backward - forward, "C": backward}
            assert zones == {zone: (workers - 1) * length for zone, length in lengths.items()}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
def test_section_3_4_bubble_ratio(workers: int, waves: int) -> None:
    result = simulate(hanayo(workers, workers, waves))
    exact = Fraction(2 * (workers - 1), 3 * workers * waves + 2 * (workers - 1))
    assert result.bubble_ratio == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("waves", WAVES)
def test_section_3_4_published_closed_form_counts_half_of_the_idle_time(workers: int, waves: int) -> None:
    """(2P−2)/(3PW+P−1) has the right idle time, but only half of it in the makespan below it."""
    result = simulate(hanayo(workers, workers, waves))
    published = Fraction(2 * workers - 2, 3 * workers * waves + workers - 1)
    idle, busy = Fraction(result.idle[0]), Fraction(result.busy[0])
    assert published == idle / (busy + idle / 2)
    assert published > Fraction(2 * (workers - 1), 3 * workers * waves + 2 * (workers - 1))


def test_section_3_4_one_wave_has_the_bubble_ratio_of_chimera() -> None:
    assert simulate(hanayo(workers=2, micro_batches=2, waves=1)).bubble_ratio == 0.25
    assert simulate(chimera(stages=4, micro_batches=4)).bubble_ratio == 0.25


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
@pytest.mark.parametrize("units", [1, 2, 4])
def test_section_3_4_peak_activations(workers: int, waves: int, units: int) -> None:
    """2·waves·P − (P−1−w) stages, so at most the memory of P whole micro-batches."""
    peaks = simulate(hanayo(workers, units * workers, waves)).peak_activations
    assert peaks == tuple(2 * waves * workers - (workers - 1 - w) for w in range(workers))
    assert max(peaks) / (2 * waves) == workers


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("waves", WAVES)
def test_section_3_2_no_second_copy_of_the_weights(workers: int, waves: int) -> None:
    """2·waves stages a worker, each 1/(2·waves) of a worker's share."""
    assert set(simulate(hanayo(workers, workers, waves)).weight_copies) == {2 * waves}


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 3, 4])
@pytest.mark.parametrize("costs", [Costs(), EQUAL_SLOTS])
def test_section_3_2_chimera_wave(workers: int, units: int, costs: Costs) -> None:
    """One wave on P workers takes the time of Chimera with D = 2P on half the work.

    Two such pipelines (width 2) therefore equal one Chimera on 2P workers, without its second copy of
    the weights: both hold two stages a worker, but Chimera's two are copies of stages held elsewhere.
    """
    one_wave = simulate(hanayo(workers, units * workers, waves=1), costs)
    pair = simulate(chimera(2 * workers, 2 * units * workers), costs)
    assert one_wave.makespan == pair.makespan
    assert one_wave.schedule.stages == pair.schedule.stages
    assert 2 * one_wave.schedule.workers == pair.schedule.workers
    assert 2 * one_wave.schedule.micro_batches == pair.schedule.micro_batches
    assert set(one_wave.idle) == set(pair.idle)
    assert len(one_wave.schedule.placement.copies(0)) == 1
    assert len(pair.schedule.placement.copies(0)) == 2


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_figure_6_more_waves_halve_the_bubbles_of_the_same_model(workers: int) -> None:
    one, two, four = (
        simulate(hanayo(workers, workers, waves), Costs(forward=4 / waves, backward=8 / waves))
        for waves in (1, 2, 4)
    )
    assert one.busy == two.busy == four.busy
    assert one.idle[0] == 2 * two.idle[0] == 4 * four.idle[0]


@pytest.mark.parametrize("workers", WORKERS)
def test_last_unit_may_be_partial(workers: int) -> None:
    for micro_batches in range(1, 3 * workers + 1):
        result = simulate(hanayo(workers, micro_batches, waves=2))
        assert set(result.busy) == {4 * 3 * micro_batches}
