"""Recorded calls of any system as JSON: for each rank a list of its sends, receives, batches and waits.

``{"ranks": [[{"send": 1, "tag": "F0"}, {"batch": [{"send": 1}, {"recv": 1}], "id": "b"}, ...], ...]}``.
The models below are the form; docs/lint.md shows it. Calls return at once, as ``isend`` and ``irecv`` do,
unless they ``"wait"``.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterflow.errors import ConfigError

from .calls import CallLists, CallSide, CallStep, CommunicatorScope, Part, Row

FORM = "recorded calls"

_Name = Annotated[str, Field(max_length=200)]
_Rank = Annotated[int, Field(ge=0, lt=10**6)]


class _CallEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RecordedMessage(_CallEntry):
    """A send or a receive: one of ``send`` and ``recv``, which is the other rank."""

    send: _Rank | None = None
    recv: _Rank | None = None
    tag: _Name | int = ""
    communicator: _Name | None = None
    id: _Name | None = None


class RecordedStep(RecordedMessage):
    """An entry of a rank's list: a message, a batch of messages, a wait, or work."""

    batch: list[RecordedMessage] | None = None
    wait: bool | list[_Name] | Literal["all"] | None = None
    compute: _Name | None = None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)] = 1.0


class RecordedCalls(_CallEntry):
    """A file of recorded calls."""

    format: Literal[1] = 1
    communicators: Literal["group", "pair", "edge"] = "group"
    connected: bool = False
    partial: bool = False
    ranks: Annotated[list[list[RecordedStep]], Field(min_length=1)]


def read_json(text: str, name: str) -> Any:
    """The values in a text of JSON.

    Raises:
        ConfigError: the text is no JSON; the message has the line and column.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}: line {error.lineno}, column {error.colno}: no JSON: {error.msg}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: no JSON that can be read: its brackets are nested too deep") from None


def recorded_lists(values: Any, name: str) -> CallLists:
    """The lists in recorded calls that were read from JSON.

    Raises:
        ConfigError: the values are not of this form.
    """
    try:
        record = RecordedCalls.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{name}: {_place(first['loc'])}: {first['msg']}") from None
    known = CommunicatorScope(record.communicators)
    count = len(record.ranks)
    rows = (_Rows(row, rank, count, known, name).steps for rank, row in enumerate(record.ranks))
    return CallLists(tuple(rows), FORM, record.connected, record.partial)


def _place(location: tuple[int | str, ...]) -> str:
    words = [str(word) for word in location]
    if words[:1] != ["ranks"] or len(words) < 3:
        return ".".join(words) or "the file"
    return f"rank {words[1]}, entry {words[2]}{': ' if words[3:] else ''}{'.'.join(words[3:])}"


class _Rows:
    def __init__(
        self, entries: list[RecordedStep], rank: int, count: int, known: CommunicatorScope, name: str
    ) -> None:
        self.rank, self.count, self.known, self.name = rank, count, known, name
        self.ids: dict[str, tuple[int, int | None]] = {}
        """For each id, the number of its call, and its part if it names a message of a batch."""
        self.calls: list[int] = []
        self.written: list[CallStep] = []
        for number, entry in enumerate(entries):
            self._add(number, entry)
        self.steps: Row = tuple(self.written)

    def _add(self, number: int, entry: RecordedStep) -> None:
        place = f"rank {self.rank}, entry {number}"
        kinds = [entry.send is not None, entry.recv is not None, entry.batch is not None]
        kinds += [entry.compute is not None, entry.wait is not None and not isinstance(entry.wait, bool)]
        is_work = kinds[3]
        if sum(kinds) != 1 and not (is_work and sum(kinds[:3]) == 0):
            raise self._error(
                place, 'an entry is a "send", a "recv", a "batch", a "compute" or a "wait" for ids'
            )
        if any(kinds[:3]):
            self._call(entry, place)
        else:
            self.written.append(
                CallStep(
                    number=len(self.written),
                    label=entry.compute or "wait",
                    needs=self._needs(entry.wait, place),
                    receives=self._receives(entry.wait),
                    seconds=entry.seconds if entry.compute else 0.0,
                    place=place,
                )
            )

    def _call(self, entry: RecordedStep, place: str) -> None:
        messages = [entry] if entry.batch is None else entry.batch
        if not messages:
            raise self._error(place, "a batch has at least one message")
        parts = tuple(self._part(message, place, batched=entry.batch is not None) for message in messages)
        if len({part.communicator for part in parts}) > 1:
            raise self._error(place, "a batch runs on one communicator; its messages name several")
        step = len(self.written)
        shown = ";".join(map(_label, parts))
        label = shown if entry.batch is None else f"({shown})"
        if len(label) > 60:
            label = f"batch of {len(parts)}"
        self.written.append(CallStep(step, label, parts, place=place))
        self.calls.append(step)
        names: list[tuple[str | None, int | None]] = [(entry.id, None)]
        names += [(message.id, part) for part, message in enumerate(entry.batch or ())]
        for name, number in names:
            if name in self.ids:
                raise self._error(place, f"the id {name!r} names an earlier call too")
            if name is not None:
                self.ids[name] = step, number
        if entry.wait is True:
            self.written.append(CallStep(step + 1, f"wait for {label}", needs=(step,), place=place))

    def _needs(self, wait: Any, place: str) -> tuple[int, ...]:
        if wait == "all":
            return tuple(self.calls)
        missing = next((name for name in wait or () if name not in self.ids), None)
        if missing is not None:
            raise self._error(place, f'no earlier call has the "id" {missing!r}')
        return tuple(sorted({self.ids[name][0] for name in wait or ()}))

    def _receives(self, wait: Any) -> tuple[tuple[int, int], ...]:
        if not isinstance(wait, list):
            return ()
        ends = [self.ids[name] for name in wait]
        batches = {step for step, part in ends if part is None}
        return tuple((step, part) for step, part in ends if part is not None and step not in batches)

    def _part(self, message: RecordedMessage, place: str, *, batched: bool) -> Part:
        if (message.send is None) == (message.recv is None):
            raise self._error(place, 'a message has either "send" or "recv"')
        sends = message.send is not None
        peer = message.send if message.send is not None else message.recv
        assert peer is not None
        if peer >= self.count or peer == self.rank:
            raise self._error(place, f"rank {peer} is {'this rank' if peer == self.rank else 'not listed'}")
        communicator = message.communicator
        if communicator is None:
            kind = CommunicatorScope.GROUP if batched and self.known is CommunicatorScope.PAIR else self.known
            communicator = kind.of_message(*((self.rank, peer) if sends else (peer, self.rank)))
        return Part(CallSide.SEND if sends else CallSide.RECEIVE, peer, str(message.tag), communicator)

    def _error(self, place: str, text: str) -> ConfigError:
        return ConfigError(f"{self.name}: {place}: {text}")


def _label(part: Part) -> str:
    tag = f" {part.name}" if part.name else ""
    return f"send{tag} to {part.peer}" if part.side is CallSide.SEND else f"recv{tag} from {part.peer}"
