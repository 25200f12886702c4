"""Output of ``--json`` of commands whose answers are the same on every machine, against saved outputs.

A kept output is what ``counterflow COMMAND --json`` printed. It changes only where that is wanted, because
users' programs read these keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run

GOLDEN = Path(__file__).parent / "golden"

COMMANDS = {
    "simulate": "simulate chimera --stages 4 --micro-batches 4 --p2p 0.1 --sync 0.5 --replicas 2 "
    "--weight-bytes 1MiB --activation-bytes 2MB --timeline --messages",
    "simulate-plain": "simulate hanayo --workers 2 --waves 1 --micro-batches 2",
    "simulate-without-flush": "simulate pipedream --stages 3",
    "synthesize": "synthesize --placement vee --workers 2 --micro-batches 4 --peak 4 --moves 100",
    "compare": "compare --workers 4 --micro-batches 8 --p2p 0.1 --weight-bytes 1GiB --activation-bytes 1MiB "
    "--memory 2060MiB --moves 200",
    "layout": "layout Et*3|(tt|)*29,m|L --layers 12 --pp 4 --vpp 2",
    "check": "check mixpipe --stages 4 --micro-batches 8 --injected max",
    "schemes": "schemes",
    "plan": "plan --example chimera-bert48 --workers 4 --workers 8 --top 2",
    "plan-list": "plan --list",
    "plan-divided": "plan --example hanayo-bert64 --scheme dapple --scheme chimera --tensor-parallel 2",
    "reproduce-list": "reproduce --list",
    "reproduce-table": "reproduce chimera-table2",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_stays_as_it_was(run: Run, name: str) -> None:
    answer = run(f"{COMMANDS[name]} --json")
    assert answer.code == 0, answer.err
    expected = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    assert list(differences(answer.json, expected, "")) == []


def differences(actual: Any, expected: Any, place: str) -> Iterator[str]:
    """Differences of two answers; computed numbers may differ in their last digits between machines."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        for key in sorted({*actual, *expected}):
            if key not in actual or key not in expected:
                yield f"{place}.{key}: {'gone' if key in expected else 'new'}"
            else:
                yield from differences(actual[key], expected[key], f"{place}.{key}")
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for index, (actual_item, expected_item) in enumerate(zip(actual, expected, strict=True)):
            yield from differences(actual_item, expected_item, f"{place}[{index}]")
    elif type(actual) is not type(expected) or not (
        math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-12)
        if isinstance(actual, float)
        else actual == expected
    ):
        yield f"{place}: {actual!r} in place of {expected!r}"


def test_differences_are_found() -> None:
    expected = {"a": [1, 2.0], "b": "x"}
    assert list(differences({"a": [1, 2.0 + 1e-12], "b": "x"}, expected, "")) == []
    assert list(differences({"a": [1.0, 2.1], "c": 1}, expected, "")) == [
        ".a[0]: 1.0 in place of 1",
        ".a[1]: 2.1 in place of 2.0",
        ".b: gone",
        ".c: new",
    ]
