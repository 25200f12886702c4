"""Predicted against measured steps with tensor parallelism inside stages: four processes over Gloo.

    python benchmarks/tensor_parallel.py [--turns 9] [--keep]

Claim: with T positions predicted steps are within 5 % of measured ones in the median, 10 % at most.

Layers sleep in place of computing, because four processes share the two cores of this machine; what they
sleep is divided by T but for a quarter, as their `Division` says. Two small linear maps in each are divided
for real, by columns and by rows: torch's tensor parallelism sums the layer's whole output over the positions
in a forward and the gradient of its input in a backward. Pipeline, messages, sums of replicas and those of
positions are the runtime's; links and all-reduces are measured as `counterflow profile` does it, between two
of four processes, the others waiting. Two numbers are taken from measured steps: an op's overhead from 1F1B
on four workers, and what a divided layer takes beside its sums (torch's DTensors run on the host) from two
replicas of two positions without a pipeline; all other rows are predicted.

Configurations take turns, and the quieter half of the steps counts.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from emulated_device import precise_sleep, sleep_until, undisturbed
from kit import arguments, machine_line
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import counterflow as cf
from counterflow.common.parallel_degrees import Degrees
from counterflow.measure.cluster_costs import fitted
from counterflow.measure.links import MESSAGES, measure_allreduces, measure_messages
from counterflow.planning import (
    AllReduce,
    Cluster,
    Configuration,
    Division,
    LayerProfile,
    Model,
    Predictor,
    Profile,
)
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import registry
from counterflow.schedule.modes import Recompute

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
"""Of a whole layer and a micro-batch."""
DIVIDED = 0.75
"""The share of them that is divided."""
LAYERS, SAMPLES, WIDTH, INNER = 8, 4, 256, 8
TOKENS = {"64 KiB": 16, "1 MiB": 256}
"""By the bytes of a micro-batch's output."""
QUIETEST = 0.5
RESULT = Path(__file__).parent / "results" / "tensor_parallel.txt"


def left(positions: int) -> float:
    return 1 - DIVIDED + DIVIDED / positions


