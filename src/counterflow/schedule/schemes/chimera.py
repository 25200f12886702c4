"""Chimera: pipes in both directions whose 1F1B orders fit into each other's bubbles.

D=4, N=4 (0, 1 down; 2, 3 up; digit = forward, letter = backward, B = 2F):

    P0  0 1 . 2 c c 3 d d . a a . . b b
    P1  . 0 2 1 3 . c c a a d d b b . .
    P2  . 2 0 3 1 . a a c c b b d d . .
    P3  2 3 . 0 a a 1 b b . c c . . d d

The basic unit in slots: the j-th micro-batch of a pipe has its forward of stage s in slot 2j + s and its
backward in slot 2j + 2D − 1 − s. A pipe runs D/(2f) of the D micro-batches, and no two ops share a
worker and a slot. More micro-batches are appended as further units (``concat``):

* direct: units shifted by 2D slots. * forward-doubling: units of 2D micro-batches; pair j of a pipe is one
forward in slot 2j + s, its backwards k = 2j and 2j + 1 are in slots D + 2k + (D − 1 − s); units shifted by 3D
slots. At most D remaining micro-batches run as a basic unit. * backward-halving: the same slots, where the
forward runs one micro-batch and backwards 2j and 2j + 1 are its two halves.

With more than one pair of pipes (f > 1) two backwards of a doubled or halved unit can have the same slot; the
one of the lower pipe goes first. Slots strictly increase along dependencies, so the order stays right.

Source: Li & Hoefler, Chimera (SC'21): sections 3.1, 3.5 (Figure 7) and 3.6 (Figure 8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from counterflow.errors import ConfigError
from counterflow.schedule.ir import Op, OptionValue, Schedule
from counterflow.schedule.op import B, F
from counterflow.schedule.orders.legal import at_least
from counterflow.schedule.orders.slots import Placed, orders_by_slot, spread
from counterflow.schedule.orders.split import split_backwards, split_workload
from counterflow.schedule.placement import Placement, bidirectional
from counterflow.schedule.scheme import MICRO_BATCHES, SPLIT, Directions, Option, OptionType, Scheme
from counterflow.schedule.workload import Pass, Share, Workload


class Concat(StrEnum):
    """Continuation of Chimera after its first D micro-batches (section 3.5)."""

    DIRECT = "direct"
    FORWARD_DOUBLING = "forward-doubling"
    BACKWARD_HALVING = "backward-halving"


def chimera(
    stages: int,
    micro_batches: int,
    pairs: int = 1,
    concat: Concat | str = Concat.DIRECT,
    split: bool = False,
) -> Schedule:
    """Bidirectional pipes, ``pairs`` in each direction.

    Args:
        stages: depth D, the number of workers, even.
        micro_batches: N, 1 or more; fewer than D are spread over the pipes as evenly as possible.
        pairs: f, the pipes in each direction; divides D/2. Every worker holds 2f stages.
        concat: how units follow the first one: ``direct``, ``forward-doubling`` or ``backward-halving``.
        split: whether backwards are split (``split_backwards``).

    Raises:
        ConfigError: an option is out of range.

    >>> schedule = chimera(stages=4, micro_batches=4)
    >>> " ".join(f"{op.kind.value}{op.micro_batches[0]}" for op in schedule.orders[0])
    'F0 F1 F2 B2 F3 B3 B0 B1'
    """
    placement, passes = _passed(stages, micro_batches, pairs, concat)
    options = (
        ("stages", stages),
        ("micro_batches", micro_batches),
        ("pairs", pairs),
        ("concat", Concat(concat).value),
    )
    orders = orders_by_slot(stages, _placed(placement, passes))
    schedule = Schedule("chimera", options, _work(placement, micro_batches, passes), orders)
    return split_backwards(schedule, split)


def _workload(
    stages: int,
    micro_batches: int,
    pairs: int = 1,
    concat: Concat | str = Concat.DIRECT,
    split: bool = False,
) -> Workload:
    placement, passes = _passed(stages, micro_batches, pairs, concat)
    return split_workload(_work(placement, micro_batches, passes), split)


def _work(placement: Placement, micro_batches: int, passes: Sequence[_Slots]) -> Workload:
    by_number = sorted((slots.work for slots in passes), key=lambda work: work.micro_batches)
    return Workload(placement, micro_batches, tuple(by_number))


def _passed(
    stages: int, micro_batches: int, pairs: int, concat: Concat | str
) -> tuple[Placement, list[_Slots]]:
    at_least("stages", stages, 2)
    at_least("micro_batches", micro_batches, 1)
    at_least("pairs", pairs, 1)
    try:
        concat = Concat(concat)
    except ValueError:
        legal = ", ".join(Concat)
        raise ConfigError(f"concat={concat!r}: unknown; legal: {legal}") from None
    placement = bidirectional(stages, pairs)
    units = list(_units(stages, micro_batches, pairs, concat))
    return placement, list(_passes(stages, units, 2 * pairs, concat))


def _units(
    stages: int, micro_batches: int, pairs: int, concat: Concat
) -> Iterator[tuple[int, bool, list[int]]]:
    doubling = concat is Concat.FORWARD_DOUBLING
    full = 2 * stages if doubling else stages
    shift = 2 * stages if concat is Concat.DIRECT else 3 * stages
    for unit, done in enumerate(range(0, micro_batches, full)):
        size = min(full, micro_batches - done)
        basic = concat is Concat.DIRECT or (doubling and size <= stages)
        # The remainder goes to down 0, up 0, down 1, up 1, …; pipes are down pipes, then up pipes.
        shares = spread(size, 2 * pairs)
        yield unit * shift, basic, shares[0::2] + shares[1::2]


class _Slots(NamedTuple):
    """A pass and its slots: that of its forward on stage 0, and those of its shares' backwards on stage D -
    1.
    """

    work: Pass
    forward: int
    backwards: tuple[int, ...]


def _passes(
    stages: int, units: Sequence[tuple[int, bool, list[int]]], pipes: int, concat: Concat
) -> Iterator[_Slots]:
    first = 0
    for pipe in range(pipes):
        for start, basic, shares in units:
            batches = range(first, first + shares[pipe])
            first = batches.stop
            step = 2 if concat is Concat.FORWARD_DOUBLING and not basic else 1
            halves = 2 if concat is Concat.BACKWARD_HALVING else 1
            for j, begin in enumerate(range(batches.start, batches.stop, step)):
                group = tuple(range(begin, min(begin + step, batches.stop)))
                parts = tuple(Share((m,), part, halves) for m in group for part in range(halves))
                # In a unit of doubled or halved ops a forward takes as long as a backward (Figure 7 c, d).
                slots = [stages + 2 * j] if basic else [stages + 2 * (2 * j + i) for i in range(len(parts))]
                yield _Slots(Pass(pipe, group, parts), start + 2 * j, tuple(start + slot for slot in slots))


def _placed(placement: Placement, passes: Sequence[_Slots]) -> Iterator[Placed]:
    forward_op, backward_op = F, B
    for work, forward, backwards in passes:
        pipe, batches = work.pipe, work.micro_batches
        workers = placement.pipes_stages[pipe]
        last = len(workers) - 1
        for s, worker in enumerate(workers):
            yield forward + s, worker, Op(forward_op, s, batches, pipe)
        for share, slot in zip(work.shares, backwards, strict=True):
            group, part, parts = share.micro_batches, share.part, share.parts
            for s, worker in enumerate(workers):
                yield slot + last - s, worker, Op(backward_op, s, group, pipe, part, parts)


def _planned(workers: int, micro_batches: int, _layers: int) -> Iterator[Mapping[str, OptionValue]]:
    # The alternatives differ from direct only if something follows the first unit.
    ways = Concat if micro_batches > workers else (Concat.DIRECT,)
    for pairs in (f for f in range(1, workers // 2 + 1) if (workers // 2) % f == 0):
        for way in ways:
            yield {"pairs": pairs, "concat": way.value}


def _most_stashed(
    stages: int, concat: str = Concat.DIRECT.value, split: bool = False, **_: OptionValue
) -> int | None:
    if split:
        return None
    return 2 * stages if concat == Concat.FORWARD_DOUBLING.value else stages


def _most_in_flight(
    stages: int, pairs: int = 1, concat: str = Concat.DIRECT.value, **_: OptionValue
) -> int | None:
    """The bound of a unit: a pipe's first micro-batch of the next unit enters when the first one of this unit
    has returned.
    """
    unit = 2 * stages if concat == Concat.FORWARD_DOUBLING.value else stages
    return -(-unit // (2 * pairs))


SCHEME = Scheme(
    name="chimera",
    build=chimera,
    workload=_workload,
    summary="1F1B in two directions whose bubbles fill each other",
    source="Li and Hoefler 2021",
    options=(
        Option("stages", "even, 2 or more", "depth D: stages of each pipe, and workers", letter="D"),
        MICRO_BATCHES,
        Option(
            "pairs",
            "a divisor of stages/2",
            "f: pipes in each direction",
            default=1,
            letter="f",
            unsaid=1,
        ),
        Option(
            "concat",
            ", ".join(Concat),
            "how units of D micro-batches follow each other",
            default=Concat.DIRECT.value,
            kind=OptionType.WORD,
            words=tuple(way.value for way in Concat),
        ),
        SPLIT,
    ),
    directions=Directions.TWO,
    planner=_planned,
    needs="an even depth",
    most_stashed=_most_stashed,
    most_in_flight=_most_in_flight,
)
