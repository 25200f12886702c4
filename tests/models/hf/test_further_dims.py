"""Models of transformers on meshes of further dimensions, without a line about the model."""

from __future__ import annotations

import operator
import runpy
from pathlib import Path
from typing import Any

import pytest

import counterflow as cf


@pytest.mark.parametrize(("file", "case"), [("expert_cases.py", "five"), ("context_cases.py", "decoders")])
def test_models_train_as_one_process(file: str, case: str) -> None:
    """Those of experts, divided over positions; and decoders whose sequences positions share."""
    cf.launch(Cases(file, case), workers=4, timeout_seconds=120, threads=1)


class Cases:
    """A function of a file here, which other processes find by the path."""

    def __init__(self, file: str, name: str) -> None:
        self.file, self.name = file, name

    def __reduce__(self) -> Any:
        return operator.getitem, (_File(self.file), self.name)

    def __call__(self) -> None:
        """As it is read from a pickle, it is the function itself."""


class _File:
    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return runpy.run_path, (str(Path(__file__).with_name(self.name)),)
