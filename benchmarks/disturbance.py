"""Profiles of a quiet and of a busy machine, and the steps that their plans run.

    python benchmarks/disturbance.py [--steps 30] [--mini-batch 32] [--keep]

Claim: with one busy process per core, the step of the plan is within 15 % of what a quiet machine runs, or
the profile says that it is not reliable.

The built-in GPT example is profiled twice on all cores, one thread a worker: as the machine is, and beside
one process per core that counts. With each profile a plan is made, and its pipeline is run after the busy
processes have ended. In the table: the plan's step with its range, the median of the measured steps, their
ratio, seconds of a block's forward and backward together at 4 samples, and what the profile says of itself.
Takes about a minute on a quiet machine. Run it on one: otherwise "quiet" is not.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kit import arguments, keep, load, machine, machine_line

import counterflow as cf
from counterflow.measure.machine import cores
from counterflow.measure.model_profile import Measurement
from counterflow.planning.inputs.reliability import unreliable
from counterflow.schedule.op import B, F
from counterflow.training import load_config
from counterflow.training.job import prepare
from counterflow.training.profiling import measure, subject_of

SIZES = 1, 2, 4, 8
WITHIN = 0.15
SAMPLES = 4
"""Samples at which seconds of a block are shown."""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that count meanwhile."""
    counting = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def measured(options: dict[str, Any], samples: int, steps: int) -> list[float]:
    """Seconds of a worker's steps with these options, of a replica that gets these samples."""
    subject = subject_of(prepare(load_config()))
    pipeline = cf.Pipeline(
        subject.layers, subject.loss, optimizer=subject.optimizer, execution=subject.execution, **options
    )
    batch = subject.batch(samples)
    return [pipeline.step(*batch).seconds for _ in range(5 + steps)][5:]


def row(name: str, measurement: Measurement, mini_batch: int, steps: int) -> dict[str, Any]:
    best = cf.plan(measurement, mini_batch=mini_batch).best[0]
    prediction, options = best.prediction, best.pipeline_options
    replicas = prediction.configuration.replicas
    workers = prediction.workers * replicas
    samples = mini_batch // replicas
    transport = "gloo" if workers > 1 else "local"
    runs = cf.launch(measured, options, samples, steps, workers=workers, threads=1, transport=transport)
    block = measurement.profile.layer("gpt-block")
    median = statistics.median(runs[0])
    return {
        "machine": name,
        "plan": f"{prediction.schedule}, {replicas} replicas",
        "step": prediction.step_text,
        "step_seconds": prediction.step_seconds,
        "step_range_seconds": prediction.step_range_seconds,
        "measured_seconds": median,
        "ratio": prediction.step_seconds / median,
        "block_seconds": block.seconds(F, SAMPLES) + block.seconds(B, SAMPLES),
        "waiting_share": measurement.profile.waiting_share,
        "reliability": unreliable(measurement.profile) or "nothing",
    }


def main() -> None:
    parser = arguments(__doc__, "disturbance.txt and disturbance.json")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mini-batch", type=int, default=32)
    args = parser.parse_args()
    about, begin = machine(), time.perf_counter()
    config = load_config(None, ["train.threads=1"])
    profiles = {"as it is": measure(config, sizes=SIZES, workers=cores())}
    with busy(cores()):
        profiles["one busy process per core"] = measure(config, sizes=SIZES, workers=cores())
    rows = [row(name, profile, args.mini_batch, args.steps) for name, profile in profiles.items()]
    lines = [machine_line(about), f"load of the last minute at the end {load():.1f}", ""]
    for result in rows:
        lines += [
            f"{result['machine']}: {result['plan']}",
            f"  planned {result['step']}, measured {1000 * result['measured_seconds']:.4g} ms, "
            f"ratio {result['ratio']:.2f}",
            f"  block at {SAMPLES} samples {1000 * result['block_seconds']:.3g} ms; waiting for a processor "
            f"{result['waiting_share']:.0%} of the steps",
            f"  the profile says: {result['reliability']}",
        ]
    loaded = rows[-1]
    holds = abs(loaded["ratio"] - 1) <= WITHIN or loaded["reliability"] != "nothing"
    blocks = loaded["block_seconds"] / rows[0]["block_seconds"]
    lines += [
        "",
        f"block, busy against as it is: {blocks:.2f}",
        f"the claim {'holds' if holds else 'DOES NOT HOLD'}; {time.perf_counter() - begin:.0f} s",
    ]
    print("\n".join(lines))
    if args.keep:
        keep("disturbance", lines, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
