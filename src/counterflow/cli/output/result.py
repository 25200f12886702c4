"""What the models of ``--json`` are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Options = dict[str, bool | int | str]
"""Options of a scheme."""


def said(text: str) -> Any:
    """What a key means, for the page."""
    return Field(description=text)


class Part(BaseModel):
    """An object inside of what a command prints."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Result(Part):
    """What a command prints. Keys that do not apply are left out."""

    format: Annotated[Literal[1], said("the version of this form")] = 1
