"""Files that the linter reads, and those that it refuses with their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from counterflow.errors import ConfigError
from counterflow.lint.calls import CallLists, CallSide, CommunicatorScope
from counterflow.lint.reading import read_lists
from counterflow.lint.recorded import recorded_lists
from counterflow.lint.torch_lists import read_torch_lists
from counterflow.lint.verdicts import PAIRED, lint
from counterflow.schedule import formats, schemes

TWO = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def read(text: str, communicators: CommunicatorScope = CommunicatorScope.GROUP) -> CallLists:
    return read_torch_lists(text, "x.csv", communicators)


def test_torch_lists() -> None:
    first, second = read(TWO, CommunicatorScope.PAIR).ranks
    assert [step.label for step in first] == ["0F0", "0SEND_F0", "0RECV_B0", "0B0"]
    assert [step.needs for step in first] == [(), (0,), (), (2,)]
    assert [step.needs for step in second] == [(), (0,), (), (2,)]
    (send,) = first[1].parts
    assert (send.side, send.peer, send.name, send.communicator) == (CallSide.SEND, 1, "0F0", "pair 0-1")
    assert second[0].parts[0].name == "0F0"


def test_pairs_and_batches_of_torch() -> None:
    lists = read("(0F1;0B0)OVERLAP_F_B,(0SEND_F1;0RECV_B1)BATCH_P2P\n1RECV_F1,1F1,1B1,1SEND_B1\n")
    overlapped, batch = lists.ranks[0]
    assert overlapped.seconds == 3.0
    assert [part.side for part in batch.parts] == [CallSide.SEND, CallSide.RECEIVE]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0F0,0SEND_F0\n1RECV_F0, 1XX3\n", r"x.csv: line 2, column 11: '1XX3' is not an action; actions"),
        ("0F0,0UNSHARD3\n", r"line 1, column 5: '0UNSHARD3' is not"),
        ("0/2:0F0,0SEND_F0\n", "x.csv: line 1, column 1: 0/2:0F0 is of a slice, and messages of torch"),
        ("0F0,0/2:0SEND_F0\n", "line 1, column 5: '0/2:0SEND_F0' is not an action"),
        ("0F0,0B0\n", "no action sends or receives"),
        ("", "no action; expected one row per rank"),
        ("0F0,0SEND_F0\n0F1\n", "line 2, column 1: 0F1 is of stage 0, which is on rank 0"),
        (
            "0F0,0SEND_F0\n",
            "line 1, column 5: 0SEND_F0 is a message to or from a stage, and no row has stage 1",
        ),
        ("0F0,0SEND_F0,1F0\n", "stage 1 is on the same rank"),
        ("rank 1: 0F0\n", "row 0 is of rank 1; write all ranks in order"),
        ("(0F0;0SEND_F0)BATCH_P2P\n", "0F0 is no send or receive"),
    ],
)
def test_wrong_torch_lists(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(text)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"ranks": []}, "ranks: List should have at least 1 item"),
        ({"ranks": [[{"send": 1, "sent": 2}], []]}, "rank 0, entry 0: sent: Extra inputs"),
        ({"ranks": [[{"send": 2}], []]}, "rank 0, entry 0: rank 2 is not listed"),
        ({"ranks": [[{"send": 0}], []]}, "rank 0 is this rank"),
        ({"ranks": [[{"send": 1, "recv": 1}], []]}, "an entry is a"),
        ({"ranks": [[{}], []]}, "an entry is a"),
        ({"ranks": [[{"batch": [{}]}], []]}, 'either "send" or "recv"'),
        ({"ranks": [[{"batch": []}], []]}, "at least one message"),
        ({"ranks": [[{"wait": ["a"]}], []]}, 'no earlier call has the "id"'),
        ({"ranks": [[{"send": 1, "id": "a"}, {"send": 1, "id": "a"}], []]}, "names an earlier call too"),
        (
            {
                "ranks": [
                    [{"batch": [{"send": 1, "communicator": "a"}, {"send": 1, "communicator": "b"}]}],
                    [],
                ]
            },
            "runs on one communicator",
        ),
    ],
)
def test_wrong_recorded_calls(values: object, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        recorded_lists(values, "x.json")


def test_lone_and_crossed_messages_are_named() -> None:
    lone = lint(recorded_lists({"ranks": [[{"send": 1, "tag": "a"}], []]}, "x"))
    assert not lone.ok
    (finding,) = (finding for finding in lone.findings if finding.rule == PAIRED)
    assert "send a to 1 has no receive" in finding.faults[0]
    rows = [[{"send": 1, "tag": t} for t in "ab"], [{"recv": 0, "tag": t} for t in "ba"]]
    crossed = lint(recorded_lists({"ranks": rows}, "x"))
    assert crossed.fix is not None
    assert crossed.fix.changes == ("rank 1: swap the receives of b and a",)


def test_files_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "lists"
    path.write_text(TWO, encoding="utf-8")
    subject = read_lists(path)
    assert [finding.ok for finding in subject.findings] == [True] * 5
    assert lint(subject.lists, further=subject.findings).ok
    path.write_text(json.dumps({"ranks": [[{"send": 1}], [{"recv": 0}]]}), encoding="utf-8")
    assert lint(read_lists(path).lists).ok
    with pytest.raises(ConfigError, match="leave out communicators"):
        read_lists(path, CommunicatorScope.PAIR)
    path.write_text(formats.dumps(schemes.zb_v(workers=2, micro_batches=4)), encoding="utf-8")
    assert lint(read_lists(path).lists).ok
    path.write_text('{"ranks": [[{"send": 1]}', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1, column 23: no JSON"):
        read_lists(path)


def test_rules_of_the_ops_are_those_of_the_checker(tmp_path: Path) -> None:
    """A send before its op is made, and an op without its receive."""
    path = tmp_path / "lists.csv"
    path.write_text("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", encoding="utf-8")
    (*_, messages) = read_lists(path).findings
    assert "comes before F0.0 is computed" in messages.faults[0]
    path.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n", encoding="utf-8")
    (*_, messages) = read_lists(path).findings
    assert "is after F0.1, which needs it" in messages.faults[0]
    assert not lint(read_lists(path).lists).ok
