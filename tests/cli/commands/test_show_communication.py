"""``counterflow show --communication``: the plan as text, picture and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..conftest import Run

PLAN = "show dapple --stages 3 --micro-batches 3 --communication"


def test_the_plan_as_text(run: Run) -> None:
    answer = run(PLAN)
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[1] == "4 communicators, made in 4 rounds: 4 have at most 1 in a round, so there are no fewer"
    at = lines.index("worker 1: 6 messages, posted 0 to 1 op ahead, in 4 buffers; all are in use at action 7")
    assert lines[at + 1 : at + 6] == [
        "op        F0.1 F1.1 B0.1 F2.1 B1.1 B2.1",
        "buffer 0  F0.0 ──── ────      B1.2",
        "buffer 1  F1.0 ──── ──── ──── ────",
        "buffer 2            F2.0 ──── ──── ────",
        "buffer 3            B0.2      B2.2 ────",
    ]


def test_by_tag_receives_are_posted_further_ahead(run: Run) -> None:
    assert " to 3 ops ahead" in run(f"{PLAN} --matching tag").out


def test_workers_without_messages(run: Run) -> None:
    answer = run("show gpipe --stages 1 --micro-batches 2 --communication")
    assert "no messages between workers" in answer.out
    assert "worker 0 receives nothing" in answer.out


def test_the_proofs_as_json(run: Run) -> None:
    plan = json.loads(run(f"{PLAN} --format json").out)
    rounds = plan["communicators"]["rounds"]
    assert sorted(tuple(link) for row in rounds for link in row) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert plan["communicators"]["fewest"] == len(rounds)
    for worker in plan["workers"]:
        at = worker["in_use_at"]
        live = [row for row in worker["receives"] if row["posted"] <= at <= row["until"]]
        assert len({row["buffer"] for row in live}) == len(live) == worker["buffers"] == worker["in_use"]
        assert all(worker["actions"][row["posted"]].startswith("Receive") for row in worker["receives"])


def test_the_picture(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    assert run(f"{PLAN} --out {path}").code == 0
    first = path.read_bytes()
    assert b"<svg" in first
    run(f"{PLAN} --out {path}")
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--memory --compare gpipe", "--communication draws the plan alone; leave out --compare, --memory"),
        ("--format csv", "torch's csv has no buffers"),
        (
            "--out plan.html",
            "plan.html: cannot tell what to draw from this name; legal endings: .png, .svg, .pdf",
        ),
    ],
)
def test_what_does_not_fit_is_refused(run: Run, options: str, error: str) -> None:
    answer = run(f"{PLAN} {options}")
    assert answer.code
    assert error in answer.err


def test_matching_needs_the_plan(run: Run) -> None:
    assert "--matching: add --communication" in run("show dapple --stages 2 --matching tag").err
