"""The page on planning your own model: its commands and its program run as they stand, on threads."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import counterflow as cf
from counterflow.runtime.workers.launch import launch
from counterflow.schedule.registry import schedule_of

from ..cli.conftest import Run, run  # noqa: F401 - a fixture
from .test_pages import blocks


def test_the_page(
    run: Run,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def on_threads(*arguments: Any, **options: Any) -> Any:
        return launch(*arguments, **options | {"transport": "local"})

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own", None)  # other pages have such a file too
    monkeypatch.setattr("counterflow.measure.survey.launch", on_threads)
    own, program = blocks("plan-your-own-model.md", "python")
    Path("own.py").write_text(own)
    Path("program.py").write_text(program.replace("workers=2", "workers=2, sizes=(1, 4), repeats=1"))
    profiled, planned = blocks("plan-your-own-model.md", "bash")[0].splitlines()
    answer = run(profiled.removeprefix("counterflow "), "--sizes", "1,4", "--repeats", "1")
    assert answer.code == 0
    assert "block" in answer.out
    assert planned == "counterflow plan" + answer.err.rpartition("counterflow plan")[2].rstrip()
    answer = run(planned.removeprefix("counterflow "), "--workers", "2", "--scheme", "1f1b")
    assert "Run it on 2 workers: cf.Pipeline(model, loss, 'dapple(stages=2, micro_batches=" in answer.err
    capsys.readouterr()
    runpy.run_path("program.py", run_name="__main__")
    options = eval(capsys.readouterr().out)
    assert isinstance(schedule_of(options["schedule"], {}), cf.Schedule)
    sys.modules.pop("own")
