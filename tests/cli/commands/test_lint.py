from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import Run

LISTS = "[... 0SEND_F1, 2RECV_F0, 2F0]\n[... 1SEND_F0, 1RECV_F1, 1F1]\n"
CIRCLE = [
    "    ╭▶ rank 0: 0SEND_F1 (line 1, column 6) waits until rank 1 begins 1RECV_F1, which is behind 1SEND_F0",
    "    ╰─ rank 1: 1SEND_F0 (line 2, column 6) waits until rank 0 begins 2RECV_F0, which is behind 0SEND_F1",
]


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    path = tmp_path / "two.txt"
    path.write_text(LISTS, encoding="utf-8")
    return path


def test_a_circle(run: Run, lists: Path, tmp_path: Path) -> None:
    picture = tmp_path / "circle.svg"
    answer = run("lint", str(lists), "--out", str(picture))
    assert answer.code == 1
    lines = answer.out.splitlines()
    assert lines[0] == f"{lists}: torch's schedule with communication, 2 ranks, 4 calls"
    at = lines.index("✗ NCCL's order")
    assert lines[at + 1 : at + 3] == CIRCLE
    assert lines[at + 3] == "✗ NCCL's order, one hardware queue: as with NCCL's order"
    assert lines[at + 4] == "✗ launch-blocking: as with NCCL's order"
    assert lines[-2:] == [
        "Smallest change: rank 0: swap 0SEND_F1 and 2RECV_F0 (the changed lists end under 5 rules)",
        "Wrong: 4 of 6 rules broken.",
    ]
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_rules_and_json(run: Run, lists: Path) -> None:
    answer = run("lint", str(lists), "--rule", "eager", "--json")
    assert answer.code == 0
    assert [rule["rule"] for rule in answer.json["rules"]] == ["each send meets its receive", "eager sends"]
    answer = run("lint", str(lists), "--rule", "nccl", "--json")
    assert answer.code == 1
    assert answer.json["rules"][1]["waits"][0]["behind"] == "1SEND_F0"
    assert answer.json["fix"]["changes"] == ["rank 0: swap 0SEND_F1 and 2RECV_F0"]


def test_a_communicator_an_edge_ends_it_in_nccl_order(run: Run, lists: Path) -> None:
    assert run("lint", str(lists), "--rule", "nccl", "--communicators", "edge").code == 0


def test_wrong_requests(run: Run, lists: Path, tmp_path: Path) -> None:
    for words in ((str(tmp_path / "none"),), (str(lists), "--out", "x.gif"), (str(lists), "--rule", "mpi")):
        assert run("lint", *words).code == 2
