"""A GPT cut in two on two cores: samples a second against torch's 1F1B and against one process.

    python benchmarks/real_compute.py [--models example larger] [--repeats 9] [--micro-batches 8]
        [--only zb]

Claims: dapple and chimera train at least as many samples a second as torch.distributed.pipelining's
Schedule1F1B on the same halves, and as one process with two threads on the same mini-batch. zb-h1,
zb-v and chimera split have backwards in two ops, beside ScheduleZBVZeroBubble: they gain what they fill of
the bubbles, less what the split costs (`split_backward.py` has that by itself, in µs and bytes).

Two processes with one torch thread each. All contenders have the same weights at the start, the same cut,
the same mini-batches in the same micro-batches and the same AdamW; that their losses agree at the end is
checked. The single process is worker 0 with two threads while worker 1 waits: once with the micro-batches
one after another (gradients accumulate), once with the whole mini-batch in one go. Contenders take turns
of a few steps (A B C A B C), so that noise hits all alike; a turn counts until its last worker is done.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed.pipelining as theirs
from kit import arguments, keep, load, machine, machine_line
from torch import Tensor, nn

import counterflow as cf
from counterflow.capture.estimates import estimated_costs
from counterflow.models.gpt import GPTConfig
from counterflow.models.presets import preset
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.cuts import balance

WORKERS = 2
STEPS = 3
"""Of a turn."""


def models() -> dict[str, GPTConfig]:
    example = preset("example").config
    assert isinstance(example, GPTConfig)
    larger = GPTConfig(layers=8, hidden=256, heads=8, vocabulary=256, positions=128, dropout=0.0)
    return {"example": example, "larger": larger}


def built(config: GPTConfig) -> list[nn.Module]:
    torch.manual_seed(0)
    return config.build()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Contender(Protocol):
    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on a mini-batch; the loss, on the workers that know it."""


class Ours:
    """A schedule of Counterflow's."""

    def __init__(
        self, config: GPTConfig, schedule: cf.Schedule, cuts: list[int], *, clip: float | None
    ) -> None:
        self.pipeline = cf.Pipeline(
            built(config), config.loss, schedule, cuts=cuts, optimizer=adamw, clip_norm=clip
        )

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        return self.pipeline.step(inputs, targets).loss


