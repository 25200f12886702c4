"""Schemes without a flush on emulated devices: is there no bubble between warm-up and drain?

    python benchmarks/steady_state.py [--depths 4] [--payloads 4KiB 4MiB] [--periods 12] [--bare] [--keep]

Claim: at D=4 with messages of 4 KiB a period takes at most 1.03 of N (F + B), for every asynchronous scheme.

Devices, stages and messages are those of `emulated_device.py`: a worker's share of the model takes 20 ms
forward and 40 ms backward a micro-batch. The pipeline is filled once; then, without any flush, the time
from one step's return to the return of a later one is taken on every worker, and divided by the periods
between. The table shows the slowest worker, and beside it the same scheme with what a flush after every
period would cost: the simulator's time of one period with its warm-up and drain. `--bare` times a loop that
only sends, receives and sleeps in the same order, and the same loop with the stages under autograd: what more
periods take longer, by period. Neither updates anything.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from emulated_device import (
    BACKWARD_SECONDS,
    BYTES,
    FORWARD_SECONDS,
    GOAL,
    SAMPLES,
    Bare,
    BareAutograd,
    note,
    precise_sleep,
    simulated,
    sleepers,
    timed,
    trivial_loss,
    undisturbed,
)
from kit import arguments, keep, load, machine, machine_line

import counterflow as cf
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import registry


@dataclass(slots=True)
class Row:
    name: str
    micro_batches: int
    copies: float
    ideal: float
    flushed: float
    periods: list[float]
    versions: list[int]
    bare: float | None = None
    """A period of the bare loop, in seconds."""
    autograd: float | None = None
    """The same of the loop with autograd."""

    @property
    def median(self) -> float:
        return statistics.median(self.periods)

    @property
    def ratio(self) -> float:
        return self.median / self.ideal


@dataclass(frozen=True)
class Settings:
    payloads: tuple[str, ...]
    periods: int
    repeats: int
    only: tuple[str, ...]
    bare: bool


def schedules(depth: int) -> dict[str, cf.Schedule]:
    s = cf.schemes
    return {
        "pipedream": s.pipedream(depth),
        f"pipedream-2bw N={depth}": s.pipedream_2bw(depth, depth),
        f"pipedream-2bw N={2 * depth}": s.pipedream_2bw(depth, 2 * depth),
        f"wpipe M={depth}": s.wpipe(depth, depth),
        f"wpipe M={2 * depth}": s.wpipe(depth, 2 * depth),
    }


def bare_period(
    kind: type[Bare], schedule: cf.Schedule, size: int, settings: Settings, transport: Any
) -> float:
    """Seconds of a period in a loop without an engine: of long runs without short ones."""
    build = partial(registry.build, schedule.scheme)
    options = dict(schedule.options)
    counts = schedule.stages + 2, schedule.stages + 2 + settings.periods
    loops = [kind("", build(options | {"periods": count}), size, transport) for count in counts]
    nothing = torch.empty(0)
    taken: list[list[float]] = [[], []]
    for _ in range(settings.repeats):
        for loop, found in zip(loops, taken, strict=True):
            found.append(timed(partial(loop.step, nothing, nothing), transport)[0])
    short, long = map(statistics.median, taken)
    return (long - short) / settings.periods


def one_period(schedule: cf.Schedule) -> cf.Schedule:
    """A period by itself, from an empty pipeline to an empty one."""
    orders = tuple(
        tuple(op._replace(version=0) for op in order if schedule.period_of(op) == 0)
        for order in schedule.orders
    )
    workload = replace(schedule.workload, periods=1)
    return replace(schedule, workload=workload, orders=orders, steady=None)


def work(settings: Settings) -> dict[str, list[Row]]:
    """What every worker runs; the rows by payload."""
    torch.set_num_threads(1)
    undisturbed()
    precise_sleep()
    transport = current_transport()
    depth, rank = transport.world_size, transport.rank
    found: dict[str, list[Row]] = {}
    for payload in settings.payloads:
        for name, schedule in schedules(depth).items():
            if settings.only and not any(word in name for word in settings.only):
                continue
            count = schedule.micro_batches
            ideal = count * (FORWARD_SECONDS + BACKWARD_SECONDS)
            copies = sum(simulated(schedule).weight_copies) / schedule.stages
            row = Row(name, count, copies, ideal, simulated(one_period(schedule)).makespan, [], [])
            pipeline = cf.Pipeline(
                sleepers(schedule.stages, depth),
                trivial_loss,
                schedule,
                cuts=range(1, schedule.stages),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                digest_every=0,
            )
            inputs = torch.empty(count * SAMPLES, BYTES[payload] // 4 // SAMPLES)
            targets = torch.zeros(count * SAMPLES)
            gc.collect()
            gc.freeze()
            for _ in range(2 * depth + 4):
                pipeline.step(inputs, targets)
            for _ in range(settings.repeats):
                begin = time.perf_counter()
                for _ in range(settings.periods):
                    pipeline.step(inputs, targets)
                row.periods.append((time.perf_counter() - begin) / settings.periods)
            pipeline.flush()
            rows = transport.gather(row.periods)
            row.periods = [max(each) for each in zip(*rows, strict=True)]
            held = transport.gather([float(sum(pipeline.peak_versions.values()))])
            row.versions = [int(each[0]) for each in held]
            if settings.bare:
                row.bare, row.autograd = (
                    bare_period(kind, schedule, BYTES[payload], settings, transport)
                    for kind in (Bare, BareAutograd)
                )
            found.setdefault(payload, []).append(row)
            note(rank, f"D={depth} {payload}: {name} {row.median * 1e3:.1f} ms, ratio {row.ratio:.3f}")
    return found


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| scheme | weights held, in stages, by worker | N (F + B), ms | a period, ms | least .. most "
        "| ratio | bare ratio | with autograd | with a flush, simulated ms | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        held = " ".join(map(str, row.versions))
        late = "" if row.ratio <= GOAL else "over 1.03"
        loops = (row.bare, row.autograd)
        beside = " | ".join("" if loop is None else f"{loop / row.ideal:.3f}" for loop in loops)
        lines.append(
            f"| {row.name} | {held} | {row.ideal * 1e3:.0f} | {row.median * 1e3:.1f} "
            f"| {min(row.periods) * 1e3:.1f} .. {max(row.periods) * 1e3:.1f} | {row.ratio:.3f} "
            f"| {beside} | {row.flushed * 1e3:.0f} | {late} |"
        )
    return lines


def main() -> None:
    parser = arguments(__doc__, "steady_state.*")
    parser.add_argument("--depths", type=int, nargs="+", default=[4])
    parser.add_argument("--payloads", nargs="+", choices=BYTES, default=list(BYTES))
    parser.add_argument("--periods", type=int, default=6, help="periods timed together")
    parser.add_argument("--repeats", type=int, default=5, help="times that is done, without a flush between")
    parser.add_argument("--only", nargs="+", default=[], help="schemes whose name has one of these words")
    parser.add_argument("--bare", action="store_true", help="also time loops without an engine")
    options = parser.parse_args()
    about = machine()
    settings = Settings(
        tuple(options.payloads), options.periods, options.repeats, tuple(options.only), options.bare
    )
    lines = [f"# python benchmarks/steady_state.py, {machine_line(about)}"]
    lines.append(
        f"# medians of {settings.repeats} times {settings.periods} periods; 20 ms forward, 40 ms backward a "
        "worker and micro-batch"
    )
    data: list[dict[str, object]] = []
    for depth in options.depths:
        found = cf.launch(work, settings, workers=depth, transport="gloo", threads=1)[0]
        for payload, rows in found.items():
            lines += ["", f"## D={depth}, messages of {payload}", "", *table(rows)]
            data += [{"depth": depth, "payload": payload, **asdict(row)} for row in rows]
    about["load_after"] = round(load(), 2)
    print("\n".join(lines))
    if options.keep:
        keep("steady_state", lines, {"machine": about, "rows": data})


if __name__ == "__main__":
    main()
