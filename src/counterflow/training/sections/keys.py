"""Elements of a config's tables: keys with a default, a meaning and legal values.

Invariant: the meaning of a key is stated where it is defined, and nowhere else. torch is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict

from counterflow.common.options import metadata, option, phrase

AUTO = "auto"
"""``train.resume``: resume in the run's own folder. ``pipeline.transport``: choose by the machine."""

MANY = 1_000_000_000
"""Upper bound of numbers that cost neither time nor memory before they are reached."""

PATH = "a path, in quotes"
SHARE = "a number from 0 to less than 1"


def as_path(value: object) -> Path:
    """A text as a path.

    Raises:
        ValueError: the text cannot be a path.
    """
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(value)
    return Path(value)


PathKey = Annotated[Path, BeforeValidator(as_path)]
WholeNumbers = Annotated[tuple[int, ...], Strict(False)]


def count(default: int | None, most: int, *, least: int = 1) -> Any:
    """A key that is a whole number, with a maximum; more is refused before anything is built."""
    return option(default, f"a whole number, {least} to {most:,}", ge=least, le=most)


class Key(NamedTuple):
    """Metadata of a key: its meaning, and its legal values as errors say them."""

    about: str
    legal: str


class Section(BaseModel):
    """One table of the config file. Keys are checked strictly: ``"4"`` is not a number, 1 is not true."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def keys_known(cls) -> dict[str, Key]:
        """Every key of the table."""
        return {
            name: Key(phrase(info), str(metadata(info, "legal")))
            for name, info in cls.model_fields.items()
            if not metadata(info, "no_key")
        }

    def values(self) -> dict[str, Any]:
        """The keys that have a value, in the order of the file."""
        fields = type(self).model_fields.items()
        present = {name: getattr(self, name) for name, info in fields if not metadata(info, "no_key")}
        return {name: value for name, value in present.items() if value is not None}

    def about(self, key: str) -> str:
        """Meaning of a key."""
        return self.keys_known()[key].about
