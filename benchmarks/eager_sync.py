"""Sums of gradients at the end, eager and eager-opt (Chimera, Figure 12): measured, and predicted.

    python benchmarks/eager_sync.py [--turns 15] [--keep]

Needs root, and Linux: each worker is a node of its own, a network namespace behind a relay with a rate
(``namespaces.py``). Chimera with four stages and four micro-batches, in one pipeline group and in two.
Processes sum real gradients over Gloo; their ops are emulated. An op of an idle host sleeps. That of a busy
host computes for a share of its time, a slice of a millisecond at a time, and sleeps between: it takes longer
if the threads of a sum take the cores.

The three modes take turns in one run; a step is timed alone, on the slowest worker. The link's latency and
rate, those of its sums, and an op's time beside no sum are measured in the same run and the prediction is
made from them, without and with a slowdown of compute beside a sum. The slowdown itself is measured, too, in
turns: an op of 40 ms that begins when a sum does, and starts it, against one without a sum.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from emulated_device import precise_sleep, undisturbed
from emulated_stage import emulated_stage
from kit import arguments, keep, machine_line
from namespaces import all_done, nodes, one_a_node
from torch import Tensor, nn

import counterflow as cf
from counterflow.measure.cluster_costs import fitted
from counterflow.measure.links import measure_links
from counterflow.planning import (
    AllReduce,
    Arrangement,
    Cluster,
    Configuration,
    LayerProfile,
    Link,
    Model,
    Predictor,
    Profile,
)
from counterflow.planning.cost.device_placement import devices
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.modes import Sync

DEPTH = 4
SAMPLES = 2
FORWARD_SECONDS = 0.02
"""Of a stage, and of each half of its backward."""
WIDTH = 1024
"""Floats of a message for one sample."""
SLICE_SECONDS = 0.001
"""Computed at once by a busy host."""
MODES = Sync.END, Sync.EAGER, Sync.EAGER_OPT


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        replicas: pipeline groups.
        megabits: rate of the link out of each worker.
        weights: floats of a stage.
        busy: share of an op's time in which the host computes.
    """

    replicas: int
    megabits: float
    weights: int
    busy: float


CASES = (
    *(Case(1, 300.0, weights, busy) for weights in (100_000, 500_000, 1_000_000) for busy in (0.0, 0.3, 0.6)),
    *(Case(2, 300.0, weights, busy) for weights in (100_000, 500_000) for busy in (0.0, 0.15)),
)


@dataclass(frozen=True)
class Row:
    """A case's steps in seconds, by mode."""

    case: Case
    rate: float
    sum_seconds: float
    slowdown: float
    measured: dict[str, list[float]]
    predicted: dict[str, float]
    slowed: dict[str, float]


class Host:
    """Executes an op: sleeps, or computes in slices and sleeps between."""

    def __init__(self) -> None:
        self.busy, self.product = 0.0, torch.rand(160, 160)
        self.count = 1
        took = statistics.median(self._slice() for _ in range(200))
        self.count = max(1, round(SLICE_SECONDS / took))

    def _slice(self) -> float:
        begin = time.perf_counter()
        for _ in range(self.count):
            torch.mm(self.product, self.product)
        return time.perf_counter() - begin

    def op(self, seconds: float) -> None:
        """Execute an op that takes so long on a host that does nothing beside it."""
        if not self.busy:
            time.sleep(seconds)
            return
        slices = round(self.busy * seconds / SLICE_SECONDS)
        pause = seconds * (1 - self.busy) / slices
        with torch.no_grad():
            for _ in range(slices):
                self._slice()
                time.sleep(pause)


class Layer(nn.Module):
    """A stage."""

    def __init__(self, weights: int, host: Host) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weights, 1))
        self.host = host

    def forward(self, value: Tensor) -> Tensor:
        return emulated_stage(value, self.weight, partial(self.host.op, FORWARD_SECONDS))


