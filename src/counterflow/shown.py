"""What the models of ``--json`` are made of.

Invariant: a key has one description, and reads its value from the library's record. A record that is shown as
it stands needs no model: its docstring says what its attributes are. What it does not do: print.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

from pydantic import (
    AliasChoices,
    AliasGenerator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
)

Options = Annotated[dict[str, bool | int | str], BeforeValidator(dict)]
"""Options of a scheme."""


def exact(value: float) -> int | float:
    """A count as JSON should show it: 5 rather than 5.0, but 2.5 as it is."""
    return int(value) if float(value).is_integer() else value


Count = Annotated[int | float, BeforeValidator(exact)]
"""A number that is whole as a rule."""


def said(text: str, *places: str) -> Any:
    """What a key means, for the page, and where its value is if not under the key's own name.

    Args:
        text: what it means.
        places: attributes of the record, dotted; the first that is there.
    """
    return Field(description=text, validation_alias=_choices(*places) if places else None)


def reads(*places: str) -> ConfigDict:
    """The setting of a model whose keys are attributes of these attributes of the record, or its own."""
    names = AliasGenerator(validation_alias=lambda key: _choices(key, *(f"{one}.{key}" for one in places)))
    return ConfigDict(alias_generator=names)


def _choices(*places: str) -> AliasChoices:
    """The places of a value; numbers in them are indices."""
    paths = ([int(part) if part.isdigit() else part for part in one.split(".")] for one in places)
    return AliasChoices(*(AliasPath(str(first), *rest) for first, *rest in paths))


class Part(BaseModel):
    """An object inside of what a command prints."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True, populate_by_name=True)

    @classmethod
    def of(cls, **found: Any) -> Self:
        """What reads these records by their names."""
        return cls.model_validate(SimpleNamespace(**found))


class Result(Part):
    """What a command prints. Keys that do not apply are left out."""

    format: Annotated[Literal[1], said("the version of this form")] = 1


def result_of(doc: str, base: type[Result], *records: type, **more: Any) -> type[Result]:
    """The model of what shows the attributes of records side by side.

    Args:
        doc: what prints it.
        base: what it has before them.
        records: dataclasses; an attribute that is one of them is not shown for itself.
        more: further keys, annotated.
    """
    fields: dict[str, Any] = {}
    for record in records:
        known = meanings(record)
        for name, kind in get_type_hints(record).items():
            if kind not in records:
                fields[name] = Annotated[kind, said(known[name])]
    model: type[Result] = create_model("Shown", __base__=base, __doc__=doc, **fields, **more)
    return model


def meanings(shown: type) -> dict[str, str]:
    """What each key of a model or a record means: a record's docstring says it of its attributes."""
    if issubclass(shown, BaseModel):
        named = {name: field.description for name, field in shown.model_fields.items()}
    else:
        text = (inspect.getdoc(shown) or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
        told = {name: " ".join(about.split()).rstrip(".") for name, about in _ATTRIBUTE.findall(text)}
        named = {name: _NONE.sub("null", told.get(name, "")) for name in get_type_hints(shown)}
    return {name: about or name.replace("_", " ") for name, about in named.items()}


_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n     .+)*)", re.MULTILINE)
_NONE = re.compile(r"\bNone\b")


def sections(*shown: type) -> dict[type, str]:
    """Of models, and of all that they show inside of them, a table of their keys, for the page."""
    found: dict[type, str] = {}
    waiting = list(shown)
    for one in waiting:
        if one not in found:
            about = " ".join((inspect.getdoc(one) or "").partition("\n\nAttributes:")[0].split())
            rows = (f"| `{name}` | {meaning} |" for name, meaning in meanings(one).items())
            lines = [f"### {about}", "", "| key | meaning |", "|---|---|", *rows]
            found[one] = "\n".join(lines).replace("``", "`")
            waiting += [part for kind in get_type_hints(one).values() for part in _parts(kind)]
    return found


def _parts(kind: Any) -> list[type]:
    """The models and records in an annotation."""
    if isinstance(kind, type) and (issubclass(kind, Part) or dataclasses.is_dataclass(kind)):
        return [kind]
    return [part for inner in get_args(kind) for part in _parts(inner)]
