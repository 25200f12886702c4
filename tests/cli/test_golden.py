"""What ``--json`` prints of commands whose answers are the same on every machine, against kept outputs.

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

KEPT = Path(__file__).parent / "golden"

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
    kept = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
    assert list(differences(answer.json, kept, "")) == []


def differences(found: Any, kept: Any, place: str) -> Iterator[str]:
    """Where two answers differ; computed numbers may differ in their last digits from machine to machine."""
    if isinstance(found, dict) and isinstance(kept, dict):
        for key in sorted({*found, *kept}):
            if key not in found or key not in kept:
                yield f"{place}.{key}: {'gone' if key in kept else 'new'}"
            else:
                yield from differences(found[key], kept[key], f"{place}.{key}")
    elif isinstance(found, list) and isinstance(kept, list) and len(found) == len(kept):
        for index, (one, other) in enumerate(zip(found, kept, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif type(found) is not type(kept) or not (
        math.isclose(found, kept, rel_tol=1e-9, abs_tol=1e-12) if isinstance(found, float) else found == kept
    ):
        yield f"{place}: {found!r} in place of {kept!r}"


def test_differences_are_found() -> None:
    kept = {"a": [1, 2.0], "b": "x"}
    assert list(differences({"a": [1, 2.0 + 1e-12], "b": "x"}, kept, "")) == []
    assert list(differences({"a": [1.0, 2.1], "c": 1}, kept, "")) == [
        ".a[0]: 1.0 in place of 1",
        ".a[1]: 2.1 in place of 2.0",
        ".b: gone",
        ".c: new",
    ]
