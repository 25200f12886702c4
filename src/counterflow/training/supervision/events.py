"""Events of a run other than its steps: failures, restarts, the end; one line of JSON each, in its folder.

Invariant: a line is written in one piece by the process that knows of the event, and is never changed; what
is shown about a failure is what is written. torch is not imported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from counterflow.errors import ConfigError

from ..folder import EVENTS

_LOG = logging.getLogger(__name__)

Event = dict[str, Any]
"""``time`` (ISO 8601, UTC), ``event``, and by event:

* ``began``: ``run``, a unique name.
* ``started``: ``restarts`` that this command allows.
* ``failed``: ``attempt``, from 0; ``step`` in flight; ``worker`` to blame and its ``action``, as far as is
  known; ``message``; ``lost``, whether a worker, a device or a link was gone, and not the run's own doing.
* ``restarted``: ``attempt``; ``step`` that the run resumes from; ``source``: ``memory``, ``checkpoint`` or
  ``beginning``.
* ``fewer``: ``workers`` that are left, over all replicas; ``runs``, what they run, in words.
* ``gave up``: ``message``.
* ``stopped``: ``signal``, ``step``.
"""

BEGAN, STARTED, FAILED = "began", "started", "failed"
RESTARTED, GAVE_UP, STOPPED = "restarted", "gave up", "stopped"
FEWER = "fewer"

_FIELDS: dict[str, dict[str, Any]] = {
    BEGAN: {"run": str},
    STARTED: {"restarts": int},
    FAILED: {"step": int, "message": str, "lost": bool},
    RESTARTED: {"attempt": int, "step": int, "source": str},
    GAVE_UP: {"message": str},
    STOPPED: {"signal": str, "step": int},
    FEWER: {"workers": int, "runs": str},
}
"""Fields that readers of each event need, with their types."""

_RUN = re.compile(r"[0-9a-f]{32}")
"""Name of a run, which becomes that of a folder in memory."""


def note(folder: Path, event: str, **more: Any) -> Event:
    """Add an event; an error of writing is only logged."""
    line: Event = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **more}
    try:
        handle = os.open(folder / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, (json.dumps(line) + "\n").encode())
        finally:
            os.close(handle)
    except OSError as error:
        _LOG.warning("%s cannot be written: %s", folder / EVENTS, error.strerror)
    return line


def read(folder: Path) -> list[Event]:
    """All events of a run, in order, without incomplete lines and those that no run can have written.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        lines = (folder / EVENTS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{folder / EVENTS}: cannot be read: {error.strerror}") from None
    events: list[Event] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and _is_event(event):
                events.append(event)
    return events


def _is_event(event: Event) -> bool:
    fields = _FIELDS.get(str(event.get("event")))
    if fields is None:
        return False
    try:
        datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return False
    return all(isinstance(event.get(name), kinds) for name, kinds in fields.items())


def of_this_start(folder: Path) -> list[Event]:
    """The events since the last command that allows restarts."""
    events = read(folder)
    starts = [index for index, event in enumerate(events) if event["event"] == STARTED]
    return events[starts[-1] if starts else 0 :]


def run_of(folder: Path) -> str:
    """The name of the run in a folder; a run without a name gets one."""
    names = [event["run"] for event in read(folder) if event["event"] == BEGAN]
    names = [name for name in names if _RUN.fullmatch(name)]
    return names[0] if names else str(note(folder, BEGAN, run=uuid.uuid4().hex)["run"])


def in_words(event: Event) -> str:
    """An event as a sentence; empty for events that begin a run."""
    if event["event"] == FAILED:
        action = f" (in {event['action']})" if event.get("action") else ""
        return f"step {event['step']} failed: {event['message']}{action}"
    if event["event"] == RESTARTED:
        source = {"memory": "from the workers' memory", "checkpoint": "from its checkpoint"}
        where = source.get(event["source"])
        place = f"after step {event['step']}, {where}" if where else "from the beginning"
        return f"restart {event['attempt']}: resuming {place}" if event["attempt"] else f"resuming {place}"
    if event["event"] == FEWER:
        workers = f"{event['workers']} worker{'s are' if event['workers'] > 1 else ' is'} left"
        return f"{workers}: continuing with {event['runs']}"
    if event["event"] == GAVE_UP:
        return f"gave up: {event['message']}"
    if event["event"] == STOPPED:
        return f"stopped after step {event['step']} by {event['signal']}"
    return ""
