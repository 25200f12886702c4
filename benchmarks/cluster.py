"""Clusters of several nodes on this machine: links found, steps predicted and measured, and plans chosen.

    python benchmarks/cluster.py [--layout 2x2 ...] [--megabits 1000 100] [--delays 0.1 5] [--keep]

Needs root, and Linux: each node is a network namespace behind a relay with a rate and a delay
(``namespaces.py``), whose own rate and delay a socket measures first. Inside a node messages go by loopback.
torchrun starts the workers of each node in its namespace. All namespaces and processes are taken down
whatever happens.

Stages sleep, so that many workers run on two cores; they send real tensors and sum real gradients. Links are
measured by the functions that `counterflow profile` uses. With these and the sleeps

* some configurations of each cluster, drawn at random with a fixed seed over schemes, depths, widths, sync
  modes, arrangements and compression, are predicted and measured: the median of some steps;
* one task a cluster is planned by the search, over all schemes with a flush; its five best plans and every
  scheme's default (all workers in one pipeline, two micro-batches a worker) are measured. The planner is
  right where its first choice is as quick as the quickest of these.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from emulated_device import precise_sleep, undisturbed
from emulated_stage import emulated_stage
from kit import RESULTS, arguments, load, machine, machine_line
from namespaces import all_done, inside, nodes, probe, require_namespaces
from torch import Tensor, nn

import counterflow as cf
from counterflow.measure.cluster_costs import fitted
from counterflow.measure.links import measure_links
from counterflow.measure.survey import _pairs
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
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.runtime.workers.rank_info import rank_info
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import registry
from counterflow.schedule.modes import Recompute, Sync

SAMPLES = 2  # of a micro-batch, in what is not planned
BEST = 5  # plans that are measured
STEPS = 4  # the first of them is not counted
MORE = {"hanayo": {"waves": 1}, "interleaved": {"chunks": 2}}
"""Options without which these schemes are another one."""


@dataclass(frozen=True)
class Task:
    """What is trained: two layers a worker.

    Attributes:
        name: what to call it.
        weights: floats of a layer.
        width: floats of its output, for one sample.
    """

    name: str
    weights: int
    width: int


TASKS = Task("large weights", 1_000_000, 4_096), Task("large messages", 250_000, 16_384)


@dataclass(frozen=True)
class Row:
    """A configuration on a cluster, in seconds a step."""

    name: str
    predicted: float
    measured: float


class Layer(nn.Module):
    """Sleeps for a time and a time for each sample, as long for each half of its backward."""

    def __init__(self, task: Task, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(task.weights, 1))
        self.seconds = seconds

    def at(self, samples: float) -> float:
        """Seconds of a forward of so many samples."""
        return self.seconds * (0.2 + 0.8 * samples / SAMPLES)

    def forward(self, value: Tensor) -> Tensor:
        return emulated_stage(value, self.weight, partial(time.sleep, self.at(len(value))))


class Work:
    """What workers do on one cluster: all of them the same."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)
        undisturbed()
        precise_sleep()
        self.number, self.task = number, TASKS[number % len(TASKS)]
        self.transport = current_transport("gloo")
        here = rank_info()
        assert here is not None
        self.size, self.nodes = here.world_size, here.machines
        self.each = self.size // self.nodes
        self.layers = 2 * self.size
        self.seconds = 0.01  # eight workers want no more of the cores than four do

    @cached_property
    def cluster(self) -> Cluster:
        """As the functions behind ``profile`` find it; what the first worker found."""
        links = [measure_links(3, pair) for pair in _pairs(self.each, self.nodes)]
        near, far = links[0], links[-1]
        found = [fitted(near[0]), fitted(near[1], begins=2), fitted(far[0]), fitted(far[1], begins=2)]
        flat = [x for link in found for x in (link.latency_seconds, link.seconds_per_byte)]
        flat = list(self.transport.gather(flat)[0])
        near, near_sums, far, far_sums = (Link(*flat[i : i + 2]) for i in range(0, 8, 2))
        several = self.each > 1
        return Cluster(
            "emulated", self.nodes, self.each, 1e12,
            inside=near if several else Link(0.0, 0.0), between=far,
            allreduce_inside=near_sums if several else None, allreduce_between=far_sums,
            allreduce=AllReduce.RING, shared_adapter=several,
        )  # fmt: skip

    @cached_property
    def profile(self) -> Profile:
        """Of a layer: its sleeps, and what it takes beside them, alone on this worker; the first one's."""
        layer, beside = Layer(self.task, self.seconds), []
        for _ in range(8):
            value = torch.zeros(SAMPLES, self.task.width, requires_grad=True)
            begin = time.perf_counter()
            layer(value).mean().backward()
            beside.append((time.perf_counter() - begin - 3 * layer.at(SAMPLES)) / 3)
        more = max(0.0, self.transport.gather([statistics.median(beside)])[0][0])
        sizes = (1.0, 64.0)
        forward = tuple(layer.at(n) + more for n in sizes)
        kind = LayerProfile(
            sizes, forward, tuple(2 * s for s in forward), (0.0, 0.0), 4.0 * self.task.weights,
            4.0 * self.task.width, input_gradient_seconds=forward, weight_gradients_seconds=forward,
        )  # fmt: skip
        return Profile("p", "a sleep", "", {"layer": kind})

    def predictor(self, *, compress: bool) -> Predictor:
        """Predicts on this cluster."""
        model = Model(
            "sleeping", ("layer",) * self.layers, 0.0,
            config={"pipeline": {"clip_norm": 0, "compress": compress}},
        )  # fmt: skip
        return Predictor(model, self.profile, self.cluster)

    def row(self, configuration: Configuration, *, compress: bool = False, name: str = "") -> Row:
        """A configuration, predicted and measured."""
        predicted = self.predictor(compress=compress).predict(configuration)
        chosen = predicted.configuration
        schedule = registry.build(chosen.scheme, dict(chosen.options))
        mesh = devices(schedule.placement, chosen.replicas, chosen.arrangement)
        pipeline = cf.Pipeline(
            [Layer(self.task, self.seconds) for _ in range(self.layers)],
            lambda output, _: output.mean(), schedule, sync=chosen.sync, recompute=chosen.recompute,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), digest_every=0,
            cuts=tuple(map(int, chosen.cuts)), mesh=mesh, compress=compress, zero_stage=chosen.zero_stage,
        )  # fmt: skip
        inputs = torch.zeros(chosen.samples * schedule.micro_batches, self.task.width)
        taken = []
        for _ in range(STEPS):
            self.transport.gather([0.0])
            begin = time.perf_counter()
            pipeline.step(inputs, torch.zeros(len(inputs)))
            taken.append(max(row[0] for row in self.transport.gather([time.perf_counter() - begin])))
        pipeline.close()
        said = name or f"{shown_options(chosen)} {chosen.sync} {chosen.arrangement}"
        said += " zero_stage=1" if chosen.zero_stage else ""
        said += " compressed" if compress else ""
        return Row(said, predicted.step_seconds, statistics.median(taken[1:]))

    def drawn(self, count: int) -> list[tuple[Configuration, bool]]:
        """Some configurations: each of another scheme, the rest of it drawn."""
        draw = random.Random(self.number)
        found: list[tuple[Configuration, bool]] = []
        for scheme in draw.sample(with_a_flush(), len(with_a_flush())):
            depth = draw.choice([d for d in (2, 4, 8) if d <= self.size])
            options = default(scheme, depth)
            copies = self.size // depth > 1
            configuration = Configuration.of(
                scheme, options, self.size // depth, SAMPLES, sync=draw.choice(list(Sync)),
                arrangement=draw.choice([*Arrangement][: 2 if copies else 1]),
            )  # fmt: skip
            compress = draw.random() < 0.25
            if self.builds(scheme, options):
                found.append((configuration, compress))
        return found[:count]

    def builds(self, scheme: str, options: dict[str, Any]) -> bool:
        """Whether there is such a schedule with a layer for each of its stages."""
        try:
            return registry.build(scheme, options).stages <= self.layers
        except cf.ConfigError:
            return False

    def planned(self) -> tuple[list[Row], list[Row]]:
        """The best plans of a task, best first, and what every scheme does by default."""
        mini_batch = 2 * SAMPLES * self.size
        constraints = Constraints(schemes=tuple(with_a_flush()), recompute=(Recompute.NONE,))
        predictor = self.predictor(compress=False)
        best = search(predictor.model, self.profile, self.cluster, mini_batch, constraints, count=BEST).best
        plans = [self.row(plan.play.prediction().configuration) for plan in best]
        defaults = []
        for scheme in with_a_flush():
            options = default(scheme, self.size)
            if self.builds(scheme, options):
                defaults.append(self.row(Configuration.of(scheme, options, 1, SAMPLES), name=scheme))
        return plans, defaults


