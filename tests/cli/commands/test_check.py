from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from counterflow.program.rules import RULES

from ..conftest import Run

CHIMERA = "check chimera --stages 4 --micro-batches 8"
PEAK = "peak within the limit"


def test_every_rule_holds(run: Run) -> None:
    answer = run(CHIMERA)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines() == [
        "chimera(stages=4, micro_batches=8, pairs=1, concat=direct): 4 workers, 64 ops",
        *(f"✓ {rule.name}" for rule in RULES),
        f"Right: all {len(RULES)} rules hold.",
    ]


def test_json(run: Run) -> None:
    answer = run(f"{CHIMERA} --json")
    assert answer.code == 0
    rules = [{"rule": rule.name, "ok": True, "detail": ""} for rule in RULES]
    assert answer.json == {
        "format": 1,
        "scheme": "chimera",
        "options": {"stages": 4, "micro_batches": 8, "pairs": 1, "concat": "direct"},
        "workers": 4,
        "stages": 4,
        "pipes": 2,
        "micro_batches": 8,
        "op_count": 64,
        "ok": True,
        "rules": rules,
    }


def test_a_broken_limit(run: Run) -> None:
    answer = run("check dapple --stages 4 --micro-batches 8 --peak-limit 3")
    assert (answer.code, answer.err) == (1, "")
    lines = answer.out.splitlines()
    broken = lines.index(f"✗ {PEAK}")
    assert lines[broken + 1] == "    worker 0, op 3: F3.0 makes 4 stashed forwards, the limit is 3"
    assert lines[-1] == f"Wrong: 1 of {len(RULES)} rules broken."


def test_a_broken_limit_as_json(run: Run) -> None:
    answer = run("check dapple --stages 4 --micro-batches 8 --peak-limit 3 --json")
    assert answer.code == 1
    assert answer.json["ok"] is False
    assert [rule["rule"] for rule in answer.json["rules"] if not rule["ok"]] == [PEAK]


def test_a_limit_that_holds(run: Run) -> None:
    assert run("check dapple --stages 4 --micro-batches 8 --peak-limit 4").code == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("check chimera --stages 5 --micro-batches 8", "Error: --stages 5: two directions need"),
        ("check chimera", "Error: chimera needs --stages and --micro-batches"),
        ("check chimra", "Error: unknown scheme 'chimra'; did you mean 'chimera'?"),
        (f"{CHIMERA} --peak-limit -1", "--peak-limit"),
        (f"{CHIMERA} --forward 1", "No such option: --forward"),
    ],
)
def test_refused(refused: Callable[..., str], line: str, message: str) -> None:
    assert message in refused(line)


def test_a_file(run: Run, exported: Callable[[str], Path]) -> None:
    path = exported("wpipe --workers 2 --micro-batches 2 --periods 3")
    answer = run(f"check {path}")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("wpipe(workers=2, micro_batches=2, periods=3, groups=2): 2 workers")


def test_rules_that_are_skipped_are_one_line(run: Run, exported: Callable[[str], Path]) -> None:
    path = exported("dapple --stages 2 --micro-batches 2")
    path.write_text(path.read_text(encoding="utf-8").replace('"F0.0", ', "", 1), encoding="utf-8")
    lines = run(f"check {path}").out.splitlines()
    assert "✗ every op exactly once" in lines
    assert len([line for line in lines if "skipped, because a rule above fails" in line]) == 1
    assert lines[-1].endswith(" skipped.")
