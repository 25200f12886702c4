"""What the results of a benchmark are kept with: the machine, the day, and how busy it was."""

from __future__ import annotations

import datetime as dt
import os
import platform


def load() -> float:
    """Processes that wanted to run, mean of the last minute."""
    return os.getloadavg()[0]


def machine() -> dict[str, object]:
    """As it is now, for a JSON file."""
    import torch  # noqa: PLC0415 - not all benchmarks need it

    from counterflow.measure.machine import processor  # noqa: PLC0415

    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": str(dt.date.today()),
        "load_before": round(load(), 2),
    }


def shown(found: dict[str, object]) -> str:
    """The same in a line."""
    line = (
        f"{found['cores']} cores of an {found['cpu']}, Python {found['python']}, torch {found['torch']}, "
        f"{found['date']}, load before {found['load_before']}"
    )
    before = found["load_before"]
    if isinstance(before, float) and before > 0.3:
        line += " - NOT IDLE, the numbers are noisy"
    return line
