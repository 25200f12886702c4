"""Experts of transformers' models, divided without a line about the model."""

from __future__ import annotations

import operator
import runpy
from pathlib import Path
from typing import Any

import counterflow as cf


def test_models_of_experts_train_as_one_process() -> None:
    cf.launch(Cases(), workers=4, timeout_seconds=120, threads=1)


class Cases:
    """The function ``five`` of expert_cases.py, which other processes find by the path."""

    def __reduce__(self) -> Any:
        return operator.getitem, (_File(), "five")

    def __call__(self) -> None:
        """As it is read from a pickle, it is the function itself."""


class _File:
    def __reduce__(self) -> Any:
        return runpy.run_path, (str(Path(__file__).with_name("expert_cases.py")),)
