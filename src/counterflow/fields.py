"""What people give of a record: how a flag of a command and a form of the page ask for its fields.

Invariant: a field says it where it stands, so a record, its flags and its form cannot differ. Not here: what
a value may be, which is the record's own business.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from counterflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Asked:
    """How a field is asked for.

    Attributes:
        about: what it is, as a sentence.
        kind: what is given: a number, a flag, one of an enum's words, a text that is read; or a list of such,
            if it may be repeated.
        metavar: what stands for the value: ``SECONDS`` or ``BYTES`` say how a text is read, too.
        name: what it is asked for by, if that is not the field's name.
        divided: the least it may be, if it grows with the stage's share of the model; None: it does not.
        least: the smallest legal number; None: whatever the record takes.
        most: the largest.
    """

    about: str
    kind: Any = str
    metavar: str | None = None
    name: str | None = None
    divided: float | None = None
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class AskedField:
    """A field with how it is asked for."""

    record: type
    field: str
    default: Any
    asked: Asked

    @property
    def name(self) -> str:
        """What it is asked for by."""
        return self.asked.name or self.field


def asked(default: Any, about: str, kind: Any = str, **more: Any) -> Any:
    """A field of a dataclass that people may give; ``more`` are other attributes of ``Asked``.

    With ``MISSING`` of ``dataclasses`` in place of a default they must give it.
    """
    return field(default=default, metadata={"asked": Asked(about, kind, **more)})


def asked_fields(*records: type) -> dict[str, AskedField]:
    """The fields of these dataclasses that people may give, by what they are asked for by.

    Raises:
        ConfigError: two have one name.
    """
    found: dict[str, AskedField] = {}
    for record in records:
        for each in fields(record):
            if "asked" not in each.metadata:
                continue
            one = AskedField(record, each.name, each.default, each.metadata["asked"])
            if one.name in found:
                raise ConfigError(f"{one.name}: two fields of {record.__name__} and others have this name")
            found[one.name] = one
    return found
