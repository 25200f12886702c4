"""Dumps of torch's flight recorder, all ranks', as lists of calls.

A dump is a pickle of plain containers. It is read by an unpickler without any names: a pickle that asks for a
class or a function is refused, and runs nothing. Dumps as JSON are read too.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from counterflow.errors import ConfigError

from .calls import CallLists, CallSide, CallStep, Part

FORM = "dumps of torch's flight recorder"

_MOST_BYTES = 256 * 2**20
_NAME = re.compile(r"[\w.-]+:(send|recv) (\d{1,9})(->|<-)(\d{1,9})")
_RANK = re.compile(r"(\d{1,9})(?:\.\w+)?$")
_PICKLE = b"\x80"


class _PlainUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"asks for {module_name}.{global_name}")

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("asks for a persistent object")


@dataclass(frozen=True, slots=True)
class FlightCall:
    """A call of a dump.

    Attributes:
        side: send or receive.
        peer: the other rank.
        complete: True if it ran to its end.
        state: torch's word for its state.
        communicator: name of its group.
        batch: number that the calls of a batch share; -1: none.
    """

    side: CallSide
    peer: int
    complete: bool
    state: str
    communicator: str
    batch: int


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The dump of a rank.

    Attributes:
        rank: the rank.
        calls: its sends and receives, in order.
        from_start: True if the dump begins with the rank's first operation.
        collectives: collectives that are not complete.
    """

    rank: int
    calls: tuple[FlightCall, ...]
    from_start: bool
    collectives: tuple[str, ...]


def is_flight_record(path: Path) -> bool:
    """True if a file is a pickle, or JSON with the entries of a dump."""
    try:
        with path.open("rb") as file:
            begin = file.read(65536)
    except OSError:
        return False
    return begin[:1] == _PICKLE or (begin.lstrip()[:1] == b"{" and b'"pg_config"' in begin)


def read_flight_records(paths: Sequence[Path]) -> list[FlightRecord]:
    """The dumps of all ranks, by rank.

    Args:
        paths: a file a rank, whose name ends with the rank, or a folder of them.

    Raises:
        ConfigError: a file is no dump, or a rank is missing or has two.
    """
    files: list[Path] = []
    for path in paths:
        files += (
            [file for file in sorted(path.iterdir()) if is_flight_record(file)] if path.is_dir() else [path]
        )
    if not files:
        raise ConfigError(f"{paths[0]}: no dump of the flight recorder in this folder")
    records: dict[int, FlightRecord] = {}
    for path in files:
        match = _RANK.search(path.name)
        if match is None:
            raise ConfigError(f"{path}: the name of a dump ends with its rank, as in nccl_trace_rank_0")
        rank = int(match[1])
        if rank in records:
            raise ConfigError(f"{path}: a second dump of rank {rank}")
        records[rank] = flight_record(_values(path), rank, str(path))
    peers = {call.peer for record in records.values() for call in record.calls if not call.complete}
    missing = [rank for rank in range(max([*records, *peers]) + 1) if rank not in records]
    if missing:
        raise ConfigError(f"no dump of rank {', '.join(map(str, missing[:8]))}; name the files of all ranks")
    return [records[rank] for rank in sorted(records)]


