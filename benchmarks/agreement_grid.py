"""Pipelines against one process over the whole grid: every number within 1e-10 in float64.

    python benchmarks/agreement_grid.py [--depths 2,4,8] [--transport strict-local|gloo|strict-nccl]
                                        [--device cpu|cuda] [--kinds flush,continuous] [--only hanayo]
                                        [--every K [--offset I]] [--log FILE]

Schemes × depth × micro-batches below, at, above and not divisible by the depth × width 1 and 2 ×
recomputation none, stage, layer × sync end, eager, eager-opt (where there are copies to sum). Threads with
rendezvous sends and one order of messages for each pair of workers, as NCCL needs it; dropout on, tied
embeddings, micro-batches of unequal size, AdamW steps, clipping. Schemes without a flush make four steps more
than their warm-up, a flush and two steps more, and are compared with a process that keeps old weights.
``--every K`` takes each K-th case, from the I-th on; with ``--log`` what went well before is not done again,
so that the whole can be run in parts.
Prints a line a scheme and depth, and at the end what failed.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from kit import arguments

from counterflow.errors import CounterflowError
from counterflow.program.segments import segments
from counterflow.program.sync import needs_sync
from counterflow.runtime.transport.kinds import kinds
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import TrialTraining, small_trial
from counterflow.verification.training_agreement import TrainingResult


def schedules(depth: int) -> Iterator[tuple[str, Schedule]]:
    """Every scheme with every option, for a number of workers."""
    yield "pipedream", schemes.pipedream(depth)
    for n in (depth, depth + 1, 2 * depth):
        yield "pipedream-2bw", schemes.pipedream_2bw(depth, n)
        yield "wpipe", schemes.wpipe(depth, n)
    counts = sorted({max(1, depth - 1), depth, depth + 1, 2 * depth, 2 * depth + 3})
    for n in counts:
        yield "gpipe", schemes.gpipe(depth, n)
        yield "gpipe groups=2", schemes.gpipe(depth, n, groups=2)
        yield "dapple", schemes.dapple(depth, n)
        yield "interleaved chunks=2", schemes.interleaved(depth, n, chunks=2)
        yield "gems", schemes.gems(depth, n)
        for concat in ("direct", "forward-doubling", "backward-halving"):
            for pairs in (f for f in (1, 2, 4) if (depth // 2) % f == 0):
                yield f"chimera f={pairs} {concat}", schemes.chimera(depth, n, pairs=pairs, concat=concat)
        for k in range(2, depth + 1, 2):
            for early in range((depth - k) // 2 + 1):
                yield f"mixpipe K={k} Γ={early}", schemes.mixpipe(depth, n, injected=k, early_forwards=early)
        if n > depth:
            yield "mixpipe K=max", schemes.mixpipe(depth, n, injected="max")
        for waves in (1, 2, 4):
            yield f"hanayo waves={waves}", schemes.hanayo(depth, n, waves=waves)
    for n in counts:
        yield from split(depth, n)


def split(depth: int, n: int) -> Iterator[tuple[str, Schedule]]:
    """Every scheme whose backwards are split."""
    yield "zb-h1", schemes.zb_h1(depth, n)
    yield "zb-h2", schemes.zb_h2(depth, n)
    yield "zb-v", schemes.zb_v(depth, n)
    yield "v-half", schemes.v_half(depth, n)
    yield "v-min", schemes.v_min(depth, n)
    yield "interleaved-zb chunks=2", schemes.interleaved_zb(depth, n, chunks=2)
    yield "dapple split", schemes.dapple(depth, n, split=True)
    yield "interleaved chunks=2 split", schemes.interleaved(depth, n, chunks=2, split=True)
    yield "gems split", schemes.gems(depth, n, split=True)
    yield "chimera direct split", schemes.chimera(depth, n, split=True)
    yield "mixpipe K=2 split", schemes.mixpipe(depth, n, injected=2, split=True)
    yield "hanayo waves=2 split", schemes.hanayo(depth, n, waves=2, split=True)
    if n >= 2 * depth:
        yield "dualpipe", schemes.dualpipe(depth, n + n % 2)
        yield "dualpipe-v", schemes.dualpipe_v(depth, n)


def cases(depth: int) -> Iterator[tuple[str, Schedule, dict[str, Any]]]:
    """Every case of one depth."""
    for (name, schedule), replicas, recompute in itertools.product(
        schedules(depth), (1, 2), ("none", "stage", "layer")
    ):
        chooses = schedule.synchronous and needs_sync(schedule, replicas)
        for sync in ("end", "eager", "eager-opt") if chooses else ("eager-opt",):
            yield name, schedule, {"replicas": replicas, "recompute": recompute, "sync": sync}


@lru_cache(maxsize=8)
def reference(
    text: str, replicas: int, device: str
) -> tuple[TrialTraining, TrainingResult | None, tuple[int, ...]]:
    """A trial and what one process makes of it, which the next cases need, too; the steps to flush after.

    With old weights ``verify`` makes it: only that knows the cuts.
    """
    schedule = loads(text, "case")
    if not schedule.synchronous:
        steps = segments(schedule, replicas=replicas).last + 4
        return small_trial(schedule, replicas=replicas, steps=steps + 2), None, (steps - 1,)
    trial = small_trial(schedule, replicas=replicas, steps=2)
    return trial, trial.one_process(device=device), ()


def compared(schedule: Schedule, how: dict[str, Any], transport: str, device: str) -> tuple[float, str]:
    """The largest relative error of a case, and what is wrong with it."""
    options = dict(how)
    replicas = options.pop("replicas")
    trial, expected, flushes = reference(dumps(schedule), replicas, device)
    try:
        found = trial.verify(
            transport=transport,
            device=device,
            reference=expected,
            flush_after=flushes,
            **options,
        )
    except CounterflowError as problem:
        return float("inf"), str(problem).splitlines()[0]
    error = max(found.loss_error, found.norm_error, found.gradient_error, found.weight_error)
    return error, "" if found.ok else str(found)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--depths", default="2,4,8")
    parser.add_argument("--transport", default="strict-local", choices=[kind.name for kind in kinds()])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", default="flush,continuous")
    parser.add_argument("--only", nargs="+", default=[], help="schemes whose name has one of these words")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--log", type=Path, help="note each case here; what went well is not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{dt.date.today()}, {platform.machine()}, torch {torch.__version__}, "
        f"{given.device}, {given.transport}"
    )
    failed: list[str] = []
    done: dict[str, Any] = {}
    if given.log is not None and given.log.exists():
        done = {row["case"]: row for row in map(json.loads, given.log.read_text().splitlines())}
    total = 0
    worst: dict[tuple[int, str], tuple[float, int]] = {}
    start = time.perf_counter()
    number = 0
    for depth in map(int, given.depths.split(",")):
        for name, schedule, how in cases(depth):
            if ("flush" if schedule.synchronous else "continuous") not in given.kinds.split(","):
                continue
            if given.only and not any(word in name for word in given.only):
                continue
            number += 1
            if number % given.every != given.offset % given.every:
                continue
            case = f"{schedule} {how}"
            row = done.get(case)
            if row is None or row["problem"]:
                error, problem = compared(schedule, how, given.transport, given.device)
                row = {"case": case, "error": error, "problem": problem}
                if given.log is not None:
                    with given.log.open("a") as log:
                        log.write(json.dumps(row) + "\n")
            error = row["error"]
            if row["problem"]:
                failed.append(f"{case}: {row['problem']}")
            before = worst.get((depth, name), (0.0, 0))
            worst[depth, name] = max(before[0], error), before[1] + 1
            total += 1
        for (at, name), (error, count) in worst.items():
            if at == depth:
                print(
                    f"depth {depth}  {name:<30} {count:>4} cases, largest relative error {error:.1e}",
                    flush=True,
                )
    print(f"{total} cases in {time.perf_counter() - start:.0f} s, {len(failed)} failed")
    for line in failed:
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
