"""Scheduling policy of Gloo's threads: waits of two workers, and steps of pipelines, in turns.

    python benchmarks/gloo_policy.py [--rounds 10] [--keep]

Question: what do the threads of Gloo cost that poll for a lock whose owner they preempted? With the policy
``SCHED_BATCH``, which Counterflow starts them with, they preempt nobody (``thread_policy.py``).

Waits: two workers compute for 2 ms, then send 16 KiB to each other, or sum 400 KB. Steps: a Transformer of 8
small blocks in four schedules. Within one run the threads change between both policies after each 15.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from kit import arguments, keep, machine, machine_line
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import counterflow as cf
from counterflow.runtime.workers.world import current_transport

POLICIES = {"SCHED_OTHER": os.SCHED_OTHER, "SCHED_BATCH": os.SCHED_BATCH}
SCHEDULES = ("dapple", 2), ("chimera", 2), ("dapple", 4), ("chimera", 4)
TURNS = 15
"""Measurements before the policy changes."""

BUSY_SECONDS = 0.002


def set_policy(policy: int) -> None:
    """Set the policy of Gloo's threads in this process."""
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


def in_turns(run: Callable[[], float], rounds: int) -> dict[str, list[float]]:
    """Seconds of ``run`` under each policy."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, policy in POLICIES.items():
            set_policy(policy)
            run()
            seconds[name] += [run() for _ in range(TURNS)]
    return seconds


def waits(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a worker's waits by kind."""
    transport = current_transport()
    peer, pair = 1 - transport.rank, transport.group((0, 1))
    sent, received, summed = torch.zeros(4096), torch.zeros(4096), torch.zeros(100_000)
    numbers = torch.randn(64, 64)

    def exchange() -> None:
        receive = transport.receive((received,), peer, 0)
        send = transport.send((sent,), peer, 0)
        receive.wait()
        send.wait()

    def timed(call: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            while time.perf_counter() - begin < BUSY_SECONDS:
                torch.relu(numbers)
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin

        return run

    calls = {"exchange": exchange, "all-reduce": lambda: transport.all_reduce(summed, pair).wait()}
    return {name: in_turns(timed(call), rounds) for name, call in calls.items()}


def steps(scheme: str, workers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a pipeline's steps."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(8)]
    schedule = getattr(cf.schemes, scheme)(workers, workers)
    pipeline = cf.Pipeline(layers, mse_loss, schedule, optimizer=torch.optim.AdamW)
    x: Tensor = torch.randn(16, 16, 64)
    for _ in range(5):
        pipeline.step(x, x)
    return in_turns(lambda: pipeline.step(x, x).seconds, rounds)


def line(name: str, seconds: dict[str, list[float]]) -> str:
    """A row of the table: medians, means and their ratio."""
    other, batch = (seconds[name] for name in POLICIES)
    cells = [f"{1e3 * value:.2f}" for values in (other, batch) for value in middle(values)]
    ratios = [f"{b / a:.2f}" for a, b in zip(middle(other), middle(batch), strict=True)]
    return f"| {name} | {' | '.join(cells)} | {' | '.join(ratios)} |"


def middle(values: list[float]) -> tuple[float, float]:
    """Median and mean."""
    return statistics.median(values), statistics.fmean(values)


def main() -> None:
    parser = arguments(__doc__, "gloo_policy.txt")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    lines = [f"# python benchmarks/gloo_policy.py, {machine_line(machine())}", ""]
    columns = [f"{name}: {value}" for name in POLICIES for value in ("median", "mean")]
    lines += [f"| ms | {' | '.join(columns)} | ratio: median | mean |", "|---|" + "--:|" * 6]
    print(*lines, sep="\n", flush=True)

    def add(name: str, seconds: dict[str, list[float]]) -> None:
        lines.append(line(name, seconds))
        print(lines[-1], flush=True)

    for name, seconds in cf.launch(waits, options.rounds, workers=2, transport="gloo", threads=1)[0].items():
        add(name, seconds)
    for scheme, workers in SCHEDULES:
        run = cf.launch(steps, scheme, workers, options.rounds, workers=workers, transport="gloo", threads=1)
        add(f"a step of {scheme}, {workers} workers", run[0])
    if options.keep:
        keep("gloo_policy", lines)


if __name__ == "__main__":
    main()
