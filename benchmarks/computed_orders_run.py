"""Computed orders run on emulated devices, beside every named scheme at equal memory.

    python benchmarks/computed_orders_run.py [--repeats 5] [--seconds 20] [--keep]

Claim: in three cases that no named scheme was drawn for, the order computed for them is faster, measured,
than every named scheme of the same placement and memory, and within 5 % of its prediction: an embedding and a
head that make the end stages heavy; one device half as fast as the others; messages of a quarter of a stage.

Devices are those of ``program_times.py``: threads that sleep in place of computing, links that carry one
message at a time each way. A backward is split: its two halves sleep apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from emulated_device import First, precise_sleep, slept
from machine import machine, shown
from program_times import WIDTH, measured
from torch import Tensor, nn

import counterflow as cf
from counterflow.schedule.placement import Placement, wave
from counterflow.schedule.workload import plain
from counterflow.synthesis.named import named
from counterflow.synthesis.posing import problem_of

GOAL = 0.05
RESULTS = Path(__file__).parent / "results"
MICRO_BATCHES = 8


class Split(nn.Module):
    """A layer whose forward, input gradient and weight gradients take given seconds a sample."""

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.seconds = forward, inputs, weights
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, value: Tensor) -> Tensor:
        begin = time.perf_counter()
        forward, inputs, weights = (seconds * value.shape[0] for seconds in self.seconds)
        return slept(value, self.weight, begin, (forward, inputs, weights))[0]


def split_stages(costs: cf.Costs) -> tuple[list[nn.Module], Sequence[int]]:
    """A layer a stage; before the first one that takes next to no time, so that its halves come apart too."""
    assert isinstance(costs.forward, tuple)
    assert isinstance(costs.input_gradient, tuple)
    assert isinstance(costs.weight_gradients, tuple)
    each = zip(costs.forward, costs.input_gradient, costs.weight_gradients, strict=True)
    layers = [Split(f / WIDTH, i / WIDTH, w / WIDTH) for f, i, w in each]
    return [First(), *layers], range(2, len(layers) + 1)


def costs_of(shares: Sequence[float], message: float = 0.0) -> cf.Costs:
    """Seconds of stages that are so much longer than the usual 60, 60 and 50 ms."""
    forward, inputs, weights = (tuple(seconds * s for s in shares) for seconds in (0.06, 0.06, 0.05))
    return cf.Costs(forward=forward, input_gradient=inputs, weight_gradients=weights, p2p=message)


def cases() -> Iterator[tuple[str, Placement, cf.Costs, float]]:
    """What it is, the placement, its costs, and the most activations a worker may stash."""
    ends = (0.65, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.8)
    yield "embedding and head make the ends heavy", wave(4, 1), costs_of(ends), 4
    halves = (0.5, 0.5, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5)
    yield "worker 2 is half as fast", wave(4, 1), costs_of(halves), 6
    yield "messages of a quarter of a stage", wave(4, 1), costs_of((0.5,) * 8, message=0.25 * 0.03), 6


def rows(repeats: int, seconds: float) -> Iterator[str]:
    """The table, a row an order."""
    yield "| case | order | predicted ms | measured ms | measured / predicted |"
    yield "|---|---|---|---|---|"
    for name, placement, costs, peak in cases():
        workload = plain(placement, MICRO_BATCHES, split=True)
        found = cf.synthesize(workload, costs, peak=peak, seconds=seconds)
        problem = problem_of(workload, costs, peak=peak)
        orders = {how: problem.schedule(words) for how, words in named(problem) if problem.fits(words)}
        orders[f"computed ({found.method}, gap {found.gap:.1%})"] = found.schedule
        for how, schedule in orders.items():
            predicted = cf.simulate(schedule, costs).makespan
            took = measured(schedule, costs, repeats, split_stages)
            yield (
                f"| {name}, at most {peak} activations | {how} | {predicted * 1e3:.1f} | {took * 1e3:.1f} | "
                f"{took / predicted:.3f} |"
            )


def main() -> None:
    """Print the table, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--keep", action="store_true", help="write computed_orders_run.txt")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0002)  # a thread that wakes is not held up by one that computes in Python
    late = precise_sleep()
    lines = [
        f"# {shown(machine())}; sleeps end {late * 1e6:.0f} µs late; medians of {given.repeats} steps",
        "",
    ]
    print("\n".join(lines))
    for line in rows(given.repeats, given.seconds):
        lines.append(line)
        print(line, flush=True)
    if given.keep:
        (RESULTS / "computed_orders_run.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
