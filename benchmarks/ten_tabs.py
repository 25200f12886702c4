"""What ten tabs on one live run cost the run.

Claim: no measurable time. One training, in whose course windows without a tab and windows with ten take
turns, so that what drifts meets both; the page's server is a process of its own and runs throughout. Of each
window's steps the median counts, and of each pair of neighbours the ratio; told is the median ratio and, for
what can be measured at all, the ratios' spread: windows without tabs against the next such ones.

A tab is a client that asks what the page asks, as often (``--pages``: ten pages in chromium, which take
processor time of their own to draw; a tab that is not seen asks nothing). Beside it the server's processor
time, which is what the training has to share where it uses all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from machine import machine, shown
from page_times import chromium, processor_seconds, served

TABS = 10
EVERY_SECONDS = 0.7
"""As runs.js asks."""

SETTLING_SECONDS = 1.0
"""At the begin of a window, which do not count."""

SMALL = ("model.layers=4", "model.hidden=32", "model.heads=2", "train.evaluate_every=0")


class Windowed(NamedTuple):
    """A window: whether there were tabs, its median step and the processor time of the server, in seconds."""

    tabs: bool
    step: float
    server: float


class Tabs:
    """Ten clients that do what a page does: the list, and of the run what is not known."""

    def __init__(self, address: str, run: str) -> None:
        self._host = urlsplit(address).netloc
        self._run = run
        self._shown = threading.Event()
        self.asked = 0
        for number in range(TABS):
            threading.Thread(target=self._follow, args=(number,), daemon=True).start()

    def show(self, seen: bool) -> None:
        """Open them all, or close them."""
        (self._shown.set if seen else self._shown.clear)()

    def _follow(self, number: int) -> None:
        headers = {"X-Counterflow": "page", "Content-Type": "application/json"}
        metrics = timeline = ""
        connection = HTTPConnection(self._host, timeout=60)
        time.sleep(EVERY_SECONDS * number / TABS)
        while self._shown.wait():
            try:
                self._ask(connection, "GET", "/api/runs", headers)
                body = {"runs": [{"name": self._run, "metrics": metrics}], "timeline": timeline}
                found = self._ask(connection, "POST", "/api/run", headers, json.dumps(body))
                metrics, timeline = found["runs"][0]["metrics"], found["version"]
                self.asked += 1
            except (ConnectionError, HTTPException):  # the server closes what is silent for some seconds
                connection.close()
            time.sleep(EVERY_SECONDS)

    @staticmethod
    def _ask(
        connection: HTTPConnection, method: str, path: str, headers: Any, body: str | None = None
    ) -> Any:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found
        return found


@contextlib.contextmanager
def clients(address: str, run: str) -> Iterator[Callable[[bool], None]]:
    """Ten of them."""
    tabs = Tabs(address, run)
    yield tabs.show
    assert tabs.asked, "nothing was asked"


@contextlib.contextmanager
def pages(address: str, run: str) -> Iterator[Callable[[bool], None]]:
    """Ten pages of a browser, each seen."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        tabs = [browser.new_page(viewport={"width": 1280, "height": 900}) for _ in range(TABS)]

        def show(seen: bool) -> None:
            for tab in tabs:
                tab.goto(f"{address}/runs?run={quote(run)}" if seen else "about:blank")

        yield show
        browser.close()


@contextlib.contextmanager
def training(folder: Path, more: Sequence[str]) -> Iterator[Path]:
    """A training that goes on until it is ended; the folder it writes, once it makes steps."""
    words = [word for setting in (*SMALL, *more) for word in ("--set", setting)]
    command = [sys.executable, "-m", "counterflow", "train", "--out", str(folder), "--steps", "1000000"]
    with subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            while not (folder / "metrics.jsonl").exists() or len(times(folder)) < 10:
                if process.poll() is not None:
                    assert process.stderr is not None
                    raise SystemExit(process.stderr.read().decode())
                time.sleep(0.2)
            yield folder
        finally:
            process.terminate()


def times(folder: Path) -> list[float]:
    """When each step was over, in seconds of the run."""
    lines = (folder / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
    return [line["seconds"] for line in map(json.loads, lines) if "loss" in line]


def measure(given: argparse.Namespace) -> list[Windowed]:
    """Windows in turn, the first one without tabs."""
    found = []
    with tempfile.TemporaryDirectory() as folder, training(Path(folder) / "run", given.set) as run:
        opened = pages if given.pages else clients
        with served(Path(folder)) as (address, server), opened(address, str(run)) as show:
            for number in range(2 * given.pairs + 1):
                tabs = number % 2 == 1
                show(tabs)
                time.sleep(SETTLING_SECONDS)
                first, busy = len(times(run)), processor_seconds(server)
                time.sleep(given.seconds)
                busy = processor_seconds(server) - busy
                steps = [b - a for a, b in pairwise(times(run)[first - 1 :])]
                found.append(Windowed(tabs, statistics.median(steps), busy / given.seconds))
            show(False)
    return found


def told(found: Sequence[Windowed]) -> dict[str, Any]:
    """The ratios: with tabs to the mean of the windows before and after it; and of those to each other."""
    ratios = [
        found[i].step / statistics.fmean((found[i - 1].step, found[i + 1].step))
        for i in range(1, len(found), 2)
    ]
    bare = [b.step / a.step for a, b in pairwise(found[::2])]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "without": bare,
        "step": [statistics.median(w.step for w in found if w.tabs is tabs) for tabs in (False, True)],
        "server": [statistics.fmean(w.server for w in found if w.tabs is tabs) for tabs in (False, True)],
    }


def main() -> None:
    """Measure and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=8, help="windows with tabs")
    arguments.add_argument("--seconds", type=float, default=15.0, help="of a window")
    arguments.add_argument("--pages", action="store_true", help="pages of a browser in place of clients")
    arguments.add_argument("--set", action="append", default=[], help="a key of the training's config")
    given = arguments.parse_args()
    about = machine()
    result = told(measure(given))
    print(shown(about))
    kind = "pages of chromium" if given.pages else "clients that ask what a page asks"
    print(
        f"{TABS} {kind}; {given.pairs} pairs of windows of {given.seconds:g} s in one training of 4 workers"
    )
    print(f"{'':28}{'no tab':>10}{'ten tabs':>10}")
    print(
        "median step, ms"
        + "".join(f"{1e3 * step:>{w}.2f}" for step, w in zip(result["step"], (23, 10), strict=True))
    )
    print(
        "server, % of a core"
        + "".join(f"{100 * busy:>{w}.1f}" for busy, w in zip(result["server"], (19, 10), strict=True))
    )
    print(
        f"ratio of a window with tabs to those around it   {result['ratio']:.4f}, the median of "
        + ", ".join(f"{ratio:.3f}" for ratio in result["ratios"])
    )
    print(
        "ratio of windows without tabs, in their order    "
        + ", ".join(f"{ratio:.3f}" for ratio in result["without"])
    )


if __name__ == "__main__":
    main()
