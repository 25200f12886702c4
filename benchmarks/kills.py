"""Runs that are killed at random moments go on by themselves, and end with the same numbers.

    python benchmarks/kills.py [--kills 20] [--minutes 8] [--seed 0] [--beside] [--keep]

Six schemes, three whose stages have several holders (twins) and three without. Each run is killed several
times, at moments and in ways that a seed draws:

* ``worker``: SIGKILL of a worker; its machine, and so its copy in memory, lives;
* ``machine``: SIGSTOP, its copies in memory are deleted, SIGKILL: as when its machine is gone;
* ``saving``: as ``machine``, while a checkpoint is being written;
* ``launcher``: SIGKILL of the command; it is given once more, as a batch system would, with
  ``train.resume = "auto"``.

A run counts if it ends with 0, has the metrics of an undisturbed run bit for bit and each step once, and
leaves no process, no draft of a checkpoint and no memory behind. Seconds are from the signal to the next line
of the metrics after the run went on; with them: from where it went on, and how many steps were made again.
``--beside`` compares twins and the checkpoint instead: runs of a small and a larger model, in which a
worker's machine is gone with its copies, in turn with that of its twin (``both``). ``--keep`` adds the rows
to benchmarks/results/kills.json and writes its table, kills.txt. Linux only.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kit import RESULTS, arguments, machine, machine_line

STEPS, CHECKPOINT_EVERY = 80, 8

COMMON = {
    "model.layers": 4,
    "model.hidden": 32,
    "model.heads": 2,
    "model.positions": 32,
    "train.samples": 16,
    "train.threads": 1,
    "train.evaluate_every": 0,
    "train.checkpoint_every": CHECKPOINT_EVERY,
    "pipeline.timeout_seconds": 30,
}

SCHEMES: dict[str, tuple[bool, dict[str, Any]]] = {
    "chimera": (True, {"schedule.stages": 2}),
    "gems": (True, {"schedule.stages": 2}),
    "dapple, 2 replicas": (True, {"schedule.scheme": "dapple", "schedule.stages": 2, "pipeline.replicas": 2}),
    "dapple": (False, {"schedule.stages": 2}),
    "hanayo": (False, {"schedule.workers": 2}),
    "zb-h1": (False, {"schedule.stages": 2}),
}
"""By name: whether each stage has several holders, and the keys of the run."""

KINDS = {"worker": 4, "machine": 5, "saving": 2, "launcher": 1}
"""What is killed, and how often beside the others."""


BESIDE: dict[str, dict[str, Any]] = {
    "68 thousand": {},
    "13 million": {"model.hidden": 512, "train.samples": 8},
}
"""Models by their weights, in chimera."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A row: what was killed, and how the run went on."""

    scheme: str
    twins: bool
    kind: str
    step: int
    source: str
    again: int
    seconds: float
    run: int
    right: bool = False
    whole_seconds: float = 0.0
    """To the step after the one at which it was killed."""
    weights: str = ""
    """Of the model, where twins are compared with the checkpoint."""


class Run:
    """A command that trains, and what is seen of it from outside."""

    def __init__(self, name: str, folder: Path, *, restarts: int = 0, weights: str = "") -> None:
        keys = COMMON | SCHEMES[name][1] | BESIDE.get(weights, {})
        scheme = keys.pop("schedule.scheme", name)
        self.folder = folder
        self.command = [
            *(sys.executable, "-m", "counterflow", "train", "--scheme", str(scheme)),
            *("--steps", str(STEPS), "--max-restarts", str(restarts), "--out", str(folder)),
            *(part for key, value in keys.items() for part in ("--set", f"{key}={value}")),
        ]
        self.log = folder.with_suffix(".log")
        self.process = self._start()

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen([*self.command, *more], stdout=log, stderr=log, start_new_session=True)

    def start_again(self) -> None:
        self.process.wait()
        self.process = self._start("--set", "train.resume=auto")

    def metrics(self) -> list[dict[str, float]]:
        found = []
        path = self.folder / "metrics.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [line for line in found if "loss" in line]

    def step(self) -> int:
        return max((int(line["step"]) for line in self.metrics()), default=0)

    def restarted(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for line in lines if (event := json.loads(line))["event"] == "restarted"]

    def workers(self) -> dict[int, int]:
        """Process by rank: whoever has the files of a rank's copies open."""
        found, begin = {}, f"/dev/shm/{self.memory()}/rank-"
        for process in processes():
            try:
                files = [str(handle.readlink()) for handle in (process / "fd").iterdir()]
            except OSError:
                continue
            for file in files:
                if file.startswith(begin):
                    found[int(file.removeprefix(begin).split(".")[0])] = int(process.name)
        return found

    def memory(self) -> str:
        """The name of this run's copies in memory."""
        for line in (self.folder / "events.jsonl").read_text().splitlines():
            if (event := json.loads(line))["event"] == "began":
                return f"counterflow-{os.getuid()}-{event['run']}"
        return "nothing"

    def saving(self) -> bool:
        return any((self.folder / "checkpoint").glob(".step-*"))


def processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def left(run: Run) -> list[str]:
    """What is left of a run that must not be."""
    found = []
    for process in processes():
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(run.folder) in command:
            found.append(f"process {process.name}")
    found += [str(path) for path in run.folder.rglob(".*")]
    memory = Path("/dev/shm") / run.memory()
    return [*found, str(memory)] if memory.exists() else found


def until(run: Run, what: str, condition: Any, seconds: float = 300) -> bool:
    """Wait; False if the run ended before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if run.process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            sys.exit(f"{run.folder}: {what} did not come within {seconds:g} s; see {run.log}")
        time.sleep(0.002)
    return True


def kill(run: Run, name: str, kind: str, drawn: random.Random, number: int) -> Kill | None:
    """Kill once and see how it goes on; None: the run ended before."""
    after = len(run.restarted())
    begun = run.step()
    delay = drawn.uniform(0, 0.3)
    if not until(run, "a step", lambda: run.step() > begun and run.workers()):
        return None
    time.sleep(delay)
    if kind == "saving" and not until(run, "a checkpoint", run.saving):
        return None
    ranks = run.workers()
    if run.process.poll() is not None or not ranks or run.step() >= STEPS - 1:
        return None
    rank = drawn.choice(sorted(ranks))
    before = run.step()
    began = time.monotonic()
    if kind == "launcher":
        run.process.kill()
        run.start_again()
    else:
        if kind != "worker":
            os.kill(ranks[rank], signal.SIGSTOP)
            gone = "*" if kind == "both" else str(rank)  # of chimera's two workers each is the other's twin
            for path in (Path("/dev/shm") / run.memory()).glob(f"rank-{gone}.*"):
                path.unlink()
        os.kill(ranks[rank], signal.SIGKILL)
    if not until(run, "a restart", lambda: len(run.restarted()) > after):
        return None
    event = run.restarted()[-1]
    until(run, "the next step", lambda: run.step() > event["step"])
    seconds = time.monotonic() - began
    until(run, "the step after the kill", lambda: run.step() > before)
    whole = round(time.monotonic() - began, 2)
    again = max(0, before - event["step"])
    return Kill(
        name, SCHEMES[name][0], kind, before, event["source"], again, round(seconds, 2), number, False, whole
    )


def curve(run: Run) -> list[tuple[float, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in run.metrics()]


def undisturbed(name: str, folder: Path, weights: str = "") -> list[tuple[float, float, float]]:
    run = Run(name, folder / f"whole {name} {weights}".strip(), weights=weights)
    if run.process.wait():
        sys.exit(f"{name}: the undisturbed run failed; see {run.log}")
    return curve(run)


def beside(folder: Path, each: int, drawn: random.Random, seed: int) -> list[Kill]:
    """Kills of a twin, in turn with kills of both: the first goes on from memory, the second cannot."""
    rows = []
    for weights in BESIDE:
        whole = undisturbed("chimera", folder, weights)
        run = Run("chimera", folder / weights, restarts=2 * each, weights=weights)
        until(run, "a checkpoint", lambda run=run: run.step() > CHECKPOINT_EVERY, 600)
        found = []
        for number in range(each):
            row = kill(run, "chimera", ("machine", "both")[number % 2], drawn, seed)
            if row is None:
                break
            found.append(row)
            print(f"{weights}: {row}", flush=True)
        right = run.process.wait() == 0 and curve(run) == whole and not left(run)
        rows += [replace(row, right=right, weights=weights) for row in found]
    return rows


def table_beside(rows: list[Kill]) -> str:
    lines = [
        f"{len(rows)} kills of chimera to compare twins and the checkpoint, "
        f"{sum(row.right for row in rows)} in runs that ended with the undisturbed curve; medians",
        "",
        f"{'weights':12} {'went on from':12} {'kills':>5} {'made again':>10} {'s to next step':>14}  "
        "s to the step after the kill",
    ]
    for weights in BESIDE:
        for source in ("memory", "checkpoint"):
            found = [row for row in rows if (row.weights, row.source) == (weights, source)]
            if found:
                again, seconds, whole = (
                    statistics.median(getattr(row, name) for row in found)
                    for name in ("again", "seconds", "whole_seconds")
                )
                lines.append(
                    f"{weights:12} {source:12} {len(found):5} {again:10.1f} {seconds:14.1f}  {whole:28.1f}"
                )
    return "\n".join(lines) + "\n"


def table(rows: list[Kill]) -> str:
    compared = [row for row in rows if row.weights]
    rows = [row for row in rows if not row.weights]
    lines = [
        f"{len(rows)} kills in {len({(row.scheme, row.run) for row in rows})} runs of {STEPS} steps, a "
        f"checkpoint every {CHECKPOINT_EVERY}; {sum(row.right for row in rows)} of them in runs that ended "
        "with the undisturbed curve and left nothing behind",
        "",
        f"{'scheme':20} {'killed':9} {'kills':>5}  {'went on from':12} {'made again':>10}  s to next step",
    ]
    for scheme in SCHEMES:
        for kind in KINDS:
            for source in ("memory", "checkpoint", "beginning"):
                found = [r for r in rows if (r.scheme, r.kind, r.source) == (scheme, kind, source)]
                if not found:
                    continue
                again = f"{min(r.again for r in found)} to {max(r.again for r in found)}"
                median = statistics.median(row.seconds for row in found)
                lines.append(f"{scheme:20} {kind:9} {len(found):5}  {source:12} {again:>10}  {median:14.1f}")
    for source in ("memory", "checkpoint"):
        seconds = [row.seconds for row in rows if row.source == source and row.kind != "launcher"]
        if seconds:
            median = statistics.median(seconds)
            lines.append(f"from {source}: {median:.1f} s to the next step, median of {len(seconds)}")
    return "\n".join(lines) + "\n" + (f"\n{table_beside(compared)}" if compared else "")


def keep(rows: list[Kill], about: dict[str, Any]) -> None:
    """Add rows to those that are kept, and write the table of all."""
    path = RESULTS / "kills.json"
    kept = json.loads(path.read_text()) if path.exists() else {"machines": [], "kills": []}
    if about not in kept["machines"]:
        kept["machines"].append(about)
    kept["kills"] += [asdict(row) for row in rows]
    path.write_text(json.dumps(kept, indent=1) + "\n")
    (RESULTS / "kills.txt").write_text(
        f"{machine_line(about)}\n\n{table([Kill(**row) for row in kept['kills']])}"
    )


def main() -> None:
    parser = arguments(__doc__, "kills.*")
    parser.add_argument("--kills", type=int, default=20, help="end after so many")
    parser.add_argument("--minutes", type=float, default=8, help="begin no other run after so many")
    parser.add_argument("--each", type=int, default=6, help="kills of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", action="store_true", help="compare twins and the checkpoint")
    options = parser.parse_args()
    drawn, rows, wrong = random.Random(options.seed), [], 0
    about, began = machine(), time.monotonic()
    curves: dict[str, list[tuple[float, float, float]]] = {}
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    if options.beside:
        rows = beside(folder, options.each, drawn, options.seed)
        wrong = sum(not row.right for row in rows)
    for number in range(0 if options.beside else 10**6):
        name = list(SCHEMES)[(number + options.seed) % len(SCHEMES)]
        if len(rows) >= options.kills or time.monotonic() - began > 60 * options.minutes:
            break
        if name not in curves:
            curves[name] = undisturbed(name, folder)
        run = Run(name, folder / f"{number} {name}", restarts=2 * options.each)
        found = []
        for _ in range(options.each):
            row = kill(
                run,
                name,
                drawn.choices(list(KINDS), list(KINDS.values()))[0],
                drawn,
                1000 * options.seed + number,
            )
            if row is None:
                break
            found.append(row)
        code = run.process.wait()
        problems = [] if code == 0 else [f"exit code {code}"]
        if curve(run) != curves[name]:
            problems.append("another curve")
        problems += left(run)
        wrong += bool(problems)
        told = ", ".join(f"{r.kind} at {r.step}: {r.source} {r.seconds:.1f} s" for r in found)
        print(f"{name}: {told or 'no kill'}: {'; '.join(problems) or 'right'}", flush=True)
        found = [replace(row, right=not problems) for row in found]
        rows += found
        if options.keep:
            keep(found, about)
    if options.beside and options.keep:
        keep(rows, about)
    print(table(rows))
    if wrong:
        sys.exit(f"{wrong} runs were not right; see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
