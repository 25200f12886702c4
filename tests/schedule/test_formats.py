"""Schedule files: the same text read back is the same schedule; what is damaged is told with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.errors import ConfigError
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads, parse_op
from counterflow.schedule.ir import Op, OpKind, Schedule

ops = st.builds(
    Op,
    kind=st.sampled_from(OpKind),
    stage=st.integers(0, 99),
    micro_batches=st.lists(st.integers(0, 9999), min_size=1, max_size=3).map(tuple),
    pipe=st.integers(0, 9),
    part=st.integers(0, 3),
    parts=st.integers(4, 6),
    version=st.integers(0, 9),
)


@settings(derandomize=True, deadline=None)
@given(ops)
def test_an_op_is_read_as_it_is_printed(op: Op) -> None:
    assert parse_op(str(op)) == op


@pytest.mark.parametrize(
    "schedule",
    [
        schemes.gpipe(3, 4, groups=2),
        schemes.chimera(4, 8, concat="forward-doubling"),
        schemes.chimera(8, 5, pairs=2, concat="backward-halving"),
        schemes.mixpipe(4, 4, injected="max"),
        schemes.hanayo(3, 4, waves=2),
        schemes.wpipe(2, 3, periods=4),
        schemes.pipedream(3),
    ],
    ids=str,
)
def test_the_text_read_back_is_the_same_schedule(schedule: Schedule) -> None:
    text = dumps(schedule)
    again = loads(text, "x.json")
    assert again == schedule
    assert dumps(again) == text


def test_a_file_has_one_line_a_worker() -> None:
    lines = dumps(schemes.dapple(2, 2)).splitlines()
    assert '    ["F0.0", "F1.0", "B0.0", "B1.0"],' in lines


def damaged(**changes: Any) -> str:
    data = json.loads(dumps(schemes.dapple(2, 2)))
    data.update(changes)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (dumps(schemes.dapple(2, 2))[:-30], r"x\.json: not JSON, at line \d+, column \d+"),
        ("[]", "not a schedule file"),
        ("[" * 100_000, "x.json"),
        (damaged(format="other"), "not a schedule file"),
        (damaged(format_version=2), "format_version"),
        (damaged(micro_batches="four"), "micro_batches"),
        (damaged(micro_batches=0), "micro_batches"),
        (damaged(surprise=1), "surprise"),
        (damaged(options={"a": None}), "options"),
        (damaged(placement=[[0, 2]]), r"placement\[0\]\[1\]: worker 2, but there are 2 orders"),
        (damaged(placement=[[0, 1], [0]]), r"placement\[1\]: 1 stage, but pipe 0 has 2"),
        (damaged(placement=[[]]), "placement"),
        (damaged(steady=[[0, 99], [0, 1]]), "steady"),
        (damaged(orders=[["F0.0"], ["X1.0"]]), r'orders\[1\]\[0\]: "X1.0" is not an op; ops look like'),
        (damaged(orders=[["F0.0"], [7]]), r"orders\[1\]\[0\]"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loads(text, "x.json")
