"""A search in its own process: it reads a request as JSON from stdin and writes reports to stdout.

A report is a line of JSON: ``progress`` as it changes, ``result`` or ``error`` at the end. An interrupt ends
an order with the best so far, and a plan without a result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from counterflow.errors import CounterflowError

from .asked import Work

Tell = Callable[[dict[str, Any]], None]

_TELL_SECONDS = 0.2
"""Minimum time between reports of progress."""


def main() -> None:
    """Read the request, search, and report the result."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a server in the background ignores it
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as told:
        os.dup2(2, 1)  # whatever else is printed
        # An interrupt before this point ends the process immediately.
        _write(told, {"progress": {"said": "reading what is asked", "share": None}})
        try:
            _work(Work.model_validate_json(sys.stdin.read()), told)
        except CounterflowError as error:
            _write(told, {"error": str(error)})
        except (KeyboardInterrupt, BrokenPipeError):
            os._exit(0)  # nobody waits for a result
        except Exception as error:
            _write(told, {"error": f"{type(error).__name__}: {error}. This is a bug in Counterflow."})


def _write(told: TextIO, line: dict[str, Any]) -> None:
    told.write(json.dumps(line, allow_nan=False) + "\n")
    told.flush()


def _work(work: Work, told: TextIO) -> None:
    due = 0.0

    def tell(progress: dict[str, Any]) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _TELL_SECONDS
            _write(told, {"progress": progress})

    if work.order is not None:
        from .kept import read  # noqa: PLC0415 - each needs other rooms
        from .orders import order  # noqa: PLC0415

        assert work.schedule is not None
        costs = None if work.planned is None else read(work.planned)
        _write(told, {"result": order(work.order, work.schedule, tell, costs)})
    if work.plan is not None:
        from .kept import written  # noqa: PLC0415
        from .plans import plan  # noqa: PLC0415

        result, kept = plan(work.plan, tell)
        _write(told, {"result": result, "kept": written(kept)})
    if work.compare is not None:
        from .comparisons import compare  # noqa: PLC0415

        _write(told, {"result": compare(work.compare, tell)})


if __name__ == "__main__":
    main()
