"""Runs for the page, read from their folders while they may still be written.

Invariant: nothing is written, locked or asked of a run; a file is read again only where it has changed,
however many pages look. What is of a measured and a predicted timeline the simulator's own classes say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from counterflow.checkpoints.index import complete
from counterflow.draw.page import page_data
from counterflow.draw.units import TimeUnit, bytes_text, time_unit
from counterflow.errors import ConfigError, CounterflowError
from counterflow.simulate import Cause, Simulation
from counterflow.train import events
from counterflow.train.config import RunConfig
from counterflow.train.folder import (
    CHECKPOINT,
    CONFIG,
    EVENTS,
    LIVE,
    METRICS,
    SUMMARY,
    TIMELINE,
    is_run,
    lines_of,
    read_timeline,
)
from counterflow.train.load import load_config
from counterflow.train.lock import LOCK
from counterflow.train.timeline import Timeline
from counterflow.train.window import Window

from .asked import RunsAsked

_POINTS = 1000
"""Of a curve that are sent; more cannot be told apart."""

_LATELY_SECONDS = 120.0

_WAITING = "waiting for others' ops and messages"

SLOW = 1.15
"""A worker whose ops take so many times what is predicted, measured by the middle worker, is told as slow."""


_LARGEST = 1e300
"""Of a number in a line of metrics; what is larger, or none, is left out: JSON and curves have none such."""


@dataclass(slots=True)
class _Metrics:
    """The lines of a file, what stands in a row of the last ones, and how far it was read."""

    file: int = -1
    read: int = 0
    rest: bytes = b""
    lines: list[dict[str, float]] = field(default_factory=list)
    step: float = 0
    loss: float | None = None

    def update(self, path: Path) -> None:
        """Read what was added; all of it where the file is another one."""
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self.file or about.st_size < self.read:
                self.file, self.read, self.rest = about.st_ino, 0, b""
                self.lines, self.step, self.loss = [], 0, None
            file.seek(self.read)
            text = self.rest + file.read()
            self.read = file.tell()
        whole, _, self.rest = text.rpartition(b"\n")
        for line in lines_of(whole):
            if all(-_LARGEST < value < _LARGEST for value in line.values()):
                self.lines.append(line)
                self.step = max(self.step, line["step"])
                self.loss = line.get("loss", self.loss)

    @property
    def version(self) -> str:
        """What changes when there are others."""
        return f"{self.file}.{len(self.lines)}"


class Runs:
    """The runs that may be looked at: those given, and those in the folders given."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = tuple(places)
        self._metrics: dict[Path, _Metrics] = {}
        self._timelines: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {}
        self._abouts: dict[Path, tuple[str, dict[str, Any]]] = {}
        self._lock = Lock()

    def paths(self) -> dict[str, Path]:
        """Every run by what the page calls it, the newest first."""
        found = {}
        for place in self._places:
            for path in [place] if is_run(place) else _within(place):
                found[str(path)] = path
        return dict(sorted(found.items(), key=lambda one: -_changed(one[1] / METRICS)))

    def listed(self) -> dict[str, Any]:
        """All of them, with what fits in a row."""
        shown, paths = [], self.paths()
        with self._lock:
            for gone in self._metrics.keys() - set(paths.values()):
                del self._metrics[gone]
        for name, path in paths.items():
            metrics = self._lines(path)
            shown.append(
                {
                    "name": name,
                    "state": state_of(path),
                    "steps": int(metrics.step),
                    "loss": "" if metrics.loss is None else f"{metrics.loss:.4g}",
                    "changed": _changed(path / METRICS),
                }
            )
        return {"runs": shown, "places": [str(place) for place in self._places]}

    def look(self, asked: RunsAsked) -> dict[str, Any]:
        """Some runs side by side; what the page has already is left out.

        Raises:
            ConfigError: there is no such run.
        """
        known = self.paths()
        for one in asked.runs:
            if one.name not in known:
                raise ConfigError(f"run {one.name!r}: is not among those that this server shows")
        paths = {one.name: known[one.name] for one in asked.runs}
        version, timeline = self._timeline(paths)
        return {
            "runs": [self._run(one.name, known[one.name], one.metrics) for one in asked.runs],
            "version": version,
            "timeline": None if version == asked.timeline else timeline,
        }

    def _run(self, name: str, path: Path, seen: str) -> dict[str, Any]:
        metrics = self._lines(path)
        return {
            "name": name,
            "state": state_of(path),
            "about": self._about(path),
            "events": list(_events(path)),
            "metrics": metrics.version,
            "curves": None if metrics.version == seen else _curves(metrics.lines),
        }

    def _lines(self, path: Path) -> _Metrics:
        with self._lock:
            metrics = self._metrics.setdefault(path, _Metrics())
            try:
                metrics.update(path / METRICS)
            except OSError:  # the run has been removed
                return _Metrics()
            return metrics

    def _about(self, path: Path) -> dict[str, Any]:
        """Of its config."""
        version = _stamp(path / CONFIG)
        kept = self._abouts.get(path)
        if kept is None or kept[0] != version:
            kept = self._abouts[path] = version, _about(path)
        return kept[1]

    def _timeline(self, paths: dict[str, Path]) -> tuple[str, dict[str, Any]]:
        """The last step of one run measured and predicted; of several, measured."""
        version = "/".join(f"{_stamp(path / TIMELINE)}.{_stamp(path / LIVE)}" for path in paths.values())
        key = tuple(paths)
        with self._lock:
            kept = self._timelines.get(key)
            if kept is None or kept[0] != version:
                kept = version, _pictured(paths)
                self._timelines[key] = kept
                if len(self._timelines) > 16:
                    del self._timelines[next(iter(self._timelines))]
            return kept


