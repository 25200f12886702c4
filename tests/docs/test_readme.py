"""The README names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_walk_through_the_code_names_true_files() -> None:
    walk = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Working on it")[2]
    paths = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", walk)
    assert len(paths) > 20
    for path in paths:
        places = [ROOT / path, ROOT / "src" / "counterflow" / path]
        assert any(place.exists() for place in places), path
