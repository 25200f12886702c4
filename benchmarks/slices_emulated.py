"""Schedules in slices of the sequence on emulated devices, beside torch's schedules of whole micro-batches.

    python benchmarks/slices_emulated.py [--repeats 4] [--keep]

Claims: a step in 1, 2, 4 and 8 slices, of equal and of growing cost, takes at most 1.03 of the predicted
one; 1F1B in 8 slices takes less time than torch's 1F1B and its interleaved one, and saves 0.35 of what the
former does; and at the memory of each of torch's schedules one of ours in slices is faster.

Devices, contenders and turns are those of ``emulated_device.py``: a process a worker, Gloo, sleeping layers.
Here a micro-batch is one sample of 1,024 positions, so that torch has no smaller ones, and takes a worker
40 ms forward and 80 ms backward. Of that, the slice from a share b of the sequence to e takes the share
(1 - a) (e - b) + a (e² - b²), where a is the attention's: 0, or a half. A whole one takes the same in both.
Where slices of equal length grow, others are as long as makes them take equal times.

Each layer leaves a state to the next slice, with a gradient that comes back, as keys and values are. Of
halves of a backward, that of the weight has no attention. Predicted is what ``cf.simulate`` says with
messages that take as long as measured. Saved is the most that a worker saves for backward, in micro-batches
of its layers, as the schedule says; ``slices.py`` measures it.

There are two devices. ``stream``: ops queue up, as on a GPU, and the host goes on meanwhile. ``host``: an op
sleeps in the thread that asks for it, so that what the host does for it adds to it, and n slices have n times
as many ops; how much that is comes from the step of one slice, and is in a second prediction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from emulated_device import (
    BACKWARD_SECONDS,
    BYTES,
    FORWARD_SECONDS,
    GOAL,
    Groups,
    Ours,
    Row,
    Stream,
    Theirs,
    message_seconds,
    note,
    precise_sleep,
    slept,
    take_device,
    take_turns,
    undisturbed,
)
from kit import arguments, keep, machine, machine_line
from torch import Tensor, nn

import counterflow as cf
from counterflow.runtime.workers.world import current_transport

WORKERS, MICRO_BATCHES, POSITIONS = 4, 8, 1024
TIMES = 2
"""What a micro-batch takes, in those of ``emulated_device.py``."""
GROWS = 0.5
"""The share of a whole micro-batch's time that is attention, where slices' costs grow."""
HOST_REPEATS = 3
THEIRS = "torch 1F1B", "torch Interleaved1F1B", "torch ZBVZeroBubble"


# The layers, and what they are predicted to take


class Layer(nn.Module):
    """The layers of a stage: sleep as long as their slice is to take.

    Args:
        share: of what a worker holds.
        attention: share of the time that is attention.
    """

    def __init__(self, share: float, attention: float) -> None:
        super().__init__()
        self.share, self.attention = share, attention
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.carry = cf.Carry()

    def forward(self, value: Tensor) -> Tensor:
        entered = time.perf_counter()
        before, state = self.carry.take((0, None))
        after = before + value.shape[1]
        begin, end = before / POSITIONS, after / POSITIONS
        attention = self.attention * (end**2 - begin**2)
        linear = (1 - self.attention) * (end - begin)
        forward, backward = (TIMES * self.share * each for each in (FORWARD_SECONDS, BACKWARD_SECONDS))
        seconds = forward * (linear + attention), backward * (linear / 2 + attention), backward * linear / 2
        output, left = slept(value, self.weight, entered, seconds, state)
        self.carry.leave((after, left))
        return output


def predicted(
    schedule: cf.Schedule, message: float, *, attention: float = 0.0, overhead: float = 0.0
) -> cf.Simulation:
    """The simulation of a schedule with the costs of the layers, and of messages and the host, in seconds."""
    share = TIMES * schedule.workers / schedule.stages
    forward, backward = share * FORWARD_SECONDS, share * BACKWARD_SECONDS
    costs = cf.Costs(forward, backward, attention=attention, overhead=overhead, p2p=message)
    return cf.simulate(schedule, costs)


def equal_times(slices: int) -> tuple[int, ...]:
    """Positions of as many slices that take equal times, where costs grow."""
    linear = 1 - GROWS
    costs = [number / slices for number in range(slices + 1)]
    ends = [(math.sqrt(linear**2 + 4 * GROWS * cost) - linear) / (2 * GROWS) for cost in costs]
    return tuple(after - before for before, after in pairwise(round(POSITIONS * end) for end in ends))


# The contenders


@dataclass(frozen=True)
class Case:
    """One of ours: a scheme, its slices or their lengths, and the attention's share of the time."""

    scheme: str
    slices: int | tuple[int, ...] = 1
    attention: float = 0.0

    @property
    def schedule(self) -> cf.Schedule:
        build: Callable[..., cf.Schedule] = getattr(cf.schemes, self.scheme)
        return build(WORKERS, micro_batches=MICRO_BATCHES, slices=self.slices)

    def __str__(self) -> str:
        name = {"dapple": "1f1b", "zb_v": "zb-v"}[self.scheme]
        if isinstance(self.slices, int):
            return f"{name} | {self.slices}"
        return f"{name} | {len(self.slices)}: {' '.join(map(str, self.slices))}"