def state_of(path: Path) -> str:
    """``running``: somebody writes there. ``ended``: all steps were made. ``stopped``: neither."""
    if _is_written(path):
        return "running"
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return "stopped"
    return "stopped" if isinstance(summary, dict) and summary.get("stopped") else "ended"


def _is_written(path: Path) -> bool:
    """Whether the process that its lock names is there; of another machine, whether it wrote lately."""
    try:
        owner = re.fullmatch(r"process (\d+) on (.*)\n", (path / LOCK).read_text(encoding="utf-8"))
        if owner is None:
            return False
        if owner[2] != platform.node():
            return time.time() - _changed(path / METRICS) < _LATELY_SECONDS
        os.kill(int(owner[1]), 0)
    except PermissionError:  # of another user
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _within(place: Path) -> Iterator[Path]:
    try:
        entries = sorted(place.iterdir())
    except OSError:
        return
    yield from (entry for entry in entries if is_run(entry))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _stamp(path: Path) -> str:
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_ino}-{about.st_mtime_ns}"


def _about(path: Path) -> dict[str, Any]:
    try:
        config: RunConfig = load_config(path / CONFIG)
    except CounterflowError as error:
        return {"problem": str(error)}
    return {
        "scheme": config.schedule.scheme,
        "steps": config.train.steps,
        "samples": config.train.samples,
        "replicas": config.pipeline.replicas,
    }


def _events(path: Path) -> Iterator[dict[str, str]]:
    """What happened, in words, by time; then the checkpoints that there are."""
    try:
        known = events.read(path)
    except (OSError, ValueError) as error:  # not UTF-8
        known = []
        yield {"time": "", "text": f"{EVENTS}: {error}", "kind": "wrong"}
    for event in known:
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # a line of another program
            if text := _in_words(event):
                kind = "wrong" if event["event"] in (events.FAILED, events.GAVE_UP) else ""
                yield {"time": str(event.get("time", "")), "text": text, "kind": kind}
    for checkpoint in complete(path / CHECKPOINT):
        yield {"time": "", "text": f"checkpoint {checkpoint.name}", "kind": "kept"}


def _in_words(event: events.Event) -> str:
    if event["event"] == events.GAVE_UP:
        return f"gave up: {event['message']}"
    if event["event"] == events.STOPPED:
        return f"stopped after step {event['step']} by {event['signal']}"
    return events.in_words(event)


