"""Every bound of some problems that fit on a hand, and when each of their ops may run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest

import counterflow as cf
from counterflow.schedule.orders.slices import sliced_workload
from counterflow.schedule.placement import bidirectional, linear, wave
from counterflow.schedule.workload import plain
from counterflow.simulation import ByteCosts
from counterflow.synthesis.bounds.lower import bounds, lower_bound
from counterflow.synthesis.bounds.windows import windows_of
from counterflow.synthesis.posing import problem_of
from counterflow.synthesis.problem import Problem, Store

Rows = list[list[float]]


class Case(NamedTuple):
    """A problem, its bounds with their reasons, and heads and tails by letter and micro-batch."""

    problem: Problem
    found: list[tuple[float, str]]
    heads: Rows
    tails: Rows


def idles(before: str, after: str) -> str:
    """What a worker idles because of its memory, in a bound's words."""
    return (
        f", idles {before} before its first backward can start and {after} after its last forward, when no "
        "more fits its memory"
    )


def too_long(worker: int, name: str, most: str) -> str:
    """That memory is held too long, in a bound's words."""
    return f"worker {worker} holds {name} of each micro-batch too long for its limit, {most}"


def away(idle: str) -> str:
    """What a worker idles while one micro-batch after another is away, in a bound's words."""
    return f", and idles {idle} in all while micro-batches that nearly fill its memory make their round trips"


# F0 takes 2, a message 0.5, F1 1, B1 2, a message, and then three backwards 4 each
LINKS = Case(
    problem_of(plain(linear(2), 3), cf.Costs(forward=(2, 1), backward=(4, 2), p2p=0.5, agreement=0.25)),
    [
        (18.25, "micro-batches occupy B.1 of worker 1 for this long"),
        (18.25, "worker 0 has 18 of work plus 0.25 of unavoidable idle time"),
        (18.25, "worker 0 has 18 to do" + idles("0", "0.25")),
        (18.25, "worker 1 has 9 of work plus 9.25 of unavoidable idle time"),
        (16.25, "worker 1 has 9 to do" + idles("2.5", "4.75")),
        (18.25, "the messages from worker 1 to 0 take 1.5"),
        (18.25, "the messages from worker 0 to 1 take 1.5"),
    ],
    [[0.0, 2.0, 4.0], [6.0, 10.0, 14.0], [2.5, 4.5, 6.5], [3.5, 5.5, 7.5]],
    [[16.25, 12.25, 8.25], [8.25, 4.25, 0.25], [14.75, 10.75, 6.75], [12.75, 8.75, 4.75]],
)

# as before, but a worker is busy with its messages: worker 0 has three of its own more to do
BUSY = Case(
    problem_of(
        plain(linear(2), 3), cf.Costs(forward=(2, 1), backward=(4, 2), p2p=0.5, agreement=0.25, overlap=False)
    ),
    [
        (18.25, "micro-batches occupy B.1 of worker 1 for this long"),
        (19.75, "worker 0 has 19.5 of work plus 0.25 of unavoidable idle time"),
        (19.75, "worker 0 has 19.5 to do" + idles("0", "0.25")),
        (18.25, "worker 1 has 10.5 of work plus 7.75 of unavoidable idle time"),
        (17.25, "worker 1 has 10.5 to do" + idles("2.5", "4.25")),
        (18.25, "the messages from worker 1 to 0 take 1.5"),
        (18.25, "the messages from worker 0 to 1 take 1.5"),
    ],
    [[0.0, 2.5, 5.0], [6.0, 10.0, 14.0], [2.5, 5.0, 7.5], [3.5, 6.0, 8.5]],
    [[16.25, 12.25, 8.25], [8.25, 4.25, 0.25], [14.75, 10.75, 6.75], [12.75, 8.75, 4.75]],
)

