"""Following runs: which there are, what was added to them, and one answer for all pages that ask alike.

Invariant: nothing is written, locked or asked of a run. However many pages look, folders are walked at most
once in ``Pace.fresh_seconds``, a file is read again only where it has changed, of metrics only what was
added, and what is the same for several pages is worked out and written as JSON once.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from counterflow.checkpoints.index import CHECKPOINT
from counterflow.errors import ConfigError, CounterflowError
from counterflow.schedule.ir import Schedule
from counterflow.training.folder import (
    CONFIG,
    EVENTS,
    LIVE,
    METRICS,
    SCHEDULE,
    SUMMARY,
    TIMELINE,
    read_schedule,
    read_timeline,
)
from counterflow.training.metrics import Tail
from counterflow.training.supervision.exclusive import LOCK

from .requests import RunsRequest
from .runs import RunState, about_of, changed, events_of, no_timeline, pictured, state_of

CURVES = ("loss", "validation_loss", "samples_per_second")

_POINTS = 1000
"""Number of points of a curve that are sent first; more cannot be distinguished."""

_LARGEST = 1e300
"""Largest number in a line of metrics; larger or non-finite ones are left out: JSON cannot contain them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits on what a server takes from the runs that it follows.

    Attributes:
        fresh_seconds: how old an answer may be.
        share: of a core's time that a run's timelines may take to be worked out.
    """

    fresh_seconds: float = 0.15
    share: float = 0.005


AT_ONCE = Pace(0.0, float("inf"))
"""Every look is a new one."""


@dataclass(slots=True)
class _Metrics:
    tail: Tail
    name: str = ""
    """Another one whenever the file is begun again."""
    seen: tuple[int, int, int] = (-1, 0, 0)
    """The file's number, its size and when it was written."""
    curves: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    step: float = 0
    loss: float | None = None

    def update(self) -> None:
        """Read what was added; all of it where the file is another one."""
        about = self.tail.path.stat()
        seen = about.st_ino, about.st_size, about.st_mtime_ns
        if seen == self.seen:
            return
        restarted, lines = self.tail.read()
        if restarted:
            self.name, self.step, self.loss = secrets.token_hex(6), 0, None
            self.curves = {name: ([], []) for name in CURVES}
        self.seen = seen
        for line in lines:
            if all(-_LARGEST < value < _LARGEST for value in line.values()):
                for name in line.keys() & self.curves.keys():
                    steps, values = self.curves[name]
                    steps.append(line["step"])
                    values.append(line[name])
                self.step = max(self.step, line["step"])
                self.loss = line.get("loss", self.loss)

    @property
    def version(self) -> str:
        """Version that a page with all points reports."""
        return ".".join([self.name, *(str(len(steps)) for steps, _ in self.curves.values())])

    def since(self, version: str) -> tuple[bool, dict[str, list[list[float]]] | None]:
        """Points that a page of that version lacks, and whether to append them; None: it lacks nothing.

        If not appended, they are a whole curve: as many points as can be distinguished, always with the last.
        """
        name, *counts = version.split(".")
        had = dict(zip(self.curves, counts, strict=False))
        if name == self.name and len(counts) == len(self.curves) and all(map(_is_count, counts)):
            added = {
                name: [column[int(had[name]) :] for column in curve] for name, curve in self.curves.items()
            }
            lacking = sum(len(steps) for steps, _ in added.values())
            if lacking < _POINTS:
                return True, added if lacking else None
        return False, {name: [_thinned(column) for column in curve] for name, curve in self.curves.items()}


