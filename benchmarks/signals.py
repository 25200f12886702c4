"""A signal at any moment of ``counterflow train`` ends it, soon, and leaves no process behind.

    python benchmarks/signals.py [--keep]

Twenty moments of a run of two processes, each found by what the run shows: a line of its output, a process
that it starts, a file that it writes. At each the whole process group gets Ctrl-C, as from a terminal, and at
some of them SIGTERM or SIGHUP, or the command alone gets it. Told are the exit code, and the seconds until
the command has ended and until none of its processes is there. Right is 130 after Ctrl-C and 75 after another
signal; in its first tenths of a second, before the command listens, it may die by the signal itself, which a
shell calls 130 too.
``--keep`` writes benchmarks/results/signals.txt. Linux only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit import arguments, keep, machine_line

LIMIT_SECONDS = 120.0

COMMAND = [sys.executable, "-m", "counterflow", "train", "--scheme", "dapple", "--workers", "2"]
OPTIONS = {
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 2,
    "model.positions": 32,
    "train.samples": 16,
    "train.threads": 1,
    "train.evaluate_every": 40,
    "train.checkpoint_every": 20,
}


class Run:
    """A run that was just started; each question about it is answered by looking once."""

    def __init__(self, folder: Path, options: dict[str, object], more: list[str]) -> None:
        self.folder = folder
        sets = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
        self.output = folder.parent / f"{folder.name}.out"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *sets, "--steps", "1000000", "--out", str(folder), *more],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # What a terminal gives, whatever this process has.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )

    def says(self, text: str) -> bool:
        return text in self.output.read_text()

    def others(self) -> list[tuple[int, str]]:
        """Its processes but the command itself: of its session, that are not dead."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                state, _, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ValueError, IndexError):
                continue
            if int(session) == self.process.pid != int(entry.name) and state not in "ZX":
                found.append((int(entry.name), line))
        return found

    def servers(self) -> int:
        return sum("multiprocessing.forkserver" in line for _, line in self.others())

    def workers(self) -> int:
        """Processes beside the one that they are forked from and the tracker; they have its command line."""
        return max(0, self.servers() - 1)

    def maps(self, name: str) -> bool:
        """Whether the command has loaded a library."""
        try:
            return name in Path(f"/proc/{self.process.pid}/maps").read_text()
        except OSError:
            return False

    def lines(self) -> int:
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def has(self, pattern: str) -> bool:
        return any(self.folder.glob(pattern))

    def threads(self) -> int:
        """Of the worker with most."""
        counts = [0]
        for pid, line in self.others():
            if "forkserver" in line:
                try:
                    counts.append(len(list(Path(f"/proc/{pid}/task").iterdir())))
                except OSError:
                    continue
        return max(counts)


@dataclass(frozen=True)
class Moment:
    """When, how it is seen, and what is sent; ``again`` is sent once more as soon as it was."""

    name: str
    seen: Callable[[Run], bool]
    number: signal.Signals = signal.SIGINT
    alone: bool = False
    again: bool = False
    early: bool = False
    local: bool = False


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

MOMENTS = [
    Moment("the process is there", lambda _: True, early=True),
    Moment("torch is being loaded", lambda run: run.maps("libtorch_cpu")),
    Moment("torch is being loaded", lambda run: run.maps("libtorch_cpu"), TERM),
    Moment("the run's folder is there", lambda run: run.has("*")),
    Moment("it says that workers start", lambda run: run.says("starting 2")),
    Moment("it says that workers start", lambda run: run.says("starting 2"), TERM),
    Moment("it says that workers start", lambda run: run.says("starting 2"), HUP),
    Moment("it says that workers start, threads", lambda run: run.says("starting 2"), local=True),
    Moment("what they are forked from loads", lambda run: run.servers() >= 1),
    Moment("what they are forked from loads", lambda run: run.servers() >= 1, alone=True),
    Moment("what they are forked from loads", lambda run: run.servers() >= 1, again=True),
    Moment("one worker is there", lambda run: run.workers() >= 1),
    Moment("both workers are there", lambda run: run.workers() >= 2),
    Moment("both workers are there", lambda run: run.workers() >= 2, TERM),
    Moment("both workers are there", lambda run: run.workers() >= 2, HUP, alone=True),
    Moment("workers have connected", lambda run: run.workers() >= 2 and run.threads() >= 6),
    Moment("the first step is made", lambda run: run.lines() >= 1),
    Moment("the first step is made", lambda run: run.lines() >= 1, TERM),
    Moment("steps are made, threads", lambda run: run.lines() >= 10, local=True),
    Moment("a checkpoint is being written", lambda run: run.has("checkpoint/.step-*draft")),
    Moment("a checkpoint is there", lambda run: run.has("checkpoint/step-*"), again=True),
    Moment("an evaluation was made", lambda run: run.says("validation loss"), HUP),
]


def outcome(moment: Moment, folder: Path) -> tuple[bool, str]:
    """Whether a run ended as it should at a moment, and what was seen."""
    options = OPTIONS | ({"pipeline.transport": "local"} if moment.local else {})
    run = Run(folder, options, [])
    began = time.monotonic()
    while not moment.seen(run):
        if run.process.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
            os.killpg(run.process.pid, signal.SIGKILL)
            return False, f"the moment was never seen\n{run.output.read_text()}"
    send = os.kill if moment.alone else os.killpg
    sent = time.monotonic()
    send(run.process.pid, moment.number)
    if moment.again:
        send(run.process.pid, moment.number)
    try:
        code = run.process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        return False, f"never ended\n{run.output.read_text()}"
    seconds = time.monotonic() - sent
    while run.others() and time.monotonic() - sent < LIMIT_SECONDS:
        time.sleep(0.02)
    gone = time.monotonic() - sent
    left = run.others()
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    right = {130 if moment.number is INT else 75} | ({-moment.number} if moment.early else set())
    ok = code in right and not left and "Traceback" not in run.output.read_text()
    told = f"exit {code:4} after {seconds:4.1f} s, no process after {gone:4.1f} s"
    return ok, told if ok else f"{told}, {len(left)} left\n{run.output.read_text()[-2000:]}"


def main() -> None:
    """Send them all."""
    parser = arguments(__doc__, "signals.*")
    options = parser.parse_args()
    lines = [
        machine_line(),
        "",
        f"{len(MOMENTS)} moments of `counterflow train` at which a signal was sent: what it ended with.",
        "",
    ]
    print("\n".join(lines))
    wrong = 0
    with tempfile.TemporaryDirectory() as root:
        for number, moment in enumerate(MOMENTS):
            ok, told = outcome(moment, Path(root) / f"run-{number}")
            wrong += not ok
            to = "the command" if moment.alone else "all"
            times = ", twice" if moment.again else ""
            sent = f"{moment.number.name} to {to}{times}"
            lines.append(f"{'ok   ' if ok else 'WRONG'} {moment.name:36} {sent:28} {told}")
            print(lines[-1], flush=True)
    lines += ["", f"{len(MOMENTS) - wrong} of {len(MOMENTS)} as they should be"]
    print(lines[-1])
    if options.keep:
        keep("signals", lines)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