# within a worker's span nothing comes before its first op
BUSY_STEADY = Case(
    problem_of(
        plain(linear(2), 3),
        cf.Costs(forward=(2, 1), backward=(4, 2), p2p=0.5, agreement=0.25, overlap=False),
        objective="steady",
    ),
    [
        (19.5, "worker 0 has 19.5 to do"),
        (19.5, "worker 0 has 19.5 to do" + idles("0", "0")),
        (10.5, "worker 1 has 10.5 to do"),
        (10.5, "worker 1 has 10.5 to do" + idles("0", "0")),
        (1.5, "the messages from worker 1 to 0 take 1.5"),
        (1.5, "the messages from worker 0 to 1 take 1.5"),
    ],
    [[0.0, 2.5, 5.0], [6.0, 10.0, 14.0], [2.5, 5.0, 7.5], [3.5, 6.0, 8.5]],
    [[16.0, 12.0, 8.0], [8.0, 4.0, 0.0], [14.5, 10.5, 6.5], [12.5, 8.5, 4.5]],
)

# after the last backward, of worker 0, come its sum of 3 and the agreement of 1
REPLICAS = Case(
    problem_of(plain(linear(2), 3), cf.Costs(sync=(3, 4), replicas=2, agreement=1)),
    [
        (14.0, "micro-batches occupy B.1 of worker 1 for this long"),
        (14.0, "worker 0 has 9 of work plus 5 of unavoidable idle time"),
        (14.0, "worker 0 has 9 to do" + idles("1", "4")),
        (14.0, "the gradient syncs of worker 0 run one after another"),
        (16.0, "worker 1 has 9 of work plus 7 of unavoidable idle time"),
        (16.0, "worker 1 has 9 to do" + idles("1", "6")),
        (13.0, "the gradient syncs of worker 1 run one after another"),
    ],
    [[0.0, 1.0, 2.0], [4.0, 6.0, 8.0], [1.0, 2.0, 3.0], [2.0, 4.0, 6.0]],
    [[13.0, 11.0, 9.0], [8.0, 6.0, 4.0], [12.0, 10.0, 8.0], [10.0, 8.0, 6.0]],
)

# each worker sums both stages, 3 and 4, of which the first is ready at 4, and agrees: 12
TWO_WAYS = Case(
    problem_of(plain(bidirectional(2), 2, pipe_of=lambda m: m % 2), cf.Costs(sync=(3, 4), agreement=1)),
    [
        (10.0, "micro-batches occupy B.0p1 of worker 1 for this long"),
        (10.0, "worker 0 has 6 of work plus 4 of unavoidable idle time"),
        (10.0, "worker 0 has 6 to do" + idles("0", "4")),
        (12.0, "the gradient syncs of worker 0 run one after another"),
        (10.0, "worker 1 has 6 of work plus 4 of unavoidable idle time"),
        (10.0, "worker 1 has 6 to do" + idles("0", "4")),
        (12.0, "the gradient syncs of worker 1 run one after another"),
    ],
    [[0.0], [4.0], [1.0], [2.0], [1.0], [2.0], [0.0], [4.0]],
    [[9.0], [4.0], [8.0], [6.0], [8.0], [6.0], [9.0], [4.0]],
)

# without what all agree upon
TWO_WAYS_STEADY = Case(
    problem_of(
        plain(bidirectional(2), 2, pipe_of=lambda m: m % 2),
        cf.Costs(sync=(3, 4), agreement=1),
        objective="steady",
    ),
    [
        (9.0, "worker 0 has 6 of work plus 3 of unavoidable idle time"),
        (9.0, "worker 0 has 6 to do" + idles("0", "3")),
        (7.0, "the gradient syncs of worker 0 run one after another"),
        (9.0, "worker 1 has 6 of work plus 3 of unavoidable idle time"),
        (9.0, "worker 1 has 6 to do" + idles("0", "3")),
        (7.0, "the gradient syncs of worker 1 run one after another"),
    ],
    [[0.0], [4.0], [1.0], [2.0], [1.0], [2.0], [0.0], [4.0]],
    [[8.0], [3.0], [7.0], [5.0], [7.0], [5.0], [8.0], [3.0]],
)

