"""Memory, files and threads stay flat: over many pipelines in one process, and over many steps of one run.

    python benchmarks/flat.py pipelines [--count 500] [--keep]
    python benchmarks/flat.py steps [--count 10000] [--keep]

``pipelines`` makes, runs and closes one pipeline after another in two worker processes: three steps each, of
four schemes in turn. ``steps`` makes one run of many steps, with a checkpoint and a copy to memory every
100, as ``counterflow train`` does, and counts its workers and who launched them from outside. Each checkpoint
compares all copies of a stage: the run ends there if two differ in a bit.

Counted are, by process: resident memory without what files have in it (MiB), open files, threads, and shared
memory that is resident (MiB), in which copies of weights are. First, caches of torch and of the allocator
fill: torch's flight recorder notes the last 2,000 collectives of a process with their stacks; for
``pipelines``, which make few, it is told to note 200. The command fails if in the last half memory grows by
more than ``MOST_RATE``, or files, threads or shared memory do.
Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from kills import processes
from machine import machine, shown
from torch import Tensor, nn

import counterflow as cf
from counterflow.runtime.workers.world import current_transport

RESULTS = Path(__file__).parent / "results" / "flat.txt"

MOST_RATE = {"pipelines": 2.0, "steps": 0.5}
"""MiB for a thousand more."""

Row = tuple[float, int, int, float]
"""MiB of memory, open files, threads, MiB in shared memory."""


def look(pid: int | str = "self", *, trimmed: bool = False) -> Row:
    """What a process has."""
    if trimmed:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    own = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    private, shared = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem"))
    return private, len(list((own / "fd").iterdir())), int(status["Threads"]), shared


# -- pipelines


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def many(count: int) -> list[Row]:
    """What a worker does: pipelines one after another."""
    made = (
        lambda: cf.schemes.chimera(2, 4),
        lambda: cf.schemes.dapple(2, 4),
        lambda: cf.schemes.zb_h1(2, 4),
        lambda: cf.schemes.pipedream_2bw(2, 4),
    )
    found = []
    for number in range(count):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        with cf.Pipeline(layers, loss, made[number % len(made)](), optimizer=torch.optim.AdamW) as pipeline:
            for _ in range(3):
                pipeline.step(*torch.randn(2, 8, 64))
            pipeline.flush()
        if (number + 1) % max(1, count // 50) == 0:
            current_transport().gather([])
            found.append(look(trimmed=True))
    return found


def pipelines(count: int) -> dict[str, list[Row]]:
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")
    found = cf.launch(many, count, workers=2, threads=1)
    return {f"worker {worker}": rows for worker, rows in enumerate(found)}


# -- steps


def steps(count: int) -> dict[str, list[Row]]:
    """One run, its processes looked at about 100 times."""
    with tempfile.TemporaryDirectory(prefix="flat-") as root:
        folder = Path(root) / "run"
        keys = {
            "model.layers": 2,
            "model.hidden": 16,
            "model.heads": 2,
            "model.positions": 16,
            "schedule.stages": 2,
            "train.samples": 8,
            "train.threads": 1,
            "pipeline.digest_every": 100,
            "train.evaluate_every": 1000,
            "train.checkpoint_every": 100,
            "train.memory_every": 100,
        }
        command = [
            *(sys.executable, "-m", "counterflow", "train", "--scheme", "chimera", "--steps", str(count)),
            *("--out", str(folder)),
            *(part for key, value in keys.items() for part in ("--set", f"{key}={value}")),
        ]
        log = Path(root) / "log"
        with log.open("wb") as file:
            run = subprocess.Popen(command, stdout=file, stderr=file)
        rows: dict[int, list[Row]] = {}
        seen = 0
        while run.poll() is None:
            time.sleep(0.1)
            made = made_of(folder)
            if made < seen + max(1, count // 100):
                continue
            seen = made
            for pid in (*workers_of(folder), run.pid):
                try:
                    rows.setdefault(pid, []).append(look(pid))
                except (OSError, KeyError):
                    continue
        if run.returncode:
            sys.exit(f"the run failed: {log.read_text()}")
    launcher = rows.pop(run.pid)
    workers = [found for found in rows.values() if len(found) > 10]
    return {f"worker {worker}": found for worker, found in enumerate(workers)} | {"launcher": launcher}


def made_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()[-1:] if path.exists() else []
    try:
        return max((int(json.loads(line)["step"]) for line in lines), default=0)
    except ValueError:
        return 0


def workers_of(folder: Path) -> list[int]:
    """The processes that have copies of this run's weights mapped, or a worker's name."""
    events = folder / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    names = [event["run"] for line in lines if (event := json.loads(line))["event"] == "began"]
    found = []
    for process in processes():
        try:
            if names and f"{os.getuid()}-{names[0]}/rank-" in (process / "maps").read_text():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def table(mode: str, count: int, rows: Mapping[str, Sequence[Row]]) -> tuple[str, bool]:
    """What is kept, and whether all is flat."""
    lines = [
        f"{count:,} {mode}",
        f"{'':8}  {'memory, MiB, after 1/4':>22} {'1/2':>6} {'3/4':>6} {'all':>6} "
        f"{'a 1000 more':>11}  {'files':>8} {'threads':>8} {'shared, MiB':>12}",
    ]
    flat = True
    for who, found in rows.items():
        tenth, whole = max(1, len(found) // 10), len(found)
        parts = [found[max(0, whole * part // 4 - tenth) : whole * part // 4] for part in (1, 2, 3, 4)]
        memory = [statistics.median(row[0] for row in part) for part in parts]
        rate = (memory[3] - memory[1]) / (0.5 * count) * 1000
        early, late = found[whole // 10 : whole // 2], found[whole // 2 :]
        usual = [
            [statistics.median_low(row[at] for row in part) for part in (early, late)] for at in (1, 2, 3)
        ]
        flat &= rate <= MOST_RATE[mode] and all(after <= before for before, after in usual)
        lines.append(
            f"{who:8}  {memory[0]:22.1f} {memory[1]:6.1f} {memory[2]:6.1f} {memory[3]:6.1f} {rate:11.2f}  "
            + " ".join(
                f"{f'{before:g}–{after:g}':>{width}}"
                for (before, after), width in zip(usual, (8, 8, 12), strict=True)
            )
        )
    lines.append("flat" if flat else "NOT flat")
    return "\n".join(lines) + "\n", flat


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("pipelines", "steps"))
    parser.add_argument("--count", type=int)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    about, began = machine(), time.perf_counter()
    count = options.count or {"pipelines": 500, "steps": 10_000}[options.mode]
    rows = {"pipelines": pipelines, "steps": steps}[options.mode](count)
    text, flat = table(options.mode, count, rows)
    text = f"{shown(about)}, {time.perf_counter() - began:.0f} s\n{text}"
    print(text)
    if options.keep:
        kept = RESULTS.read_text().split("\n\n") if RESULTS.exists() else []
        kept = [part.strip() for part in kept if part.strip() and f" {options.mode}\n" not in part]
        RESULTS.write_text("\n\n".join([*kept, text.strip()]) + "\n")
    sys.exit(not flat)


if __name__ == "__main__":
    main()
