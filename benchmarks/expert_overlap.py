"""All-to-alls of experts beside the compute of another micro-batch, on emulated devices and on real ones.

    python benchmarks/expert_overlap.py [--repeats 3] [--keep]

Claim: where all-to-all is a third of the work, a step without ``overlap_experts`` takes at least 1.2 of one
with it. What ``cf.simulate`` predicts is beside.

Four processes: two workers by two positions of experts, Gloo. On an emulated device compute is a sleep of the
thread, and an all-to-all of rows ends a time after it began, one after another; the rows themselves are a few
and really go over Gloo. A layer takes 40 ms forward and 80 ms backward in three parts, between which are two
all-to-alls of 15 ms each way: 60 of 180 ms. The host's work for an op, and turns of threads, add to that.

The real device is this machine's: layers of experts in float32 that compute, and all-to-alls of their rows
over Gloo, which takes cores from what computes. Nothing of it was run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from emulated_device import precise_sleep, undisturbed
from kit import arguments, keep, machine_line
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import counterflow as cf
from counterflow.api import experts

FORWARD, BACKWARD, ALL_TO_ALL = 0.040, 0.080, 0.030
"""Seconds of a layer's compute, and of its all-to-alls each way."""
PARTS, EXCHANGES = 3, 2
MICRO_BATCHES = 16
GOAL = 1.2
SCHEDULES = {
    "dualpipe-v": cf.schemes.dualpipe_v(workers=2, micro_batches=MICRO_BATCHES),
    "dualpipe": cf.schemes.dualpipe(stages=2, micro_batches=MICRO_BATCHES),
}


class Part(torch.autograd.Function):
    """A part of a layer's compute: it sleeps."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        time.sleep(FORWARD / PARTS)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD / PARTS)
        return gradients[0]


class Link:
    """All-to-alls of rows that end a time after they began, one after another."""

    def __init__(self) -> None:
        self.free = 0.0
        self.exchange = dist.all_to_all_single

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all_single(self, output: Tensor, rows: Tensor, *splits: Any, **options: Any) -> Any:
        waits = not options.pop("async_op", False)
        work = self.exchange(output, rows, *splits, async_op=True, **options)
        if splits and splits[0] is not None:
            self.free = max(self.free, time.perf_counter()) + ALL_TO_ALL / EXCHANGES
        pending = Pending(work, self.free)
        if waits:
            pending.wait()
        return pending


class Pending(NamedTuple):
    """An all-to-all in flight."""

    work: Any
    ends: float

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.ends - time.perf_counter()))


@contextmanager
def emulated() -> Iterator[None]:
    """Context in which all-to-alls of experts take the link's time."""
    experts.dist = Link()  # type: ignore[assignment]
    try:
        yield
    finally:
        experts.dist = dist


class Emulated(nn.Module):
    """A layer of experts whose parts sleep."""

    expert_parameters = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1, 1))
        self.scale = nn.Parameter(torch.ones(1))  # so the first stage has a backward as long as others'

    def forward(self, value: Tensor) -> Tensor:
        tokens = sleep(value * self.scale)
        choices = torch.arange(tokens.shape[0])[:, None] % 2
        sent = cf.dispatch(tokens, choices, self.weight)
        outputs = cf.grouped_linear(sleep(sent.rows), self.weight, sent.counts)
        return sleep(cf.combine(sent, outputs))


class Real(nn.Module):
    """A residual layer of four experts, of which two run for each token."""

    expert_parameters = ("up", "down")
    width, hidden, count = 256, 512, 4

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(self.width, self.count, bias=False)
        self.up = nn.Parameter(torch.randn(self.count, self.width, self.hidden) / self.width**0.5)
        self.down = nn.Parameter(torch.randn(self.count, self.hidden, self.width) / self.hidden**0.5)

    def forward(self, value: Tensor) -> Tensor:
        tokens = value.flatten(0, -2)
        scores = self.router(tokens).sigmoid()
        choices = scores.topk(2).indices
        sent = cf.dispatch(tokens, choices, self.up)
        hidden = nn.functional.silu(cf.grouped_linear(sent.rows, self.up, sent.counts))
        outputs = cf.grouped_linear(hidden, self.down, sent.counts)
        return value + cf.combine(sent, outputs, scores.gather(1, choices)).view_as(value)


def sleep(value: Tensor) -> Tensor:
    part: Tensor = Part.apply(value)  # type: ignore[no-untyped-call]
    return part


class Row(NamedTuple):
    """Seconds of steps of a schedule, without overlap and with it."""

    without: list[float]
    overlapped: list[float]

    @property
    def ratio(self) -> float:
        return median(self.without) / median(self.overlapped)