# no two micro-batches at a time: 1 + 1 + 2 + 2 for each
ONE_EACH = Case(
    problem_of(plain(linear(2), 3), peak=1),
    [
        (18.0, "micro-batches occupy B.1 of worker 1 for this long"),
        (18.0, "worker 0 has 9 of work plus 9 of unavoidable idle time"),
        (15.0, "worker 0 has 9 to do" + idles("3", "3")),
        (18.0, too_long(0, "activations", "1")),
        (18.0, "worker 0 has 9 to do" + away("9")),
        (18.0, "worker 1 has 9 of work plus 9 of unavoidable idle time"),
        (12.0, "worker 1 has 9 to do" + idles("1", "2")),
        (12.0, too_long(1, "activations", "1")),
    ],
    [[0.0, 6.0, 12.0], [4.0, 10.0, 16.0], [1.0, 7.0, 13.0], [2.0, 8.0, 14.0]],
    [[17.0, 11.0, 5.0], [12.0, 6.0, 0.0], [16.0, 10.0, 4.0], [14.0, 8.0, 2.0]],
)

# worker 1 alone works without a break from 1 to 13, and worker 0 ends it
TWO_AND_ONE = Case(
    problem_of(plain(linear(2), 4), peak=(2, 1)),
    [
        (15.0, "micro-batches occupy B.1 of worker 1 for this long"),
        (15.0, "worker 0 has 12 of work plus 3 of unavoidable idle time"),
        (15.0, "worker 0 has 12 to do" + idles("2", "1")),
        (12.0, too_long(0, "activations", "2")),
        (15.0, "worker 1 has 12 of work plus 3 of unavoidable idle time"),
        (15.0, "worker 1 has 12 to do" + idles("1", "2")),
        (15.0, too_long(1, "activations", "1")),
    ],
    [[0.0, 1.0, 6.0, 9.0], [4.0, 7.0, 10.0, 13.0], [1.0, 4.0, 7.0, 10.0], [2.0, 5.0, 8.0, 11.0]],
    [[14.0, 11.0, 8.0, 5.0], [9.0, 6.0, 2.0, 0.0], [13.0, 10.0, 7.0, 4.0], [11.0, 8.0, 5.0, 2.0]],
)

# worker 0 holds 2 for 4 seconds and 0.5 for 2, three times: 27 / 4.5
SPLIT = Case(
    problem_of(
        plain(linear(2), 3, split=True),
        cf.Costs(
            forward=1,
            input_gradient=1,
            weight_gradients=2,
            memory=ByteCosts(activations=2.0, kept_for_weights=0.5),
        ),
        memory_bytes=4.5,
    ),
    [
        (10.0, "micro-batches occupy I.1 of worker 1 for this long"),
        (13.0, "worker 0 has 12 of work plus 1 of unavoidable idle time"),
        (13.0, "worker 0 has 12 to do" + idles("1", "0")),
        (6.0, too_long(0, "bytes", "4.5")),
        (13.0, "worker 1 has 12 of work plus 1 of unavoidable idle time"),
        (13.0, "worker 1 has 12 to do" + idles("1", "0")),
        (4.333333333, too_long(1, "bytes", "4.5")),
    ],
    [[0.0, 1.0, 4.0], [3.0, 4.0, 7.0], [4.0, 6.0, 8.0], [1.0, 2.0, 5.0], [2.0, 3.0, 6.0], [3.0, 5.0, 7.0]],
    [[9.0, 7.0, 5.0], [6.0, 4.0, 2.0], [4.0, 2.0, 0.0], [8.0, 6.0, 4.0], [7.0, 5.0, 3.0], [4.0, 2.0, 0.0]],
)

# two limits at once
SPLIT_STEADY = Case(
    problem_of(
        plain(linear(2), 3, split=True),
        cf.Costs(
            forward=1,
            input_gradient=1,
            weight_gradients=2,
            memory=ByteCosts(activations=2.0, kept_for_weights=0.5),
        ),
        peak=(2, 3),
        memory_bytes=4.5,
        objective="steady",
    ),
    [
        (13.0, "worker 0 has 12 of work plus 1 of unavoidable idle time"),
        (13.0, "worker 0 has 12 to do" + idles("1", "0")),
        (9.0, too_long(0, "activations", "2")),
        (6.0, too_long(0, "bytes", "4.5")),
        (12.0, "worker 1 has 12 to do"),
        (12.0, "worker 1 has 12 to do" + idles("0", "0")),
        (4.0, too_long(1, "activations", "3")),
        (3.333333333, too_long(1, "bytes", "4.5")),
    ],
    [[0.0, 1.0, 6.0], [3.0, 4.0, 9.0], [4.0, 6.0, 10.0], [1.0, 2.0, 7.0], [2.0, 3.0, 8.0], [3.0, 5.0, 9.0]],
    [[11.0, 7.0, 5.0], [8.0, 4.0, 2.0], [6.0, 2.0, 0.0], [10.0, 6.0, 4.0], [9.0, 5.0, 3.0], [4.0, 2.0, 0.0]],
)

