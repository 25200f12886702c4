"""Searches of the page, each in a process of its own: how far one is, what it found, and stopping it.

Invariant: at most ``MOST`` run at a time; each ends by itself, when it is stopped, and with the server. The
server never waits for one.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import counterflow
from counterflow.errors import ConfigError

from .asked import JobAsked, PlanFound, Work
from .kept import KeptPlans, read

MOST = 2
"""Searches at a time: each takes a core."""

_KEPT = 20
"""Searches whose results are kept."""


class Job:
    """One search.

    ``asked`` is its request, ``progress`` its last report, ``result`` its result for the page, and ``kept``
    its result for the server.
    """

    def __init__(self, work: Work) -> None:
        self.state = "running"
        self.progress: Any = None
        self.result: Any = None
        self.error = ""
        self.kept: KeptPlans | None = None
        self.asked = work.model_dump_json()
        self._begun = self._stopped = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "counterflow.explore.work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
            encoding="utf-8",
        )
        Thread(target=self._follow, daemon=True).start()

    @property
    def serves_again(self) -> bool:
        """Whether its result answers another equal request: it was not stopped before its end."""
        return self.state == "done" and not self._stopped

    def _follow(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(self.asked)
                process.stdin.close()
                for line in process.stdout:
                    told = json.loads(line)
                    self._begun = True
                    self.progress = told.get("progress", self.progress)
                    self.result = told.get("result", self.result)
                    self.error = told.get("error", self.error)
                    if "kept" in told:
                        self.kept = read(told["kept"])
            except (OSError, ValueError) as error:
                self.error = self.error or str(error)
        if self.result is not None:
            self.state = "done"
        else:
            self.state = "failed" if self.error else "stopped"

    def stop(self) -> None:
        """Have it end with what it has found so far, as Ctrl-C does; at once if it has not begun."""
        if self._process.poll() is None:
            self._stopped = True
            self._process.send_signal(signal.SIGINT if self._begun else signal.SIGKILL)

    def end(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()


def _environment() -> dict[str, str]:
    """Environment of a search, which imports nothing from the current folder unless this process does.

    The folder of the package is on the path where only the current folder leads to it, as in a checkout.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    root = str(Path(counterflow.__file__).resolve().parents[1])
    if Path(root) == Path.cwd().resolve() and sys.path[:1] in ([""], [root]):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))
    return environment


class Jobs:
    """All searches of a server, by name."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = Lock()

    def start(self, work: Work) -> dict[str, str]:
        """Start a job, or find one with an equal request and a result; its name.

        Raises:
            ConfigError: the maximum number of jobs is running.
        """
        asked = work.model_dump_json()
        with self._lock:
            for name, job in self._jobs.items():
                if job.asked == asked and job.serves_again:
                    return {"job": name}
            running = sum(job.state == "running" for job in self._jobs.values())
            if running >= MOST:
                raise ConfigError(f"{running} searches are running already; stop one, or wait for its end")
            name = secrets.token_hex(8)
            self._jobs[name] = Job(work)
            while len(self._jobs) > _KEPT:
                self._jobs.popitem(last=False)[1].end()
            return {"job": name}

    def look(self, asked: JobAsked) -> dict[str, Any]:
        """How far one is; with its result once it has ended.

        Raises:
            ConfigError: there is none of that name.
        """
        job = self.find(asked.job)
        if asked.stop:
            job.stop()
        done = job.state != "running"
        return {
            "state": job.state,
            "progress": job.progress,
            "error": job.error,
            "result": job.result if done else None,
        }

    def plans(self, asked: PlanFound) -> KeptPlans:
        """The plans that one is among.

        Raises:
            ConfigError: there is no such search, or it has found fewer plans.
        """
        kept = self.find(asked.job).kept
        if kept is None or asked.plan >= len(kept.plans):
            raise ConfigError(f"plan {asked.plan + 1}: that search has found fewer")
        return kept

    def find(self, name: str) -> Job:
        """One of them.

        Raises:
            ConfigError: there is none of that name.
        """
        with self._lock:
            if name not in self._jobs:
                raise ConfigError(f"search {name[:40]}: is not known to this server")
            return self._jobs[name]

    def end(self) -> None:
        """End all."""
        with self._lock:
            for job in self._jobs.values():
                job.end()
