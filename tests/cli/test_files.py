"""Schedule files: exported and read back, edited by hand, damaged, in the wrong place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import counterflow as cf
from counterflow.schedule.formats import dumps, loads

from .conftest import Run

DAPPLE = "dapple --stages 2 --micro-batches 4"
CIRCLE = [
    "worker 0, op 1: B0.0 waits for B0.1 (worker 1, op 2)",
    "worker 1, op 1: F1.1 waits for F1.0 (worker 0, op 2)",
]
READERS = ["simulate", "check", "show"]

Exported = Callable[[str], Path]
Refused = Callable[..., str]


@pytest.fixture
def deadlocked(tmp_path: Path) -> Path:
    """A file in which each worker wants first what the other one makes second."""
    schedule = cf.schemes.dapple(stages=2, micro_batches=2)
    first, last = schedule.orders
    assert list(map(str, first)) == ["F0.0", "F1.0", "B0.0", "B1.0"]
    assert list(map(str, last)) == ["F0.1", "B0.1", "F1.1", "B1.1"]
    orders = tuple((o[0], o[2], o[1], o[3]) for o in (first, last))
    path = tmp_path / "deadlocked.json"
    path.write_text(dumps(replace(schedule, orders=orders)), encoding="utf-8")
    return path


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A file that can be played, but in which a backward is missing everywhere."""
    schedule = cf.schemes.dapple(stages=2, micro_batches=2)
    orders = tuple(order[:-1] for order in schedule.orders)
    path = tmp_path / "wrong.json"
    path.write_text(dumps(replace(schedule, orders=orders)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "line",
    [
        "gpipe --stages 2 --micro-batches 3 --groups 2",
        "chimera --stages 4 --micro-batches 8 --concat backward-halving",
        "chimera --stages 4 --micro-batches 8 --pairs 2 --concat forward-doubling",
        "pipedream-2bw --stages 3 --micro-batches 4 --periods 2",
        "wpipe --workers 2 --micro-batches 3 --periods 3",
    ],
)
def test_a_file_is_the_same_schedule(run: Run, exported: Exported, line: str) -> None:
    path = exported(line)
    assert run(f"simulate {path} --json --timeline") == run(f"simulate {line} --json --timeline")
    on_stdout = run(f"export {line}")
    assert (on_stdout.code, on_stdout.err) == (0, "")
    assert loads(on_stdout.out, "stdout") == loads(path.read_text(encoding="utf-8"), str(path))


def test_export_says_what_it_wrote(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    answer = run(f"export {DAPPLE} --out {path}")
    assert (answer.out, answer.err) == ("", f"Wrote {path}: dapple(stages=2, micro_batches=4)\n")


def test_costs_apply_to_a_file(run: Run, exported: Exported) -> None:
    path = exported(DAPPLE)
    costs = "--forward 2 --recompute stage --weight-bytes 1GiB --json"
    assert run(f"simulate {path} {costs}") == run(f"simulate {DAPPLE} {costs}")


def test_a_file_of_an_asynchronous_scheme_without_a_steady_part(run: Run, exported: Exported) -> None:
    out = run(f"simulate {exported('pipedream --stages 4 --periods 2')}").out
    assert "none: no steady part in 2 periods" in out
    assert "--periods" not in out


def test_a_scheme_is_a_scheme_though_a_file_has_its_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dapple").write_text("no schedule", encoding="utf-8")
    assert run(f"simulate {DAPPLE}").code == 0
    Path("mine").write_text(run(f"export {DAPPLE}").out, encoding="utf-8")
    assert run("simulate mine").code == 0


@pytest.mark.parametrize("command", READERS)
def test_a_file_fixes_its_options(refused: Refused, exported: Exported, command: str) -> None:
    path = exported(DAPPLE)
    assert refused(f"{command} {path} --micro-batches 8 --periods 2") == (
        f"Error: {path} is a schedule file, which fixes its own options: leave out --micro-batches, "
        "--periods\n"
    )


def test_check_shows_the_circle(run: Run, deadlocked: Path) -> None:
    answer = run(f"check {deadlocked}")
    assert (answer.code, answer.err) == (1, "")
    assert "✓ every op exactly once" in answer.out
    assert "✗ no deadlock with buffered sends" in answer.out
    for line in CIRCLE:
        assert line in answer.out
    assert "Right" not in answer.out


def test_check_shows_the_circle_as_json(run: Run, deadlocked: Path) -> None:
    answer = run(f"check {deadlocked} --json")
    assert (answer.code, answer.err) == (1, "")
    assert list(answer.json)[-2:] == ["ok", "rules"]
    assert answer.json["ok"] is False
    (broken, *_) = [rule for rule in answer.json["rules"] if rule["ok"] is False]
    assert broken["rule"] == "no deadlock with buffered sends"
    for line in CIRCLE:
        assert line in broken["detail"]
    assert any(rule["ok"] is None and rule["detail"] for rule in answer.json["rules"])


@pytest.mark.parametrize("line", ["simulate {}", "simulate {} --json", "show {}"])
def test_a_deadlock_cannot_be_played(run: Run, deadlocked: Path, line: str) -> None:
    answer = run(line.format(deadlocked))
    assert (answer.code, answer.out) == (1, "")
    for wait in CIRCLE:
        assert wait in answer.err


@pytest.mark.parametrize("command", ["simulate", "show"])
def test_a_file_that_is_wrong_but_can_be_played(run: Run, wrong: Path, command: str) -> None:
    assert run(f"check {wrong}").code == 1
    answer = run(f"{command} {wrong}")
    assert answer.code == 0
    assert answer.err == (
        f"Warning: {wrong} does not pass the checker (every op exactly once); "
        f"see: counterflow check {wrong}\n"
    )


@pytest.mark.parametrize("command", READERS)
def test_no_such_file(refused: Refused, tmp_path: Path, command: str) -> None:
    path = tmp_path / "nowhere.json"
    message = refused(f"{command} {path}")
    assert message.startswith(
        f"Error: {path}: no such file or folder; give a scheme of 'counterflow schemes'"
    )
    assert refused(f"{command} nowhere.json").startswith("Error: nowhere.json: no such file")


def test_not_a_file(refused: Refused, tmp_path: Path) -> None:
    assert refused(f"check {tmp_path}") == f"Error: {tmp_path}: is a directory, not a schedule file\n"


def test_not_text(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff")
    assert refused(f"check {path}") == f"Error: {path}: is not a text file (byte 0 is not UTF-8)\n"


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95])
def test_truncated(refused: Refused, exported: Exported, command: str, share: float) -> None:
    path = exported(DAPPLE)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: int(len(text.rstrip()) * share)], encoding="utf-8")
    message = refused(f"{command} {path}")
    assert message.startswith(f"Error: {path}")
    assert "line" in message