# a worker holds stages 0 and 3, the other 1 and 2
WAVE = Case(
    problem_of(plain(wave(2, 1), 2), cf.Costs(p2p=1, link="infinite"), peak=2),
    [
        (25.0, "micro-batches occupy B.2 of worker 1 for this long"),
        (25.0, "worker 0 has 12 of work plus 13 of unavoidable idle time"),
        (22.0, "worker 0 has 12 to do" + idles("4", "6")),
        (19.0, too_long(0, "activations", "2")),
        (25.0, "worker 1 has 12 of work plus 13 of unavoidable idle time"),
        (27.0, "worker 1 has 12 to do" + idles("7", "8")),
        (24.0, too_long(1, "activations", "2")),
        (27.0, "worker 1 has 12 to do" + away("10")),
    ],
    [[0.0, 8.0], [14.0, 23.0], [5.0, 14.0], [6.0, 15.0], [2.0, 11.0], [11.0, 20.0], [3.0, 12.0], [9.0, 18.0]],
    [
        [24.0, 15.0],
        [2.0, 0.0],
        [19.0, 10.0],
        [17.0, 8.0],
        [22.0, 13.0],
        [5.0, 3.0],
        [21.0, 12.0],
        [14.0, 5.0],
    ],
)

# Slices of 0.5 each, and worker 0 has room for three. From its F1 to its I1 a micro-batch is away for 3: F1
# and I1 of worker 1, and a message each way. Beside it fit 1 of I and W of the one before, and F0 of the next
# one: worker 0 idles 2.5, then 1.5, then 2. On worker 1, I1 may follow F1 at once.
SLICES = Case(
    problem_of(
        sliced_workload(plain(linear(2), 3, split=True), 2),
        cf.Costs(p2p=1, link="infinite"),
        peak=(1.5, math.inf),
    ),
    [
        (14.5, "micro-batches occupy I.1:1/2 of worker 1 for this long"),
        (15.0, "worker 0 has 9 of work plus 6 of unavoidable idle time"),
        (13.0, "worker 0 has 9 to do" + idles("2.5", "1.5")),
        (10.0, too_long(0, "activations", "1.5")),
        (15.0, "worker 0 has 9 to do" + away("6")),
        (14.5, "worker 1 has 9 of work plus 5.5 of unavoidable idle time"),
        (10.5, "worker 1 has 9 to do" + idles("1.5", "0")),
    ],
    [
        [0.0, 0.5, 5.0],
        [0.5, 5.0, 9.5],
        [4.5, 9.0, 13.5],
        [4.0, 8.5, 13.0],
        [5.0, 9.5, 14.0],
        [4.5, 9.0, 13.5],
        [1.5, 2.0, 6.5],
        [2.0, 6.5, 11.0],
        [3.0, 7.5, 12.0],
        [2.5, 7.0, 11.5],
        [3.5, 8.0, 12.5],
        [3.0, 7.5, 12.0],
    ],
    [
        [14.0, 9.5, 5.0],
        [13.5, 9.0, 4.5],
        [1.5, 1.0, 0.5],
        [10.0, 5.5, 1.0],
        [1.0, 0.5, 0.0],
        [1.0, 0.5, 0.0],
        [12.5, 8.0, 3.5],
        [12.0, 7.5, 3.0],
        [3.0, 2.5, 2.0],
        [11.5, 7.0, 2.5],
        [1.0, 0.5, 0.0],
        [1.0, 0.5, 0.0],
    ],
)

