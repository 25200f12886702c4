"""Parts of the models of ``--json``.

Invariant: a key has one description, and reads its value from the library's record. A record that is shown
unchanged needs no model: its docstring describes its attributes. Nothing is printed here.
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
    """A number as JSON should show it: 5 rather than 5.0, but 2.5 unchanged."""
    return int(value) if float(value).is_integer() else value


Count = Annotated[int | float, BeforeValidator(exact)]
"""A number that is usually whole."""


def describe(text: str, *places: str) -> Any:
    """Meaning of a key, for the page, and where its value is found if not under the key's own name.

    Args:
        text: meaning of the key.
        places: dotted attributes of the record; the first that exists is read.
    """
    return Field(description=text, validation_alias=_choices(*places) if places else None)


def reads(*places: str) -> ConfigDict:
    """Setting of a model whose keys are attributes of the record, or of these attributes of the record."""
    names = AliasGenerator(
        validation_alias=lambda key: _choices(key, *(f"{place}.{key}" for place in places))
    )
    return ConfigDict(alias_generator=names)


def _choices(*places: str) -> AliasChoices:
    paths = ([int(part) if part.isdigit() else part for part in place.split(".")] for place in places)
    return AliasChoices(*(AliasPath(str(first), *rest) for first, *rest in paths))


class Part(BaseModel):
    """An object inside a command's output."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True, populate_by_name=True)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """A model of this class that reads the named records."""
        return cls.model_validate(SimpleNamespace(**values))


class Result(Part):
    """Output of a command. Keys that do not apply are omitted."""

    format: Annotated[Literal[1], describe("the version of this form")] = 1


def result_of(doc: str, base: type[Result], *records: type, **more: Any) -> type[Result]:
    """A model that shows the attributes of several records side by side.

    Args:
        doc: docstring: what prints the model.
        base: model whose keys come first.
        records: dataclasses; an attribute that contains one of them is not shown itself.
        more: further keys, annotated.
    """
    fields: dict[str, Any] = {}
    for record in records:
        known = meanings(record)
        for name, kind in get_type_hints(record).items():
            if kind not in records:
                fields[name] = Annotated[kind, describe(known[name])]
    model: type[Result] = create_model("Shown", __base__=base, __doc__=doc, **fields, **more)
    return model


def meanings(shown: type) -> dict[str, str]:
    """Meaning of each key of a model or record; a record's docstring describes its attributes."""
    if issubclass(shown, BaseModel):
        named = {name: field.description for name, field in shown.model_fields.items()}
    else:
        text = (inspect.getdoc(shown) or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
        attributes = {name: " ".join(about.split()).rstrip(".") for name, about in _ATTRIBUTE.findall(text)}
        named = {name: _NONE.sub("null", attributes.get(name, "")) for name in get_type_hints(shown)}
    return {name: about or name.replace("_", " ") for name, about in named.items()}


_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n     .+)*)", re.MULTILINE)
_NONE = re.compile(r"\bNone\b")


def sections(*shown: type) -> dict[type, str]:
    """For each model, and each model inside it, a table of its keys, for the page."""
    by_model: dict[type, str] = {}
    waiting = list(shown)
    for model in waiting:
        if model not in by_model:
            about = " ".join((inspect.getdoc(model) or "").partition("\n\nAttributes:")[0].split())
            rows = (f"| `{name}` | {meaning} |" for name, meaning in meanings(model).items())
            lines = [f"### {about}", "", "| key | meaning |", "|---|---|", *rows]
            by_model[model] = "\n".join(lines).replace("``", "`")
            waiting += [part for kind in get_type_hints(model).values() for part in _parts(kind)]
    return by_model


def _parts(kind: Any) -> list[type]:
    if isinstance(kind, type) and (issubclass(kind, Part) or dataclasses.is_dataclass(kind)):
        return [kind]
    return [part for inner in get_args(kind) for part in _parts(inner)]
