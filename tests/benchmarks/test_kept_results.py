"""What grids and sweeps printed is kept only where nothing failed."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_no_kept_table_says_that_something_failed() -> None:
    said = {
        path.name: re.findall(r"(\d[\d,]*) (?:failed|failures|wrong)\b", path.read_text(encoding="utf-8"))
        for path in RESULTS.glob("*.txt")
    }
    assert {name for name, counts in said.items() if {*counts} - {"0"}} == set()
    grids = {"agreement_grid.txt", "check_sweep.txt", "checkpoint_grid.txt", "strict_nccl_grid.txt"}
    assert grids <= {name for name, counts in said.items() if counts}
