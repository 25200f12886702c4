"""Takes the picture of a run in docs/explore.md: ``python docs/explore_pictures.py``, a minute or two.

A training of the example is followed while it goes on, so that the picture shows what the page shows today.
Nothing else should run: the measured times are in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

PICTURES = Path(__file__).parent / "pictures"
UNTIL_STEP = 100
"""At which the picture is taken."""

_COMMAND = (sys.executable, "-u", "-m", "counterflow")


def _steps(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b'"loss"')
    except FileNotFoundError:
        return 0


def _look(page: Page, address: str) -> None:
    page.goto(f"{address}?run=runs%2Fmine")
    page.wait_for_selector("html[data-ready]")
    expect(page.locator("canvas")).to_have_count(2)
    page.screenshot(path=PICTURES / "explore-runs.png", full_page=True)


def main() -> None:
    """Train, serve, look."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "runs" / "mine"
        run.parent.mkdir()
        train = [*_COMMAND, "train", "--out", "runs/mine", "--set", "train.evaluate_every=20"]
        with (
            subprocess.Popen(train, cwd=folder, stdout=subprocess.DEVNULL) as training,
            subprocess.Popen(
                [*_COMMAND, "explore", "--no-open", "--port", "0", "runs"],
                cwd=folder,
                stderr=subprocess.PIPE,
                text=True,
            ) as server,
            sync_playwright() as play,
        ):
            try:
                assert server.stderr is not None
                address = server.stderr.readline().split()[1]
                while _steps(run) < UNTIL_STEP or not (run / "live.json").exists():
                    if training.poll() is not None:
                        raise SystemExit("the training has ended; see what it said")
                    time.sleep(0.2)
                browser = play.chromium.launch(
                    executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
                )
                window = {"width": 1280, "height": 900}
                _look(browser.new_page(viewport=window, color_scheme="dark"), address)
                browser.close()
            finally:
                training.terminate()
                server.terminate()


if __name__ == "__main__":
    main()
