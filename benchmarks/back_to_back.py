"""Steps that follow each other without a barrier, ours beside torch's, on emulated devices.

    python benchmarks/back_to_back.py [--depths 4 8] [--messages 4KiB 4MiB] [--steps 20] [--repeats 5]

Claims, with messages of 4 KiB, one copy of the model and no higher peak than 1F1B's first worker: a step
takes at most 1.04 times the work N(F + I + W) at D = 4 and 1.06 at D = 8, and at least 8 % less than the
best of torch's.

Devices, stages and contenders are those of `emulated_device.py`: F = I = W = 20 ms a micro-batch for what a
worker holds, N = 2 D, as many processes as workers. A run is so many steps, each with an optimiser's step,
and nothing between them on either side (`Pipeline(barrier=False)`); its time is from one agreed start until
the last worker has made its last update, divided by the steps. Contenders take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from emulated_device import (
    BACKWARD_SECONDS,
    BYTES,
    FORWARD_SECONDS,
    SAMPLES,
    THEIR_SCHEDULES,
    Groups,
    Ours,
    Row,
    Theirs,
    add_sizes,
    against,
    message_seconds,
    note,
    our_schedules,
    precise_sleep,
    timed,
    undisturbed,
)
from machine import load, machine, shown

import counterflow as cf
from counterflow.runtime.workers.world import current_transport

GOALS = {4: 1.04, 8: 1.06}
"""By depth: a step over the work, with one copy of the model and 1F1B's memory."""

GAIN = 0.08
RESULTS = Path(__file__).parent / "results"

OURS = (
    *("dapple", "interleaved chunks=2", "chimera direct", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"),
    *("interleaved-zb chunks=2", "chimera split"),
)
"""Those that the engine does not run are left out."""


@dataclass(frozen=True)
class Settings:
    """What is run: sizes of messages, steps in a row, turns, and which contenders."""

    payloads: tuple[str, ...]
    steps: int
    repeats: int
    only: tuple[str, ...]

    def takes(self, name: str) -> bool:
        """Whether a contender was asked for."""
        return not self.only or any(word in name for word in self.only)


def work(settings: Settings, count: int) -> dict[str, list[Row]]:
    """What every worker runs; the rows by size of message, with the seconds of a step."""
    torch.set_num_threads(1)
    first, late = undisturbed(), precise_sleep()
    transport = current_transport()
    workers, rank = transport.world_size, transport.rank
    slowest = max(row[0] for row in transport.gather([late]))
    note(rank, f"D={workers} N={count}: sleeps end {slowest * 1e6:.0f} µs late, real-time priority: {first}")
    groups = Groups(transport)
    return {payload: _race(settings, count, payload, transport, groups) for payload in settings.payloads}


def _race(settings: Settings, count: int, payload: str, transport: Any, groups: Groups) -> list[Row]:
    workers, rank, steps = transport.world_size, transport.rank, settings.steps
    message = message_seconds(transport, BYTES[payload])
    found = our_schedules(workers, count)
    contenders: list[Ours | Theirs] = [
        Ours(name, found[name], message, groups, barrier=False)
        for name in OURS
        if name in found and settings.takes(name)
    ]
    names = [name for name in THEIR_SCHEDULES if "GPipe" not in name and settings.takes(name)]
    contenders += [Theirs(name, count, rank, workers) for name in names]
    inputs = torch.zeros(count * SAMPLES, BYTES[payload] // 4 // SAMPLES)
    targets = torch.zeros(count * SAMPLES)

    def several(contender: Ours | Theirs, number: int) -> None:
        for _ in range(number):
            contender.step(inputs, targets)

    for contender in contenders:
        several(contender, 3)  # the first learns shapes, two count bytes
        contender.end()
    expected = steps * count * workers * (FORWARD_SECONDS + BACKWARD_SECONDS)
    for turn in range(settings.repeats):
        gc.collect()
        gc.freeze()
        for contender in contenders:
            taken, slept, busy = timed(partial(several, contender, steps), transport)
            contender.end()
            assert abs(slept - expected) < 1e-6 * steps, (contender.row.name, slept, expected)
            contender.row.steps.append(taken / steps)
            contender.row.busy.append(busy / steps)
        note(rank, f"D={workers} N={count} {payload}: turn {turn + 1}")
    return [contender.row for contender in contenders]


def table(rows: Sequence[Row], depth: int, count: int) -> list[str]:
    """The contenders, and how ours stand to the goals."""
    work_seconds = count * (FORWARD_SECONDS + BACKWARD_SECONDS)
    lines = [
        f"the work N(F + I + W): {work_seconds * 1e3:.0f} ms",
        "",
        "| schedule | copies of the model | peak | ms a step | least .. most | over the work "
        "| simulated ms | ratio | with messages, ms | ratio | processor ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        beside = " |  |  | "
        if row.with_messages:
            beside = (
                f"{row.ideal * 1e3:.1f} | {row.ratio:.3f} "
                f"| {row.with_messages * 1e3:.1f} | {row.median / row.with_messages:.3f}"
            )
        lines.append(
            f"| {row.name} | {row.copies:g} | {f'{row.peak:g}' if row.peak else ''} | {row.median * 1e3:.1f} "
            f"| {min(row.steps) * 1e3:.1f} .. {max(row.steps) * 1e3:.1f} "
            f"| {row.median / work_seconds:.3f} | {beside} | {statistics.median(row.busy) * 1e3:.0f} |"
        )
    return [*lines, "", *_verdict(rows, depth, work_seconds)]


def _verdict(rows: Sequence[Row], depth: int, work_seconds: float) -> list[str]:
    own = [row for row in rows if row.ours and row.copies <= 1 and row.peak <= depth]
    others = [row for row in rows if row.name in THEIR_SCHEDULES]
    if not own:
        return []
    mine = min(own, key=lambda row: row.median)
    goal = f" (goal: {GOALS[depth]})" if depth in GOALS else ""
    lines = [
        "our best with one copy and no more activations than 1F1B: "
        f"{mine.name}, {mine.median / work_seconds:.3f} of the work{goal}"
    ]
    if others:
        best = min(others, key=lambda row: row.median)
        lines.append(f"against the best of torch (goal: {GAIN:.0%}): {against(mine, best)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8], help="workers; N is twice as many")
    add_sizes(parser)
    parser.add_argument("--steps", type=int, default=20, help="steps in a row")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name has one of these words")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/back_to_back.*")
    options = parser.parse_args()
    about = machine()
    settings = Settings(tuple(options.payloads), options.steps, options.repeats, tuple(options.only))
    lines = [
        f"# python benchmarks/back_to_back.py, {shown(about)}",
        f"# medians of {settings.repeats} runs of {settings.steps} steps; F = I = W = 20 ms a worker and "
        "micro-batch",
    ]
    data: list[dict[str, object]] = []
    for depth in options.depths:
        count = 2 * depth
        found = cf.launch(work, settings, count, workers=depth, transport="gloo", threads=1)[0]
        for payload, rows in found.items():
            lines += ["", f"## D={depth}, N={count}, messages of {payload}", "", *table(rows, depth, count)]
            data += [{"depth": depth, "micro_batches": count, "payload": payload, **asdict(r)} for r in rows]
    about["load_after"] = round(load(), 2)
    print("\n".join(lines))
    if options.keep:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "back_to_back.txt").write_text("\n".join(lines) + "\n")
        (RESULTS / "back_to_back.json").write_text(
            json.dumps({"machine": about, "rows": data}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
