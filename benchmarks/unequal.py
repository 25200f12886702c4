"""Workers that differ in speed, planned and measured.

    python benchmarks/unequal.py [--steps 9] [--keep]

Claim: with kinds of nodes in the cluster file predictions are as near as with equal devices, and the plan
made with them is quicker than the plan that takes all devices for equal.

Layers sleep, on some workers 1.5 to 3 times as long; messages and sums are real (Gloo, one machine). On each
of three clusters some configurations are predicted and measured (median of the steps): cut for the cluster,
with its slow nodes at one end or the other; and two plans, of a search that knows the kinds, and of one that
does not. The plan of the latter runs with the cuts that it has made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from cluster import Layer as Sleeping
from cluster import Task
from emulated_device import note, precise_sleep, undisturbed
from kit import arguments, keep, machine_line

import counterflow as cf
from counterflow.measure.cluster_costs import fitted
from counterflow.measure.links import measure_links
from counterflow.planning import (
    Cluster,
    Configuration,
    LayerProfile,
    Link,
    Model,
    NodeKind,
    Predictor,
    Profile,
)
from counterflow.planning.cost.device_placement import devices
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.node_orders import in_words, node_orders
from counterflow.planning.search.search import search
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import registry
from counterflow.schedule.modes import Recompute

TASK = Task("sleeps", 10_000, 1_024)
LAYERS, SECONDS, SAMPLES, MICRO_BATCHES = 16, 0.0025, 2, 8
CLUSTERS = (
    (NodeKind("plain", 1), NodeKind("slow", 1, slowness=2.0)),
    (NodeKind("plain", 3), NodeKind("slow", 1, slowness=1.5)),
    (NodeKind("plain", 2), NodeKind("slow", 2, slowness=3.0)),
)
SCHEMES = "gpipe", "1f1b", "zb-h1", "interleaved", "chimera", "hanayo"


class Layer(Sleeping):
    """Sleeps as long as this worker's device makes it, also for what a layer takes beside its sleeps."""

    slowness, beside = 1.0, 0.0

    def at(self, samples: float) -> float:
        return self.slowness * super().at(samples) + (self.slowness - 1) * self.beside


def begun() -> Any:
    torch.set_num_threads(1)
    undisturbed()
    precise_sleep()
    return current_transport()


