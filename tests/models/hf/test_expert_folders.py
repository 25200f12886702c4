"""Folders of models of experts, read and written by pipelines with divided experts."""

from __future__ import annotations

from pathlib import Path

import counterflow as cf

from ...kit import FileFunction


def test_folders_of_experts_are_read_and_written_in_parts() -> None:
    """The five families, bit for bit: each position has its experts and no others."""
    case = FileFunction(Path(__file__).with_name("expert_cases.py"), "files")
    cf.launch(case, workers=4, timeout_seconds=120, threads=1)
