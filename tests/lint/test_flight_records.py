"""Dumps of torch's flight recorder: read without code, and placed in a schedule."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from counterflow.errors import ConfigError
from counterflow.lint.calls import CallLists, CallSide, CommunicatorScope
from counterflow.lint.flight_records import read_flight_records
from counterflow.lint.reading import read_lists, read_subject
from counterflow.lint.verdicts import lint
from counterflow.lint.waiting import TransportRule

from .hangs.cases import FOLDER

HANG = FOLDER / "pytorch-178815.csv"


def entry(number: int, title: str, state: str = "completed", **more: Any) -> dict[str, Any]:
    """An entry with the keys of version 2.10 that matter here, as torch writes them."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 0,
        "p2p_seq_id": number,
        "op_id": number,
        "profiling_name": title,
        "input_sizes": [[3]],
        "state": state,
        "retired": state == "completed",
        "is_p2p": True,
        **more,
    }


def write(folder: Path, rows: Sequence[Sequence[dict[str, Any]]], *, as_json: bool = False) -> None:
    for rank, entries in enumerate(rows):
        ranks = str(list(range(len(rows))))
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        values = {"version": "2.10", "pg_config": config, "entries": list(entries)}
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(json.dumps(values).encode() if as_json else pickle.dumps(values, protocol=2))


def rows_of(lists: CallLists, counts: Sequence[int], *, before: int = 0) -> list[list[dict[str, Any]]]:
    """Entries of ranks that called so many messages, of which the last is not complete."""
    rows = []
    for rank, (row, count) in enumerate(zip(lists.ranks, counts, strict=True)):
        parts = [part for step in row for part in step.parts] * 2
        titles = [
            f"nccl:send {rank}->{part.peer}"
            if part.side is CallSide.SEND
            else f"nccl:recv {rank}<-{part.peer}"
            for part in parts
        ]
        states = ["completed"] * (count - 1) + ["started"]
        called = list(enumerate(zip(titles, states, strict=False)))[before:]
        rows.append([entry(number, title, state) for number, (title, state) in called])
    return rows


def schedule() -> CallLists:
    return read_lists(HANG, CommunicatorScope.PAIR).lists


@pytest.mark.parametrize("as_json", [False, True])
def test_places_in_a_schedule(tmp_path: Path, as_json: bool) -> None:
    """Rank 0 is in its fourth message, 2SEND_F0 … of 2 ranks that hang as in PR 178815."""
    lists = schedule()
    sends = [[step.label for step in row if step.parts] for row in lists.ranks]
    stuck = [sends[0].index("2SEND_F1"), sends[1].index("3SEND_B0")]
    write(tmp_path, rows_of(lists, [number + 1 for number in stuck]), as_json=as_json)
    subject = read_subject([tmp_path], CommunicatorScope.PAIR, HANG)
    assert [place.action for place in subject.places] == ["2SEND_F1", "3SEND_B0"]
    assert [place.step for place in subject.places] == [0, 0]
    assert [place.ops for place in subject.places] == [("2F1",), ("3B0",)]
    verdict = lint(subject.lists, [TransportRule.NCCL])
    assert not verdict.ok
    assert verdict.fix is not None


def test_second_step_and_a_dump_that_lost_its_begin(tmp_path: Path) -> None:
    lists = schedule()
    sizes = [sum(len(step.parts) for step in row) for row in lists.ranks]
    write(tmp_path, rows_of(lists, [sizes[0] + 3, sizes[1] + 3], before=5))
    places = read_subject([tmp_path], CommunicatorScope.PAIR, HANG).places
    sends = [[step.label for step in row if step.parts] for row in lists.ranks]
    assert [place.action for place in places] == [sends[0][2], sends[1][2]]


def test_without_a_schedule(tmp_path: Path) -> None:
    rows = [
        [entry(0, "nccl:send 0->1", "started"), entry(1, "nccl:recv 0<-1", "scheduled")],
        [entry(0, "nccl:send 1->0", "started"), entry(1, "nccl:recv 1<-0", "scheduled")],
    ]
    write(tmp_path, rows)
    subject = read_subject([tmp_path])
    assert [str(place) for place in subject.places] == [
        "rank 0: in send to rank 1 (started)",
        "rank 1: in send to rank 0 (started)",
    ]
    verdict = lint(subject.lists, [TransportRule.NCCL])
    assert verdict.fix is not None
    assert verdict.fix.changes == ("rank 0: swap send to 1 and recv from 1",)


def test_a_rank_that_never_calls_and_one_in_a_collective(tmp_path: Path) -> None:
    rows = [
        [entry(0, "nccl:recv 0<-1", "started")],
        [entry(0, "nccl:all_reduce", "scheduled", is_p2p=False, retired=False)],
    ]
    write(tmp_path, rows)
    subject = read_subject(sorted(tmp_path.iterdir()))
    assert "in nccl:all_reduce of group '0' (scheduled)" in str(subject.places[1])
    verdict = lint(subject.lists, [TransportRule.NCCL])
    (play,) = (finding.play for finding in verdict.findings if finding.play)
    assert not play.closed
    assert play.waits[-1].awaited == -1


def test_batches_are_one_launch(tmp_path: Path) -> None:
    rows = [
        [
            entry(0, f"nccl:send {rank}->{1 - rank}", "scheduled", retired=False),
            entry(1, f"nccl:recv {rank}<-{1 - rank}", "scheduled", retired=False),
            entry(2, "nccl:coalesced", "started", retired=False),
        ]
        for rank in range(2)
    ]
    write(tmp_path, rows)
    lists = read_subject([tmp_path]).lists
    assert [len(step.parts) for row in lists.ranks for step in row] == [2, 2]
    assert lint(lists, [TransportRule.NCCL]).ok


class _Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (pickle.dumps(_Harmful()), "asks for posix.mkdir"),
        (b"\x80\x02]", "no dump of the flight recorder"),
        (pickle.dumps([1]), 'it has no list "entries"'),
        (pickle.dumps({"entries": [{"state": "completed"}]}), 'entry 0: no "profiling_name"'),
    ],
)
def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, error: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace_0"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=error):
        read_flight_records([path])
    assert not Path("harm").exists()


def test_all_ranks_are_needed(tmp_path: Path) -> None:
    write(tmp_path, [[], [entry(0, "nccl:send 1->0")]])
    (tmp_path / "nccl_trace_rank_0").unlink()
    with pytest.raises(ConfigError, match="no dump of rank 0"):
        read_flight_records([tmp_path])
    write(tmp_path, [[entry(0, "nccl:send 0->1", "started")], []])
    with pytest.raises(ConfigError, match="no dump of rank 1"):
        read_flight_records([tmp_path / "nccl_trace_rank_0"])
    (tmp_path / "nccl_trace_rank_1").rename(tmp_path / "trace")
    with pytest.raises(ConfigError, match="ends with its rank"):
        read_flight_records([tmp_path / "trace"])


def test_the_schedule_does_not_fit(tmp_path: Path) -> None:
    write(tmp_path, [[entry(0, "nccl:recv 0<-1", "started")], [entry(0, "nccl:send 1->0", "started")]])
    first, _ = read_subject([tmp_path], None, HANG).places
    assert first.remark == "call 0 is a receive from rank 1, and the schedule has a send to rank 1"
