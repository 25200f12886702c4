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

from .requests import SearchInput

ReportProgress = Callable[[dict[str, Any]], None]

_REPORT_SECONDS = 0.2
"""Minimum time between reports of progress."""


def main() -> None:
    """Read the request, search, and report the result."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a server in the background ignores it
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as reports:
        os.dup2(2, 1)  # whatever else is printed
        # An interrupt before this point ends the process immediately.
        _write(reports, {"progress": {"said": "reading what is asked", "share": None}})
        try:
            _work(SearchInput.model_validate_json(sys.stdin.read()), reports)
        except CounterflowError as error:
            _write(reports, {"error": str(error)})
        except (KeyboardInterrupt, BrokenPipeError):
            os._exit(0)  # nobody waits for a result
        except Exception as error:
            _write(reports, {"error": f"{type(error).__name__}: {error}. This is a bug in Counterflow."})


def _write(reports: TextIO, line: dict[str, Any]) -> None:
    reports.write(json.dumps(line, allow_nan=False) + "\n")
    reports.flush()


def _work(work: SearchInput, reports: TextIO) -> None:
    due = 0.0

    def report_progress(progress: dict[str, Any]) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _REPORT_SECONDS
            _write(reports, {"progress": progress})

    if work.order is not None:
        from .best_orders import order  # noqa: PLC0415 - each needs other rooms
        from .saved_plans import read  # noqa: PLC0415

        assert work.schedule is not None
        costs = None if work.planned is None else read(work.planned)
        _write(reports, {"result": order(work.order, work.schedule, report_progress, costs)})
    if work.plan is not None:
        from .plan_answers import plan  # noqa: PLC0415
        from .saved_plans import written  # noqa: PLC0415

        result, saved_plans = plan(work.plan, report_progress)
        _write(reports, {"result": result, "kept": written(saved_plans)})
    if work.compare is not None:
        from .comparisons import compare  # noqa: PLC0415

        _write(reports, {"result": compare(work.compare, report_progress)})


if __name__ == "__main__":
    main()
