"""Faults at known steps of a run: a worker is killed, or gets another signal.

A process that finds this file as ``sitecustomize.py`` on its path and is a worker installs them by itself.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FAULTS = "COUNTERFLOW_TEST_FAULTS"
"""Variable with the faults, as JSON."""


Faults = list[dict[str, Any]]


def faults(folder: Path, *steps: tuple[int, int, int], after: Path | None = None) -> Faults:
    """Faults that happen once each: the rank that gets a signal, before which batch, and the signal.

    The last one waits until a file exists, if that is named.
    """
    planned_faults = [
        {"mark": str(folder / f"fault-{number}"), "rank": rank, "step": step, "signal": int(sent)}
        for number, (rank, step, sent) in enumerate(steps)
    ]
    if after is not None:
        planned_faults[-1]["after"] = str(after)
    return planned_faults


def install(planned_faults: Faults) -> None:
    """Let this process meet those faults that are its worker's; a run looks for signals after each step."""
    import importlib

    from counterflow.data.text_batches import NextByte
    from counterflow.runtime.workers.world import current_transport
    from counterflow.training import loop

    batch = NextByte.batch

    def batch_(self: NextByte, step: int, *args: Any, **options: Any) -> Any:
        for fault in planned_faults:
            mark = Path(fault["mark"])
            if step >= fault["step"] and current_transport().rank == fault["rank"] and not mark.exists():
                mark.touch()
                while "after" in fault and not Path(fault["after"]).exists():
                    time.sleep(0.05)
                os.kill(os.getpid(), fault["signal"])
                break
        return batch(self, step, *args, **options)

    vars(importlib.import_module("counterflow.drawing"))["draw_charts"] = lambda *_: None  # takes long
    vars(loop)["_LOOK_SECONDS"] = 0.0
    setattr(NextByte, "batch", batch_)  # noqa: B010


if __name__ == "sitecustomize" and {"RANK", "SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID"} & os.environ.keys():
    install(json.loads(os.environ[FAULTS]))