class Theirs:
    """A schedule of torch's on the same cuts: Schedule1F1B on halves, ScheduleZBVZeroBubble on quarters."""

    def __init__(self, config: GPTConfig, count: int, cuts: list[int], rank: int) -> None:
        layers = built(config)
        edges = [0, *cuts, len(layers)]
        parts = [nn.Sequential(*layers[begin:end]) for begin, end in pairwise(edges)]
        held = [rank] if len(parts) == WORKERS else [rank, len(parts) - 1 - rank]
        device = torch.device("cpu")
        stages = [theirs.PipelineStage(parts[s], s, len(parts), device) for s in held]
        self.schedule = (
            theirs.Schedule1F1B(stages[0], count, loss_fn=config.loss)
            if len(held) == 1
            else theirs.ScheduleZBVZeroBubble(stages, count, loss_fn=config.loss)
        )
        self.optimizer = adamw(p for s in held for p in parts[s].parameters())
        self.first, self.last = 0 in held, len(parts) - 1 in held

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        losses: list[Tensor] = []
        self.schedule.step(
            *([inputs] if self.first else []),
            target=targets if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else float("nan")


class Alone:
    """One process, on worker 0, with as many threads as there are workers."""

    def __init__(self, config: GPTConfig, pieces: int, rank: int) -> None:
        self.rank, self.pieces, self.loss = rank, pieces, config.loss
        self.model = nn.Sequential(*built(config))
        self.optimizer = adamw(self.model.parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        if self.rank:
            return float("nan")
        torch.set_num_threads(WORKERS)
        total = 0.0
        for value, target in zip(inputs.chunk(self.pieces), targets.chunk(self.pieces), strict=True):
            loss = self.loss(self.model(value), target) / self.pieces
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.set_num_threads(1)
        return total


@dataclass
class Row:
    name: str
    seconds: list[float]
    """Of a step, by turn."""
    loss: float


@dataclass(frozen=True)
class Settings:
    models: tuple[str, ...]
    micro_batches: int
    samples: int
    repeats: int
    warm_up: int
    only: tuple[str, ...]


def work(settings: Settings) -> dict[str, tuple[list[Row], list[int], int]]:
    """What both workers run; by model the rows, the cut and the number of parameters."""
    torch.set_num_threads(1)
    transport = current_transport()
    rank, count = transport.rank, settings.micro_batches
    found = {}
    for name in settings.models:
        config = models()[name]
        layers = built(config)
        costs = estimated_costs(layers)
        cuts, quarters = (list(balance(costs, stages)) for stages in (WORKERS, 2 * WORKERS))
        size = sum(p.numel() for p in nn.Sequential(*layers).parameters())
        makers: dict[str, Callable[[], Contender]] = {
            "dapple": lambda: Ours(config, cf.schemes.dapple(WORKERS, count), cuts, clip=None),
            "chimera": lambda: Ours(config, cf.schemes.chimera(WORKERS, count), cuts, clip=None),
            "zb-h1": lambda: Ours(config, cf.schemes.zb_h1(WORKERS, count), cuts, clip=None),
            "zb-v": lambda: Ours(config, cf.schemes.zb_v(WORKERS, count), quarters, clip=None),
            "chimera split": lambda: Ours(
                config, cf.schemes.chimera(WORKERS, count, split=True), cuts, clip=None
            ),
            "torch 1F1B": lambda: Theirs(config, count, cuts, rank),
            "torch ZBVZeroBubble": lambda: Theirs(config, count, quarters, rank),
            "one process, 2 threads, accumulated": lambda: Alone(config, count, rank),
            "one process, 2 threads, whole": lambda: Alone(config, 1, rank),
        }
        contenders = {
            label: make()
            for label, make in makers.items()
            if not settings.only or any(word in label for word in settings.only)
        }
        rows = {label: Row(label, [], 0.0) for label in contenders}
        generator = torch.Generator().manual_seed(1)
        for turn in range(settings.warm_up + settings.repeats):
            batches = [config.sample(count * settings.samples, generator=generator) for _ in range(STEPS)]
            for label, contender in contenders.items():
                transport.gather([0.0])
                begin = time.perf_counter()
                for inputs, targets in batches:
                    loss = contender.step(inputs, targets)
                ends = transport.gather([time.perf_counter(), loss])
                starts = transport.gather([begin])
                taken = (max(row[0] for row in ends) - max(row[0] for row in starts)) / STEPS
                if turn >= settings.warm_up:
                    rows[label].seconds.append(taken)
                rows[label].loss = next(row[1] for row in ends if row[1] == row[1])
            note(rank, f"{name}: turn {turn + 1}")
        losses = [row.loss for row in rows.values()]
        assert max(losses) - min(losses) < 2e-3 * max(losses), dict(zip(rows, losses, strict=True))
        found[name] = list(rows.values()), cuts, size
    return found


def note(rank: int, text: str) -> None:
    if rank == 0:
        print(text, file=sys.stderr, flush=True)


def table(rows: list[Row], samples: int) -> list[str]:
    lines = [
        "| contender | samples/s | least .. most | ms a step | loss at the end |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        rates = [samples / seconds for seconds in row.seconds]
        lines.append(
            f"| {row.name} | {statistics.median(rates):.1f} | {min(rates):.1f} .. {max(rates):.1f} "
            f"| {statistics.median(row.seconds) * 1e3:.1f} | {row.loss:.5f} |"
        )
    return lines


def verdicts(rows: list[Row]) -> list[str]:
    """Ratios are of steps of one turn, so that slow minutes of the machine cancel."""
    own = [row for row in rows if not row.name.startswith(("torch", "one process"))]
    lines = []
    unsplit = {"zb-h1": "dapple", "zb-v": "dapple", "chimera split": "chimera"}
    for mine in own:
        for other in rows:
            if other in own and unsplit.get(mine.name) != other.name:
                continue
            ratios = [b / a for a, b in zip(mine.seconds, other.seconds, strict=True)]
            ratio, wins = statistics.median(ratios), sum(r > 1 for r in ratios)
            lines.append(
                f"{mine.name} against {other.name}: {ratio:.3f} times as fast"
                f"{'' if ratio >= 1 else ' - SLOWER'}, ahead in {wins} of {len(ratios)} turns"
            )
    return lines


def main() -> None:
    parser = arguments(__doc__, "real_compute.*")
    parser.add_argument("--models", nargs="+", choices=models(), default=list(models()))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--repeats", type=int, default=9, help=f"turns timed, of {STEPS} steps")
    parser.add_argument("--warm-up", type=int, default=2, help="turns before")
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name has one of these words")
    options = parser.parse_args()
    about = machine()
    settings = Settings(
        tuple(options.models),
        options.micro_batches,
        options.samples,
        options.repeats,
        max(1, options.warm_up),
        tuple(options.only),
    )
    total = settings.micro_batches * settings.samples
    found = cf.launch(work, settings, workers=WORKERS, transport="gloo", threads=1)[0]
    lines = [f"# python benchmarks/real_compute.py, {machine_line(about)}"]
    data: list[dict[str, object]] = []
    for name, (rows, cuts, size) in found.items():
        config = models()[name]
        lines += [
            "",
            f"## {name}: {config.layers} blocks, hidden {config.hidden}, {config.positions} positions, "
            f"{size:,} parameters, cut at layer {cuts[0]}; "
            f"{settings.micro_batches} micro-batches of {settings.samples} samples",
            "",
            *table(rows, total),
            "",
            *verdicts(rows),
        ]
        data += [{"model": name, "samples": total, **asdict(row)} for row in rows]
    about["load_after"] = round(load(), 2)
    print("\n".join(lines))
    if options.keep:
        keep("real_compute", lines, {"machine": about, "rows": data})


if __name__ == "__main__":
    main()
