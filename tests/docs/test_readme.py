"""README and the pages for beginners: short, with programs that run, outputs and messages that are so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import counterflow as cf
from counterflow.schedule import registry

from ..cli.conftest import Run, run

__all__ = ["run"]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 120


def test_it_is_short() -> None:
    assert README.count("\n") <= MOST_LINES


def test_it_says_at_its_head_what_was_run_on_gpus() -> None:
    table = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8").partition("| anything on a GPU |")[2]
    head = README.partition("## Install")[0]
    assert "**Status: alpha.**" in head
    assert ("Nothing has run on a GPU yet" in head) is ("**not run yet**" in table.partition("\n")[0])


def test_its_program_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {"__name__": "read"}
    exec(program, scope)
    (alone,) = re.findall(r'alone = (".+?")', program)
    program = program.replace("work, alone", f"work, {alone}")
    lines = re.findall(r'cf\.launch\(work, (".+?"), workers=(\d).*  # ([\d.]+)', program)
    assert [workers for _, workers, _ in lines] == ["4", "1"]
    for schedule, workers, printed in lines:
        call = scope["work"], ast.literal_eval(schedule)
        found = cf.launch(*call, workers=int(workers), transport="local", timeout_seconds=120)
        assert all(losses == found[0] for losses in found)
        assert len(found[0]) == 20
        assert str(found[0][-1]) == printed, "the numbers of one process, as printed"
    assert found[0][-1] < found[0][0]


def test_its_numbers_are_those_of_the_kept_results() -> None:
    def kept(name: str) -> str:
        return (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")

    asynchronous = [scheme.name for scheme in registry.SCHEMES.values() if not scheme.synchronous]
    assert f"There are {_WORDS[len(registry.SCHEMES)]} schemes" in README
    assert f"{len(registry.SCHEMES) - len(asynchronous)} schemes, your own file" in README
    median = re.search(r"off by ([\d.]+)% in the median", kept("cluster.txt"))
    assert median is not None
    assert f"[{median[1]} % median error][cluster]" in README
    worst = max(
        float(error) for error in re.findall(r"relative error ([\d.e-]+)", kept("agreement_grid.txt"))
    )
    assert f"[{worst:.1e} at most][grid]" in README
    ours, theirs = (
        re.search(
            rf"^\| {name} \|[^|]*\|[^|]*\| ([\d.]+) \|[^|]*\|[^|]*\| ([\d.]+)", kept("back_to_back.txt"), re.M
        )
        for name in ("zb-v", "torch ZBVZeroBubble")
    )
    assert ours is not None
    assert theirs is not None
    assert f"[{ours[1]} ms][back] a step, ideal {ours[2]} | [{theirs[1]} ms][back]" in README


_WORDS = {18: "eighteen", 19: "nineteen", 20: "twenty"}


def test_pictures_of_schedules_are_what_the_commands_print(run: Run) -> None:
    page = (ROOT / "docs" / "pipeline-schedules.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n\$ counterflow ([^\n]*)\n(.+?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for command, shown in blocks:
        answer = run(command)
        assert answer.code == 0
        assert answer.out == shown


def test_formulas_of_papers_are_what_the_command_prints(run: Run) -> None:
    page = (ROOT / "docs" / "choosing-a-scheme.md").read_text(encoding="utf-8")
    shown = re.search(
        r"^\$ counterflow ([^\n]*--formulas)\n```\n\n```text\n(.+?)^```", page, re.DOTALL | re.MULTILINE
    )
    assert shown is not None
    printed = [line.split() for line in run(shown[1]).out.splitlines()]
    rows = [line.split() for line in shown[2].splitlines() if not {*line} <= {"─", " "}]
    assert len(rows) > 12
    assert all(row in printed for row in rows)


def test_messages_in_troubleshooting_are_the_librarys() -> None:
    """Each message, cut at …, is made of texts in the code; their f-strings are joined with …."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts = "\n".join(
        text for path in (ROOT / "src").rglob("*.py") for text in _texts(ast.parse(path.read_text()))
    )
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) >= 16
    for message in messages:
        for piece in filter(None, (part.strip() for part in message.split("…"))):
            assert piece in texts, piece


def _texts(tree: ast.AST) -> list[str]:
    """All texts but docstrings; where an f-string has a value stands an ellipsis."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values]
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.append(node.value)
    return found
