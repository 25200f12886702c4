"""What ten tabs on one live run cost the run.

Claim: no measurable time. One training, in whose course short windows without tabs and with ten form pairs,
in an order that turns about from pair to pair, so that what drifts meets both alike. Of each window's steps
the median counts, of each pair the ratio; told is the median ratio with the interval in which it lies by 95 %
(order statistics of the pairs: no form of the scatter is assumed). Between these pairs are as many in which
neither window has tabs: what can be measured at all. No time is measurable where the first interval holds 1
or lies within the second.

A tab is a client that asks what the page asks, at the moments at which it asks. ``--pages``: ten pages in
chromium, each in a window of its own. They take processor time of their own to draw, and here from the
training's cores; a user's browser is mostly on another machine. Beside it the processor time of the server,
which is there throughout, and of the clients.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from machine import machine, shown
from page_times import chromium, processor_seconds, served

TABS = 10
EVERY_SECONDS = 0.8
"""As runs.js asks, at whole multiples by the machine's clock."""

SETTLING_SECONDS = 1.5
"""At the begin of a window, which do not count."""

SMALL = ("model.layers=4", "model.hidden=32", "model.heads=2", "train.evaluate_every=0")


class Windowed(NamedTuple):
    """A window: its median step, in seconds, and the shares of a core of the server and of the clients."""

    step: float
    server: float
    clients: float


class Pair(NamedTuple):
    """Two windows that follow each other; ``tabs``: whether there were ten in ``second``, else in neither."""

    tabs: bool
    first: Windowed
    second: Windowed

    @property
    def ratio(self) -> float:
        """Of the window with tabs to the other one."""
        return self.second.step / self.first.step


class Tabs:
    """Ten clients that do what a page does: ask for what of the run is not known."""

    def __init__(self, address: str, run: str) -> None:
        self._host = urlsplit(address).netloc
        self._run = run
        self._shown = threading.Event()
        self.asked = 0
        for _ in range(TABS):
            threading.Thread(target=self._follow, daemon=True).start()

    def show(self, seen: bool) -> None:
        """Open them all, or close them."""
        (self._shown.set if seen else self._shown.clear)()

    def _follow(self) -> None:
        headers = {"X-Counterflow": "page", "Content-Type": "application/json"}
        metrics = timeline = listed = ""
        connection = HTTPConnection(self._host, timeout=60)
        while self._shown.wait():
            try:
                seen = [{"name": self._run, "metrics": metrics}]
                body = json.dumps({"runs": seen, "timeline": timeline, "listed": listed})
                connection.request("POST", "/api/run", body=body, headers=headers)
                answer = connection.getresponse()
                found = json.loads(answer.read())
                assert answer.status == 200, found
                metrics, timeline, listed = found["runs"][0]["metrics"], found["version"], found["listed"]
                self.asked += 1
            except (ConnectionError, HTTPException):  # the server closes what is silent for some seconds
                connection.close()
            time.sleep(EVERY_SECONDS - time.time() % EVERY_SECONDS)


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


def measure(given: argparse.Namespace) -> list[Pair]:
    """Pairs with tabs and pairs without in turn; in every other one the window with tabs comes first."""
    found = []
    with tempfile.TemporaryDirectory() as folder, training(Path(folder) / "run", given.set) as run:
        opened = pages if given.pages else clients
        with served(Path(folder)) as (address, server), opened(address, str(run)) as show:
            _window(run, server, given.seconds)  # in which the server begins, and which does not count
            for number in range(2 * given.pairs):
                tabs, turned = number % 2 == 0, number // 2 % 2 == 1
                windows = []
                for second in (turned, not turned):
                    show(tabs and second)
                    windows.append(_window(run, server, given.seconds))
                found.append(Pair(tabs, *(windows[::-1] if turned else windows)))
            show(False)
    return found


def _window(run: Path, server: int, seconds: float) -> Windowed:
    time.sleep(SETTLING_SECONDS)
    first, busy, own = len(times(run)), processor_seconds(server), time.process_time()
    time.sleep(seconds)
    busy, own = processor_seconds(server) - busy, time.process_time() - own
    steps = [b - a for a, b in pairwise(times(run)[first - 1 :])]
    return Windowed(statistics.median(steps), busy / seconds, own / seconds)


def interval(values: Sequence[float], likely: float = 0.95) -> tuple[float, float]:
    """Between which of the values the median lies, at least so likely, whatever they are drawn from.

    >>> interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    """
    known, count = sorted(values), len(values)
    cut = 0
    while 1 - 2 * sum(math.comb(count, k) for k in range(cut + 2)) / 2**count >= likely:
        cut += 1
    return known[cut], known[-1 - cut]


def told(found: Sequence[Pair]) -> Iterator[str]:
    """The table."""
    with_tabs = [pair for pair in found if pair.tabs]
    columns = [pair.first for pair in with_tabs], [pair.second for pair in with_tabs]
    yield f"{'':28}{'no tab':>10}{'ten tabs':>10}"
    steps = [1e3 * statistics.median(window.step for window in column) for column in columns]
    servers = [1e2 * statistics.fmean(window.server for window in column) for column in columns]
    own = [1e2 * statistics.fmean(window.clients for window in column) for column in columns]
    for name, values in (("median step, ms", steps), ("server, % of a core", servers), ("clients", own)):
        yield f"{name:28}" + "".join(f"{value:>10.2f}" for value in values)
    yield f"{'ratio of the two windows':40}{'median':>8}{'95 %':>17}   of all pairs"
    for tabs, name in ((True, "ten tabs to none"), (False, "none to none")):
        ratios = [pair.ratio for pair in found if pair.tabs is tabs]
        low, high = interval(ratios)
        yield (
            f"{name:40}{statistics.median(ratios):>8.4f}{f'{low:.4f} to {high:.4f}':>17}"
            f"   {min(ratios):.3f} to {max(ratios):.3f}"
        )


def main() -> None:
    """Measure and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=20, help="with tabs, and as many without")
    arguments.add_argument("--seconds", type=float, default=6.0, help="of a window")
    arguments.add_argument("--pages", action="store_true", help="pages of a browser in place of clients")
    arguments.add_argument("--set", action="append", default=[], help="a key of the training's config")
    given = arguments.parse_args()
    about = machine()
    found = measure(given)
    print(shown(about))
    kind = "pages of chromium" if given.pages else "clients that ask what a page asks"
    print(
        f"{TABS} {kind}; {given.pairs} pairs of windows of {given.seconds:g} s in one training of 4 workers, "
        f"and {given.pairs} without tabs between them"
    )
    print("\n".join(told(found)))


if __name__ == "__main__":
    main()
