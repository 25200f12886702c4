"""What the tables of a config are made of: keys with a default, a meaning and legal values.

Invariant: what a key means is said where it stands, and nowhere else. torch is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict

from counterflow.execution import option, phrase, said

AUTO = "auto"
"""``train.resume``: go on in the run's own folder, wherever it got to. ``pipeline.transport``: what fits."""

MANY = 1_000_000_000
"""The most of what takes neither time nor memory before it is reached."""

PATH = "a path, in quotes"
SHARE = "a number from 0 to less than 1"


def as_path(value: object) -> Path:
    """A path, of a text that can be one.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(value)
    return Path(value)


PathKey = Annotated[Path, BeforeValidator(as_path)]
WholeNumbers = Annotated[tuple[int, ...], Strict(False)]


def count(default: int | None, most: int, *, least: int = 1) -> Any:
    """A key that is a whole number, with the most that can be meant: more is refused before it is built."""
    return option(default, f"a whole number, {least} to {most:,}", ge=least, le=most)


class Key(NamedTuple):
    """What is said of a key: what it means, and what it may be in the words of an error."""

    about: str
    legal: str


class Section(BaseModel):
    """One table of the config file. Keys are checked strictly: ``"4"`` is no number, 1 is not true."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def keys_known(cls) -> dict[str, Key]:
        """Every key that it may have."""
        return {
            name: Key(phrase(info), str(said(info, "legal")))
            for name, info in cls.model_fields.items()
            if not said(info, "no_key")
        }

    def given(self) -> dict[str, Any]:
        """The keys that have a value, in the order of the file."""
        fields = type(self).model_fields.items()
        values = {name: getattr(self, name) for name, info in fields if not said(info, "no_key")}
        return {name: value for name, value in values.items() if value is not None}

    def about(self, key: str) -> str:
        """What a key of it means."""
        return self.keys_known()[key].about