def _values(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: has more than {_MOST_BYTES // 2**20} MiB; this is no dump")
    if data[:1] != _PICKLE:
        try:
            return json.loads(data)
        except ValueError as error:
            raise ConfigError(f"{path}: neither a pickle nor JSON: {error}") from None
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise ConfigError(
            f"{path}: no dump of the flight recorder, which is a pickle of plain values: {error}"
        ) from None


def flight_record(values: Any, rank: int, name: str) -> FlightRecord:
    """The record of a rank.

    Args:
        values: what a dump contains.
        rank: its rank.
        name: its name, for errors.

    Raises:
        ConfigError: the values are not those of a dump.
    """
    entries = values.get("entries") if isinstance(values, Mapping) else None
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f'{name}: no dump of the flight recorder: it has no list "entries"')
    groups = _groups(values.get("pg_config"))
    calls: list[FlightCall] = []
    collectives: list[str] = []
    pending: list[int] = []
    for number, entry in enumerate(entries):
        place = f"{name}: entry {number}"
        title = entry.get("profiling_name")
        if not isinstance(title, str):
            raise ConfigError(f'{place}: no "profiling_name"')
        complete = entry.get("state") == "completed" or bool(entry.get("retired"))
        state = str(entry.get("state"))
        if match := _NAME.fullmatch(title):
            group = _group(entry)
            ranks = groups.get(group) or (next(iter(groups.values())) if len(groups) == 1 else None)
            peer = int(match[4])
            if ranks is not None:
                if peer >= len(ranks):
                    raise ConfigError(f"{place}: {title}: its group has {len(ranks)} ranks")
                peer = ranks[peer]
            side = CallSide.SEND if match[1] == "send" else CallSide.RECEIVE
            pending.append(len(calls))
            calls.append(FlightCall(side, peer, complete, state, group, -1))
        elif title.endswith(":coalesced"):
            _close(calls, pending, entry, number, complete=complete, state=state)
            pending = []
        elif not complete:
            collectives.append(f"{title} of group {_group(entry)!r} ({state})")
        if entry.get("is_p2p") is False and not title.endswith(":coalesced"):
            pending = []
    first = entries[0].get("record_id", 0) if entries else 0
    return FlightRecord(rank, tuple(calls), first == 0, tuple(collectives))


def _close(
    calls: list[FlightCall],
    pending: list[int],
    entry: Mapping[str, Any],
    number: int,
    *,
    complete: bool,
    state: str,
) -> None:
    """Give the calls of a batch its number and state: torch records its calls, then the batch itself."""
    group = _group(entry)
    for place in reversed(pending):
        call = calls[place]
        if call.communicator != group or call.complete:
            break
        calls[place] = FlightCall(call.side, call.peer, complete, state, group, number)


def _group(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return str(group[0]) if isinstance(group, Sequence) and group else str(entry.get("pg_id", ""))


def _groups(config: Any) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for key, about in config.items() if isinstance(config, Mapping) else ():
        ranks = about.get("ranks") if isinstance(about, Mapping) else about
        try:
            listed = json.loads(ranks) if isinstance(ranks, str) else ranks
        except ValueError:
            continue
        if isinstance(listed, Sequence) and all(isinstance(rank, int) for rank in listed):
            groups[str(key)] = sorted(listed)
    return groups


def recorded_call_lists(records: Sequence[FlightRecord]) -> CallLists:
    """The calls of all ranks, those of a batch in one step; only incomplete ones if a dump lost its begin."""
    from_start = all(record.from_start for record in records)
    rows = (_row(record, [c for c in record.calls if from_start or not c.complete]) for record in records)
    return CallLists(tuple(rows), FORM)


def _row(record: FlightRecord, calls: Sequence[FlightCall]) -> tuple[CallStep, ...]:
    steps: list[CallStep] = []
    parts: list[Part] = []
    for number, call in enumerate(calls):
        pair = f"{min(record.rank, call.peer)}-{max(record.rank, call.peer)}"
        communicator = call.communicator if call.batch >= 0 else f"{call.communicator}, pair {pair}"
        parts.append(Part(call.side, call.peer, "", communicator))
        following = calls[number + 1] if number + 1 < len(calls) else None
        if following is None or call.batch < 0 or following.batch != call.batch:
            label = ";".join(map(_label, parts))
            place = f"call {number - len(parts) + 1}, {call.state}"
            steps.append(
                CallStep(len(steps), f"({label})" if len(parts) > 1 else label, tuple(parts), place=place)
            )
            parts = []
    return tuple(steps)


def _label(part: Part) -> str:
    return f"send to {part.peer}" if part.side is CallSide.SEND else f"recv from {part.peer}"
