"""The commands of docs/planning.md for two machines, run on two that are emulated here.

    python benchmarks/two_nodes.py [--megabits 100] [--delay 5] [--keep]

Needs root, and Linux: two network namespaces behind a relay (``namespaces.py``) that know each other as node0
and node1. Commands that begin with torchrun run in both, others in the first. ``--keep`` writes
results/two_nodes.txt: what the first node printed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kit import RESULTS, arguments, machine_line
from namespaces import all_done, inside, nodes

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
NAMED = ["unshare", "--uts", "sh", "-c", 'echo $0 > /proc/sys/kernel/hostname; exec "$@"']
"""Before a host's name and a command: torchrun tells the others the name of its host."""
PROGRAMS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "counterflow": [sys.executable, "-m", "counterflow"],
}


def commands() -> list[str]:
    """Those of the page's part on two machines."""
    part = re.search(r"^## Two machines\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    if part is None:
        raise SystemExit(f"{PAGE} has no part on two machines")
    return re.findall(r"^\$ (.*)$", part[1], re.MULTILINE)


@contextmanager
def known(names: Sequence[str]) -> Iterator[None]:
    """All know each other by name."""
    folders = [Path("/etc/netns") / name for name in names]
    hosts = ["127.0.0.1 localhost", *(f"10.77.0.{i + 1} node{i}" for i in range(len(names)))]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(hosts) + "\n")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Read the command line and do what it says."""
    parser = arguments(__doc__, "two_nodes.txt")
    parser.add_argument("--megabits", type=float, default=100.0)
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds one way")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is taken down
    about = f"{machine_line()}; {given.megabits:g} Mbit/s, {given.delay:g} ms"
    print(about, flush=True)
    kept = [about]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "cf0", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    with (
        nodes(2, given.megabits, given.delay / 1000) as names,
        known(names),
        tempfile.TemporaryDirectory() as folder,
    ):
        for line in commands():
            program, *words = shlex.split(line)
            where = names if program == "torchrun" else names[:1]
            outs = [Path(folder) / f"out{i}" for i in range(len(where))]
            started = []
            for i, (name, out) in enumerate(zip(where, outs, strict=True)):
                core = ["taskset", "--cpu-list", str(i % (os.cpu_count() or 1))]
                command = [*core, *NAMED, f"node{i}", *PROGRAMS[program], *words]
                with out.open("w") as file:
                    to = {"stdout": file, "stderr": subprocess.STDOUT}
                    started.append(inside(name, *command, env=environment, cwd=folder, **to))
            print(f"\n$ {line}", flush=True)
            try:
                all_done(started, 600)
            finally:
                said = [row for row in outs[0].read_text().splitlines() if "[W" not in row[:20]]
                print("\n".join(said), flush=True)
            kept += ["", f"$ {line}", *said]
    if given.keep:
        (RESULTS / "two_nodes.txt").write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    main()
