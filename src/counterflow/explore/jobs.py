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
from threading import Lock, Thread
from typing import Any

from counterflow.errors import ConfigError

from .asked import JobAsked, Work

MOST = 2
"""Searches at a time: each takes a core."""

_KEPT = 20
"""Searches whose results are kept."""


class Job:
    """One search. ``progress`` is the last that it told, ``result`` what it found."""

    def __init__(self, work: Work) -> None:
        self.state = "running"
        self.progress: Any = None
        self.result: Any = None
        self.error = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "counterflow.explore.work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            text=True,
            encoding="utf-8",
        )
        Thread(target=self._follow, args=(work.model_dump_json(),), daemon=True).start()

    def _follow(self, text: str) -> None:
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(text)
                process.stdin.close()
                for line in process.stdout:
                    told = json.loads(line)
                    self.progress = told.get("progress", self.progress)
                    self.result = told.get("result", self.result)
                    self.error = told.get("error", self.error)
            except (OSError, ValueError) as error:
                self.error = self.error or str(error)
        if self.result is not None:
            self.state = "done"
        else:
            self.state = "failed" if self.error else "stopped"

    def stop(self) -> None:
        """Have it end with what it has found so far, as Ctrl-C does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()


class Jobs:
    """All searches of a server, by name."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = Lock()

    def start(self, work: Work) -> dict[str, str]:
        """Begin one; its name.

        Raises:
            ConfigError: as many as may run are running.
        """
        with self._lock:
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