EQUAL = *(Case("dapple", n) for n in (1, 2, 4, 8)), *(Case("zb_v", n) for n in (2, 4))
GROWING = (
    *(Case("dapple", n, GROWS) for n in (2, 4, 8)),
    *(Case("dapple", equal_times(n), GROWS) for n in (2, 4, 8)),
    Case("zb_v", equal_times(4), GROWS),
)


@dataclass(frozen=True)
class Found:
    """What a worker saw: a message's seconds, and the rows by device, torch's last."""

    message: float
    host: list[Row]
    stream: list[Row]


def work(repeats: int) -> Found:
    """What every worker runs."""
    torch.set_num_threads(1)
    first, late = undisturbed(), precise_sleep()
    transport = current_transport()
    rank = transport.rank
    message = message_seconds(transport, BYTES["4KiB"])
    note(rank, f"sleeps end {late * 1e6:.0f} µs late, real-time priority: {first}")
    groups = Groups(transport)
    equal, growing = (
        [
            Ours(
                str(case),
                case.schedule,
                message,
                groups,
                layer=partial(Layer, attention=case.attention),
                simulate=partial(predicted, attention=case.attention),
            )
            for case in cases
        ]
        for cases in (EQUAL, GROWING)
    )
    torchs = [
        Theirs(name, MICRO_BATCHES, rank, WORKERS, layer=partial(Layer, attention=0.0)) for name in THEIRS
    ]
    for one in torchs:
        one.row.ideal *= TIMES
    step = partial(
        take_turns,
        inputs=torch.zeros(MICRO_BATCHES, POSITIONS, 1),
        targets=torch.zeros(MICRO_BATCHES, POSITIONS),
        transport=transport,
        expected=TIMES * MICRO_BATCHES * WORKERS * (FORWARD_SECONDS + BACKWARD_SECONDS),
    )
    every: list[Ours | Theirs] = [*equal, *growing, *torchs]
    step(every, turn=0, counts=False)
    of_host: list[Ours | Theirs] = [*equal, *torchs]
    for turn in range(HOST_REPEATS):
        step(of_host, turn=1 + turn, counts=True)
        note(rank, f"host: turn {turn + 1}")
    host = [contender.row for contender in of_host]
    for contender in of_host:
        contender.row = replace(contender.row, steps=[], busy=[])
    take_device(Stream(rank, message))  # the first turn compares what slices made, which is here a time
    for turn in range(1 + repeats):
        step(every, turn=1 + turn, counts=turn > 0)
        note(rank, f"stream: turn {turn + 1}")
    return Found(message, host, [one.row for one in every])


# The report


def table(rows: Sequence[Row], base: Row) -> Iterator[str]:
    """Lines of rows, beside torch's 1F1B."""
    yield (
        "| schedule | slices | saved | over torch 1F1B's | predicted ms | measured ms | least .. most "
        "| error | over torch 1F1B's |"
    )
    yield "|---|---|--:|--:|--:|--:|---|--:|--:|"
    for row in rows:
        name = row.name if row.ours else f"{row.name} | 1"
        yield (
            f"| {name} | {row.peak:.3g} | {row.peak / base.peak:.3g} | {expected(row) * 1e3:.1f} "
            f"| {row.median * 1e3:.1f} | {min(row.steps) * 1e3:.1f} .. {max(row.steps) * 1e3:.1f} "
            f"| {error(row):+.1%} | {row.median / base.median:.3f} |"
        )