class Work:
    """What every worker of a link does, case by case."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        undisturbed()
        precise_sleep()
        self.host, self.transport = Host(), current_transport("gloo")
        self.size = int(os.environ["WORLD_SIZE"])

    @cached_property
    def cluster(self) -> Cluster:
        """The link and its sums, as the first worker found them."""
        messages, sums = measure_links(3, (0, 1))
        found = [fitted(messages), fitted(sums, begins=2)]
        flat = [x for link in found for x in (link.latency_seconds, link.seconds_per_byte)]
        flat = list(self.transport.gather(flat)[0])
        return Cluster(
            "emulated", self.size, 1, 1e12, inside=Link(0.0, 0.0), between=Link(*flat[:2]),
            allreduce_between=Link(*flat[2:]), allreduce=AllReduce.RING,
        )  # fmt: skip

    def profile(self, case: Case) -> Profile:
        """Of a stage: an op's time on this host beside no sum, the workers all at once."""
        layer, taken = Layer(case.weights, self.host), []
        for _ in range(12):
            value = torch.zeros(SAMPLES, WIDTH, requires_grad=True)
            self.transport.gather([0.0])
            begin = time.perf_counter()
            output = layer(value)
            between = time.perf_counter()
            output.mean().backward()
            taken.append((between - begin, time.perf_counter() - between))
        each = [statistics.median(row) for row in zip(*taken[2:], strict=True)]
        forward, backward = (
            statistics.mean(column) for column in zip(*self.transport.gather(each), strict=True)
        )
        kind = LayerProfile(
            (1.0, 64.0), (forward,) * 2, (backward,) * 2, (0.0, 0.0), 4.0 * case.weights, 4.0 * WIDTH
        )
        return Profile("p", "emulated", "", {"layer": kind})

    def beside(self, case: Case) -> tuple[float, float]:
        """Slowdown of an op beside a sum of two workers, the start of the sum included; the sum's seconds."""
        pairs = [tuple(range(k, self.size, self.size // 2)) for k in range(self.size // 2)]
        groups = [self.transport.group(ranks) for ranks in pairs]
        mine = next(g for ranks, g in zip(pairs, groups, strict=True) if self.transport.rank in ranks)
        flat = torch.zeros(case.weights)
        alone, during, sums = [], [], []
        for _ in range(9):
            for into, summing in ((alone, False), (during, True)):
                self.transport.gather([0.0])
                begin = time.perf_counter()
                work = self.transport.all_reduce(flat, mine) if summing else None
                self.host.op(2 * FORWARD_SECONDS)
                into.append(time.perf_counter() - begin)
                if work is not None:
                    work.wait()
            self.transport.gather([0.0])
            begin = time.perf_counter()
            self.transport.all_reduce(flat, mine).wait()
            sums.append(time.perf_counter() - begin)
        ratio = statistics.median(during) / statistics.median(alone) - 1
        rows = self.transport.gather([ratio, statistics.median(sums)])
        return statistics.mean(row[0] for row in rows), statistics.median(row[1] for row in rows)

    def pipeline(self, case: Case, mode: Sync) -> cf.Pipeline:
        """Chimera with one layer a stage."""
        schedule = cf.schemes.chimera(DEPTH, DEPTH)
        arrangement = next(iter(Arrangement))
        return cf.Pipeline(
            [Layer(case.weights, self.host) for _ in range(DEPTH)],
            lambda output, _: output.mean(), schedule, sync=mode,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            digest_every=0, witness_every=0, cuts=range(1, DEPTH),
            mesh=devices(schedule.placement, case.replicas, arrangement),
        )  # fmt: skip

    def step_seconds(self, pipeline: cf.Pipeline, inputs: Tensor) -> float:
        """Seconds of a step on the slowest worker."""
        self.transport.gather([0.0])
        begin = time.perf_counter()
        pipeline.step(inputs, torch.zeros(len(inputs)))
        return max(row[0] for row in self.transport.gather([time.perf_counter() - begin]))

    def row(self, case: Case, turns: int) -> Row:
        """A case: the modes in turns, and their predictions."""
        self.host.busy = case.busy
        profile = self.profile(case)
        slowdown, sum_seconds = self.beside(case)
        pipelines = {mode: self.pipeline(case, mode) for mode in MODES}
        inputs = torch.zeros(SAMPLES * DEPTH, WIDTH)
        measured: dict[str, list[float]] = {str(mode): [] for mode in MODES}
        for turn in range(turns + 2):
            for place in range(len(MODES)):
                mode = MODES[(place + turn) % len(MODES)]
                taken = self.step_seconds(pipelines[mode], inputs)
                if turn >= 2:
                    measured[str(mode)].append(taken)
        for pipeline in pipelines.values():
            pipeline.close()
        both = [
            {str(mode): self.predicted(case, profile, mode, s) for mode in MODES}
            for s in (0.0, max(0.0, slowdown))
        ]
        return Row(case, 1 / self.cluster.between.seconds_per_byte, sum_seconds, slowdown, measured, *both)

    def predicted(self, case: Case, profile: Profile, mode: Sync, slowdown: float) -> float:
        """Seconds of a step."""
        model = Model("emulated", ("layer",) * DEPTH, 0.0, config={"pipeline": {"clip_norm": 0}})
        predictor = Predictor(model, profile, replace(self.cluster, sync_slowdown=slowdown))
        sizes = {"stages": DEPTH, "micro_batches": DEPTH}
        found = predictor.predict(Configuration.of("chimera", sizes, case.replicas, SAMPLES, sync=mode))
        return float(found.step_seconds)


def work(out: str, cases: str, turns: int) -> None:
    """A worker; the first one writes."""
    self = Work()
    rows = [asdict(self.row(Case(**each), turns)) for each in json.loads(cases)]
    if self.transport.rank == 0:
        Path(out).write_text(json.dumps(rows))


def measured(cases: list[Case], turns: int) -> list[dict[str, Any]]:
    """The rows of cases with the same workers and link."""
    count = DEPTH * cases[0].replicas
    with nodes(count, cases[0].megabits, 1e-4) as names, tempfile.NamedTemporaryFile("r") as file:
        program = [sys.executable, __file__, "--work", file.name, "--turns", str(turns)]
        program += ["--cases", json.dumps([asdict(case) for case in cases])]
        all_done(one_a_node(names, *program), 900)
        found: list[dict[str, Any]] = json.load(file)
    return found


def report(rows: list[Row]) -> list[str]:
    """The table: medians in milliseconds, and ratios of a mode's median to that of eager-opt."""
    lines = [
        "| W | Mbit/s | a stage's gradients | sum, ms | host | compute beside a sum | | end, ms | eager, ms "
        "| eager-opt, ms | end / eager-opt | eager / eager-opt |",
        "|--:|--:|--:|--:|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        case = row.case
        about = f"| {case.replicas} | {8e-6 * row.rate:.0f} | {4e-6 * case.weights:g} MB "
        about += f"| {1e3 * row.sum_seconds:.0f} "
        about += f"| {f'{case.busy:.0%} busy' if case.busy else 'idle'} | {row.slowdown:+.1%} "
        medians = {mode: statistics.median(taken) for mode, taken in row.measured.items()}
        for kind, times in (
            ("measured", medians),
            ("predicted", row.predicted),
            ("predicted, with the slowdown", row.slowed),
        ):
            cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in times.values())
            last = times[str(Sync.EAGER_OPT)]
            ratios = f"{times[str(Sync.END)] / last:.3f} | {times[str(Sync.EAGER)] / last:.3f}"
            lines.append(f"{about}| {kind} | {cells} | {ratios} |")
            about = "| | | | | | "
    return lines


def main() -> None:
    """Read the command line and do what it says."""
    parser = arguments(__doc__, "eager_sync.txt")
    parser.add_argument("--turns", type=int, default=15, help="steps of each mode")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.cases, given.turns)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is taken down
    lines = [f"# python benchmarks/eager_sync.py --turns {given.turns}, {machine_line()}", ""]
    rows = []
    links = dict.fromkeys((case.replicas, case.megabits) for case in CASES)
    for link in links:
        cases = [case for case in CASES if (case.replicas, case.megabits) == link]
        found = measured(cases, given.turns)
        rows += [Row(**{**each, "case": Case(**each["case"])}) for each in found]
        print(*report(rows), sep="\n", file=sys.stderr, flush=True)
    lines += report(rows)
    print("\n".join(lines))
    if given.keep:
        keep("eager_sync", lines)


if __name__ == "__main__":
    main()
