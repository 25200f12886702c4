"""Two nodes that lose each other: runs go on by themselves, or end with the reason in time.

    python benchmarks/node_faults.py [--run "NAME, NAME" ...] [--times 1] [--keep]

Nodes are network namespaces of this machine, joined by a link of their own (``ip netns``, ``veth``,
``tc``): it needs root on Linux, and says so otherwise. On each torchrun starts two workers (``--a-node``) of
a chimera that has as many stages as workers; a message's timeout is 10 s. A run meets one fault or several,
each some steps after it went on from the one before. Without a word more it is to end with 0 and the
undisturbed curve, bit for bit, or within 1e-6 relative where fewer workers went on.

* ``cut 5 s``: the link is cut for 5 s;
* ``cut``: for good; the workers of the node without torchrun's store have to end with a reason, and then its
  torchrun, once TCP gives the connection up; the other node goes on alone;
* ``frozen``: all processes of a node are stopped (SIGSTOP) until the run has ended; the other one goes on
  alone, and the node that thaws has to end and to write nothing;
* ``stopped``: one worker is stopped for good;
* ``lost``: a node is gone, with its memory; the other one goes on alone;
* ``replaced``: a node is gone, and a new one comes after 3 s;
* ``slow``: 20 ms more each way, and 1 % of packets lost, from then on;
* ``full``: the disk of the run's folder is full for 10 s.

Seconds are from the fault to the first line of events.jsonl about it ("told"), to the next step after that,
and to the end of the last worker on a node that is cut off or thaws. ``--keep`` adds the rows to
benchmarks/results/node_faults.json and writes its table; what is kept already counts for ``--times``. Several
may run side by side.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kills import processes
from kit import RESULTS, arguments, machine_line

STEPS, TIMEOUT_SECONDS, PATIENCE_SECONDS = 60, 10, 240

Curve = list[tuple[float, float, float]]

TCP_TRIES = "6"
"""How often TCP sends again before it gives up, about 25 s; with Linux's 15 torchrun waits for 15 minutes."""

ADDRESSES = "10.213.77.1", "10.213.77.2"

