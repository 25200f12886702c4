"""The example of Monarch, whose workers meet faults: monarch_job.py EXAMPLE CONFIG OUT FAULTS."""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

from counterflow.training import Callback


class Faulty(Callback):
    """Is sent to all workers, where it installs the faults."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def __reduce__(self) -> Any:
        return _installed, (self.told,)


def _installed(told: Any) -> Callback:
    from tests.integrations.launchers import faults

    faults.install(told)
    return Callback()


if __name__ == "__main__":
    example, config, out, told = sys.argv[1:]
    runpy.run_path(example)["main"](config, out, Faulty(json.loads(told)))