CASES = [
    LINKS,
    BUSY,
    BUSY_STEADY,
    REPLICAS,
    TWO_WAYS,
    TWO_WAYS_STEADY,
    ONE_EACH,
    TWO_AND_ONE,
    SPLIT,
    SPLIT_STEADY,
    WAVE,
    SLICES,
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_all_bounds_and_their_reasons(case: Case) -> None:
    rows = [(round(bound.seconds, 9), bound.reason) for bound in bounds(case.problem)]
    assert rows == case.found


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_when_each_op_may_run(case: Case) -> None:
    windows = windows_of(case.problem)
    assert windows.heads == case.heads
    assert windows.tails == case.tails


def test_the_first_of_equal_bounds_is_told() -> None:
    bound = lower_bound(LINKS.problem)
    assert (bound.seconds, bound.reason) == LINKS.found[0]


def test_work_that_takes_no_time() -> None:
    bound = lower_bound(problem_of(plain(linear(2), 1), cf.Costs(forward=0, backward=0)))
    assert (bound.seconds, bound.reason) == (0.0, "time does not run backwards")


def found_of(problem: Problem) -> list[tuple[float, str]]:
    return [(round(bound.seconds, 9), bound.reason) for bound in bounds(problem)]


def test_with_room_for_all_a_worker_idles_before_its_backwards_or_after_its_forwards() -> None:
    """Worker 1 may start after 1; 2 follow it. It idles 1 for B2, or F2, B2 and B0 without B1: the longer."""
    problem = problem_of(plain(linear(3), 2), cf.Costs(forward=(1, 2, 1), backward=(2, 1, 2)))
    assert (11.0, "worker 1 has 6 to do" + idles("1", "4")) in found_of(problem)
    # Of equally long ones the first: F2 and B2 before B1 as well as after F1.
    assert (9.0, "worker 1 has 3 to do" + idles("4", "2")) in found_of(problem_of(plain(linear(3), 1)))


def test_what_is_not_limited_bounds_nothing() -> None:
    costs = cf.Costs(memory=ByteCosts(activations=2.0))
    problem = problem_of(plain(linear(2), 3), costs, peak=(math.inf, 1), memory_bytes=(4.5, math.inf))
    areas = [bound for bound in found_of(problem) if "too long" in bound[1]]
    # Worker 0 holds a micro-batch for 1 + 1 + 2 + 2, and of 2 bytes 2 fit into 4.5.
    assert areas == [(9.0, too_long(0, "bytes", "4.5")), (12.0, too_long(1, "activations", "1"))]


@pytest.mark.parametrize(
    ("at_start", "at_end", "most", "seconds"),
    [
        ((3, 1), (-1, -3), 5.0, 9.0),  # 2 for 2 + 4, and of 2 two fit
        ((1, 1), (2, -4), 6.0, 7.0),  # 1 for 2 and 3 for 4, and of 3 two fit
        ((1, 3), (0, -4), 5.0, 3.6),  # 1 for 6
        ((0.5, 0), (0, -0.5), 1.2, 9.0),  # 0.5 for 6, and of 0.5 two fit
        ((0, 0), (1, -1), 2.0, 6.0),  # 1 for 4
        ((1, -1), (0, 0), 2.0, 9.0),  # 1 for 6
        ((1, 0), (-1, 0), 5.0, 0.0),  # nothing from the forward's end
        ((1, -2), (0, 1), 5.0, None),  # less than nothing in the backward
        ((-1, 0), (2, -1), 2.0, None),  # in the forward
        ((1, 2), (-2, 0), 2.0, None),  # and between
    ],
)
def test_how_long_what_a_micro_batch_holds_fills_a_worker(
    at_start: tuple[float, ...], at_end: tuple[float, ...], most: float, seconds: float | None
) -> None:
    """Three micro-batches of a forward of 2 and a backward of 4."""
    problem = problem_of(plain(linear(1), 3), cf.Costs(forward=2, backward=4))
    limited = replace(problem, stores=(Store("things", at_start, at_end, (most,)),))
    areas = [bound for bound in found_of(limited) if "too long" in bound[1]]
    assert areas == ([] if seconds is None else [(seconds, too_long(0, "things", f"{most:g}"))])