KEYS: dict[str, Any] = {
    "model.layers": 4,
    "model.hidden": 32,
    "model.heads": 2,
    "model.positions": 32,
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
    ended_seconds: float | None = None
    a_node: int = 2


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
            ip("netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_retries2={TCP_TRIES}")
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

    def __init__(
        self, folder: Path, names: tuple[str, str], a_node: int, *, fewer_after: float | None
    ) -> None:
        self.folder, self.names, self.a_node = folder, names, a_node
        self.more = [] if fewer_after is None else ["--set", f"train.fewer_after={fewer_after:g}"]
        self.began = time.monotonic()
        self.agents = [self.start(0), self.start(1)]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        command = [
            *("ip", "netns", "exec", self.names[node], sys.executable, "-m", "torch.distributed.run"),
            *(
                "--nnodes",
                "1:2" if self.more else "2",
                "--nproc-per-node",
                str(self.a_node),
                "--max-restarts",
                "5",
            ),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "faults"),
            *(
                "--rdzv-conf",
                f"is_host={1 - node},last_call_timeout=5,keep_alive_interval=1,join_timeout=120",
            ),
            *("--local-addr", ADDRESSES[node], "-m", "counterflow", "train", "--scheme", "chimera"),
            *("--steps", str(STEPS), "--out", str(self.folder), *self.more),
            *("--set", f"schedule.stages={2 * self.a_node}"),
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

    def curve(self) -> Curve:
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
        self.signal(node, signal.SIGKILL)
        for rank in range(self.a_node * node, self.a_node * (node + 1)):
            for path in Path("/dev/shm").glob(f"counterflow-{os.getuid()}-{self.name()}/rank-{rank}.*"):
                path.unlink(missing_ok=True)

    def name(self) -> str:
        return next((event["run"] for event in self.lines("events.jsonl") if event["event"] == "began"), "-")

    def signal(self, node: int, what: signal.Signals) -> None:
        for pid in self.of_node(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

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
            self.signal(node, signal.SIGKILL)
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
        run.signal(1, signal.SIGSTOP)
    elif fault == "stopped":
        os.kill(random.choice(run.workers(1)), signal.SIGSTOP)
    elif fault == "full":
        filler = run.folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(10)
        filler.unlink()


FAULTS = "cut 5 s", "cut", "frozen", "stopped", "lost", "replaced", "slow", "full"
GOES_ON_ALONE = {"lost", "cut", "frozen"}


def one(faults: Sequence[str], a_node: int, root: Path, whole: Curve) -> tuple[list[Row], Curve]:
    """A run that meets faults, and its curve.

    Args:
        faults: one after the other.
        a_node: workers of each node.
        root: where the run's folder and its logs go.
        whole: the undisturbed curve; empty: not known.
    """
    folder = root / f"{'-'.join(faults).replace(' ', '-') or 'none'}-{time.monotonic_ns()}"
    folder.mkdir()
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(nodes())
        if "full" in faults:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
        alone = not GOES_ON_ALONE.isdisjoint(faults)
        run = Run(folder, names, a_node, fewer_after=5 if alone else None)
        stack.callback(run.end)
        problem, gone = "", None
        try:
            for number, fault in enumerate(faults):
                found = met(fault, run, STEPS * number // len(faults), STEPS // 2 // len(faults))
                if found is None:
                    break
                rows.append(found[0])
                gone = found[1]
            # A node that is cut off or gone is not waited for.
            waited = run.agents[:1] if alone else run.agents
            run.until("the end", lambda: all(agent.poll() is not None for agent in waited))
            codes = [agent.returncode for agent in waited]
            problem = f"exit codes {codes}" if any(codes) else ""
            curve = run.curve()
            if "frozen" in faults:
                run.signal(1, signal.SIGCONT)
                gone = Gone(run)
            if gone:
                rows[-1] = replace(rows[-1], ended_seconds=gone.join())
        except (TimeoutError, IndexError) as error:
            problem = str(error) or type(error).__name__
            curve = run.curve()
        events = run.lines("events.jsonl")
        largest = 0.0
        if whole and not problem:
            largest, problem = compared(curve, whole, 1e-6 if alone else 0)
        if folder.is_dir() and not problem:
            problem = next((f"left: {path.name}" for path in folder.rglob(".*")), "")
        if not problem and run.curve() != curve:
            problem = "written to after the end"
    workers = next((event["workers"] for event in events[::-1] if event["event"] == "fewer"), 2 * a_node)
    return [
        replace(row, workers=workers, largest=largest, problem=problem, a_node=a_node) for row in rows
    ], curve


def met(fault: str, run: Run, first: int, within: int) -> tuple[Row, Gone | None] | None:
    """What came of a fault in a run, at one of so many steps from the first one on.

    None: the run ended before.
    """
    at = max(8, first) + random.randrange(within)
    run.until("a step", lambda: run.step() >= at and run.workers(1))
    if run.step() == STEPS:
        return None
    step, known, began = run.step(), len(run.lines("events.jsonl")), time.monotonic()
    do(fault, run)
    gone = Gone(run) if fault == "cut" else None

    def events(name: str = "") -> list[dict[str, Any]]:
        return [event for event in run.lines("events.jsonl")[known:] if name in event["event"]]

    told = next_seconds = None
    source = ""
    moved = run.step()

    def passed() -> bool:
        """Without a word: a short cut may."""
        return run.step() == STEPS or (fault == "cut 5 s" and run.step() > moved + 1)

    if run.until("the end or a failure", lambda: events() or passed()) and events():
        told = datetime.fromisoformat(events()[0]["time"]).timestamp() - time.time()
        told += time.monotonic() - began
        run.until("a restart", lambda: events("restarted"))
        source, reached = events("restarted")[-1]["source"], events("restarted")[-1]["step"]
        run.until("the next step", lambda: run.step() > reached)
        next_seconds = time.monotonic() - began
    elif fault == "cut 5 s":
        next_seconds = time.monotonic() - began
    return Row(fault, step, told, next_seconds, source, 4, 0.0, ""), gone


class Gone:
    """When the last worker of the second node was gone, seen from a thread of its own."""

    def __init__(self, run: Run) -> None:
        self._run, self._began, self.seconds = run, time.monotonic(), math.inf
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while self._run.workers(1):
            time.sleep(0.5)
        self.seconds = time.monotonic() - self._began

    def join(self) -> float:
        """Wait for it, and then for the node's torchrun."""
        self._thread.join(PATIENCE_SECONDS)
        agent = self._run.agents[1]
        self._run.until("the end of the other node", lambda: agent.poll() is not None)
        return self.seconds


def compared(curve: Curve, whole: Curve, tolerance: float) -> tuple[float, str]:
    """The largest relative difference of the losses, and what is wrong with it."""
    if [row[0] for row in curve] != [row[0] for row in whole]:
        return 0.0, "other steps"
    largest = max(abs(a[1] - b[1]) / abs(b[1]) for a, b in zip(curve, whole, strict=True))
    return largest, "another curve" if largest > tolerance else ""


def table(rows: list[Row]) -> str:
    lines = [
        f"{'fault':8} {'times':>5} {'right':>5}  {'s to told':>9} {'longest':>7}  {'s to next step':>14}"
        f" {'longest':>7}  {'s to end':>8} {'longest':>7}  went on from",
    ]
    for fault in FAULTS:
        found = [row for row in rows if row.fault == fault]
        if not found:
            continue
        sources = Counter(row.source or "without a restart" for row in found)
        lines.append(
            f"{fault:8} {len(found):5} {sum(not row.problem for row in found):5}  "
            f"{_of([row.told_seconds for row in found], 9)}  {_of([row.next_seconds for row in found], 14)}  "
            f"{_of([row.ended_seconds for row in found], 8)}  "
            + ", ".join(f"{source} {times}" for source, times in sources.most_common())
        )
    lines += [f"{row.fault} at step {row.step}: {row.problem}" for row in rows if row.problem]
    return "\n".join(lines) + "\n"


def _of(seconds: list[float | None], width: int) -> str:
    """The median and the longest."""
    known = [one for one in seconds if one is not None]
    cells = (f"{statistics.median(known):.1f}", f"{max(known):.1f}") if known else ("–", "–")
    return f"{cells[0]:>{width}} {cells[1]:>7}"


@contextlib.contextmanager
def kept_rows() -> Iterator[list[Row]]:
    """The kept rows, for one process at a time; those that are there at the end are kept."""
    path = RESULTS / "node_faults.json"
    with (Path(tempfile.gettempdir()) / "node_faults.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
        before = len(rows)
        yield rows
        if len(rows) > before:
            path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
            (RESULTS / "node_faults.txt").write_text(f"{machine_line()}\n\n{table(rows)}")


def main() -> None:
    parser = arguments(__doc__, "node_faults.*")
    parser.add_argument("--run", action="append", help="the faults of a run, with commas between them")
    parser.add_argument("--times", type=int, default=1, help="so many of each fault")
    parser.add_argument("--a-node", type=int, default=2, help="workers of each node")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if sys.platform != "linux" or os.getuid():
        sys.exit("nodes are network namespaces: this needs root on Linux")
    runs = [[fault.strip() for fault in run.split(",")] for run in options.run or FAULTS]
    if unknown := {fault for run in runs for fault in run} - set(FAULTS):
        sys.exit(f"no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # nodes are taken away then too
    random.seed(options.seed)
    root = Path(tempfile.mkdtemp(prefix="node-faults-"))
    _, whole = one((), options.a_node, root, [])
    if len(whole) != STEPS:
        sys.exit(f"the undisturbed run made {len(whole)} steps; see {root}")
    made: list[Row] = []
    while True:
        with kept_rows() as rows:
            counted = Counter(row.fault for row in (rows if options.keep else made) if not row.problem)
        due = [run for run in runs if any(counted[fault] < options.times for fault in run)]
        if not due or sum(bool(row.problem) for row in made) > options.times:
            break
        for run in due:
            found, _ = one(run, options.a_node, root, whole)
            made += found
            for row in found:
                print(json.dumps(asdict(row)), flush=True)
            if options.keep:
                with kept_rows() as rows:
                    rows.extend(found)
    print(table(made))
    if any(row.problem for row in made):
        sys.exit(f"logs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