def with_a_flush() -> list[str]:
    """Schemes by name."""
    return [name for name, known in registry.SCHEMES.items() if known.synchronous]


def default(scheme: str, depth: int) -> dict[str, Any]:
    """Options of a scheme that nobody has looked into."""
    known = registry.scheme(scheme)
    return {known.depth: depth, "micro_batches": 2 * depth, **MORE.get(scheme, {})}


def shown_options(configuration: Configuration) -> str:
    """Scheme, depth, width, micro-batch and what else it has."""
    options = dict(configuration.options)
    known = registry.scheme(configuration.scheme)
    words = [f"D={options.pop(known.depth)}", f"W={configuration.replicas}"]
    words += [f"N={options.pop('micro_batches')}", f"B={configuration.samples}"]
    return " ".join([known.name, *words, *(f"{name}={value}" for name, value in options.items())])


def work(out: str, number: int, count: int) -> None:
    """A worker; the first one writes."""
    self = Work(number)
    plans, defaults = self.planned()
    rows = [self.row(configuration, compress=compress) for configuration, compress in self.drawn(count)]
    cluster = self.cluster
    found = {
        "task": self.task.name,
        "inside": self.each > 1 and _link(cluster.inside),
        "between": _link(cluster.between),
        **{
            key: [asdict(r) for r in each]
            for key, each in (("rows", rows), ("plans", plans), ("defaults", defaults))
        },
    }
    if self.transport.rank == 0:
        Path(out).write_text(json.dumps(found))