def _curves(lines: Sequence[dict[str, float]]) -> dict[str, list[list[float]]]:
    """By name, steps and values; as many as can be told apart, the last one always."""
    names = ("loss", "validation_loss", "samples_per_second")
    found = {}
    for name in names:
        rows = [(line["step"], line[name]) for line in lines if name in line]
        every = max(1, -(-len(rows) // _POINTS))
        kept = [*rows[::every], *(rows[-1:] if rows and (len(rows) - 1) % every else [])]
        found[name] = [[step for step, _ in kept], [value for _, value in kept]]
    return found


def _pictured(paths: dict[str, Path]) -> dict[str, Any]:
    timelines: dict[str, Timeline | Window] = {}
    problems = []
    for name, path in paths.items():
        try:
            timelines[name] = read_timeline(path)
        except CounterflowError as error:
            problems.append(str(error))
    if not timelines:
        return {"picture": None, "problems": problems}
    if len(paths) == 1:
        (timeline,) = timelines.values()
        charts = timeline.charts(memory=True)
        return {"picture": page_data(charts), "problems": problems, **difference(timeline)}
    charts = [
        dataclasses.replace(chart, heading=f"{name}: {chart.heading}")
        for name, timeline in timelines.items()
        for chart in timeline.charts(memory=True)[:1]
    ]
    return {"picture": page_data(charts), "problems": problems}


def difference(timeline: Timeline | Window) -> dict[str, Any]:
    """What a step took beyond its prediction, by cause, and by worker.

    Every worker's step is what it computes and its bubbles, so the means over workers add up to it.
    """
    if isinstance(timeline, Window):
        was, should = timeline.times()
        whole, busy = (was.step, should.step), (was.busy, should.busy)
        parts = [
            {"computing": each.computing, _WAITING: each.step - each.computing} for each in (was, should)
        ]
        peaks = timeline.predicted().memory or ()
    else:
        measured, predicted = timeline.measured(), timeline.predicted()
        whole, busy = (measured.makespan, predicted.makespan), (measured.busy, predicted.busy)
        parts, peaks = [_parts(measured), _parts(predicted)], predicted.memory or ()
    unit = time_unit(whole[0])
    return {
        "step": timeline.step,
        "title": f"Step {timeline.step}: measured and predicted"
        if isinstance(timeline, Timeline)
        else f"Steps {timeline.step - 1} and {timeline.step}, without a flush: measured and predicted",
        "figures": [
            ["measured", unit.text(whole[0])],
            ["predicted", unit.text(whole[1])],
            ["difference", unit.text(whole[0] - whole[1])],
        ],
        "parts": [
            [name, unit.text(took), unit.text(parts[1][name]), unit.text(took - parts[1][name])]
            for name, took in parts[0].items()
        ],
        "rows": list(_workers(unit, busy, timeline.saved_bytes, [use.peak for use in peaks])),
    }


def _parts(result: Simulation) -> dict[str, float]:
    """The mean worker's seconds: computing, and idle by cause. How long messages took was not measured."""
    workers = result.schedule.workers
    idle = {cause: sum(g.end - g.start for g in result.gaps if g.cause is cause) / workers for cause in Cause}
    return {
        "computing": sum(result.busy) / workers,
        "warm-up": idle[Cause.WARM_UP],
        _WAITING: idle[Cause.DEPENDENCY] + idle[Cause.MESSAGE],
        "drain": idle[Cause.DRAIN],
    }


def _workers(
    unit: TimeUnit,
    busy: tuple[Sequence[float], Sequence[float]],
    saved: Sequence[int],
    peaks: Sequence[float],
) -> Iterator[dict[str, Any]]:
    ratios = [was / (should or 1.0) for was, should in zip(*busy, strict=True)]
    middle = sorted(ratios)[(len(ratios) - 1) // 2] or 1.0
    for worker, ratio in enumerate(ratios):
        yield {
            "worker": f"P{worker}",
            "busy": unit.text(busy[0][worker]),
            "predicted": unit.text(busy[1][worker]),
            "times": f"{ratio:.2f}",
            "slow": ratio > SLOW * middle,
            "saved": bytes_text(saved[worker]) if worker < len(saved) else "",
            "saved_predicted": bytes_text(peaks[worker] if worker < len(peaks) else 0.0),
        }
