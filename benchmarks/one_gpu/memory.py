"""Peak memory of each worker's process beside what the planner predicts, reserved and pinned memory."""

from __future__ import annotations

from typing import Any

import memory
from memory import GOAL, Run

import counterflow as cf
from one_gpu import Report, now_of

TWO = {"stages": 2, "micro_batches": 4}
BY_WORKER = {"workers": 2, "micro_batches": 4}

RUNS = (
    Run("large", "dapple", TWO),
    Run("large", "chimera", TWO),
    Run("large", "zb-v", BY_WORKER),
    Run("large", "gpipe", TWO, recompute="layer"),
    Run("large", "interleaved", {**BY_WORKER, "chunks": 2}, recompute="stage"),
    Run("large", "pipedream-2bw", TWO),
    Run("large", "dapple", TWO, precision="autocast"),
    Run("large", "hanayo", {**BY_WORKER, "waves": 1}, precision="cast"),
    Run("large", "zb-h1", TWO, optimizer="sgd"),
)
"""Runs of two workers, which are processes that share the GPU and pass messages over Gloo."""

TOGETHER = 5
"""Runs of one launch."""


def rows(report: Report) -> None:
    """A row for each worker of each run."""
    device, wait = None if report.pretend else "cuda", {"timeout_seconds": 30.0}
    known: dict[Any, Any] = {}
    chosen = RUNS[:: report.thin]
    for first in report.cases(range(0, len(chosen), TOGETHER)) if report.thin == 1 else [0]:
        runs, plays = chosen[first : first + TOGETHER], []
        now_of(report.path).write_text(f"runs from {runs[0]} on", encoding="utf-8")
        for run in runs:
            if run.subject not in known:
                job: dict[str, Any] = {"workers": 1, "transport": "local", "device": device} | wait
                (known[run.subject],) = cf.launch(memory.profiled, run.subject, **job)
            plays.append(memory.predicted(run, *known[run.subject]))
        pairs = [(run, play.stages.cuts) for run, play in zip(runs, plays, strict=True)]
        work = memory.measured if report.pretend else memory.peaks_of_device
        by_worker = cf.launch(work, pairs, workers=2, threads=1, transport="gloo", device=device, **wait)
        for number, (run, play) in enumerate(zip(runs, plays, strict=True)):
            for worker, expected in enumerate(play.memory):
                found = by_worker[worker][number]
                values = {"bytes": found} if isinstance(found, int) else dict(found)
                error = expected.total / values["bytes"] - 1
                name = f"{play.schedule}, {run.recompute}, {run.optimizer} {run.precision}, worker {worker}"
                verdict = "agrees" if abs(error) <= GOAL or report.pretend else "differs"
                text = f"predicted {expected.total / 2**20:.1f} MiB, {error:+.1%}"
                report.add(name, verdict, text, predicted=expected.total, error=error, **values)
