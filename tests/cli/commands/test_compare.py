"""``counterflow compare``: what a stranger reads, the picture, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from counterflow.planning.inputs import input_files

from ..conftest import ENVIRONMENT, Run

FOUR = "compare --workers 4 --micro-batches 8"


def test_a_stranger_reads_which_is_quickest_within_the_memory(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "ranked.png"
    answer = run(f"{FOUR} --peak 4 --moves 100 --out", str(picture))
    assert answer.code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [line.split("  ") for line in answer.out.splitlines()]
    assert lines[0] == ["4 workers · 8 micro-batches"]
    assert "of a worker's share of the model" in answer.out
    rows = {words[0].strip(): words for words in lines if len(words) > 4}
    assert {"zb-v", "1F1B (dapple), split", "1F1B (dapple)", "computed straight, proved"} <= rows.keys()
    assert "proved: no order of these stages within these limits is better" in answer.out
    assert "pipedream, async" in rows
    assert "async: asynchronous, computes with older weights" in answer.out
    assert "schedules need more than the limits, among them all of" in answer.out
    assert "gpipe" not in rows
    assert f"Wrote {picture}" in answer.err


def test_every_option_and_every_byte(run: Run) -> None:
    bytes_ = "--weight-bytes 1GiB --activation-bytes 100MiB"
    answer = run(f"{FOUR} --scheme chimera --all --seconds 0 --costs-of model {bytes_}")
    assert "chimera, f=2, forward-doubling" in answer.out
    assert "  memory" in answer.out
    assert "of the whole model" in answer.out


def test_the_table_is_whole_on_a_terminal_of_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "COLUMNS", "80")
    sizes = "--weight-bytes 1GiB --activation-bytes 100MiB"
    for line in (f"{FOUR} --seconds 0", f"{FOUR} --seconds 0 {sizes}"):
        answer = run(line)
        table = answer.out.partition(" ─")[2].partition("schedules need more")[0]
        assert max(map(len, answer.out.splitlines())) <= 80
        assert "…" not in answer.out
        assert table.count("\n") < 30, "hardly a row takes two lines"


def test_only_schedules_with_one_copy_of_the_weights_and_todays_numbers(run: Run) -> None:
    answer = run(f"{FOUR} --seconds 0 --copies 1 --synchronous --json").json
    assert {row["weights"] for row in answer["rows"]} == {1.0}
    assert all(row["synchronous"] for row in [*answer["rows"], *answer["too_large"]])
    assert {row["scheme"] for row in answer["too_large"]} == {"chimera", "dualpipe", "gems", "mixpipe"}


def test_a_profile_has_the_costs(run: Run, refused: Callable[..., str], tmp_path: Path) -> None:
    """Of the user's model: weights, gradients, optimizer state, activations and messages together."""
    run(f"plan --example gpt-moe --save-inputs {tmp_path}")
    profiled = f"{FOUR} --seconds 0 --profile {tmp_path}"
    answer = run(f"{profiled} --micro-batch-size 4")
    assert "model gpt-moe on 4 processes on 2 cores · micro-batches of 4" in answer.out
    assert "step ms" in answer.out
    assert "have no schedule of this size: a model of 6 layers for 8 stages" in answer.out
    found = run(f"{profiled} --micro-batch-size 4 --memory 3MiB --json").json
    assert found["profiled"].startswith("model gpt-moe")
    limit = 3 * 2**20
    assert {row["peak_bytes"] <= limit for row in found["rows"]} == {True}
    assert {row["peak_bytes"] > limit for row in found["too_large"]} == {True}
    path = tmp_path / "profile.toml"
    profile = input_files.load_profile(path)
    layers = {
        kind: replace(x, low_factors=(0.9,) * len(x.samples), high_factors=(1.2,) * len(x.samples))
        for kind, x in profile.layers.items()
    }
    path.write_text(input_files.dumps(replace(profile, layers=layers)))
    steps = run(f"{profiled} --micro-batch-size 4 --scheme 1f1b").out
    assert re.search(r"1F1B [(]dapple[)] +[0-9.]+ ± [0-9.]+ ", steps), steps
    assert "also give --micro-batch-size" in refused(profiled)
    assert "--forward: the profile has all costs" in refused(f"{profiled} --micro-batch-size 4 --forward 2")


def test_a_sweep_is_a_table_and_a_figure(run: Run, refused: Callable[..., str], tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    some = f"{FOUR} --seconds 0 --scheme 1f1b --scheme zb-v --scheme chimera"
    answer = run(f"{some} --sweep p2p=0,0.5,2 --out", str(picture))
    rows = [line.split("  ")[0].strip() for line in answer.out.splitlines() if "%" in line]
    assert rows[0] == "chimera", "the fastest one with the last value"
    assert set(rows) == {"chimera", "zb-v", "1F1B (dapple), split", "1F1B (dapple)"}
    assert "zb-v" in picture.read_text(encoding="utf-8")
    found = run(f"{some} --sweep micro-batches=16,4 --json").json
    assert (found["name"], found["values"]) == ("micro_batches", [4.0, 16.0])
    assert [one["micro_batches"] for one in found["comparisons"]] == [4, 16]
    assert "--sweep x=1: give one of workers" in refused(f"{FOUR} --sweep x=1")
    assert "must be whole numbers" in refused(f"{FOUR} --sweep workers=2.5")


def test_nothing_fits(run: Run) -> None:
    answer = run(f"{FOUR} --peak 0.5 --seconds 0")
    assert answer.code == 0
    assert "No schedule keeps the limits; the smallest ones need:" in answer.out
    assert "gems, split: 1 activations, weights 2 times" in answer.out
    assert "The baseline, 1F1B (dapple), is beyond the limits: 4 activations" in answer.out


def test_what_is_refused(run: Run, refused: Callable[..., str], tmp_path: Path) -> None:
    assert "--workers 0: must be 1 or more" in refused("compare --workers 0 --micro-batches 8")
    assert "legal endings" in refused(f"{FOUR} --out", str(tmp_path / "x.html"))
    assert "needs bytes of weights" in refused(f"{FOUR} --memory 1GiB")
    assert "one number, for a worker's share of the model" in refused(f"{FOUR} --forward 1,2,1,2")
    assert "worker or model" in refused(f"{FOUR} --costs-of stage")
    three = run("compare --workers 3 --micro-batches 4 --seconds 0").out
    assert "chimera, dualpipe, gems, mixpipe have no schedule of this size: stages=3" in three
    assert "dualpipe-v has no schedule of this size: micro_batches=4" in three