def measured(
    mesh: DeviceMesh, layer: type[nn.Module], schedule: cf.Schedule, inputs: Tensor, repeats: int
) -> Row:
    """Steps in turns, with the losses of both compared."""
    row = Row([], [])
    torch.manual_seed(0)
    pipelines = [
        cf.Pipeline(
            [layer() for _ in range(schedule.stages)],
            nn.functional.mse_loss,
            schedule,
            optimizer=partial(torch.optim.SGD, lr=1e-3),
            mesh=mesh,
            parallelize=cf.ExpertParallel("ep"),
            overlap_experts=overlap,
            seed=1,
            digest_every=0,
            witness_every=0,
        )
        for overlap in (False, True)
    ]
    pipelines[1].load_state_dict(pipelines[0].state_dict())
    for turn in range(repeats + 1):  # the first step runs one op after another
        losses = []
        for pipeline, seconds in zip(pipelines, row, strict=True):
            pipeline.transport.gather_objects(None)
            begin = time.perf_counter()
            losses.append(pipeline.step(inputs, inputs).loss)
            if turn:
                seconds.append(time.perf_counter() - begin)
        assert losses[0] == losses[1]
    for pipeline in pipelines:
        pipeline.close()
    return row


def work(repeats: int) -> tuple[dict[str, Row], dict[str, Row]]:
    """What every process runs: rows of emulated devices and of real ones, by schedule."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "worker", "ep"))
    many, few = torch.randn(2 * MICRO_BATCHES, 64, Real.width), torch.zeros(2 * MICRO_BATCHES, 1)
    real = {name: measured(mesh, Real, schedule, many, repeats) for name, schedule in SCHEDULES.items()}
    undisturbed()
    precise_sleep()
    with emulated():
        rows = {
            name: measured(mesh, Emulated, schedule, few, repeats) for name, schedule in SCHEDULES.items()
        }
    return rows, real


def predicted(schedule: cf.Schedule) -> float:
    """Seconds of a step, by simulation; gradients of weights take no time."""
    backward = BACKWARD + ALL_TO_ALL
    costs = cf.Costs(
        FORWARD + ALL_TO_ALL,
        backward,
        input_gradient=backward,
        weight_gradients=0.0,
        all_to_all=ALL_TO_ALL,
        exchanges=EXCHANGES,
    )
    return cf.simulate(schedule, costs).makespan


def table(rows: dict[str, Row], *, emulates: bool) -> tuple[list[str], bool]:
    """Lines, and whether the claim holds."""
    lines, holds = [], True
    for name, row in rows.items():
        schedule = SCHEDULES[name]
        times = [f"{median(seconds) * 1e3:.0f}" for seconds in row]
        spread = f"{min(row.overlapped) * 1e3:.0f} .. {max(row.overlapped) * 1e3:.0f}"
        if not emulates:
            lines.append(f"| {name} | {times[0]} | {times[1]} | {spread} | {row.ratio:.3f} |")
            continue
        expected = predicted(schedule), predicted(cf.with_pairs(schedule))
        holds &= row.ratio >= GOAL
        shown = [f"{seconds * 1e3:.0f}" for seconds in expected]
        lines.append(
            f"| {name} | {shown[0]} | {times[0]} | {shown[1]} | {times[1]} | {spread} "
            f"| {expected[0] / expected[1]:.3f} | {row.ratio:.3f} |"
        )
    return lines, holds


def main() -> None:
    parser = arguments(__doc__, "expert_overlap.txt")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each kind that count")
    options = parser.parse_args()
    about = machine_line()
    rows, real = cf.launch(work, options.repeats, workers=4, timeout_seconds=120, threads=1)[0]
    lines, holds = table(rows, emulates=True)
    text = [
        f"# python benchmarks/expert_overlap.py, {about}",
        f"# 2 workers by 2 positions of experts, {MICRO_BATCHES} micro-batches; medians of {options.repeats} "
        "steps in turns; losses are equal to the last bit",
        "",
        "## Emulated devices, all-to-all a third of the work",
        "",
        "| schedule | predicted ms | without ms | predicted | overlapped ms | least .. most | predicted ratio"
        " | ratio |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
        *lines,
        "",
        f"ratio of at least {GOAL}: {'holds' if holds else 'DOES NOT HOLD'}",
        "",
        f"## This machine's cores: {Real.count} experts of {Real.width} x {Real.hidden}, over Gloo",
        "",
        "| schedule | without ms | overlapped ms | least .. most | ratio |",
        "|---|--:|--:|---|--:|",
        *table(real, emulates=False)[0],
        "",
        "Here an all-to-all is a copy by a core that would compute otherwise: nothing can hide it.",
    ]
    print("\n".join(text))
    if options.keep:
        keep("expert_overlap", text)


if __name__ == "__main__":
    main()
