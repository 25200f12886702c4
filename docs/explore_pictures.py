"""Takes the pictures in docs/explore.md: ``python docs/explore_pictures.py``, a minute or two.

A training of the example is followed while it goes on, so that its picture shows what the page shows today.
Nothing else should run: the measured times are in it. ``--without-run`` leaves that one as it is.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

PICTURES = Path(__file__).parent / "pictures"
UNTIL_STEP = 100
"""At which the picture is taken."""

_COMMAND = (sys.executable, "-u", "-m", "counterflow")


def _steps(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b'"loss"')
    except FileNotFoundError:
        return 0


DAPPLE = "a.scheme=dapple&a.stages=2&a.micro_batches=2"
PAGES = {
    "schedules": "/schedules?a.scheme=chimera&a.stages=4&a.micro_batches=8"
    "&b.scheme=dapple&b.stages=4&b.micro_batches=8",
    "deadlock": f"/schedules?{DAPPLE}&a.moves=0.2.0",
    "compare": "/compare",
    "plans": "/plans",
}
"""What is shown, by the picture's name."""


def _looks(browser: Browser, address: str) -> None:
    """The pages that need no run, and two of them on a phone in the dark."""
    for name, path in PAGES.items():
        page = browser.new_page(viewport={"width": 1280, "height": 960 if name == "schedules" else 760})
        _opened(page, address + path)
        if name == "schedules":  # with what is known of an op
            page.locator("canvas").first.focus()
            for _ in range(7):
                page.keyboard.press("n")
            page.wait_for_timeout(200)
        if name == "deadlock":
            page.wait_for_selector("html[data-checked]")
        page.screenshot(path=PICTURES / f"explore-{name}.png", full_page=name == "plans")
    phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    sides = []
    for name in ("schedules", "plans"):
        _opened(phone, address + PAGES[name])
        sides.append(base64.b64encode(phone.screenshot()).decode())
    both = browser.new_page(viewport={"width": 804, "height": 844})
    both.set_content(
        '<body style="margin: 0; display: flex; gap: 24px">'
        + "".join(f'<img src="data:image/png;base64,{side}">' for side in sides)
    )
    both.screenshot(path=PICTURES / "explore-narrow.png")


def _opened(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector("html[data-shown]", timeout=120_000)


def _run(browser: Browser, address: str, folder: Path) -> None:
    """A training that goes on."""
    run = folder / "runs" / "mine"
    train = [*_COMMAND, "train", "--out", "runs/mine", "--set", "train.evaluate_every=20"]
    with subprocess.Popen(train, cwd=folder, stdout=subprocess.DEVNULL) as training:
        try:
            while _steps(run) < UNTIL_STEP or not (run / "live.json").exists():
                if training.poll() is not None:
                    raise SystemExit("the training has ended; see what it said")
                time.sleep(0.2)
            page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
            page.goto(f"{address}/runs?run=runs%2Fmine")
            expect(page.locator("canvas")).to_have_count(2)
            page.screenshot(path=PICTURES / "explore-runs.png", full_page=True)
        finally:
            training.terminate()


def main() -> None:
    """Serve, look; train, look."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "runs").mkdir()
        serve = [*_COMMAND, "explore", "--no-open", "--port", "0", "runs"]
        with (
            subprocess.Popen(serve, cwd=folder, stderr=subprocess.PIPE, text=True) as server,
            sync_playwright() as play,
        ):
            try:
                assert server.stderr is not None
                address = server.stderr.readline().split()[1].removesuffix("/runs")
                browser = play.chromium.launch(
                    executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
                )
                _looks(browser, address)
                if "--without-run" not in sys.argv:
                    _run(browser, address, folder)
                browser.close()
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
