"""Findings about the machine: constants of theirs that other files state, too."""

from __future__ import annotations

from pathlib import Path

from counterflow.measure import health


def test_the_least_torch_is_the_one_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={".".join(map(str, health._LEAST_TORCH))},' in text
