"""Messages in half precision (WPipe's APC): their bytes, their time, and what they do to the loss.

    python benchmarks/compression.py [--steps 120] [--repeats 7] [--only link] [--keep]

Three tables. Bytes and time: stages that sleep as in `emulated_device.py`, 4 workers, 8 micro-batches, over
Gloo; a message is 4 KiB or 4 MiB of float32 noise, which compression halves and the processor pays for.
The same if each worker is a node of its own behind a limited link (`namespaces.py`; needs root, and Linux).
Bytes and loss: the GPT example (`counterflow train`'s model, text and optimiser) for some steps from the same
weights, with messages as they are and in half precision.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from emulated_device import (
    BYTES,
    SAMPLES,
    Device,
    note,
    precise_sleep,
    sleep_until,
    take_device,
    timed,
    trivial_loss,
    undisturbed,
)
from emulated_device import sleepers as sleeping_stages
from kit import RESULTS, arguments, machine_line
from namespaces import all_done, nodes, one_a_node
from torch import Tensor

import counterflow as cf
from counterflow.runtime.workers.world import current_transport
from counterflow.training import load_config
from counterflow.training.job import prepare

WORKERS, COUNT = 4, 8
SIZES = BYTES | {"64KiB": 64 << 10, "256KiB": 256 << 10}
LINKS = ((100.0, ("64KiB", "256KiB")), (1000.0, ("256KiB", "4MiB")))
"""Rates of links in Mbit/s, and the messages that are sent over each."""


@dataclass(slots=True)
class Row:
    name: str
    kind: str
    plain: float
    compressed: float
    plain_bytes: int
    sent_bytes: int


def schedules() -> dict[str, cf.Schedule]:
    s = cf.schemes
    return {
        "dapple": s.dapple(WORKERS, COUNT),
        "interleaved chunks=2": s.interleaved(WORKERS, COUNT, chunks=2),
        "chimera": s.chimera(WORKERS, COUNT),
        "hanayo waves=1": s.hanayo(WORKERS, COUNT, waves=1),
        "pipedream-2bw": s.pipedream_2bw(WORKERS, COUNT),
        "wpipe": s.wpipe(WORKERS, COUNT),
    }


class Fill(torch.autograd.Function):
    """Gives the gradient numbers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], 0.3)


