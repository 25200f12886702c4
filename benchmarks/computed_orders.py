"""Computed orders beside the best figures known, and on random instances.

    python benchmarks/computed_orders.py --papers [--seconds 60] [--only 6.2B] [--keep]
    python benchmarks/computed_orders.py --instances [--seconds 15] [--first 0] [--count 60] [--keep]
    python benchmarks/computed_orders.py --large [--keep]

Claims. ``--papers``: the bubble rates of the zero-bubble paper (arXiv 2401.10241, Tables 5 and 9) at the
memory of 1F1B, at twice that, and between, are reached or beaten, each cell within a minute on two cores.
``--instances``: on random placements, costs and limits a computed order is never worse than the best named
scheme of the same placement that keeps the limit; where there are at most 16 workers, the median gap to the
lower bound is at most 3 %. ``--large``: 64 workers and 512 micro-batches end within five minutes.

The 60 instances may be run in parts (``--first``, ``--count``); with ``--keep`` their rows are collected. The
best named scheme is looked for among all, also those that a computed order had no time to build.

The rate is (step - work) / step with the steady step: what a step adds if a worker begins the next one at
once. Messages take their time and occupy nobody (the paper's model), in the instances too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import machine, shown

import counterflow as cf
from counterflow.schedule.placement import Placement, bidirectional, linear, wave
from counterflow.schedule.workload import Workload, plain
from counterflow.synthesis import Synthesis, problem_of, synthesize
from counterflow.synthesis.named import named
from counterflow.synthesis.problem import value_of

RESULTS = Path(__file__).parent / "results"
SEQUENCE = 1024


@dataclass(frozen=True)
class Model:
    """A row of Table 9: sizes, and milliseconds of an op and a message."""

    name: str
    workers: int
    micro_batches: int
    forward: float
    input_gradient: float
    weight_gradients: float
    message: float
    hidden: int
    heads: int

    @property
    def costs(self) -> cf.Costs:
        """Times in milliseconds; bytes in those of the paper's model, up to a factor."""
        return cf.Costs(
            forward=self.forward,
            input_gradient=self.input_gradient,
            weight_gradients=self.weight_gradients,
            p2p=self.message,
            link="infinite",
            memory=cf.ByteCosts(activations=self.stash, kept_for_weights=32 * self.hidden),
        )

    @property
    def stash(self) -> float:
        """What a forward saves."""
        return 34 * self.hidden + 5 * self.heads * SEQUENCE

    @property
    def work(self) -> float:
        """Milliseconds of compute of a worker."""
        return self.micro_batches * (self.forward + self.input_gradient + self.weight_gradients)