def measured_links() -> tuple[Any, float]:
    """What messages, all-reduces, and a layer beside its sleeps take."""
    begun()
    found = measure_links(3, (0, 1))
    layer, beside = Layer(TASK, SECONDS), []
    for _ in range(15):
        value = torch.zeros(SAMPLES, TASK.width, requires_grad=True)
        begin = time.perf_counter()
        layer(value).mean().backward()
        beside.append((time.perf_counter() - begin - 3 * layer.at(SAMPLES)) / 3)
    quiet = sorted(beside)[: len(beside) // 2]
    return found, max(0.0, statistics.fmean(quiet))


@dataclass(frozen=True)
class Asked:
    """What workers measure: a configuration with its cuts, and the device of each worker by replica."""

    configuration: Configuration
    placed: tuple[tuple[int, ...], ...]


def measured(asked: Sequence[Asked], slowness: Sequence[float], beside: float, steps: int) -> list[float]:
    """Seconds of a step of each; what every worker runs."""
    transport = begun()
    Layer.slowness, Layer.beside = slowness[transport.rank], beside
    found = []
    for one in asked:
        chosen = one.configuration
        schedule = registry.build(chosen.scheme, dict(chosen.options))
        pipeline = cf.Pipeline(
            [Layer(TASK, SECONDS) for _ in range(LAYERS)],
            lambda outputs, _: outputs.mean(),
            schedule,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            cuts=chosen.cuts,
            sync=chosen.sync,
            mesh=one.placed,
            digest_every=0,
        )
        inputs = torch.zeros(chosen.samples * schedule.micro_batches, TASK.width)
        taken = []
        for _ in range(steps):
            transport.gather([0.0])
            begin = time.perf_counter()
            pipeline.step(inputs, torch.zeros(len(inputs)))
            taken.append(max(row[0] for row in transport.gather([time.perf_counter() - begin])))
        pipeline.close()
        found.append(statistics.median(taken[1:]))
        note(transport.rank, f"{chosen.scheme}: {1e3 * found[-1]:.0f} ms")
    return found


def of_cluster(kinds: tuple[NodeKind, ...], steps: int) -> tuple[list[str], list[float], float]:
    """Lines of the table, errors, and how many times as quick the plan is that knows the kinds."""
    size = sum(kind.nodes for kind in kinds)
    (messages, sums), beside = cf.launch(measured_links, workers=size, transport="gloo", threads=1)[0]
    here = Cluster(
        "emulated", size, 1, 1e12, Link(0.0, 0.0), fitted(messages), allreduce_between=fitted(sums, begins=2)
    )
    cluster = replace(here, kinds=kinds)
    model, profile = sleeps(), profiled(beside)
    predictor = Predictor(model, profile, cluster)
    wanted = Constraints(schemes=SCHEMES, recompute=(Recompute.NONE,), samples=(SAMPLES,))
    mini_batch = SAMPLES * MICRO_BATCHES
    plans = [search(model, profile, each, mini_batch, wanted, count=1).best[0] for each in (cluster, here)]
    chosen = [plan.play.prediction().configuration for plan in plans]
    names = ["plan", "plan that takes devices for equal"]
    first, *_, last = node_orders(cluster)
    others = ("gpipe", first), ("1f1b", first), ("1f1b", last), ("zb-h1", first), ("chimera", first)
    for scheme, nodes in others:
        chosen.append(
            Configuration.of(
                scheme, {"stages": size, "micro_batches": MICRO_BATCHES}, 1, SAMPLES, nodes=nodes
            )
        )
        names.append(scheme)
    plays = [predictor.play(one, mini_batch) for one in chosen]
    asked = [
        Asked(
            play.prediction().configuration,
            devices(play.schedule.placement, one.replicas, one.arrangement, cluster, one.nodes),
        )
        for play, one in zip(plays, chosen, strict=True)
    ]
    slowness = [kind.slowness for kind in kinds for _ in range(kind.nodes)]
    work = partial(cf.launch, workers=size, transport="gloo", threads=1)
    found = work(measured, asked, slowness, beside, steps)[0]
    lines, errors = [], []
    nodes = ", ".join(f"{kind.nodes} x {kind.slowness:g}" for kind in kinds)
    for name, play, one, took in zip(names, plays, asked, found, strict=True):
        errors.append(play.seconds / took - 1)
        where = one.configuration
        lines.append(
            f"| {nodes} | {name} | {play.schedule}, W={where.replicas} | "
            f"{in_words(where.nodes) or 'as listed'} | {' '.join(map(str, where.cuts))} | "
            f"{1e3 * play.seconds:.1f} | {1e3 * took:.1f} | {errors[-1]:+.1%} |"
        )
    return lines, errors, found[1] / found[0]


def sleeps() -> Model:
    return Model("sleeps", ("layer",) * LAYERS, 0.0, config={"pipeline": {"clip_norm": 0}})


def profiled(beside: float) -> Profile:
    """Of a layer: its sleeps and what it takes beside them."""
    layer, sizes = Layer(TASK, SECONDS), (1.0, 64.0)
    forward = tuple(layer.at(n) + beside for n in sizes)
    kind = LayerProfile(
        sizes, forward, tuple(2 * s for s in forward), (0.0, 0.0), 4.0 * TASK.weights, 4.0 * TASK.width,
        input_gradient_seconds=forward, weight_gradients_seconds=forward,
    )  # fmt: skip
    return Profile("p", "a sleep", "", {"layer": kind})


def main() -> None:
    parser = arguments(__doc__, "unequal.*")
    parser.add_argument("--steps", type=int, default=9)
    given = parser.parse_args()
    lines = [machine_line(), ""]
    lines += ["| nodes x slowness | what | schedule | in a row | cuts | predicted ms | measured ms | error |"]
    lines += ["|---|---|---|---|---|--:|--:|--:|"]
    errors, gains = [], []
    for kinds in CLUSTERS:
        more, off, gain = of_cluster(kinds, given.steps)
        lines, errors, gains = lines + more, errors + off, [*gains, gain]
    off = sorted(map(abs, errors))
    middle = statistics.median(off)
    lines += ["", f"{len(off)} configurations: off by {middle:.1%} in the median, {off[-1]:.1%} at most."]
    told = ", ".join(f"{gain:.2f}" for gain in gains)
    lines += [f"The plans that know the kinds are {told} times as quick as those that do not."]
    print("\n".join(lines))
    if given.keep:
        keep("unequal", lines)


if __name__ == "__main__":
    main()
