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

from .requests import JobRequest, PlanReference, SearchInput
from .saved_plans import SavedPlans, read

MOST = 2
"""Searches at a time: each takes a core."""

_CACHED = 20
"""Searches whose results are kept."""


class SearchJob:
    """One search.

    ``request`` is its request, ``progress`` its last report, ``result`` its result for the page, and
    ``saved_plans`` its result for the server.
    """

    def __init__(self, work: SearchInput) -> None:
        self.state = "running"
        self.progress: Any = None
        self.result: Any = None
        self.error = ""
        self.saved_plans: SavedPlans | None = None
        self.request = work.model_dump_json()
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
        """Check that the result answers equal requests: the search was not stopped before its end."""
        return self.state == "done" and not self._stopped

    def _follow(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(self.request)
                process.stdin.close()
                for line in process.stdout:
                    report = json.loads(line)
                    self._begun = True
                    self.progress = report.get("progress", self.progress)
                    self.result = report.get("result", self.result)
                    self.error = report.get("error", self.error)
                    if "kept" in report:
                        self.saved_plans = read(report["kept"])
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
        self._jobs: OrderedDict[str, SearchJob] = OrderedDict()
        self._lock = Lock()

    def start(self, work: SearchInput) -> dict[str, str]:
        """Start a job, or find one with an equal request and a result; its name.

        Raises:
            ConfigError: the maximum number of jobs is running.
        """
        request = work.model_dump_json()
        with self._lock:
            for name, job in self._jobs.items():
                if job.request == request and job.serves_again:
                    return {"job": name}
            running = sum(job.state == "running" for job in self._jobs.values())
            if running >= MOST:
                raise ConfigError(f"{running} searches are running already; stop one, or wait for its end")
            name = secrets.token_hex(8)
            self._jobs[name] = SearchJob(work)
            while len(self._jobs) > _CACHED:
                self._jobs.popitem(last=False)[1].end()
            return {"job": name}

    def look(self, request: JobRequest) -> dict[str, Any]:
        """Report the progress of a search, with the result once it has ended.

        Raises:
            ConfigError: there is none of that name.
        """
        job = self.find(request.job)
        if request.stop:
            job.stop()
        done = job.state != "running"
        return {
            "state": job.state,
            "progress": job.progress,
            "error": job.error,
            "result": job.result if done else None,
        }

    def plans(self, reference: PlanReference) -> SavedPlans:
        """The plans that one is among.

        Raises:
            ConfigError: there is no such search, or it has found fewer plans.
        """
        saved_plans = self.find(reference.job).saved_plans
        if saved_plans is None or reference.plan >= len(saved_plans.plans):
            raise ConfigError(f"plan {reference.plan + 1}: that search has found fewer")
        return saved_plans

    def find(self, name: str) -> SearchJob:
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
