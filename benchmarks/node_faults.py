"""Two nodes that lose each other: runs go on by themselves, or end with the reason in time.

    python benchmarks/node_faults.py [--fault NAME ...] [--times 1] [--keep]

Nodes are network namespaces of this machine, joined by a link of their own (``ip netns``, ``veth``,
``tc``): it needs root on Linux, and says so otherwise. On each torchrun starts two workers of a chimera of
four stages; a message's timeout is 10 s. Without a word more the run is to end with 0 and the undisturbed
curve, bit for bit, or within 1e-6 relative where fewer workers went on.

* ``lost``: a node is gone, with its memory; ``train.fewer_after`` lets the other one go on alone;
* ``replaced``: a node is gone, and a new one comes after 3 s;
* ``cut 5 s``: the link is cut for 5 s;
* ``cut``: for good; the node without torchrun's store has to end with a reason, the other one goes on alone;
* ``slow``: 20 ms more each way, and 1 % of packets lost, from then on;
* ``frozen``: a worker is stopped (SIGSTOP) for good;
* ``full``: the disk of the run's folder is full for 10 s.

Seconds are from the fault to the first line of events.jsonl about it ("told"), and to the next step after
that. ``--keep`` adds the rows to benchmarks/results/node_faults.json and writes its table.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kills import processes
from machine import machine, shown

RESULTS = Path(__file__).parent / "results"

STEPS, TIMEOUT_SECONDS, PATIENCE_SECONDS = 60, 10, 240

ADDRESSES = "10.213.77.1", "10.213.77.2"

KEYS: dict[str, Any] = {
    "model.layers": 4,
    "model.hidden": 32,
    "model.heads": 2,
    "model.positions": 32,
    "schedule.stages": 4,
    "train.samples": 16,
    "train.threads": 1,
    "train.evaluate_every": 0,
    "train.checkpoint_every": 8,
    "pipeline.timeout_seconds": TIMEOUT_SECONDS,
    "train.resume": "auto",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a fault; seconds are None where it did not come to that."""

    fault: str
    step: int
    told_seconds: float | None
    next_seconds: float | None
    source: str
    workers: int
    largest: float
    problem: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def nodes() -> Iterator[tuple[str, str]]:
    """Two namespaces with a link."""
    names = tuple(f"cf{os.getpid() % 100_000}{letter}" for letter in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "cf0", "netns", names[0], "type", "veth", "peer", "name", "cf0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cf0")
            ip("-n", name, "link", "set", "cf0", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


class Run:
    """A run on two nodes."""

    def __init__(self, folder: Path, names: tuple[str, str], *, fewer_after: float | None) -> None:
        self.folder, self.names = folder, names
        self.more = [] if fewer_after is None else ["--set", f"train.fewer_after={fewer_after:g}"]
        self.began = time.monotonic()
        self.agents = [self.start(0), self.start(1)]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        command = [
            *("ip", "netns", "exec", self.names[node], sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1:2" if self.more else "2", "--nproc-per-node", "2", "--max-restarts", "5"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "faults"),
            *(
                "--rdzv-conf",
                f"is_host={1 - node},last_call_timeout=5,keep_alive_interval=1,join_timeout=120",
            ),
            *("--local-addr", ADDRESSES[node], "-m", "counterflow", "train", "--scheme", "chimera"),
            *("--steps", str(STEPS), "--out", str(self.folder), *self.more),
            *(part for key, value in KEYS.items() for part in ("--set", f"{key}={value}")),
        ]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "cf0",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torch 2.13 tells a new node of no store
        }
        with (self.folder.parent / f"{self.folder.name}.{node}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        found = []
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def curve(self) -> list[tuple[float, float, float]]:
        return [
            (line["step"], line["loss"], line["grad_norm"])
            for line in self.lines("metrics.jsonl")
            if "loss" in line
        ]

    def step(self) -> int:
        return max((int(step) for step, *_ in self.curve()), default=0)

    def of_node(self, node: int) -> list[int]:
        """The processes of a node, its agent first."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.names[node]], capture_output=True, text=True, check=False
        )
        return sorted(map(int, found.stdout.split()))

    def workers(self, node: int) -> list[int]:
        return [pid for pid in self.of_node(node) if pid in self._mapping()]

    def _mapping(self) -> set[int]:
        found = set()
        for process in processes():
            with contextlib.suppress(OSError):
                if "/dev/shm/counterflow-" in (process / "maps").read_text():
                    found.add(int(process.name))
        return found

    def kill(self, node: int) -> None:
        """Let a node be gone, and its memory: the copies of its two ranks."""
        for pid in self.of_node(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in (2 * node, 2 * node + 1):
            for path in Path("/dev/shm").glob(f"counterflow-{os.getuid()}-{self.name()}/rank-{rank}.*"):
                path.unlink(missing_ok=True)

    def name(self) -> str:
        return next((event["run"] for event in self.lines("events.jsonl") if event["event"] == "began"), "-")

    def until(self, what: str, condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait; False if all agents ended before."""
        deadline = time.monotonic() + seconds
        while not condition():
            if all(agent.poll() is not None for agent in self.agents):
                return bool(condition())
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come within {seconds:g} s")
            time.sleep(0.05)
        return True

    def end(self) -> None:
        for node in (0, 1):
            for pid in self.of_node(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()
        shutil.rmtree(f"/dev/shm/counterflow-{os.getuid()}-{self.name()}", ignore_errors=True)


def link(run: Run, state: str) -> None:
    ip("-n", run.names[1], "link", "set", "cf0", state)


def do(fault: str, run: Run) -> None:
    """Bring a fault about; a short one is over when it returns."""
    if fault in ("lost", "replaced"):
        run.kill(1)
        if fault == "replaced":
            time.sleep(3)
            run.agents[1] = run.start(1)
    elif fault.startswith("cut"):
        link(run, "down")
        if fault == "cut 5 s":
            time.sleep(5)
            link(run, "up")
    elif fault == "slow":
        for name in run.names:
            words = ("tc", "qdisc", "add", "dev", "cf0", "root", "netem", "delay", "20ms", "loss", "1%")
            subprocess.run(["ip", "netns", "exec", name, *words], check=True)
    elif fault == "frozen":
        os.kill(random.choice(run.workers(1)), signal.SIGSTOP)
    elif fault == "full":
        filler = run.folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(10)
        filler.unlink()


FAULTS = "lost", "replaced", "cut 5 s", "cut", "slow", "frozen", "full"
GOES_ON_ALONE = "lost", "cut"


def one(fault: str, root: Path, whole: list[tuple[float, float, float]] | None) -> tuple[Row, Run]:
    """A run with a fault; without one where ``whole`` is not known."""
    folder = root / f"{fault.replace(' ', '-')}-{time.monotonic_ns()}"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(nodes())
        if fault == "full":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
        run = Run(folder, names, fewer_after=5 if fault in GOES_ON_ALONE else None)
        stack.callback(run.end)
        told = after = None
        step, source, problem = 0, "", ""
        try:
            if whole is not None:
                at = random.randrange(8, STEPS // 2)
                run.until("a step", lambda: run.step() >= at and run.workers(1))
                step, known, began = run.step(), len(run.lines("events.jsonl")), time.monotonic()
                do(fault, run)
                events = lambda: run.lines("events.jsonl")[known:]  # noqa: E731
                restarted = lambda: [e for e in events() if e["event"] == "restarted"]  # noqa: E731
                if run.until("the end or a failure", lambda: events() or run.step() == STEPS) and events():
                    told = time.monotonic() - began
                    run.until("a restart", restarted)
                    source, reached = restarted()[-1]["source"], restarted()[-1]["step"]
                    run.until("the next step", lambda: run.step() > reached)
                    after = time.monotonic() - began
            # A node that is cut off or gone is not waited for.
            waited = run.agents[:1] if fault in GOES_ON_ALONE else run.agents
            run.until("the end", lambda: all(agent.poll() is not None for agent in waited))
            codes = [agent.returncode for agent in waited]
            if any(codes):
                problem = f"exit codes {codes}"
            if fault == "cut":
                run.until("the end of the other node", lambda: run.agents[1].poll() is not None, 180)
        except (TimeoutError, IndexError) as error:
            problem = str(error) or type(error).__name__
        curve = run.curve()
        workers = next((e["workers"] for e in run.lines("events.jsonl")[::-1] if e["event"] == "fewer"), 4)
        largest = 0.0
        if whole is not None and not problem:
            if [row[0] for row in curve] != [row[0] for row in whole]:
                problem = "other steps"
            else:
                largest = max(abs(a[1] - b[1]) / abs(b[1]) for a, b in zip(curve, whole, strict=True))
                if largest > (1e-6 if fault in GOES_ON_ALONE else 0):
                    problem = "another curve"
        if folder.is_dir() and not problem:
            drafts = [str(path) for path in folder.rglob(".*")]
            problem = f"left: {drafts[0]}" if drafts else ""
        saved = run.curve()
    run.curve = lambda: saved  # type: ignore[method-assign]
    return Row(fault, step, told, after, source, workers, largest, problem), run


def table(rows: list[Row]) -> str:
    lines = [
        f"{'fault':9} {'times':>5} {'right':>5}  {'s to told':>9} {'s to next step':>14}  went on from",
    ]
    for fault in FAULTS:
        found = [row for row in rows if row.fault == fault]
        if not found:
            continue
        told = [row.told_seconds for row in found if row.told_seconds is not None]
        after = [row.next_seconds for row in found if row.next_seconds is not None]
        sources = sorted({row.source or "no restart" for row in found})
        lines.append(
            f"{fault:9} {len(found):5} {sum(not row.problem for row in found):5}  "
            f"{f'{statistics.median(told):.1f}' if told else '–':>9} "
            f"{f'{statistics.median(after):.1f}' if after else '–':>14}  {', '.join(sources)}"
        )
    lines += [f"{row.fault} at step {row.step}: {row.problem}" for row in rows if row.problem]
    return "\n".join(lines) + "\n"


def keep(row: Row, about: dict[str, object]) -> None:
    """Add a row to the kept ones, and write their table."""
    path = RESULTS / "node_faults.json"
    kept = [*(json.loads(path.read_text()) if path.exists() else []), asdict(row)]
    path.write_text(json.dumps(kept, indent=1) + "\n")
    text = table([Row(**each) for each in kept])
    (RESULTS / "node_faults.txt").write_text(f"{shown(about)}\n\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if sys.platform != "linux" or os.getuid():
        sys.exit("nodes are network namespaces: this needs root on Linux")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # nodes are taken away then too
    random.seed(options.seed)
    about = machine()
    root = Path(tempfile.mkdtemp(prefix="node-faults-"))
    row, whole = one("none", root, None)
    if row.problem:
        sys.exit(f"the undisturbed run: {row.problem}; see {root}")
    rows = []
    for _ in range(options.times):
        for fault in options.fault or FAULTS:
            row, _run = one(fault, root, whole.curve())
            print(json.dumps(asdict(row)), flush=True)
            rows.append(row)
            if options.keep:
                keep(row, about)
    print(table(rows))
    if any(row.problem for row in rows):
        sys.exit(f"logs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
