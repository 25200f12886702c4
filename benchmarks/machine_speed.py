"""Speed of the machine's cores while something else is measured.

A virtual core that shares a physical one with a neighbour's runs at 0.6 of its speed for seconds or minutes,
without any sign of it in this machine's own load. So one process per core, bound to it, does a fixed piece of
work five times a second and notes the seconds of processor time that it took: 2 % of a core.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PERIOD_SECONDS = 0.2

_PROBE = """
import json, os, sys, time
import numpy as np
core, path = int(sys.argv[1]), sys.argv[2]
os.sched_setaffinity(0, {core})
rng = np.random.default_rng(0)
matrix, row = rng.random((192, 192), dtype=np.float32), rng.random(1 << 15, dtype=np.float32)
with open(path, "a", buffering=1) as file:
    while os.getppid() == int(sys.argv[3]):
        begin = time.thread_time()
        for _ in range(4):
            matrix @ matrix
            np.exp(row)
        seconds = time.thread_time() - begin
        file.write(json.dumps([time.monotonic(), seconds]) + "\\n")
        time.sleep(float(sys.argv[4]))
"""


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of the cores in a span of time.

    Attributes:
        seconds: median processor seconds of the fixed work, the mean over the cores.
        spread: ratio of the 90 % to the 10 % quantile over all cores; near 1: the speed was steady.
    """

    seconds: float
    spread: float


class MachineSpeed:
    """Context that notes the speed of every core."""

    def __enter__(self) -> MachineSpeed:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, str(core)) for core in sorted(os.sched_getaffinity(0))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", _PROBE, path.name, path, str(os.getpid()), str(PERIOD_SECONDS)],
                env=environment,
            )
            for path in self._files
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def between(self, begin: float, end: float) -> Speed:
        """Speed between two times of ``time.monotonic``; the next notes count if there are none between."""
        time.sleep(2 * PERIOD_SECONDS)
        cores = [self._seconds(path, begin, end) for path in self._files]
        every = sorted(seconds for core in cores for seconds in core)
        low, high = every[len(every) // 10], every[(9 * len(every)) // 10]
        return Speed(statistics.fmean(map(statistics.median, cores)), high / low)

    @staticmethod
    def _seconds(path: Path, begin: float, end: float) -> list[float]:
        rows = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        later = [(at, seconds) for at, seconds in rows if at >= begin]
        return [seconds for at, seconds in later if at <= end] or [seconds for _, seconds in later[:1]]
