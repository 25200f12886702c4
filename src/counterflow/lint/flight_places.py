"""Places of ranks in a schedule by the calls of their dumps: which op of which stage each rank was in.

The calls of a step are those of the schedule, step after step, so a rank's calls fit at a place of its list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .calls import CallLists, CallSide, CallStep
from .flight_records import FlightCall, FlightRecord, recorded_call_lists

_Call = tuple[CallSide, int]


@dataclass(frozen=True, slots=True)
class DumpPlace:
    """The place of a rank when its dump was written.

    Attributes:
        rank: the rank.
        call: its first call that is not complete; empty: all are.
        state: torch's word for the state of that call.
        step: number of the training step, from 0, since the begin of the dump; -1: not known.
        action: the step of the schedule with that call; empty: not known.
        ops: steps of the schedule that wait for it, or made its message.
        collectives: collectives that are not complete.
        remark: what does not fit; empty: nothing.
    """

    rank: int
    call: str
    state: str
    step: int = -1
    action: str = ""
    ops: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    remark: str = ""

    def __str__(self) -> str:
        text = f"rank {self.rank}: "
        if not self.call:
            text += "all calls are complete"
        else:
            text += f"in {self.action or self.call} ({self.state})"
        if self.action:
            text += f", step {self.step}"
        if self.ops:
            text += f", for {' and '.join(self.ops)}"
        rest = "; ".join((*(f"in {name}" for name in self.collectives), *filter(None, (self.remark,))))
        return f"{text}; {rest}" if rest else text


def places_of(
    records: Sequence[FlightRecord], schedule: CallLists | None = None
) -> tuple[list[DumpPlace], CallLists]:
    """The place of each rank, and the lists from there on.

    Args:
        records: the dumps of all ranks.
        schedule: the schedule of a step; None: not known, then the lists are the recorded calls.
    """
    if schedule is None or len(schedule.ranks) != len(records):
        remark = "" if schedule is None else f"the schedule has {len(schedule.ranks)} ranks"
        return [_unplaced(record, remark) for record in records], recorded_call_lists(records)
    offsets = _offsets(records, schedule)
    places: list[DumpPlace] = []
    begins: list[tuple[int, int]] = []
    for record, row, offset in zip(records, schedule.ranks, offsets, strict=True):
        if offset is None:
            places.append(_unplaced(record, _misfit(record, _calls(row))))
            continue
        place, begin = _placed(record, row, offset)
        places.append(place)
        begins.append(begin)
    if None in offsets:
        return places, recorded_call_lists(records)
    return places, _remaining_steps(schedule, begins)


def _calls(row: Sequence[CallStep]) -> list[_Call]:
    return [(part.side, part.peer) for step in row for part in step.parts]


def _offsets(records: Sequence[FlightRecord], schedule: CallLists) -> list[int | None]:
    """For each rank, the place in a step's calls at which its dump begins; None: its calls do not fit.

    Where several fit, the messages between two ranks decide: as many were received as were sent.
    """
    calls = [_calls(row) for row in schedule.ranks]
    fits = [_fits(record, row) for record, row in zip(records, calls, strict=True)]
    offsets: list[int | None] = [None] * len(fits)
    for rank in sorted(range(len(fits)), key=lambda rank: len(fits[rank])):
        known = [peer for peer, offset in enumerate(offsets) if offset is not None]

        def lacking(offset: int, rank: int = rank, known: list[int] = known) -> int:
            ends = {peer: (offsets[peer] or 0) + _first_incomplete(records[peer]) for peer in known}
            end = offset + _first_incomplete(records[rank])
            return sum(_unreceived_messages(calls, (rank, end), (peer, at)) for peer, at in ends.items())

        offsets[rank] = min(fits[rank], key=lacking, default=None)
    return offsets


def _fits(record: FlightRecord, calls: list[_Call]) -> list[int]:
    recorded = [(call.side, call.peer) for call in record.calls]
    if not calls:
        return [] if recorded else [0]
    return [
        offset
        for offset in range(1 if record.from_start else len(calls))
        if all(calls[(offset + n) % len(calls)] == call for n, call in enumerate(recorded))
    ]


def _unreceived_messages(calls: list[list[_Call]], first: tuple[int, int], second: tuple[int, int]) -> int:
    total = 0
    for (sender, sent), (receiver, received) in ((first, second), (second, first)):
        sends = [place for place, call in enumerate(calls[sender]) if call == (CallSide.SEND, receiver)]
        receives = [place for place, call in enumerate(calls[receiver]) if call == (CallSide.RECEIVE, sender)]
        step = max(1, len(sends))
        lost = sum(p < sent % len(calls[sender]) for p in sends)
        lost -= sum(p < received % len(calls[receiver]) for p in receives)
        total += min(lost % step, -lost % step)
    return total


def _misfit(record: FlightRecord, calls: list[_Call]) -> str:
    if not record.from_start or not calls:
        return "its calls are not those of the schedule"
    recorded = enumerate((call.side, call.peer) for call in record.calls)
    number = next(n for n, call in recorded if calls[n % len(calls)] != call)
    side, peer = calls[number % len(calls)]
    expected = f"{side.value} {'to' if side is CallSide.SEND else 'from'} rank {peer}"
    return f"call {number} is a {_shown(record.calls[number])}, and the schedule has a {expected}"


def _shown(call: FlightCall) -> str:
    return f"{call.side.value} {'to' if call.side is CallSide.SEND else 'from'} rank {call.peer}"


def _first_incomplete(record: FlightRecord) -> int:
    return next((n for n, call in enumerate(record.calls) if not call.complete), len(record.calls))


def _unplaced(record: FlightRecord, remark: str) -> DumpPlace:
    number = _first_incomplete(record)
    if number == len(record.calls):
        return DumpPlace(record.rank, "", "", collectives=record.collectives, remark=remark)
    call = record.calls[number]
    return DumpPlace(record.rank, _shown(call), call.state, collectives=record.collectives, remark=remark)


def _placed(record: FlightRecord, row: Sequence[CallStep], offset: int) -> tuple[DumpPlace, tuple[int, int]]:
    owners = [place for place, step in enumerate(row) for _ in step.parts]
    place = _unplaced(record, "")
    if not owners:
        return place, (0, len(row))
    number = offset + _first_incomplete(record)
    training_step, at = number // len(owners), owners[number % len(owners)]
    if not place.call:
        return place, (training_step, at)
    step = row[at]
    ops = tuple(later.label for later in row if step.number in later.needs and not later.parts)
    makers = tuple(earlier.label for earlier in row if earlier.number in step.needs)
    return replace(place, step=training_step, action=step.label, ops=ops or makers), (training_step, at)


def _remaining_steps(schedule: CallLists, begins: Sequence[tuple[int, int]]) -> CallLists:
    last = max(step for step, _ in begins)
    rows: list[tuple[CallStep, ...]] = []
    for row, (first, at) in zip(schedule.ranks, begins, strict=True):
        size = 1 + max((step.number for step in row), default=0)
        rest = [
            replace(
                step,
                number=turn * size + step.number,
                needs=tuple(turn * size + need for need in step.needs),
                parts=tuple(
                    replace(part, name=part.name and f"{part.name} of step {turn}") for part in step.parts
                ),
                receives=(),
            )
            for turn in range(first, last + 1)
            for place, step in enumerate(row)
            if turn > first or place >= at
        ]
        present = {step.number for step in rest}
        rows.append(tuple(replace(s, needs=tuple(n for n in s.needs if n in present)) for s in rest))
    return replace(schedule, ranks=tuple(rows), partial=True)