class Sleep(torch.autograd.Function):
    """Sleeps before the layer's maps, and in the backward after them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: int) -> Tensor:
        ctx.positions = positions
        sleep_until(time.perf_counter() + FORWARD_SECONDS * left(positions))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sleep_until(time.perf_counter() + BACKWARD_SECONDS * left(ctx.positions))
        return gradients[0], None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.positions = 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(Sleep.apply(x, self.positions)))
        return out


def parallelize(stage: Any, mesh: Any) -> None:
    for layer in stage:
        layer.positions = mesh["tp"].size()
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def configurations() -> list[Configuration]:
    def of(scheme: str, replicas: int, positions: int, **options: Any) -> Configuration:
        more = {"recompute": options.pop("recompute", Recompute.NONE)}
        return Configuration.of(scheme, options, replicas, SAMPLES, degrees=Degrees(tp=positions), **more)

    return [
        of("dapple", 1, 1, stages=4, micro_batches=8),
        of("dapple", 2, 2, stages=1, micro_batches=4),
        of("dapple", 2, 1, stages=2, micro_batches=4),
        of("dapple", 1, 2, stages=2, micro_batches=8),
        of("dapple", 1, 2, stages=2, micro_batches=8, recompute=Recompute.STAGE),
        of("gpipe", 1, 2, stages=2, micro_batches=4),
        of("interleaved", 1, 2, workers=2, micro_batches=4, chunks=2),
        of("chimera", 1, 2, stages=2, micro_batches=4),
        of("hanayo", 1, 2, workers=2, micro_batches=4, waves=1),
        of("zb-h1", 1, 2, stages=2, micro_batches=8),
        of("dapple", 1, 4, stages=1, micro_batches=8),
    ]


def named(one: Configuration) -> str:
    options = " ".join(f"{value}" if name == "scheme" else f"{name}={value}" for name, value in one.options)
    again = f" recompute {one.recompute.value}" if one.recompute is not Recompute.NONE else ""
    return f"{one.scheme} {options}{again}"


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean() - target.mean()).square()


@dataclass(slots=True)
class Row:
    message: str
    configuration: Configuration
    predicted: float
    without_sums: float
    measured: float


def runner(one: Configuration, tokens: int) -> Any:
    """A step of it."""
    schedule = registry.build(one.scheme, dict(one.options))
    torch.manual_seed(0)
    more: dict[str, Any] = {}
    if one.degrees.tp > 1:
        shape = (one.replicas, schedule.workers, one.degrees.tp)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "worker", "tp"))
        more = {"mesh": mesh, "parallelize": parallelize}
    pipeline = cf.Pipeline(
        [Layer() for _ in range(LAYERS)],
        loss,
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        recompute=one.recompute,
        digest_every=0,
        **more,
    )
    count = SAMPLES * schedule.micro_batches
    inputs, targets = torch.randn(count, tokens, WIDTH), torch.zeros(count, 1)
    return lambda: pipeline.step(inputs, targets)


def timed(step: Any, transport: Any) -> float:
    transport.gather([0.0])
    begin = time.perf_counter()
    step()
    return max(float(row[0]) for row in transport.gather([time.perf_counter() - begin]))


def work(turns: int) -> list[Row]:
    torch.set_num_threads(1)
    transport = current_transport("gloo")
    precise_sleep()
    undisturbed()
    inside = fitted(measure_messages(transport, MESSAGES))
    sums = fitted(measure_allreduces(transport, MESSAGES, ranks=(0, 1)), begins=2)
    cluster = Cluster(
        "four processes", 1, 4, 1e12, inside, inside, allreduce_inside=sums, allreduce=AllReduce.RING
    )
    if transport.rank == 0:
        print(
            f"messages {inside.latency_seconds * 1e3:.3f} ms and {1e-6 / inside.seconds_per_byte:,.0f} MB/s; "
            f"all-reduces {sums.latency_seconds * 1e3:.3f} ms and {1e-6 / sums.seconds_per_byte:,.0f} MB/s",
            flush=True,
        )
    found = []
    for message, tokens in TOKENS.items():
        plans = configurations()
        steps = [runner(one, tokens) for one in plans]
        taken: list[list[float]] = [[] for _ in plans]
        for turn in range(turns + 3):
            for step, times in zip(steps, taken, strict=True):
                seconds = timed(step, transport)
                if turn >= 3:
                    times.append(seconds)
        measured = [statistics.fmean(sorted(t)[: max(1, int(len(t) * QUIETEST))]) for t in taken]
        profile = of(tokens)
        overhead = beside(plans[0], measured[0], tokens, profile, cluster)
        profile = replace(profile, op_overhead_seconds=overhead)
        of_sums = beside(plans[1], measured[1], tokens, profile, cluster) / LAYERS
        profile = of(tokens, of_sums, op_overhead_seconds=overhead)
        predictor = Predictor(model(tokens), profile, cluster)
        free = replace(cluster, allreduce_inside=replace(sums, latency_seconds=0.0, seconds_per_byte=0.0))
        quiet = Predictor(model(tokens), profile, free)
        if transport.rank == 0:
            told = f"{message}: an op takes {overhead * 1e3:.2f} ms beside its layers, a divided layer "
            print(f"{told}{of_sums * 1e3:.2f} ms beside its sleep and its sum", flush=True)
        found += [
            Row(message, one, predictor.predict(one).step_seconds, quiet.predict(one).step_seconds, seconds)
            for one, seconds in zip(plans, measured, strict=True)
        ]
    return found


def beside(one: Configuration, measured: float, tokens: int, profile: Profile, cluster: Cluster) -> float:
    """Seconds of an op that are not foreseen, by a step of 1F1B."""
    found = Predictor(model(tokens), profile, cluster).predict(one)
    return max(0.0, measured - found.step_seconds) / (2 * (found.micro_batches + found.workers - 1))


def of(tokens: int, of_sums: float = 0.0, **more: float) -> Profile:
    size = 4.0 * tokens * WIDTH
    layer = LayerProfile(
        (float(SAMPLES),),
        (FORWARD_SECONDS,),
        (BACKWARD_SECONDS,),
        (size * SAMPLES,),
        weights_bytes=4.0 * 2 * WIDTH * INNER,
        output_bytes=size,
        # A split backward sleeps with the gradient of its input.
        input_gradient_seconds=(BACKWARD_SECONDS,),
        weight_gradients_seconds=(0.0,),
        tensor_parallel=Division(
            weights=1.0,
            forward=DIVIDED,
            backward=DIVIDED,
            forward_sums=1,
            backward_sums=1,
            overhead_seconds=of_sums,
        ),
    )
    return Profile("sleeping layers", "this machine", "", {"layer": layer}, **more)


def model(tokens: int) -> Model:
    return Model("sleepers", ("layer",) * LAYERS, optimizer_states=0.0, input_bytes=4.0 * tokens * WIDTH)


def foreseen(row: Row) -> bool:
    return row.configuration.degrees.tp > 1 and row.configuration.replicas == 1


def table(rows: list[Row]) -> str:
    lines = [
        f"{'output':<8} {'configuration':<50} {'W':>2} {'T':>2} {'predicted':>10} {'measured':>10} "
        f"{'error':>7} {'sums of positions':>18}"
    ]
    for row in rows:
        one = row.configuration
        lines.append(
            f"{row.message:<8} {named(one):<50} {one.replicas:>2} {one.degrees.tp:>2} "
            f"{row.predicted * 1e3:>7.1f} ms {row.measured * 1e3:>7.1f} ms "
            f"{row.predicted / row.measured - 1:>+7.1%} {1 - row.without_sums / row.predicted:>18.1%}"
        )
    errors = [abs(r.predicted / r.measured - 1) for r in rows if foreseen(r)]
    lines.append(
        f"With T of 2 and 4, without the row that the overhead is taken from: "
        f"{statistics.median(errors):.1%} in the median, {max(errors):.1%} at most."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = arguments(__doc__, "tensor_parallel.*")
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    head = machine_line()
    print(head)
    told = table(cf.launch(work, given.turns, workers=4, timeout_seconds=120, threads=1)[0])
    print(told)
    if given.keep:
        RESULT.write_text(f"{head}\n\n{told}\n", encoding="utf-8")
