"""Runner of commands for these tests: in this process, as wide as needed, without colours."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from counterflow.cli import application

ENVIRONMENT = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "200"}


@dataclass(frozen=True, slots=True)
class Answer:
    """Output and exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def run() -> Run:
    """Run a command; whatever it does, no traceback is seen."""

    def run_(line: str, *more: str) -> Answer:
        result = CliRunner(env=ENVIRONMENT).invoke(
            application(), [*line.split(), *more], prog_name="counterflow"
        )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        if "--debug" not in line:
            assert "Traceback" not in result.stderr
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run_


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Run a command that must be refused: exit 2, nothing on stdout; gives the message."""

    def refused_(line: str, *more: str) -> str:
        answer = run(line, *more)
        assert (answer.code, answer.out) == (2, "")
        return answer.err

    return refused_


@pytest.fixture
def exported(run: Run, tmp_path: Path) -> Callable[[str], Path]:
    """Export a scheme into a file."""

    def exported_(line: str) -> Path:
        path = tmp_path / f"{line.split(maxsplit=1)[0]}.json"
        assert run(f"export {line} --out", str(path)).code == 0
        return path

    return exported_
