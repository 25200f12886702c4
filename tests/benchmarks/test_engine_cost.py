"""The engine's costs are measured by workers without peers, so each agreement has its stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"

PROGRAM = """
import engine_cost, counterflow as cf
for schedule in (cf.schemes.dapple(2, 2), cf.schemes.zb_v(2, 4)):
    for first in (True, False):
        print(*engine_cost.cost(schedule, 1, 0.0, first=first, barrier=True))
"""


def test_each_kind_of_action_has_a_cost() -> None:
    # Alone in a process: it puts stand-ins in place of what workers check together.
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    rows = run.stdout.splitlines()
    assert len(rows) == 4
    assert all("forward" in row and "an action" in row for row in rows)
