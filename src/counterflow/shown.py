"""What the models of ``--json`` are made of.

Invariant: a key has one description, and reads its value from the library's record. What it does not do:
print.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field

Options = dict[str, bool | int | str]
"""Options of a scheme."""


def said(text: str, *places: str) -> Any:
    """What a key means, for the page, and where its value is if not under the key's own name.

    Args:
        text: what it means.
        places: attributes of the record, dotted; the first that is there.
    """
    paths = [AliasPath(*place.split(".")) for place in places]
    return Field(description=text, validation_alias=AliasChoices(*paths) if paths else None)


class Part(BaseModel):
    """An object inside of what a command prints."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True, populate_by_name=True)


class Result(Part):
    """What a command prints. Keys that do not apply are left out."""

    format: Annotated[Literal[1], said("the version of this form")] = 1