def _link(link: Link) -> tuple[float, float]:
    return link.latency_seconds, 1 / link.seconds_per_byte if link.seconds_per_byte else 0.0


def one(layout: str, megabits: float, delay: float, number: int, count: int) -> dict[str, Any]:
    """A cluster of one kind: what its relay does, what is found of its links, steps and plans."""
    machines, each = map(int, layout.split("x"))
    with nodes(machines, megabits, delay / 1000) as names, tempfile.NamedTemporaryFile("r") as file:
        reached = probe(names)
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cf0", "OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines)]
        torchrun += ["--nproc-per-node", str(each), "--master-addr", "10.77.0.1", "--master-port", "29501"]
        program = [__file__, "--work", file.name, "--number", str(number), "--configurations", str(count)]
        started = [
            inside(name, *torchrun, "--node-rank", str(node), *program, env=environment)
            for node, name in enumerate(names)
        ]
        all_done(started, 900)
        found: dict[str, Any] = json.load(file)
    return found | {"layout": layout, "megabits": megabits, "delay_ms": delay, "socket": reached}


def report(data: dict[str, Any]) -> list[str]:
    """What is printed."""
    clusters = data["clusters"]
    lines = [machine_line(data["machine"]), ""]
    lines.append("| nodes x workers | Mbit/s, ms set | by a socket | found between nodes | found inside |")
    lines.append("|---|---|---|---|---|")
    for each in clusters:
        near = _said(each["inside"]) if each["inside"] else ""
        lines.append(f"| {kind(each)} | {_said(each['socket'])} | {_said(each['between'])} | {near} |")
    lines += ["", "| nodes x workers | Mbit/s, ms | configuration | predicted ms | measured ms | ratio |"]
    lines.append("|---|---|---|--:|--:|--:|")
    for each in clusters:
        lines += [f"| {kind(each)} {said(Row(**row))}" for row in each["rows"]]
    lines += ["", "Plans, by rank, and every scheme's default:", ""]
    lines += ["| nodes x workers | Mbit/s, ms | task | what | predicted ms | measured ms | ratio |"]
    lines.append("|---|---|---|---|--:|--:|--:|")
    for each in clusters:
        task = f"| {kind(each)} | {each['task']} "
        lines += [f"{task}{said(Row(**r), f'{n}. ')}" for n, r in enumerate(each["plans"], 1)]
        lines += [f"{task}{said(Row(**r))}" for r in each["defaults"]]
    lines += [
        "",
        "| nodes x workers | Mbit/s, ms | task | first choice | ms | quickest measured | ms | ratio |",
    ]
    lines.append("|---|---|---|---|--:|---|--:|--:|")
    behind = []
    for each in clusters:
        first, *others = (Row(**row) for row in (*each["plans"], *each["defaults"]))
        quickest = min((first, *others), key=lambda row: row.measured)
        behind.append(first.measured / quickest.measured)
        lines.append(
            f"| {kind(each)} | {each['task']} | {first.name} | {1e3 * first.measured:.1f} | "
            f"{quickest.name} | {1e3 * quickest.measured:.1f} | {behind[-1]:.3f} |"
        )
    drawn = off([row for each in clusters for row in each["rows"]])
    all_rows = off([row for each in clusters for key in ("rows", "plans", "defaults") for row in each[key]])
    return [
        *lines, "",
        f"{len(drawn)} configurations: off by {statistics.median(drawn):.1%} in the median, "
        f"{drawn[-1]:.1%} at most.",
        f"With plans and defaults {len(all_rows)}: {statistics.median(all_rows):.1%} and {all_rows[-1]:.1%}.",
        f"First choices of {len(behind)} tasks: {sum(b <= 1.05 for b in behind)} within 5 % of the quickest "
        f"measured, {max(behind) - 1:.1%} behind it at most.",
    ]  # fmt: skip


