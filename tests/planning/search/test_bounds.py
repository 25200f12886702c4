"""Bounds of small candidates by hand: what a plan cannot beat, and not less than that either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from counterflow.planning.cost.device_placement import Network
from counterflow.planning.cost.sharded_state import ShardedState
from counterflow.planning.cost.stage_ties import StageTie
from counterflow.planning.cost.stages import StageCosts
from counterflow.planning.inputs.cluster import Cluster, Collective, Link
from counterflow.planning.inputs.model import Model
from counterflow.planning.inputs.profile import LayerProfile, Profile
from counterflow.planning.search.bounds import Common, _Stashes, _WorkerState, common
from counterflow.planning.search.least_times import MinimumTimes, PipeTimes, least_times
from counterflow.planning.search.order_free_bounds import WorkerBounds, _ready, _summed
from counterflow.planning.search.path_bounds import HopCosts, PathBounds
from counterflow.planning.search.shape import WorkloadShape
from counterflow.schedule.modes import Recompute
from counterflow.schedule.op import B, F, I, OpKind, Saved, W
from counterflow.schedule.placement import Placement, bidirectional, linear, looped, wave
from counterflow.simulation.layer_cost import LayerCost, Line
from counterflow.simulation.op_costs import StageBytes

CLUSTER = Cluster("c", nodes=1, devices=2, memory_bytes=1000.0, inside=Link(0.0, 0.0), between=Link(0.0, 0.0))
PROFILE = Profile(
    "p", "", "", {"stage": LayerProfile((1.0,), (0.0,), (0.0,), (0.0,), weights_bytes=0.0, output_bytes=0.0)}
)


def costs(forward: tuple[float, ...], backward: tuple[float, ...], **others: Any) -> StageCosts:
    """Stages with these seconds; ops on two or on half a micro-batch take as much for each, unless told."""
    stages = len(forward)
    half = tuple(b / 2 for b in backward)
    none = (0.0,) * stages
    split = (others.pop(name, half) for name in ("input_gradient", "weight_gradients"))
    weights, stash = others.pop("weights", none), others.pop("stash", none)
    ties: tuple[StageTie, ...] = others.pop("ties", ())
    gradients = others.pop("gradients", weights)
    values: dict[str, Any] = {
        "layers": tuple(
            layers({F: (f / 2, f, 2 * f), B: (b / 2, b, 2 * b), I: (i / 2, i, 2 * i), W: (w / 2, w, 2 * w)})
            for f, b, i, w in zip(forward, backward, *split, strict=True)
        ),
        "_ties": (ties, [none] * stages),
        "trained": none,
        "summed": none,
    }
    rows = zip(weights, gradients, stash, strict=True)
    memory = tuple(StageBytes(w, g, {Saved.ACTIVATIONS: size}, {}) for w, g, size in rows)
    plain = StageCosts(Model("m", ("stage",) * stages), PROFILE, tuple(range(1, stages)), 1)
    summed = others.get("summed", none)  # gradients as large as their weights
    return changed(plain, **values | {"_tables": {Recompute.NONE: memory}, "synced": summed} | others)


def changed(stages: StageCosts, **values: Any) -> StageCosts:
    """The stages with values in place of those that follow from their layers."""
    copied = replace(stages)
    vars(copied).update(vars(stages) | values)
    vars(copied).pop("_distinct_layers", None)  # they follow from the others
    return copied


def layers(seconds: dict[OpKind, tuple[float, ...]], overhead: float = 0.0) -> LayerCost:
    """A stage with seconds of half a micro-batch, of one and of two, without the overhead of an op."""
    lines = {kind: ((1, Line((0.5, 1.0, 2.0), row)),) for kind, row in seconds.items()}
    return LayerCost(lines, overhead=dict.fromkeys(seconds, overhead))


def links(workers: int, latency: float = 0.0, **others: Any) -> Network:
    """Links of one latency between all workers."""
    none = ((0.0,) * workers,) * workers
    apart = tuple(tuple(0.0 if a == b else latency for b in range(workers)) for a in range(workers))
    found: dict[str, Any] = {
        "latency_seconds": apart,
        "seconds_per_byte": none,
        "ways": None,
        "allreduce": (),
        "crossed": ((),) * workers,
        "copies": 1,
    }
    return Network(**found | others)


def straight(workers: int, micro_batches: int, **others: Any) -> WorkloadShape:
    """A straight synchronous pipeline."""
    found: dict[str, Any] = {
        "placement": linear(workers),
        "passes": (micro_batches,),
        "together": (1,),
        "parts": 1,
        "split": False,
        "most_stashed": None,
        "most_in_flight": None,
        "synchronous": True,
    }
    return WorkloadShape(**found | others)


def ready(
    shape: WorkloadShape, each: list[MinimumTimes], *ways: tuple[list[float], list[float]]
) -> list[float]:
    """When gradients are ready, by the times of each pipe, and its ways before and after each stage."""
    times = PipeTimes(*(np.array(rows) for rows in zip(*map(columns, each), strict=True)))
    before, after = (np.array(rows) for rows in zip(*ways, strict=True))
    return _ready(shape, times, PathBounds(before, after, np.zeros_like(before)), range(len(ways)))


def columns(times: MinimumTimes) -> tuple[list[float], ...]:
    return times.forward, times.both, times.through, times.backward_op


def bounded(shape: WorkloadShape, stages: StageCosts, network: Network, **others: Any) -> Common:
    return common(shape, stages, network, CLUSTER, Recompute.NONE, **others)


def test_pairs_that_begin_together_leave_less_room_empty() -> None:
    """Forward doubling: two stages, 20 s apart, four micro-batches, two stashes at most.

    A micro-batch stays on worker 0 for F + 20 + F + B + 20 + B = 46 s. Four of them on two places need
    92 s, and since two begin at once, no place has to stay empty before both are taken.
    """
    shape = straight(2, 4, together=(2,), most_stashed=2)
    stages = costs((1.0, 1.0), (2.0, 2.0))
    assert bounded(shape, stages, links(2, 20.0)).bounds(2).seconds_in_any_memory == 92
    # One after the other: the second place stays empty for a forward, and at the end for a backward.
    alone = replace(shape, together=(1,))
    assert bounded(alone, stages, links(2, 20.0)).bounds(2).seconds_in_any_memory == 92 + (1 + 2) / 2
    # Three places: the third is filled a pair later, so that it stays empty for (3 − 2) / 2 · (1 + 2).
    three = bounded(shape, stages, links(2, 20.0)).bounds(3)
    assert three.seconds_in_any_memory == pytest.approx(4 * 46 / 3 + 1.5)
    # With four places the other worker decides: 21 s before its first op, 12 s of work, 22 s after.
    for places in (4, 9):
        assert bounded(shape, stages, links(2, 20.0)).bounds(places).seconds_in_any_memory == 21 + 12 + 22


def test_few_in_flight_go_one_trip_after_another() -> None:
    """Five micro-batches, two in flight: three trips of F + 20 + F + B + 20 + B = 46 s, then nothing."""
    found = bounded(straight(2, 5), costs((1.0, 1.0), (2.0, 2.0)), links(2, 20.0))
    assert found.bounds(None, most_in_flight=2).seconds_in_any_memory == 3 * 46
    # Three in flight come back in two trips; the work of worker 1, and the way there, is less with five.
    assert found.bounds(None, most_in_flight=3).seconds_in_any_memory == 2 * 46
    assert found.bounds(None, most_in_flight=5).seconds_in_any_memory == 21 + 15 + 22
    assert found.bounds(None).seconds_in_any_memory == 21 + 15 + 22


def test_a_pipe_s_ways_up_down_and_around() -> None:
    """Worker 0 holds stages 0 and 2, worker 1 stage 1; gradients travel as halves."""
    latency, per_byte = ((0.0, 100.0), (1000.0, 0.0)), ((0.0, 0.5), (0.25, 0.0))
    network = links(2, latency_seconds=latency, seconds_per_byte=per_byte)
    stages = costs((1.0, 2.0, 4.0), (8.0, 16.0, 32.0), output_bytes=(10.0, 20.0, 0.0))
    times = MinimumTimes([1.0, 2.0, 4.0], [9.0, 18.0, 36.0], [9.0, 18.0, 36.0], [8.0, 16.0, 32.0])

    def path(*holders: int) -> list[list[float]]:
        placement = Placement(2, (holders,))
        on = times.on(placement.pipes_stages, ())
        found = PathBounds.of(HopCosts.of(placement, network), on, stages.message_bytes, (1.0, 2))
        return [rows[0].tolist() for rows in (found.before, found.after, found.stay)]

    up, down = (100 + 5, 1000 + 5), (1000 + 2.5 / 2, 100 + 10 / 2)
    before, after, stay = path(0, 1, 0)
    assert before == [0, 1 + up[0], 1 + up[0] + 2 + up[1]]
    assert after == [0, 8 + down[0], 8 + down[0] + 16 + down[1]]
    last = 4 + 32
    middle = last + up[1] + down[1] + 2 + 16
    assert stay == [middle + up[0] + down[0] + 1 + 8, middle, last]
    # Stages side by side on one worker send nothing.
    assert path(0, 0, 0) == [[0, 1, 3], [0, 8, 24], [63, 54, 36]]


def test_sums_of_a_worker_follow_each_other() -> None:
    syncs, ready = (5.0, 7.0, 1.0), [10.0, 9.0, 20.0]
    assert _summed([{0}], syncs, ready) == 15
    assert _summed([{0, 1}], syncs, ready) == 9 + 7 + 5  # stage 1 is ready first, and then both are summed
    assert _summed([{0, 2}], syncs, ready) == 21  # stage 0 is summed long before stage 2 is ready
    assert _summed([{2}, {0, 1}, {0}], syncs, ready) == 21
    assert _summed([], syncs, ready) == 0


def test_when_gradients_are_ready_at_the_earliest() -> None:
    """A wave: worker 0 holds stages 0 and 3, worker 1 stages 1 and 2; two micro-batches."""
    shape = straight(2, 2, placement=wave(2, 1))
    forward, backward = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    path = ([0.0, 1.0, 3.0, 6.0], [0.0, 10.0, 30.0, 60.0])
    times = MinimumTimes(forward, both, both, backward)
    # Stage 3: twice its own 44 and stage 0's forward. Then one backward after the other.
    assert ready(shape, [times], path) == [150, 140, 120, 90]
    # Stage 1 waits for its worker, which has stages 1 and 2 to do twice from 1 on, if stage 3 takes nothing.
    slow = MinimumTimes([1.0, 2.0, 3.0, 0.0], [11.0, 22.0, 33.0, 0.0], [11.0, 22.0, 33.0, 0.0], backward)
    quick = ([0.0, 1.0, 3.0, 6.0], [0.0, 1.0, 2.0, 3.0])
    assert ready(shape, [slow], quick) == [112, 1 + 2 * (22 + 33), 1 + 2 * (2 + 33), 2 * (0 + 1)]


def test_weight_gradients_of_their_own_are_ready_when_a_stage_has_all_its_ops() -> None:
    shape = straight(2, 3)
    times = MinimumTimes([10.0, 1.0], [32.0, 4.0], [22.0, 3.0], [12.0, 2.0])
    path = ([0.0, 10.0], [0.0, 12.0])
    assert ready(shape, [times], path) == [3 * 32, 10 + 3 * 4]


def test_pipes_without_micro_batches_have_no_gradients() -> None:
    shape = straight(2, 2, placement=bidirectional(2), passes=(2, 0), together=(1, 1))
    times, path = MinimumTimes([1.0] * 2, [3.0] * 2, [3.0] * 2, [2.0] * 2), ([0.0, 1.0], [0.0, 2.0])
    dear = MinimumTimes([100.0] * 2, [300.0] * 2, [300.0] * 2, [200.0] * 2)
    assert ready(shape, [times, dear], path, path) == [1 + 6 + 2, 1 + 6]
    assert ready(replace(shape, passes=(0, 2)), [dear, times], path, path) == [9, 7]
    # Both: the later one of each stage.
    assert ready(replace(shape, passes=(1, 1)), [dear, times], path, path) == [303, 301]


def state(
    update: float, fixed: list[float], stash: list[float], usable: list[float], *others: Any
) -> _WorkerState:
    which, around, occupied = zip(*others, strict=True) if others else ((), (), ())
    stashes = _Stashes(np.array(which, dtype=np.int64), np.array(around), np.array(occupied))
    return _WorkerState.of(update, np.array(fixed), np.array(stash), np.array(usable), stashes)


def test_the_fullest_worker_and_what_its_stashes_need() -> None:
    found = state(9.0, [10.0, 20.0], [5.0, 7.0], [100.0, 30.0], (0, 4.0, 900.0), (1, 6.0, 50.0))
    assert found == _WorkerState(9.0, 4 + 900 / 90, 27.0, 1, -3.0)
    # Worker 0 has more to hold; worker 1 has less room than it needs.
    found = state(0.0, [50.0, 20.0], [5.0, 7.0], [100.0, 20.0], (0, 4.0, 100.0), (1, 6.0, 50.0))
    assert found == _WorkerState(0.0, 4 + 100 / 50, 27.0, 1, 7.0)
    assert state(0.0, [1.0], [0.0], [1.0]) == _WorkerState(0.0, 0.0, 1.0, 0, 0.0)
    # Half a byte is room as well.
    assert state(0.0, [1.0], [0.0], [1.5], (0, 4.0, 3.0)).stored == 4 + 6


def test_what_follows_from_a_promised_peak() -> None:
    rows = {"around": 3.0, "through": 20.0, "count": 4.0, "stay": 60.0, "weight_gradients": 1.5, "slope": 5.0}
    worker = WorkerBounds(np.array([0]), **{name: np.array([value]) for name, value in rows.items()})
    assert worker.promised(2, 1) == 3 + 60 / 2 + 5 / 2
    assert worker.promised(3, 1) == 3 + 60 / 3 + 5
    assert worker.promised(4, 1) == worker.promised(9, 1) == 3 + 60 / 4 + 3 * 5 / 2
    # Where stashes stay for a short time its work decides, with all but k weight gradients.
    quick = replace(worker, stay=np.array([6.0]))
    assert quick.promised(1, 1) == 3 + 20 + 3 * 1.5
    assert quick.promised(3, 1) == 3 + 20 + 1.5
    assert quick.promised(9, 1) == 3 + 20


STAGES = costs(
    (1.0, 2.0),
    (4.0, 8.0),
    output_bytes=(3.0, 0.0),
    weights=(100.0, 50.0),
    stash=(10.0, 20.0),
    trained=(10.0, 30.0),
    summed=(1.0, 2.0),
)
"""Two stages; a worker of stage 0 has 200 bytes of weights and gradients, one of stage 1 has 100."""
SUMMED = links(2, allreduce=(Collective(5.0), Collective(66.0, 2.0)), copies=2)
"""On two replicas: stage 0 is summed in 5 s, stage 1 in 70 s."""
LAST = 1 + 4
"""Seconds before worker 1's first op and after its last one: stage 0's forward and backward."""


def test_work_and_what_stands_around_it() -> None:
    found = bounded(straight(2, 3), STAGES, links(2)).bounds(None)
    assert found.seconds == found.seconds_in_any_memory == LAST + 3 * 10
    assert (found.fullest, found.least_bytes, found.too_many_bytes) == (0, 200 + 10 + 2 * 3, 216 - 1000)


def test_the_update_is_of_the_worker_that_has_most() -> None:
    update = {"update_seconds_per_byte": 0.5, "step_overhead_seconds": 2.0}
    assert bounded(straight(2, 3), STAGES, links(2), **update).bounds(None).seconds == 35 + 15 + 2
    slow = links(2, slowness=(4.0, 1.0))
    found = bounded(straight(2, 3), STAGES, slow, **update).bounds(None)
    assert found.seconds == max(3 * 4 * 5, 4 * LAST + 30) + 0.5 * 40 + 2


def test_sums_come_on_top() -> None:
    found = bounded(straight(2, 3), STAGES, SUMMED).bounds(None)
    assert found.seconds == 1 + 30 + 70  # stage 1 is ready at 31
    quick = replace(SUMMED, allreduce=(Collective(5.0), Collective(6.0)))
    assert bounded(straight(2, 3), STAGES, quick).bounds(None).seconds == 35 + 5
    # A promise says something of the ops; the sum of stage 0 follows.
    far = replace(quick, latency_seconds=links(2, 20.0).latency_seconds)
    stay = 5 + 2 * 20 + 10
    assert bounded(straight(2, 3), STAGES, far).bounds(1).seconds_in_any_memory == 3 * stay + 5


def test_sums_that_share_the_way_out_of_a_node() -> None:
    per_byte = (Collective(0.0, 5.0, 5.0), Collective(0.0, 6.0, 6.0))
    network = links(2, allreduce=per_byte, copies=2, crossed=((0,), (0,)))
    # Stage 1 is ready at 31, stage 0 at 35: both go by one way, for 5 s and 12 s.
    assert bounded(straight(2, 3), STAGES, network).bounds(None).seconds == 31 + 17
    apart = replace(network, crossed=((0,), (1,)))
    assert bounded(straight(2, 3), STAGES, apart).bounds(None).seconds == 31 + 12


def test_weight_gradients_may_come_last() -> None:
    split = costs((1.0, 2.0), (4.0, 8.0), input_gradient=(2.0, 3.0), weight_gradients=(2.0, 5.0))
    stages = changed(STAGES, layers=split.layers)
    shape = straight(2, 3, split=True)
    # Worker 1 begins at 1 and has 3 · 10 to do; to the end of stage 0's it is 1 + 3 · 5 + 2.
    assert bounded(shape, stages, links(2)).bounds(None).seconds == 31
    assert bounded(shape, stages, SUMMED).bounds(None).seconds == 31 + 70
    # With one stash all but one have had their weight gradients (2 s at least) at the last forward.
    workers = bounded(shape, stages, links(2)).order_free.workers
    rows = np.array((workers.around, workers.through, workers.weight_gradients, workers.slope)).T.tolist()
    assert rows == [[0, 9, 2, 3], [3, 15, 5, 5]]
    assert (workers.stay.tolist(), workers.count.tolist()) == ([3 * 8, 3 * 5], [3, 3])


@pytest.mark.parametrize(
    ("shape", "barrier"),
    [
        (straight(2, 3, synchronous=False), True),
        (straight(2, 3), False),
        (straight(2, 3, split=True, parts=2), True),
    ],
)
def test_where_steps_overlap_a_worker_still_runs_all_its_ops(shape: WorkloadShape, barrier: bool) -> None:
    found = bounded(shape, STAGES, SUMMED, barrier=barrier)
    ways = found.order_free
    assert (ways.least, ways.after, ways.workers.which.tolist(), ways.together) == (30, 0, [], 1)
    assert found.bounds(1).seconds == 30


def test_no_worker_s_memory_is_counted_twice() -> None:
    """A wave of two workers whose first and last stage share weights of 40 bytes."""
    stages = costs(
        (1.0,) * 4,
        (2.0,) * 4,
        weights=(100.0, 1.0, 1.0, 90.0),
        gradients=(0.0,) * 4,
        stash=(1.0, 2.0, 4.0, 8.0),
        ties=(StageTie((0, 3), 10.0, 10.0, 40.0),),
    )
    shape = straight(2, 1, placement=wave(2, 1))
    found = bounded(shape, stages, links(2)).bounds(None)
    assert (found.fullest, found.least_bytes) == (0, 190 - 40 + 8)
    small = links(2, usable_bytes=(500.0, 5.0))
    found = bounded(shape, stages, small).bounds(None)
    assert (found.fullest, found.least_bytes, found.too_many_bytes) == (1, 2 + 4, 1)


def test_stashes_find_place_one_after_the_other() -> None:
    """Worker 0 has place for one stash beside its weights; each stays for 15 s and 40 s on the way."""
    tight = links(2, 20.0, usable_bytes=(216.0, 1000.0))
    found = bounded(straight(2, 3), STAGES, tight).bounds(None)
    assert found.seconds_in_any_memory == LAST + 40 + 30
    assert found.seconds == pytest.approx(3 * 55 * 10 / (216 - 206))
    assert found.too_many_bytes == 0


def test_pipes_that_nothing_passes_need_no_place() -> None:
    stages = costs((1.0, 2.0), (4.0, 8.0), stash=(10.0, 20.0))
    shape = straight(2, 3, placement=bidirectional(2), passes=(3, 0), together=(1, 1))
    found = bounded(shape, stages, links(2))
    assert found.bounds(None).seconds == LAST + 30
    assert (found.bounds(None).fullest, found.bounds(None).least_bytes) == (1, 20)
    assert found.order_free.workers.count.tolist() == [3, 3]


def test_sharded_state_is_less_on_each_worker_and_is_sent() -> None:
    sharded = ShardedState(((5.0, 15.0),), (5.0, 15.0), (60.0, 10.0), (0.0, 0.0), 9.0)
    both = bounded(straight(2, 3), STAGES, links(2), sharded=sharded, update_seconds_per_byte=2.0)
    assert both.bounds(None, 0).seconds == 35 + 60
    found = both.bounds(None, 1)
    assert found.seconds == 35 + 30 + 9
    assert found.least_bytes == 200 + 10 + 6 - 60


# -- least times

# A forward takes 10 s, two in turn 18 s and at once 14 s, one in halves 9.5 s; a backward 20 s, of half a
# micro-batch 9 s; the halves of a split one 7 s and 12 s. Of each op, 2 s are its overhead.
SECONDS = {F: (3.75, 8.0, 12.0), B: (7.0, 18.0, 40.0), I: (2.0, 5.0, 10.0), W: (5.0, 10.0, 20.0)}


def one(**others: tuple[float, ...]) -> StageCosts:
    """One stage with these seconds, without the overhead, in place of ``SECONDS``."""
    seconds = SECONDS | {OpKind(letter): row for letter, row in others.items()}
    return costs((1.0,), (1.0,), layers=(layers(seconds, 2.0),))


@pytest.mark.parametrize(
    ("others", "recompute", "expected"),
    [
        ({}, Recompute.NONE, (10, 30, 30, 20)),
        ({}, Recompute.LAYER, (10, 38, 38, 28)),
        ({}, Recompute.STAGE, (10, 38, 38, 20)),
        ({"together": (2,)}, Recompute.NONE, (9, 29, 29, 20)),  # half of two in turn
        ({"together": (2,)}, Recompute.STAGE, (7, 35, 35, 20)),  # half of two at once
        ({"parts": 2}, Recompute.NONE, (9.5, 27.5, 27.5, 9)),  # two halves are quicker
        ({"parts": 2}, Recompute.STAGE, (10, 36, 36, 9)),
        ({"parts": 4}, Recompute.NONE, (9.5, 27.5, 27.5, 5)),
        ({"parts": 3}, Recompute.STAGE, (10, 36, 36, 20 / 3)),
        ({"parts": 2}, Recompute.LAYER, (9.5, 35.5, 35.5, 13)),
        ({"split": True}, Recompute.NONE, (10, 29, 17, 7)),  # the two halves are quicker than the whole
        ({"split": True}, Recompute.LAYER, (10, 37, 25, 15)),
        ({"split": True}, Recompute.STAGE, (10, 37, 25, 7)),
        ({"split": True, "parts": 2}, Recompute.NONE, (9.5, 27.5, 27.5, 9)),
    ],
)
def test_the_least_that_ops_take(
    others: dict[str, Any], recompute: Recompute, expected: tuple[float, ...]
) -> None:
    found = least_times(straight(1, 4, **others), one(), recompute)
    assert (found.forward, found.both, found.through, found.backward_op) == tuple(
        [seconds] for seconds in expected
    )


def test_a_whole_backward_may_be_the_quicker_one() -> None:
    dear = one(W=(24.0, 48.0, 96.0), B=(28.0, 18.0, 40.0), F=(4.5, 8.0, 12.0))
    assert least_times(straight(1, 4, split=True), dear, Recompute.NONE).both == [30]
    halves = least_times(straight(1, 4, parts=2), dear, Recompute.NONE)
    assert (halves.forward, halves.both, halves.backward_op) == ([10], [30], [20])
    alone = least_times(straight(1, 4, parts=2), dear, Recompute.NONE, halves_alone=True)
    assert (alone.forward, alone.both, alone.backward_op) == ([11], [11 + 2 * 30], [30])
    slow = one(I=(12.0, 23.0, 46.0))
    assert least_times(straight(1, 4, split=True), slow, Recompute.NONE).backward_op == [20]
    at_once = one(F=(4.5, 8.0, 20.0))
    assert least_times(straight(1, 4, together=(2,)), at_once, Recompute.STAGE).forward == [10]


def test_slower_workers_take_longer() -> None:
    times = MinimumTimes([1.0, 2.0], [3.0, 6.0], [5.0, 7.0], [2.0, 4.0])
    slowed = times.on(((1, 0),), (10.0, 100.0))
    assert [rows.tolist() for rows in slowed] == [[[100, 20]], [[300, 60]], [[500, 70]], [[200, 40]]]
    assert [rows.tolist() for rows in times.on(((1, 0),), ())] == [[list(rows)] for rows in columns(times)]


def test_what_follows_the_ops_follows_them_in_any_memory() -> None:
    tight = replace(SUMMED, latency_seconds=links(2, 20.0).latency_seconds, usable_bytes=(216.0, 1000.0))
    found = bounded(straight(2, 3), STAGES, tight, update_seconds_per_byte=0.5).bounds(None)
    assert found.seconds == pytest.approx(165 + 5 + 15)


def test_stages_that_take_next_to_nothing() -> None:
    """No second is added: the seconds of two stages of 1 and 2 ms, and 3 and 4 ms back."""
    quick = costs((1e-3, 2e-3), (3e-3, 4e-3), summed=(1.0, 1.0))
    found = bounded(straight(2, 1), quick, links(2))
    assert found.bounds(None).seconds == pytest.approx(10e-3)
    assert found.order_free.workers.weight_gradients.tolist() == [0, 0]
    summed = links(2, allreduce=(Collective(1e-3), Collective(2e-3)), copies=2)
    assert bounded(straight(2, 1), quick, summed).bounds(None).seconds == pytest.approx(11e-3)
    path = ([0.0, 1e-3], [0.0, 3e-3])
    times = MinimumTimes([1e-3, 2e-3], [4e-3, 6e-3], [4e-3, 6e-3], [3e-3, 4e-3])
    assert ready(straight(2, 1), [times], path) == pytest.approx([10e-3, 7e-3])


def test_the_weight_gradients_of_several_stages_come_before_a_sum() -> None:
    """A wave, one micro-batch: worker 1 begins at 1 and has two stages of 12 s, and then a sum of 5 s."""
    stages = costs(
        (1.0,) * 4, (11.0,) * 4, input_gradient=(1.0,) * 4, weight_gradients=(10.0,) * 4, summed=(1.0,) * 4
    )
    summed = links(2, allreduce=(Collective(5.0),) * 4, copies=2, crossed=((),) * 4)
    shape = straight(2, 1, placement=wave(2, 1), split=True)
    assert bounded(shape, stages, summed).bounds(None).seconds == 1 + 24 + 5


def test_a_worker_of_two_pipes_has_the_ops_of_both_before_the_last_sum() -> None:
    stages = costs((1.0, 1.0), (2.0, 2.0), summed=(1.0, 1.0))
    summed = links(2, allreduce=(Collective(5.0), Collective(6.0)), copies=2)
    shape = straight(2, 6, placement=bidirectional(2), passes=(3, 3), together=(1, 1))
    assert bounded(shape, stages, summed).bounds(None).seconds == 6 * 3 + 5


def test_all_later_stages_of_a_worker_come_before_the_first() -> None:
    times = MinimumTimes([1.0] * 3, [3.0] * 3, [3.0] * 3, [2.0] * 3)
    path = ([0.0, 1.0, 2.0], [0.0, 2.0, 4.0])
    shape = straight(1, 2, placement=looped(1, 3))
    assert ready(shape, [times], path) == [2 * 9, 2 * 7, 2 * 5]


def test_a_pipe_that_nothing_passes_stashes_nothing() -> None:
    stages = costs((1.0, 2.0), (4.0, 8.0), stash=(0.0, 20.0))
    shape = straight(2, 3, placement=bidirectional(2), passes=(3, 0), together=(1, 1))
    none = bounded(shape, stages, links(2, usable_bytes=(0.0, 1000.0))).bounds(None)
    assert (none.fullest, none.least_bytes) == (0, 0)


def test_where_messages_are_walked_their_buffers_are_not_there_throughout() -> None:
    walked = changed(STAGES, measured=True)
    assert bounded(straight(2, 3), walked, links(2)).bounds(None).least_bytes == 200 + 10