def expected(row: Row) -> float:
    """Seconds of its step as simulated: with messages; torch's without."""
    return row.with_messages or row.ideal


def error(row: Row) -> float:
    """By how much of the prediction the measured step is longer."""
    return row.median / expected(row) - 1


def verdicts(ours: Sequence[Row], torchs: Sequence[Row]) -> Iterator[str]:
    """What of it is claimed."""
    worst = max(ours, key=lambda row: abs(error(row)))
    late = "" if abs(error(worst)) <= GOAL - 1 else " - MORE THAN 3 %"
    yield f"farthest from its prediction: {in_words(worst)}, {error(worst):+.1%}{late}"
    for other in torchs:
        best = min((row for row in ours if row.peak <= other.peak), key=lambda row: row.median)
        wins = sum(a < b for a, b in zip(best.steps, other.steps, strict=True))
        yield (
            f"in the memory of {other.name}: {in_words(best)} saves {best.peak:.3g} for {other.peak:.3g} and "
            f"takes {best.median * 1e3:.1f} ms for {other.median * 1e3:.1f}, "
            f"{best.median / other.median:.3f} of it; faster in {wins} of {len(best.steps)} turns"
        )


def in_words(row: Row) -> str:
    return row.name.replace(" |", ", slices")


def of_the_host(found: Found) -> Iterator[str]:
    """Lines of the device that is the host: predictions without and with what it takes beside each op."""
    whole = found.host[0]
    ops = 2 * (MICRO_BATCHES + WORKERS - 1)  # one after the other, in a step of whole micro-batches
    overhead = max(0.0, whole.median - expected(whole)) / ops
    yield f"What the host takes beside an op, of the step of one slice: {overhead * 1e3:.2f} ms"
    yield ""
    yield "| schedule | slices | predicted ms | with the host's | measured ms | error | over torch 1F1B's |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    base = found.host[len(EQUAL)]
    for case, row in zip(EQUAL, found.host, strict=False):
        with_host = predicted(case.schedule, found.message, overhead=overhead).makespan
        yield (
            f"| {row.name} | {expected(row) * 1e3:.1f} | {with_host * 1e3:.1f} | {row.median * 1e3:.1f} "
            f"| {row.median / with_host - 1:+.1%} | {row.median / base.median:.3f} |"
        )
    for row in found.host[len(EQUAL) :]:
        yield (
            f"| {row.name} | 1 | {expected(row) * 1e3:.1f} | | {row.median * 1e3:.1f} | "
            f"| {row.median / base.median:.3f} |"
        )


def main() -> None:
    parser = arguments(__doc__, "slices_emulated.txt")
    parser.add_argument("--repeats", type=int, default=4, help="steps timed of each contender")
    options = parser.parse_args()
    about = machine()
    found = cf.launch(work, options.repeats, workers=WORKERS, transport="gloo", threads=1)[0]
    rows, torchs = found.stream[: -len(THEIRS)], found.stream[-len(THEIRS) :]
    equal, growing = rows[: len(EQUAL)], rows[len(EQUAL) :]
    lines = [
        f"# python benchmarks/slices_emulated.py, {machine_line(about)}",
        f"# {WORKERS} workers, {MICRO_BATCHES} micro-batches of a sample, 40 ms forward and 80 ms backward; "
        f"medians of {options.repeats} steps; a message takes {found.message * 1e3:.2f} ms",
    ]
    for title, mine in (
        ("Slices of equal cost", equal),
        (f"Slices of growing cost, attention {GROWS:g}", [equal[0], *growing]),  # a whole one is the same
    ):
        lines += ["", f"## {title}", "", *table([*mine, *torchs], torchs[0]), "", *verdicts(mine, torchs)]
    lines += ["", "## Slices of equal cost, on a device that is the host", "", *of_the_host(found)]
    print("\n".join(lines))
    if options.keep:
        keep("slices_emulated", lines)


if __name__ == "__main__":
    main()