def off(rows: Sequence[dict[str, Any]]) -> list[float]:
    """By how much predictions are off, ascending."""
    return sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)


def kind(cluster: dict[str, Any]) -> str:
    """A cluster in two columns."""
    return f"{cluster['layout']} | {cluster['megabits']:g}, {cluster['delay_ms']:g}"


def said(row: Row, before: str = "") -> str:
    """A row's last columns."""
    return (
        f"| {before}{row.name} | {1000 * row.predicted:.1f} | {1000 * row.measured:.1f} | "
        f"{row.predicted / row.measured:.3f} |"
    )


def _said(link: tuple[float, float]) -> str:
    return f"{8e-6 * link[1]:,.0f} Mbit/s, {1000 * link[0]:.2f} ms"


def picture(data: dict[str, Any]) -> None:
    """Predicted and measured, by kind of cluster."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(6, 6), layout="constrained")
    markers = dict(zip(dict.fromkeys(each["layout"] for each in data["clusters"]), "os^Dv", strict=False))
    ends = []
    for layout, marker in markers.items():
        rows = [
            row
            for each in data["clusters"] if each["layout"] == layout
            for key in ("rows", "plans", "defaults") for row in each[key]
        ]  # fmt: skip
        x, y = ([1e3 * row[key] for row in rows] for key in ("predicted", "measured"))
        axes.scatter(x, y, marker=marker, label=f"{layout}: nodes x workers", s=16, alpha=0.7)
        ends += x + y
    low, high = 0.9 * min(ends), 1.1 * max(ends)
    axes.plot([low, high], [low, high], color="0.5", linewidth=1)
    band = [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high]
    axes.fill_between([low, high], *band, color="0.9", label="within 5 %", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="predicted, ms a step", ylabel="measured, ms a step")
    axes.set_title("Emulated clusters: predicted and measured")
    axes.legend()
    figure.savefig(RESULTS / "cluster.png", dpi=120)


def main() -> None:
    """Read the command line and do what it says."""
    parser = arguments(__doc__, "cluster.txt")
    parser.add_argument("--layout", nargs="+", default=["2x2", "4x1", "2x4"])
    parser.add_argument("--megabits", nargs="+", type=float, default=[1000.0, 100.0])
    parser.add_argument("--delays", nargs="+", type=float, default=[0.1, 5.0])
    parser.add_argument(
        "--configurations", type=int, default=4, help="of each cluster, beside the planned ones"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.number, given.configurations)
        return
    require_namespaces()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is taken down
    data: dict[str, Any] = {"machine": machine(), "clusters": []}
    for number, (delay, megabits, layout) in enumerate(product(given.delays, given.megabits, given.layout)):
        try:
            data["clusters"].append(one(layout, megabits, delay, number, given.configurations))
        except SystemExit as error:  # the others are measured all the same, and this is told
            data.setdefault("failed", []).append(f"{layout}, {megabits:g} Mbit/s, {delay:g} ms: {error}")
            print(data["failed"][-1], file=sys.stderr, flush=True)
            continue
        print(*report(data)[-3:], f"load {load():.1f}", sep="\n", file=sys.stderr, flush=True)
        if given.keep:
            (RESULTS / "cluster.txt").write_text("\n".join(report(data)) + "\n")
            (RESULTS / "cluster.json").write_text(json.dumps(data, indent=1) + "\n")
            picture(data)
    print("\n".join([*report(data), *data.get("failed", [])]))
    if data.get("failed"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
