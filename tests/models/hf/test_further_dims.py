"""Models of transformers on meshes of further dimensions, without a line about the model."""

from __future__ import annotations

from pathlib import Path

import pytest

import counterflow as cf

from ...kit import FileFunction


@pytest.mark.parametrize(
    ("file", "case"),
    [
        ("expert_cases.py", "five"),
        ("context_cases.py", "decoders"),
        ("context_cases.py", "sliced"),
        ("tensor_cases.py", "decoders"),
    ],
)
def test_models_train_as_one_process(file: str, case: str) -> None:
    """Those of experts, divided; and decoders of which positions share sequences, or the work of a layer."""
    cf.launch(FileFunction(Path(__file__).with_name(file), case), workers=4, timeout_seconds=120, threads=1)