MODELS = (
    Model("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24),
    Model("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 2304, 24),
    Model("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 2304, 24),
    Model("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 4096, 32),
    Model("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 4096, 32),
    Model("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 4096, 32),
    Model("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 5120, 40),
    Model("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 5120, 40),
    Model("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 6144, 48),
)
"""Zero Bubble Pipeline Parallelism, Table 9."""

BEST = {
    ("1.5B", 24): {1.0: 0.1585, 2.0: 0.0433},
    ("1.5B", 32): {1.0: 0.1242, 2.0: 0.0039},
    ("1.5B", 64): {1.0: 0.0674, 2.0: 0.0026},
    ("6.2B", 24): {1.0: 0.1323, 2.0: 0.0029},
    ("6.2B", 32): {1.0: 0.1045, 1.25: 0.0649, 1.5: 0.0366, 1.75: 0.0142, 2.0: 0.0022},
    ("6.2B", 64): {1.0: 0.0554, 2.0: 0.0010},
    ("14.6B", 48): {1.0: 0.1397, 2.0: 0.0066},
    ("14.6B", 64): {1.0: 0.1088, 1.25: 0.0643, 1.5: 0.0437, 1.75: 0.0222, 2.0: 0.0054},
    ("28.3B", 96): {1.0: 0.1421, 2.0: 0.0038},
}
"""By model and micro-batches, and memory in that of 1F1B: the paper's Table 5 and the figure of memory."""


def papers(seconds: float, only: str | None) -> Iterator[str]:
    """The rows of the paper."""
    yield f"{'model':<7} {'p/m':<7} {'memory':>6} {'best known':>10} {'here':>8} {'bound':>8}     s  found by"
    counts = {"beaten": 0, "reached": 0, "worse": 0}
    for model in MODELS:
        if only is not None and model.name != only:
            continue
        for memory, best in BEST[model.name, model.micro_batches].items():
            began = time.perf_counter()
            found = synthesize(
                plain(linear(model.workers), model.micro_batches, split=True),
                model.costs,
                memory_bytes=memory * model.workers * model.stash,
                objective="steady",
                seconds=seconds,
            )
            took = time.perf_counter() - began
            rate = 1 - model.work / found.steady
            least = max(0.0, 1 - model.work / found.lower_bound)
            verdict = "beaten" if rate < best - 5e-5 else "reached" if rate < best + 5e-5 else "worse"
            counts[verdict] += 1
            yield (
                f"{model.name:<7} {f'{model.workers}/{model.micro_batches}':<7} {memory:>6} {best:>10.4f} "
                f"{rate:>8.4f} {least:>8.4f} {took:>5.0f}  {found.method}, {verdict}"
            )
    yield ", ".join(f"{number} {verdict}" for verdict, number in counts.items())


@dataclass(frozen=True)
class Instance:
    """A random problem."""

    name: str
    workload: Workload
    costs: cf.Costs
    peak: float


def instances(count: int, seed: int = 16) -> Iterator[Instance]:
    """Random problems: 4 to 64 workers, half to eight times as many micro-batches, uneven stages."""
    draw = random.Random(seed)
    for number in range(count):
        workers = draw.choice((4, 4, 6, 8, 8, 12, 16, 16, 24, 32, 64))
        kind = ("straight", "vee", "two-way")[number % 3]
        placement: Placement = {
            "straight": lambda: linear(workers),
            "vee": lambda: wave(workers, 1),
            "two-way": lambda: bidirectional(workers),
        }[kind]()
        most = 8 * workers if workers <= 16 else 2 * workers
        micro_batches = max(2, 2 * (draw.randint(workers // 2, most) // 2))
        stages = placement.stages
        chunk = stages // workers

        def drawn(low: float, high: float, stages: int = stages, chunk: int = chunk) -> tuple[float, ...]:
            middle = draw.uniform(low, high)
            return tuple(round(middle * draw.uniform(0.7, 1.3) / chunk, 3) for _ in range(stages))

        forward, inputs, weights = drawn(1, 2), drawn(1, 2), drawn(0.5, 2)
        message = draw.choice((0.0, draw.uniform(0.0, 1 / 3))) * statistics.mean(forward)
        limit = draw.choice((0.5, 1.0, 2.0))
        peak = max(2 * chunk if kind != "two-way" else 2, round(limit * workers * chunk))
        yield Instance(
            f"{kind} D={workers} N={micro_batches} peak={peak} message={message:.2f}",
            plain(placement, micro_batches, split=True, pipe_of=lambda m, p=placement: m % p.pipes),
            cf.Costs(
                forward=forward,
                input_gradient=inputs,
                weight_gradients=weights,
                p2p=round(message, 3),
                link="infinite",
            ),
            peak,
        )


@dataclass(frozen=True)
class Row:
    """What came out of an instance; ``named`` is the best named scheme and its makespan."""

    name: str
    workers: int
    makespan: float
    bound: float
    named: tuple[str, float] | None
    method: str
    seconds: float

    @property
    def gap(self) -> float:
        """To the lower bound."""
        return 1 - self.bound / self.makespan

    @property
    def gain(self) -> float | None:
        """Over the best named scheme."""
        return None if self.named is None else 1 - self.makespan / self.named[1]

    def __str__(self) -> str:
        gain = "      " if self.gain is None else f"{self.gain:>6.1%}"
        named = "none keeps the limit" if self.named is None else self.named[0]
        return (
            f"{self.name:<52} {self.makespan:>9.2f} {self.gap:>6.1%} {gain} {self.seconds:>5.0f}  {named}, "
            f"{self.method}"
        )


HEAD = f"{'instance':<52} {'makespan':>9} {'gap':>6} {'gain':>6}     s  best named, found by"


def best_named(instance: Instance) -> tuple[str, float] | None:
    """Of all named schemes that keep the limit."""
    problem = problem_of(instance.workload, instance.costs, peak=instance.peak)
    values = [(name, value_of(problem, words)) for name, words in named(problem) if problem.fits(words)]
    return min(values, key=lambda one: one[1], default=None)


def on_instances(which: range, seconds: float) -> Iterator[Row]:
    """Gap to the bound, and gain over the best named scheme."""
    for number, instance in enumerate(instances(which.stop)):
        if number in which:
            began = time.perf_counter()
            found = synthesize(
                instance.workload, instance.costs, peak=instance.peak, seconds=seconds, seed=number
            )
            took = time.perf_counter() - began
            yield Row(
                instance.name,
                instance.workload.placement.workers,
                found.makespan,
                found.lower_bound,
                best_named(instance),
                found.method,
                took,
            )


def summary(rows: Sequence[Row]) -> str:
    """Medians, and how often a named scheme is better."""
    small = [row.gap for row in rows if row.workers <= 16]
    gains = [row.gain for row in rows if row.gain is not None]
    worse = sum(gain < -1e-9 for gain in gains)
    median = statistics.median(row.gap for row in rows)
    return (
        f"median gap {statistics.median(small):.2%} of {len(small)} with at most 16 workers, "
        f"{median:.2%} of all {len(rows)}; worse than the best named scheme: {worse}; "
        f"gain over it from {min(gains):.1%} to {max(gains):.1%}, median {statistics.median(gains):.1%}; "
        f"no named scheme keeps the limit: {len(rows) - len(gains)}; proved the best: "
        f"{sum(row.gap <= 1e-9 for row in rows)}"
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Gap and gain by workers."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    spread = random.Random(0)
    drawn = (
        ("gap to the lower bound, %", [(row, row.gap) for row in rows]),
        ("gain over the best named scheme, %", [(row, row.gain) for row in rows if row.gain is not None]),
    )
    for axis, (label, points) in zip(axes, drawn, strict=True):
        for kind, marker in (("straight", "o"), ("vee", "^"), ("two-way", "x")):
            own = [
                (row.workers * spread.uniform(0.94, 1.06), 100 * y)
                for row, y in points
                if row.name.startswith(kind)
            ]
            axis.scatter([x for x, _ in own], [y for _, y in own], s=22, marker=marker, label=kind)
        axis.set(xlabel="workers", ylabel=label, xscale="log")
        axis.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(path, dpi=110)


def keep_instances(which: range, rows: Sequence[Row]) -> None:
    """Collect rows, and write table and picture of all that were collected."""
    path = RESULTS / "computed_orders_instances.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept |= {str(number): asdict(row) for number, row in zip(which, rows, strict=True)}
    kept = dict(sorted(kept.items(), key=lambda one: int(one[0])))
    path.write_text(json.dumps(kept, indent=1) + "\n")
    every = [Row(**row) for row in kept.values()]
    lines = [f"# {shown(machine())}", HEAD, *map(str, every), summary(every)]
    (RESULTS / "computed_orders_instances.txt").write_text("\n".join(lines) + "\n")
    draw(every, RESULTS / "computed_orders_instances.png")


def large(seconds: float) -> Iterator[str]:
    """64 workers, 512 micro-batches, with little memory: no named scheme is the best."""
    placements = {"straight": (linear(64), 48), "vee": (wave(64, 1), 96)}
    for name, (placement, peak) in placements.items():
        chunk = placement.stages // 64
        began = time.perf_counter()
        found: Synthesis = synthesize(
            plain(placement, 512, split=True),
            cf.Costs(
                forward=10.4 / chunk,
                input_gradient=10.2 / chunk,
                weight_gradients=7.7 / chunk,
                p2p=0.4,
                link="infinite",
            ),
            peak=peak,
            seconds=seconds,
        )
        scheme = "no named scheme keeps the limit"
        if found.named is not None:
            scheme = f"{found.gain:.2%} less than {found.named[0]}"
        yield (
            f"{name}, 64 workers, 512 micro-batches, at most {peak} activations: "
            f"makespan {found.makespan:.1f}, bound {found.lower_bound:.1f}, gap {found.gap:.2%}, {scheme}, "
            f"by {found.method}, "
            f"in {time.perf_counter() - began:.0f} s"
        )


def main() -> None:
    """Print the tables, and keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--papers", action="store_true")
    parser.add_argument("--instances", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--first", type=int, default=0, help="the first instance of --count")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", help="a model of the paper, such as 6.2B")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/computed_orders_*")
    given = parser.parse_args()
    if not (given.papers or given.instances or given.large):
        parser.error("choose --papers, --instances or --large")
    print(shown(machine()))
    if given.instances:
        which, rows = range(given.first, given.first + given.count), []
        print(HEAD, flush=True)
        for row in on_instances(which, given.seconds or 15):
            rows.append(row)
            print(row, flush=True)
        print(summary(rows))
        if given.keep:
            keep_instances(which, rows)
    parts = {
        "papers": lambda: papers(given.seconds or 60, given.only),
        "large": lambda: large(given.seconds or 240),
    }
    for name in (name for name in parts if getattr(given, name)):
        lines = [shown(machine())]
        for line in parts[name]():
            lines.append(line)
            print(line, flush=True)
        if given.keep:
            (RESULTS / f"computed_orders_{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
