"""The page's data of a run, read from the files of its folder, which may still be written.

Invariant: nothing is written or locked, and the run is not queried. The simulator's own classes describe
measured and predicted timelines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from counterflow.checkpoints.index import CHECKPOINT, complete
from counterflow.common.number_texts import byte_size
from counterflow.drawing.page import page_data
from counterflow.drawing.time_units import TimeUnit, time_unit
from counterflow.errors import CounterflowError
from counterflow.training.config import RunConfig
from counterflow.training.folder import CONFIG, EVENTS, METRICS, SUMMARY
from counterflow.training.load import load_config
from counterflow.training.supervision import events
from counterflow.training.supervision.exclusive import LOCK
from counterflow.training.timeline import Timeline

_LATELY_SECONDS = 120.0

SLOW = 1.15
"""A worker is reported as slow if its ops take more than this many times their predicted time."""


class RunState(StrEnum):
    """State of a run.

    A run that ends takes its lock away; one that is killed cannot.
    """

    RUNNING = "running"
    """Somebody writes there."""
    ENDED = "ended"
    """All steps were made."""
    FAILED = "failed"
    """A step failed, and nobody went on."""
    KILLED = "killed"
    """The run's process ended without writing an end."""
    STOPPED = "stopped"
    """It was asked to end, or the rest is unknown."""


def state_of(path: Path) -> RunState:
    """State of a run, from its lock, its summary and its last event."""
    if _is_written(path):
        return RunState.RUNNING
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        summary = None
    if summary is not None:
        stopped = isinstance(summary, dict) and summary.get("stopped")
        return RunState.STOPPED if stopped else RunState.ENDED
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # lines of another program
        if any(event["event"] in (events.FAILED, events.GAVE_UP) for event in events.read(path)[-1:]):
            return RunState.FAILED
    return RunState.KILLED if (path / LOCK).exists() else RunState.STOPPED


_NO_TIMELINE = {
    RunState.RUNNING: "the first one is written after some steps",
    RunState.ENDED: "it has ended without one",
    RunState.FAILED: "it failed before one was written",
}


def no_timeline(path: Path, state: RunState) -> str:
    """Reason why a run has no timeline."""
    return f"{path} has no timeline: {_NO_TIMELINE.get(state, f'it was {state} before one was written')}"


def _is_written(path: Path) -> bool:
    try:
        owner = re.fullmatch(r"process (\d+) on (.*)\n", (path / LOCK).read_text(encoding="utf-8"))
        if owner is None:
            return False
        if owner[2] != platform.node():
            return time.time() - changed(path / METRICS) < _LATELY_SECONDS
        os.kill(int(owner[1]), 0)
    except PermissionError:  # of another user
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def changed(path: Path) -> float:
    """Time of a file's last change, in seconds since 1970; 0: there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def about_of(path: Path) -> dict[str, Any]:
    """Summary of a run's config."""
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


def events_of(path: Path) -> Iterator[dict[str, str]]:
    """List a run's events in words, by time; then its checkpoints."""
    try:
        known = events.read(path)
    except (OSError, ValueError) as error:  # not UTF-8
        known = []
        yield {"time": "", "text": f"{EVENTS}: {error}", "kind": "wrong"}
    for event in known:
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # a line of another program
            if text := events.in_words(event):
                kind = "wrong" if event["event"] in (events.FAILED, events.GAVE_UP) else ""
                yield {"time": str(event.get("time", "")), "text": text, "kind": kind}
    for checkpoint in complete(path / CHECKPOINT):
        yield {"time": "", "text": f"checkpoint {checkpoint.name}", "kind": "kept"}


def pictured(timelines: Mapping[str, Timeline], problems: Sequence[str]) -> dict[str, Any]:
    """One run's step measured and predicted, and where the two differ; several runs' steps as measured.

    Args:
        timelines: by what the page calls the run.
        problems: of those that have none, in words.
    """
    if not timelines:
        return {"picture": None, "problems": problems}
    if len(timelines) == 1 and not problems:
        (timeline,) = timelines.values()
        charts = timeline.charts(memory=True)
        return {"picture": page_data(charts), "problems": problems, **difference(timeline)}
    charts = [
        dataclasses.replace(chart, heading=f"{name}: {chart.heading}")
        for name, timeline in timelines.items()
        for chart in timeline.charts(memory=True)[:1]
    ]
    return {"picture": page_data(charts), "problems": problems}


def difference(timeline: Timeline) -> dict[str, Any]:
    """Time that a step took beyond its prediction, by cause, and by worker.

    Every worker's step is what it computes and its bubbles, so the means over workers add up to it.
    """
    was, should = timeline.sides()
    peaks = timeline.predicted().memory or ()
    unit = time_unit(was.seconds)
    rows = list(_workers(unit, (was.busy, should.busy), timeline.saved_bytes, [use.peak for use in peaks]))
    return {
        "step": timeline.step,
        "title": f"Steps {timeline.step - 1} and {timeline.step}, asynchronous: measured and predicted"
        if timeline.ongoing
        else f"Step {timeline.step}: measured and predicted",
        "figures": [
            ["measured", unit.text(was.seconds)],
            ["predicted", unit.text(should.seconds)],
            ["difference", unit.text(was.seconds - should.seconds)],
        ],
        "parts": [
            [name, unit.text(took), unit.text(should.parts[name]), unit.text(took - should.parts[name])]
            for name, took in was.parts.items()
        ],
        "rows": rows,
        "remark": _ALL_SLOW if all(row["slow"] for row in rows) else "",
    }


_ALL_SLOW = "Every worker is slower than predicted: the machine is slower or busier than when ops were timed."


def _workers(
    unit: TimeUnit,
    busy: tuple[Sequence[float], Sequence[float]],
    saved: Sequence[int],
    peaks: Sequence[float],
) -> Iterator[dict[str, Any]]:
    ratios = [was / (should or 1.0) for was, should in zip(*busy, strict=True)]
    for worker, ratio in enumerate(ratios):
        yield {
            "worker": str(worker),
            "busy": unit.text(busy[0][worker]),
            "predicted": unit.text(busy[1][worker]),
            "times": f"{ratio:.2f}",
            "slow": ratio > SLOW,
            "saved": byte_size(saved[worker]) if worker < len(saved) else "",
            "saved_predicted": byte_size(peaks[worker] if worker < len(peaks) else 0.0),
        }
