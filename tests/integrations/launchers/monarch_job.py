"""The example of Monarch, whose workers meet faults: monarch_job.py EXAMPLE CONFIG OUT FAULTS."""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

from counterflow.training import Callback


class Faulty(Callback):
    """Is sent to all workers, where it installs the faults."""

    def __init__(self, planned_faults: Any) -> None:
        self.planned_faults = planned_faults

    def __reduce__(self) -> Any:
        return _installed, (self.planned_faults,)


def _installed(planned_faults: Any) -> Callback:
    from tests.integrations.launchers import faults

    faults.install(planned_faults)
    return Callback()


if __name__ == "__main__":
    example, config, out, planned_faults = sys.argv[1:]
    runpy.run_path(example)["main"](config, out, Faulty(json.loads(planned_faults)))