class Noise(torch.nn.Module):
    """A sleeping stage leaves undefined what it makes; here activations and gradients are numbers."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.stage(Fill.apply(value) if value.requires_grad else value)
        made.data.fill_(0.3)
        return made


class Uncounted(Device):
    """A device that notes nothing: stages share no object that one of them changes."""

    def compute(self, begin: float, seconds: float, ready: float = 0.0) -> float:
        """Sleep until ``seconds`` after ``begin``; when that is."""
        del ready
        sleep_until(begin + seconds)
        return begin + seconds


def timings(repeats: int, sizes: Sequence[str] = tuple(BYTES)) -> list[Row]:
    """What every worker runs: steps with sleeping stages, both ways in turn."""
    torch.set_num_threads(1)
    undisturbed()
    take_device(Uncounted())
    precise_sleep()
    transport = current_transport()
    rows = []
    for size in sizes:
        inputs = torch.zeros(COUNT * SAMPLES, SIZES[size] // 4 // SAMPLES)
        targets = torch.zeros(COUNT * SAMPLES)
        for name, schedule in schedules().items():
            both = [
                cf.Pipeline(
                    [Noise(stage) for stage in sleeping_stages(schedule.stages, WORKERS)],
                    trivial_loss,
                    schedule,
                    cuts=range(1, schedule.stages),
                    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                    compress=compress,
                    digest_every=0,
                    witness_every=0,
                )
                for compress in (False, True)
            ]
            taken: tuple[list[float], list[float]] = ([], [])
            gc.collect()
            for turn in range(repeats + 3):
                for pipeline, into in zip(both, taken, strict=True):
                    if schedule.synchronous:
                        seconds, _, _ = timed(lambda p=pipeline: p.step(inputs, targets), transport)
                    else:
                        seconds = steady(pipeline, inputs, targets, transport)
                    if turn >= 3:
                        into.append(seconds)
            used = both[1].compression
            counts = transport.gather([float(used.plain_bytes), float(used.sent_bytes)])
            plain, sent = (int(sum(column)) for column in zip(*counts, strict=True))
            times = [statistics.median(each) for each in taken]
            rows.append(Row(name, size, times[0], times[1], plain, sent))
            note(
                transport.rank, f"{size}: {name} {times[0] * 1e3:.1f} ms, compressed {times[1] * 1e3:.1f} ms"
            )
    return rows


def steady(pipeline: cf.Pipeline, inputs: Tensor, targets: Tensor, transport: Any) -> float:
    """Seconds of a period between warm-up and drain, on the slowest worker."""
    for _ in range(3):
        pipeline.step(inputs, targets)
    taken = sum(pipeline.step(inputs, targets).seconds for _ in range(3)) / 3
    pipeline.flush()
    return max(row[0] for row in transport.gather([taken]))


def losses(name: str, steps: int, compress: bool) -> tuple[float, float, int, int]:
    """What every worker runs: the example, its losses and bytes."""
    schedule = schedules()[name]
    config = load_config(sets=[f"train.steps={steps}"])
    job = prepare(config)
    with torch.device("meta"):
        layers = job.layers
    pipeline = cf.Pipeline(
        layers, job.bundle.loss, schedule, optimizer=job.optimizer, scheduler=job.scheduler, compress=compress
    )
    found = []
    samples = config.train.samples
    for step in range(steps):
        told = pipeline.step(*job.bundle.batches.batch(step, samples, replica=0, replicas=1))
        found.append(told.loss)
        if step % 20 == 0:
            note(pipeline.transport.rank, f"{name} {'compressed' if compress else 'plain'}: step {step}")
    found += [step.loss for step in pipeline.flush()]
    inputs, targets = job.bundle.batches.validation(samples, replica=0, replicas=1)
    validation = pipeline.evaluate(inputs, targets).loss
    used = pipeline.compression
    mine = [0.0] * 2 if used is None else [used.plain_bytes, used.sent_bytes]
    counts = pipeline.transport.gather([float(number) for number in mine])
    plain, sent = (int(sum(column)) for column in zip(*counts, strict=True))
    return statistics.fmean(found[-10:]), validation, plain, sent


def behind_a_link(megabits: float, sizes: Sequence[str], repeats: int) -> list[Row]:
    """Each worker as a node of its own: the rows of the first one."""
    with nodes(WORKERS, megabits, 1e-4) as names, tempfile.NamedTemporaryFile("r") as file:
        words = [sys.executable, __file__, "--work", file.name, "--repeats", str(repeats)]
        all_done(one_a_node(names, *words, "--sizes", *sizes), 900)
        return [Row(**row) for row in json.load(file)]


def work(out: str, sizes: Sequence[str], repeats: int) -> None:
    """A worker of a node; the first one writes."""
    transport = current_transport("gloo")
    rows = timings(repeats, sizes)
    if transport.rank == 0:
        Path(out).write_text(json.dumps([asdict(row) for row in rows]))


def time_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| scheme | messages | bytes sent / plain | step, ms | compressed, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.kind} | {r.sent_bytes / r.plain_bytes:.3f} | {r.plain * 1e3:.1f} "
        f"| {r.compressed * 1e3:.1f} | {r.compressed / r.plain:.3f} |"
        for r in rows
    ]
    return lines


def loss_table(steps: int) -> list[str]:
    """Losses of the example, with messages as they are and in half precision."""
    lines = [
        "",
        f"## Loss of the GPT example after {steps} steps",
        "",
        "| scheme | messages | training loss, mean of the last 10 | validation loss | bytes sent / plain |",
        "|---|---|---|---|---|",
    ]
    for name in ("chimera", "wpipe"):
        for compress in (False, True):
            loss, validation, plain, sent = cf.launch(
                losses, name, steps, compress, workers=WORKERS, transport="gloo", threads=1
            )[0]
            share = f"{sent / plain:.3f}" if plain else "1"
            kind = "half precision" if compress else "as they are"
            lines.append(f"| {name} | {kind} | {loss:.4f} | {validation:.4f} | {share} |")
    return lines


def main() -> None:
    parser = arguments(__doc__, "compression*.txt")
    parser.add_argument("--repeats", type=int, default=7, help="steps timed of each")
    parser.add_argument("--steps", type=int, default=120, help="of the GPT example")
    parser.add_argument("--only", choices=["loopback", "link", "loss"], help="one of the three tables")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.sizes, options.repeats)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is taken down
    words = [word for word in sys.argv[1:] if word != "--keep"]
    lines = [f"# {' '.join(['python benchmarks/compression.py', *words])}, {machine_line()}"]
    if options.only in (None, "loopback"):
        found = cf.launch(timings, options.repeats, workers=WORKERS, transport="gloo", threads=1)[0]
        lines += ["", "## Time over loopback", "", *time_table(found)]
    for megabits, sizes in LINKS if options.only in (None, "link") else ():
        lines += ["", f"## Time over links of {megabits:g} Mbit/s, one worker a node", ""]
        lines += time_table(behind_a_link(megabits, sizes, options.repeats))
    if options.only in (None, "loss"):
        lines += loss_table(options.steps)
    print("\n".join(lines))
    if options.keep:
        kept = "compression" if options.only is None else f"compression_{options.only}"
        (RESULTS / f"{kept}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
