"""Values as TOML: literal cases, and what the standard library reads back."""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow import ConfigError
from counterflow.common import toml


class Word(StrEnum):
    ONE = "one"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1, "1"),
        (-2.5, "-2.5"),
        (1e-5, "1e-05"),
        (float("inf"), "inf"),
        ("a\\b", r'"a\\b"'),
        ("\x00\x7f\t", r'"\u0000\u007f\t"'),
        ("Γ × 😀", '"Γ × 😀"'),
        (Path("runs/a"), '"runs/a"'),
        (Word.ONE, '"one"'),
        ((1, 2), "[1, 2]"),
        ([], "[]"),
    ],
)
def test_literal(value: object, text: str) -> None:
    assert toml.dumps(value) == text


scalars = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.recursive(scalars, lambda values: st.lists(values, max_size=4), max_leaves=8))
def test_what_is_written_reads_back_equal(value: Any) -> None:
    assert tomllib.loads(f"x = {toml.dumps(value)}  # about") == {"x": value}


def test_what_toml_has_not() -> None:
    with pytest.raises(ConfigError, match="None cannot be written as TOML"):
        toml.dumps(None)
    with pytest.raises(ConfigError, match="not Unicode"):
        toml.dumps("a\udcff")