def _is_count(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 12


def _thinned(column: list[float]) -> list[float]:
    stride = max(1, -(-len(column) // _POINTS))
    return [*column[::stride], *(column[-1:] if column and (len(column) - 1) % stride else [])]


@dataclass(slots=True)
class _KnownRun:
    metrics: _Metrics
    begun: float = 0.0
    state: RunState = RunState.STOPPED
    stamps: tuple[str, ...] = ("never",)
    """Stamps of the files from which the state is read."""
    about: tuple[str, dict[str, Any]] = ("never", {})
    events: tuple[str, list[dict[str, str]]] = ("never", [])
    schedule: tuple[str, Schedule | None] = ("never", None)


@dataclass(slots=True)
class _Drawn:
    version: str
    shown: dict[str, Any]
    due: float


class FollowedRuns:
    """The runs that may be looked at: those given, and those in the folders given."""

    def __init__(self, places: Sequence[Path], pace: Pace = Pace()) -> None:
        self._places = tuple(places)
        self._pace = pace
        self._runs: dict[Path, _KnownRun] = {}
        self._walked = float("-inf")
        self._rows: list[dict[str, Any]] = []
        self._listed = ""
        self._answers: dict[bytes, bytes] = {}
        self._drawn: dict[tuple[Path, ...], _Drawn] = {}
        self._lock = Lock()

    def listed(self) -> bytes:
        """All of them, with what fits in a row, as JSON."""
        with self._lock:
            self._walk()
            return _json({"runs": self._rows, "places": [str(place) for place in self._places]})

    def cached_answer(self, body: bytes) -> bytes | None:
        """The answer to a request that another page has made, in the same words, a moment ago."""
        return self._answers.get(body) if self._is_fresh() else None

    def answer(self, body: bytes, request: RunsRequest) -> bytes:
        """Some runs side by side, as JSON; what the page has already is left out.

        Raises:
            ConfigError: there is no such run.
        """
        with self._lock:
            self._walk()
            answer = _json(self._look(request))
            if len(self._answers) < 100:
                self._answers[body] = answer
            return answer

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._walked < self._pace.fresh_seconds

    def _walk(self) -> None:
        if self._is_fresh():
            return
        runs = {path: self._seen(path) for path in self._paths()}
        self._runs = dict(
            sorted(
                ((path, run) for path, run in runs.items() if run is not None),
                key=lambda item: -item[1].begun,
            )
        )
        rows = [
            {
                "name": str(path),
                "state": run.state,
                "steps": int(run.metrics.step),
                "loss": "" if run.metrics.loss is None else f"{run.metrics.loss:.4g}",
            }
            for path, run in self._runs.items()
        ]
        if rows != self._rows or not self._listed:
            self._rows, self._listed = rows, secrets.token_hex(6)
        self._answers = {}
        self._walked = time.monotonic()

    def _paths(self) -> Iterator[Path]:
        for place in self._places:
            if (place / METRICS).exists():
                yield place
            else:
                try:
                    yield from sorted(place.iterdir())
                except OSError:
                    continue

    def _seen(self, path: Path) -> _KnownRun | None:
        run = self._runs.get(path) or _KnownRun(_Metrics(Tail(path / METRICS)))
        try:
            run.metrics.update()
        except OSError:  # it is no run, or has been removed
            return None
        stamps = _stamp(path / LOCK), _stamp(path / SUMMARY), _stamp(path / EVENTS)
        if stamps[0] or stamps != run.stamps:  # the lock's owner may have died
            run.state, run.stamps = state_of(path), stamps
        run.begun = run.begun or changed(path / CONFIG)
        return run

    def _look(self, request: RunsRequest) -> dict[str, Any]:
        known = {str(path): path for path in self._runs}
        for reference in request.runs:
            if reference.name not in known:
                raise ConfigError(f"run {reference.name!r}: is not among those that this server shows")
        drawn = self._timelines(tuple(dict.fromkeys(known[reference.name] for reference in request.runs)))
        return {
            "listed": self._listed,
            "list": None if request.listed == self._listed else self._rows,
            "runs": [
                self._run(reference.name, known[reference.name], reference.metrics)
                for reference in request.runs
            ],
            "version": drawn.version,
            "timeline": None if drawn.version == request.timeline else drawn.shown,
        }

    def _run(self, name: str, path: Path, seen: str) -> dict[str, Any]:
        run = self._runs[path]
        if run.about[0] != (stamp := _stamp(path / CONFIG)):
            run.about = stamp, about_of(path)
        if run.events[0] != (stamp := _stamp(path / EVENTS) + _stamp(path / CHECKPOINT)):
            run.events = stamp, list(events_of(path))
        added, curves = run.metrics.since(seen)
        return {
            "name": name,
            "state": run.state,
            "about": run.about[1],
            "events": run.events[1],
            "metrics": run.metrics.version,
            "curves": curves,
            "added": added,
        }

    def _timelines(self, paths: tuple[Path, ...]) -> _Drawn:
        version = "/".join(
            ".".join([self._runs[path].state, *(_stamp(path / name) for name in (SCHEDULE, TIMELINE, LIVE))])
            for path in paths
        )
        drawn = self._drawn.get(paths)
        now = time.monotonic()
        if drawn is None or (drawn.version != version and now >= drawn.due):
            began = time.thread_time()
            shown = self._pictured(paths)
            due = now + (time.thread_time() - began) / self._pace.share
            drawn = self._drawn[paths] = _Drawn(version, shown, due)
            if len(self._drawn) > 16:
                del self._drawn[next(iter(self._drawn))]
        return drawn

    def _pictured(self, paths: Sequence[Path]) -> dict[str, Any]:
        timelines, problems = {}, []
        for path in paths:
            run, stamp = self._runs[path], _stamp(path / SCHEDULE)
            if not any((path / name).exists() for name in (TIMELINE, LIVE)):
                problems.append(no_timeline(path, run.state))
                continue
            try:
                if run.schedule[0] != stamp:
                    run.schedule = stamp, read_schedule(path)
                timelines[str(path)] = read_timeline(path, run.schedule[1])
            except CounterflowError as error:
                problems.append(str(error))
        return pictured(timelines, problems)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def _stamp(path: Path) -> str:
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_ino}-{about.st_size}-{about.st_mtime_ns}"
