"""``counterflow compare``: what a stranger reads, the picture, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..conftest import Run

FOUR = "compare --workers 4 --micro-batches 8"


def test_a_stranger_reads_which_is_quickest_within_the_memory(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "ranked.png"
    answer = run(f"{FOUR} --peak 4 --moves 100 --out", str(picture))
    assert answer.code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [line.split("  ") for line in answer.out.splitlines()]
    assert lines[0] == ["4 workers · 8 micro-batches"]
    assert "of a worker's share of the model" in answer.out
    rows = {words[2].strip() or words[1].strip(): words for words in lines if len(words) > 4}
    assert {"zb-v", "dapple, split", "computed, one stage per worker"} <= rows.keys()
    assert "proved best for these stages and limits" in answer.out
    assert "asynchronous: older weights" in answer.out
    assert "schedules need more than the limits, among them all of" in answer.out
    assert "gpipe" not in rows
    assert f"Wrote {picture}" in answer.err


def test_every_option_and_every_byte(run: Run) -> None:
    bytes_ = "--weight-bytes 1GiB --activation-bytes 100MiB"
    answer = run(f"{FOUR} --scheme chimera --all --seconds 0 --costs-of model {bytes_}")
    assert "chimera, f=2, forward-doubling" in answer.out
    assert "peak memory" in answer.out
    assert "of the whole model" in answer.out


def test_nothing_fits(run: Run) -> None:
    answer = run(f"{FOUR} --peak 0.5 --seconds 0")
    assert answer.code == 0
    assert "No schedule keeps the limits; the smallest ones need:" in answer.out
    assert "gems: 1 activations" in answer.out


def test_what_is_refused(run: Run, refused: Callable[..., str], tmp_path: Path) -> None:
    assert "--workers 0: must be 1 or more" in refused("compare --workers 0 --micro-batches 8")
    assert "legal endings" in refused(f"{FOUR} --out", str(tmp_path / "x.html"))
    assert "needs bytes of weights" in refused(f"{FOUR} --memory 1GiB")
    assert "one number, for a worker's share of the model" in refused(f"{FOUR} --forward 1,2,1,2")
    assert "worker or model" in refused(f"{FOUR} --costs-of stage")
    assert (
        "chimera has no schedule of this size" in run("compare --workers 3 --micro-batches 4 --seconds 0").out
    )
