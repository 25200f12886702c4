"""The generator of users' programs: some drawn cases, and that its judge sees what is wrong."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NUMBERS = [*range(4), *range(5, 16), 34, 119, 628, 687, 899, 982]
"""The first ones, and those that once gave other numbers or another error."""
NAMES = "kit", "user_models", "user_losses", "user_runs", "user_habits", "user_programs", "wrong_numbers"


@pytest.fixture(scope="module")
def programs() -> Iterator[Any]:
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(str(FOLDER))
        yield import_module("user_programs")
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_drawn_program_is_as_in_one_process_or_refused(programs: Any, number: int) -> None:
    finding = programs.judged(programs.drawn(0, number))
    assert finding.verdict in ("equal", "refused"), f"{programs.described(finding.case)}: {finding.text}"


@pytest.mark.filterwarnings("ignore")
def test_other_numbers_of_the_pipeline_are_seen(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(programs.Case(0, 0), scheme="dapple(stages=2, micro_batches=2)", looks=(1,), steps=2)
    assert programs.judged(case).verdict == "equal"
    own = programs.run_staged

    def run(*args: Any) -> Any:
        records, error = own(*args)
        records[1].state["1.up.bias"] = records[1].state["1.up.bias"] + 1e-6
        return records, error

    monkeypatch.setattr(programs, "run_staged", run)
    finding = programs.judged(case)
    assert finding.verdict == "WRONG"
    assert "1.up.bias" in finding.text


def test_a_sentence_is_told_from_an_error_of_python(programs: Any) -> None:
    import counterflow as cf

    assert not programs.is_internal(cf.ConfigError("the loss is no mean"))
    assert not programs.is_internal(cf.WorkerError("worker 1, action 3: the loss is inf"))
    assert programs.is_internal(cf.WorkerError("worker 1: KeyError: 'a'"))
    assert programs.is_internal(KeyError("a"))


def test_small_programs_name_their_tests(programs: Any) -> None:
    del programs  # it finds the script
    script = import_module("wrong_numbers")
    names = {each.name for each in [*script.PROGRAMS, *script.TRAINER]}
    assert len(names) == len(script.PROGRAMS) + len(script.TRAINER)
    assert script.TESTS.keys() <= names
    for test in script.TESTS.values():
        file, name = test.split("::")
        assert f"def {name}(" in (FOLDER.parent / "tests" / "runtime" / file).read_text(encoding="utf-8"), (
            test
        )
