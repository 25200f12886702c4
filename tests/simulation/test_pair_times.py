"""Simulated pairs: the all-to-all of one op beside the compute of the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from counterflow.errors import ConfigError
from counterflow.program.pairs import with_pairs
from counterflow.schedule import schemes
from counterflow.simulation import Costs, lower, simulate
from counterflow.simulation.pair_times import Exchanging, pair_seconds

COSTS = Costs(forward=3.0, backward=5.0, all_to_all=2.0, exchanges=1)
"""A forward is 0.5 + 2 + 0.5, a backward 1.5 + 2 + 1.5."""


@pytest.mark.parametrize(
    ("one", "other", "seconds"),
    [
        # F .5 (0-.5), x (.5-2.5); B 1.5 (.5-2), x (2.5-4.5); F .5 (2.5-3); B 1.5 (4.5-6)
        ((Exchanging(3.0, 2.0, 1),), (Exchanging(5.0, 2.0, 1),), 6.0),
        # F 1 (0-1), x (1-2); B 1 (1-2), x (2-3); F 1 (2-3), x (3-4); B 1 (3-4), x (4-5); F 1 (4-5); B 1 (5-6)
        ((Exchanging(5.0, 2.0, 2),), (Exchanging(5.0, 2.0, 2),), 6.0),
        # F 1 (0-1), x (1-3); R .5 (1-1.5), x (3-5); F 1 (3-4); R, B 1.5 (5-6.5), x (6.5-8.5); B 1 (8.5-9.5)
        ((Exchanging(4.0, 2.0, 1),), (Exchanging(3.0, 2.0, 1), Exchanging(4.0, 2.0, 1)), 9.5),
        # no exchange on the other side: it runs to its end within the first one
        ((Exchanging(4.0, 2.0, 1),), (Exchanging(3.0, 0.0, 0),), 5.0),
        # all is exchange, and the lane carries one at a time
        ((Exchanging(2.0, 2.0, 1),), (Exchanging(2.0, 2.0, 1),), 4.0),
    ],
)
def test_turns_of_a_pair(one: tuple[Exchanging, ...], other: tuple[Exchanging, ...], seconds: float) -> None:
    assert pair_seconds(one, other) == seconds


def test_a_step_of_one_worker_op_by_op() -> None:
    """F0.0 F0.1, then two pairs of 6 instead of 8, then B1.1 I1.0 W1.0."""
    schedule = with_pairs(schemes.dualpipe_v(workers=1, micro_batches=2))
    result = simulate(schedule, COSTS)
    assert [(str(span.op), span.start, span.end) for span in result.timeline] == [
        ("F0.0", 0.0, 3.0),
        ("F0.1", 3.0, 6.0),
        ("F1.0", 6.0, 8.25),  # 3 of 8 of the pair's 6
        ("B0.1", 8.25, 12.0),
        ("F1.1", 12.0, 14.25),
        ("B0.0", 14.25, 18.0),
        ("B1.1", 18.0, 23.0),
        ("I1.0", 23.0, 25.5),
        ("W1.0", 25.5, 28.0),
    ]
    assert simulate(schemes.dualpipe_v(workers=1, micro_batches=2), COSTS).makespan == 32.0


def test_products_of_a_pair_are_sent_when_both_ops_have_ended() -> None:
    schedule = with_pairs(schemes.dualpipe_v(workers=2, micro_batches=5))
    result = simulate(schedule, replace(COSTS, p2p=0.5))
    times = {str(span.op): span for span in result.timeline}
    sent = {(str(message.maker), str(message.taker)): message.start for message in result.messages}
    assert sent["F3.0", "F3.1"] == times["B1.3"].end > times["F3.0"].end
    for worker, bubbles in enumerate(result.bubbles):
        total = bubbles.warm_up + bubbles.dependency + bubbles.message + bubbles.drain
        assert total == pytest.approx(result.idle[worker])
    assert result.slack is None


@pytest.mark.parametrize("p2p", [0.0, 0.25])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
def test_a_program_takes_the_times_of_its_schedule(p2p: float, overlap: bool, recompute: str) -> None:
    costs = replace(COSTS, p2p=p2p, overlap=overlap, recompute=recompute, all_to_all=1.0, exchanges=3)
    for schedule in (
        schemes.dualpipe(stages=4, micro_batches=10),
        schemes.dualpipe_v(workers=2, micro_batches=7),
        schemes.interleaved(workers=2, micro_batches=6),
    ):
        paired = with_pairs(schedule)
        result, of_program = simulate(paired, costs), simulate(lower(paired, costs), costs)
        assert np.array_equal(result.start, of_program.start)
        assert np.array_equal(result.end, of_program.end)
        assert result.makespan == of_program.makespan
        assert result.messages == of_program.messages


def test_all_to_all_changes_nothing_without_pairs() -> None:
    schedule = schemes.dualpipe(stages=4, micro_batches=10)
    alone = simulate(schedule, replace(COSTS, all_to_all=0.0))
    assert np.array_equal(simulate(schedule, COSTS).end, alone.end)


def test_overlap_saves_more_than_a_fifth_if_a_third_of_the_work_is_all_to_all() -> None:
    costs = Costs(forward=1.75, backward=2.75, all_to_all=0.75)
    for schedule, ratio in (
        (schemes.dualpipe(stages=4, micro_batches=16), 1.292),
        (schemes.dualpipe_v(workers=2, micro_batches=16), 1.370),
        (schemes.dualpipe_v(workers=4, micro_batches=32), 1.364),
        (schemes.interleaved(workers=2, micro_batches=16), 1.010),
    ):
        saved = simulate(schedule, costs).makespan / simulate(with_pairs(schedule), costs).makespan
        assert saved == pytest.approx(ratio, abs=1e-3)


def test_a_recomputation_exchanges_again() -> None:
    """Within a backward too: F 3, and B 5 and 3 more, of which 4 are all-to-all."""
    schedule = with_pairs(schemes.dualpipe_v(workers=1, micro_batches=2))
    of_layers = simulate(schedule, replace(COSTS, recompute="layer"))
    of_stages = simulate(schedule, replace(COSTS, recompute="stage"))
    forward, backward = Exchanging(3.0, 2.0, 1), Exchanging(5.0, 2.0, 1)
    saved = 11.0 - pair_seconds((forward,), (Exchanging(8.0, 4.0, 2),))
    assert of_layers.makespan == 32.0 + 4 * 3.0 - 2 * saved
    saved = 11.0 - pair_seconds((forward,), (forward, backward))
    assert of_stages.makespan == 32.0 + 4 * 3.0 - 2 * saved


def test_costs_without_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="exchanges=0: must be 1 or more"):
        Costs(exchanges=0)
    with pytest.raises(ConfigError, match=r"all_to_all=-1: must be a finite number of seconds"):
        Costs(all_to_all=-1)
