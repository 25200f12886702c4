"""Letters and limits of a problem."""

import pytest

import counterflow as cf
from counterflow.schedule import schemes
from counterflow.schedule.orders.slices import sliced_workload
from counterflow.schedule.placement import bidirectional, linear, wave
from counterflow.schedule.workload import plain
from counterflow.synthesis.posing import problem_of
from counterflow.synthesis.problem import Need, peaks


def test_letters_of_a_straight_pipeline() -> None:
    costs = cf.Costs(forward=(1, 2), input_gradient=3, weight_gradients=4, p2p=((0, 0.5), (0.25, 0)))
    problem = problem_of(plain(linear(2), 3, split=True), costs)
    assert [str(x) for x in problem.letters] == ["F.0", "I.0", "W.0", "F.1", "I.1", "W.1"]
    assert [x.seconds for x in problem.letters] == [1, 3, 4, 2, 3, 4]
    assert [x.needs for x in problem.letters] == [
        (),
        (Need(0), Need(4, 0.25, 0)),
        (Need(1),),
        (Need(0, 0.5, 1),),
        (Need(3),),
        (Need(4),),
    ]
    assert problem.work() == (24, 27)
    assert problem.ops == 18
    assert problem.lanes
    assert not problem.busy


@pytest.mark.parametrize(
    "schedule",
    [
        schemes.dapple(stages=4, micro_batches=6),
        schemes.zb_v(workers=3, micro_batches=7),
        schemes.zb_h2(stages=4, micro_batches=9),
        schemes.chimera(stages=4, micro_batches=8, split=True),
        schemes.hanayo(workers=2, waves=2, micro_batches=4),
        schemes.dapple(stages=4, micro_batches=6, slices=3),
        schemes.zb_v(workers=3, micro_batches=4, slices=2),
        schemes.chimera(stages=4, micro_batches=8, split=True, slices=2),
    ],
    ids=str,
)
def test_a_schedule_is_its_words(schedule: cf.Schedule) -> None:
    problem = problem_of(schedule.workload, peak=100)
    words = problem.words_of(schedule)
    assert words is not None
    assert problem.schedule(words).orders == schedule.orders
    assert peaks(problem.stores[0], words) == cf.simulate(schedule).peak_activations


def test_letters_of_slices() -> None:
    """Each costs its part; a forward needs that of the slice before, a backward that of the slice after."""
    costs = cf.Costs(p2p=0.25, p2p_per_byte=0.5, message_bytes=4)
    problem = problem_of(sliced_workload(plain(linear(2), 3), 2), costs, peak=2)
    letters = ["F.0:0/2", "F.0:1/2", "B.0:0/2", "B.0:1/2", "F.1:0/2", "F.1:1/2", "B.1:0/2", "B.1:1/2"]
    assert [str(x) for x in problem.letters] == letters
    assert [x.seconds for x in problem.letters] == [0.5, 0.5, 1, 1] * 2
    assert [x.count for x in problem.letters] == [3] * 8
    assert [x.needs for x in problem.letters] == [
        (),
        (Need(0),),
        (Need(0), Need(6, 1.25, 0), Need(3)),
        (Need(1), Need(7, 1.25, 0)),
        (Need(0, 1.25, 1),),
        (Need(1, 1.25, 1), Need(4)),
        (Need(4), Need(7)),
        (Need(5),),
    ]
    (store,) = problem.stores
    assert list(store.at_start) == [0.5, 0.5, 0, 0] * 2
    assert list(store.at_end) == [0, 0, -0.5, -0.5] * 2


def test_sums_of_stages_with_copies() -> None:
    problem = problem_of(plain(bidirectional(2), 4, pipe_of=lambda m: m % 2), cf.Costs(sync=0.5))
    assert [(s.workers, s.seconds) for s in problem.sums] == [((0, 1), 0.5), ((0, 1), 0.5)]
    assert {str(problem.letters[n]) for n in problem.sums[0].letters} == {"B.0", "B.0p1"}


def test_limits_are_refused_where_one_micro_batch_needs_more() -> None:
    workload = plain(wave(2, 1), 3, split=True)
    with pytest.raises(cf.ConfigError, match="worker 0 may hold 1 activations, but one micro-batch needs 2"):
        problem_of(workload, peak=1)
    with pytest.raises(cf.ConfigError, match="3 numbers for 2 workers"):
        problem_of(workload, peak=(4, 4, 4))
    with pytest.raises(cf.ConfigError, match="needs the bytes of each stage"):
        problem_of(workload, memory_bytes=100)


def test_what_letters_cannot_say_is_refused() -> None:
    doubled = schemes.chimera(stages=2, micro_batches=4, concat="forward-doubling").workload
    with pytest.raises(cf.ConfigError, match="doubled forwards"):
        problem_of(doubled)
    with pytest.raises(cf.ConfigError, match="this workload is asynchronous"):
        problem_of(schemes.pipedream(stages=2, periods=3).workload)
    with pytest.raises(cf.ConfigError, match="legal: makespan, steady"):
        problem_of(plain(linear(2), 2), objective="speed")
