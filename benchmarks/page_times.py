"""How soon the live page shows what comes of a slider or of a moved op, by the wall clock, in a browser.

Claim: for a schedule of 2,000 ops the picture is there within 100 ms of the slider's step: from the browser's
event until it has painted. The server is another process; the browser is Debian's chromium
(``make browser``). Beside it, by the same clock: until the server's answer is complete, and, of a moved op,
until the checker's verdict is there; and the server's processor time for all of it. Medians, and the slowest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kit import arguments, machine, machine_line
from playwright.sync_api import Page, sync_playwright

SCHEDULES = {
    "dapple": {"stages": 8, "micro_batches": 125},
    "chimera": {"stages": 16, "micro_batches": 62},
    "zb-h1": {"stages": 8, "micro_batches": 83},
    "interleaved": {"workers": 8, "chunks": 4, "micro_batches": 32},
}
"""About 2,000 ops each."""

CLAIM_SECONDS = 0.1

_FOLLOW = """async ([what, value]) => {
  const root = document.documentElement, began = performance.now();
  const changed = name => new Promise(resolve => {
    const watch = new MutationObserver(() => { watch.disconnect(); resolve(performance.now()); });
    watch.observe(root, { attributeFilter: [name] });
  });
  const drawn = changed("data-shown"), checked = what === "move" ? changed("data-checked") : began;
  if (what === "slider") {
    const slider = document.querySelector('[aria-label="forward, slider"]');
    slider.value = value;
    slider.dispatchEvent(new Event("input"));
  } else {
    const canvas = document.querySelector("canvas");
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key: value, bubbles: true, cancelable: true }));
  }
  await drawn;
  await new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)));
  const painted = performance.now();
  const asked = performance.getEntriesByType("resource").filter(e => e.name.endsWith("/api/look")).at(-1);
  performance.clearResourceTimings();
  return [painted - began, asked.responseEnd - began, await checked - began];
}"""


class Taken(NamedTuple):
    """Seconds of one change: until it was painted, answered, and checked; and of the server's processor."""

    painted: float
    answered: float
    checked: float
    server: float


@contextlib.contextmanager
def served(*runs: Path) -> Iterator[tuple[str, int]]:
    """``counterflow explore`` in a process of its own: its address and its process id."""
    command = [sys.executable, "-m", "counterflow", "explore", "--no-open", "--port", "0", *map(str, runs)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            told = process.stderr.readline()
            found = re.search(r"http://[\d.]+:\d+", told)
            if found is None:
                raise SystemExit(told + process.stderr.read())
            yield found[0], process.pid
        finally:
            process.terminate()


def processor_seconds(pid: int) -> float:
    """What a process has used of its processor, by Linux' count."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def chromium() -> str:
    """Where the browser is."""
    return os.environ.get("CHROMIUM", "/usr/bin/chromium")


def changes(page: Page, server: int, what: str, values: Sequence[Any]) -> list[Taken]:
    """One change after another, each when the one before is painted; the first three do not count."""
    found = []
    for value in values:
        before = processor_seconds(server)
        until = page.evaluate(_FOLLOW, [what, value])
        painted, answered, checked = (each / 1e3 for each in until)
        found.append(Taken(painted, answered, checked, processor_seconds(server) - before))
    return found[3:]


def measure(times: int) -> list[dict[str, Any]]:
    """Every schedule, alone and as two, by slider; and ops moved."""
    rows = []
    with served() as (address, server), sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for scheme, options in SCHEMES_AND_TWO:
            page.goto(f"{address}/schedules?{options}")
            page.wait_for_selector("html[data-ready]", timeout=120_000)
            ops = page.evaluate("document.querySelectorAll('canvas').length")
            values = [f"{1 + n / 10:.1f}" for n in range(times + 3)]
            rows.append(
                _row(
                    f"{scheme}, slider" + (", two schedules" if ops == 2 else ""),
                    changes(page, server, "slider", values),
                )
            )
            if ops == 1:
                page.locator("canvas").focus()
                for _ in range(12):
                    page.keyboard.press("n")
                values = ["]", "["] * ((times + 4) // 2)
                rows.append(_row(f"{scheme}, an op moved", changes(page, server, "move", values)))
        browser.close()
    return rows


def _address(scheme: str, side: str) -> str:
    return f"{side}.scheme={scheme}&" + "&".join(f"{side}.{k}={v}" for k, v in SCHEDULES[scheme].items())


SCHEMES_AND_TWO = [
    *((scheme, _address(scheme, "a")) for scheme in SCHEDULES),
    ("dapple, chimera", _address("dapple", "a") + "&" + _address("chimera", "b")),
]


def _row(what: str, taken: Sequence[Taken]) -> dict[str, Any]:
    painted = [one.painted for one in taken]
    return {
        "what": what,
        "painted": statistics.median(painted),
        "slowest": max(painted),
        "answered": statistics.median(one.answered for one in taken),
        "checked": statistics.median(one.checked for one in taken),
        "server": statistics.fmean(one.server for one in taken),
    }


def main() -> None:
    """Measure and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--times", type=int, default=20, help="changes of each kind")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    about = machine()
    rows = measure(given.times)
    if given.json:
        print(json.dumps({"machine": about, "rows": rows}, indent=1))
        return
    print(machine_line(about))
    print(
        "milliseconds              painted, median   slowest   answer there   server's processor   <= 100 ms"
    )
    for row in rows:
        widths = {"painted": 9, "slowest": 10, "answered": 10, "checked": 9, "server": 15}
        numbers = "".join(f"{1e3 * row[key]:{width}.1f}" for key, width in widths.items())
        print(f"{row['what']:40}{numbers}{'yes' if row['painted'] <= CLAIM_SECONDS else 'NO':>11}")


if __name__ == "__main__":
    main()