@pytest.mark.parametrize("text", ["3", "[]", "null", '"dapple"', "{}", '{"scheme": "dapple"}', "hello"])
def test_something_else(refused: Refused, tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    assert refused(f"check {path}").startswith(f"Error: {path}")


def _top_level_keys() -> list[str]:
    return list(json.loads(dumps(cf.schemes.dapple(stages=2, micro_batches=4))))


@pytest.mark.parametrize("key", _top_level_keys())
@pytest.mark.parametrize("value", [1.5, [[[]]], {"a": None}])
def test_wrong_types(refused: Refused, exported: Exported, key: str, value: Any) -> None:
    path = exported(DAPPLE)
    data = json.loads(path.read_text(encoding="utf-8"))
    data[key] = value
    path.write_text(json.dumps(data), encoding="utf-8")
    message = refused(f"simulate {path}")
    assert message.startswith(f"Error: {path}")
    assert key in message


@pytest.mark.parametrize("text", ["Q0.0", "F0", "F-1.0", "0.0", "F0.0x", "F(0,0.0", ""])
def test_no_op(refused: Refused, exported: Exported, text: str) -> None:
    path = exported(DAPPLE)
    before = path.read_text(encoding="utf-8")
    assert "F0.0" in before
    path.write_text(before.replace("F0.0", text, 1), encoding="utf-8")
    message = refused(f"check {path}")
    assert message.startswith(f"Error: {path}")
    assert text in message


def test_export_takes_schemes_and_files(refused: Refused) -> None:
    assert refused("export x.json").startswith("Error: x.json: no such file")
    assert refused("export nothing").startswith("Error: unknown scheme 'nothing'")


def test_export_into_nowhere(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "x.json"
    assert refused(f"export {DAPPLE} --out {path}") == (
        f"Error: cannot write {path}: the directory {path.parent} does not exist\n"
    )
    assert refused(f"export {DAPPLE} --out {tmp_path}") == (
        f"Error: cannot write {tmp_path}: it is a directory\n"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_export_without_permission(refused: Refused, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    path = tmp_path / "x.json"
    assert refused(f"export {DAPPLE} --out {path}") == (f"Error: cannot write {path}: permission denied\n")


def test_a_full_disk(run: Run) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    answer = run(f"export {DAPPLE} --out /dev/full")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("Error: cannot write /dev/full: ")
