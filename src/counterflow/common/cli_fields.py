"""Flags of a command and forms of the page for the fields of a record.

Invariant: this is stated where the field is defined, so a record, its flags and its form cannot differ. Legal
values are checked by the record, not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from counterflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """Presentation of a field on the command line and the page.

    Attributes:
        about: meaning of the field, as a sentence.
        kind: type of the value: a number, a flag, one of an enum's words, a text to parse; or a list of
            these, if the option may be repeated.
        metavar: placeholder for the value; ``SECONDS`` and ``BYTES`` also say how a text is parsed.
        name: name of the option, if it is not the field's name.
        divided: minimum, if the value grows with the stage's share of the model; None: it does not.
        least: minimum; None: the record decides.
        most: maximum; None: the record decides.
    """

    about: str
    kind: Any = str
    metavar: str | None = None
    name: str | None = None
    divided: float | None = None
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class CliField:
    """A field and how it is asked for."""

    record: type
    field: str
    default: Any
    spec: FieldSpec

    @property
    def name(self) -> str:
        """Name of the option."""
        return self.spec.name or self.field


def cli_field(default: Any, about: str, kind: Any = str, **more: Any) -> Any:
    """A field of a dataclass that people may give; ``more`` are other attributes of ``FieldSpec``.

    A field whose default is ``MISSING`` of ``dataclasses`` is required.
    """
    return field(default=default, metadata={"cli_field": FieldSpec(about, kind, **more)})


def cli_fields(*records: type) -> dict[str, CliField]:
    """The fields of these dataclasses that people may give, by option name.

    Raises:
        ConfigError: two fields have the same option name.
    """
    by_name: dict[str, CliField] = {}
    for record in records:
        for item in fields(record):
            if "cli_field" not in item.metadata:
                continue
            cli = CliField(record, item.name, item.default, item.metadata["cli_field"])
            if cli.name in by_name:
                raise ConfigError(f"{cli.name}: two fields of {record.__name__} and others have this name")
            by_name[cli.name] = cli
    return by_name
