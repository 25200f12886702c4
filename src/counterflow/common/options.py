"""Records of options: fields with a meaning and legal values, which errors and config files say.

Invariant: torch is not imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from ..errors import ConfigError


def option(
    default: Any, legal: str, *, no_key: str | None = None, may_differ: bool = False, **limits: Any
) -> Any:
    """An option; the first paragraph of the docstring below it is also the comment of the config's key.

    Args:
        default: the value if the option is not given.
        legal: the legal values, as errors say them.
        no_key: why a config has no key for the option; None: it has one.
        may_differ: whether workers may have different values.
        limits: limits as pydantic accepts them.
    """
    extra: dict[str, Any] = {"legal": legal, "no_key": no_key, "may_differ": may_differ}
    return Field(default, json_schema_extra=extra, exclude=no_key is not None, **limits)


class Options(BaseModel):
    """A record of options. Values are checked strictly: "4" is not a number, 1 is not true.

    Raises:
        ConfigError: an option is unknown, or its value is not legal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_wrong(type(self), error, values)) from None

        def __setattr__(self, name: str, value: object) -> None:
            kind = type(self).__name__
            known = "" if name in type(self).model_fields else hint(name, type(self).model_fields)
            raise AttributeError(
                f"{name} cannot be set: {'an' if kind[0] in 'AEIO' else 'a'} {kind} is what a pipeline was "
                f"made with{known}; give the option to cf.Pipeline(...), or make another {kind}"
            )

    @classmethod
    def about(cls, name: str) -> str:
        """Meaning of an option, as a phrase."""
        return phrase(cls.model_fields[name])

    def agreed(self) -> dict[str, object]:
        """The options whose values must be the same on all workers."""
        return {
            name: getattr(self, name)
            for name, info in type(self).model_fields.items()
            if not metadata(info, "may_differ")
        }

    def but(self, **changed: Any) -> Self:
        """A copy of the record with other values, which are not checked."""
        return self.model_copy(update=changed)


def metadata(info: FieldInfo, what: str) -> Any:
    """Metadata of a field that ``option`` recorded."""
    extra = info.json_schema_extra
    return extra.get(what) if isinstance(extra, Mapping) else None


def phrase(info: FieldInfo) -> str:
    """The first paragraph of a field's description, as a phrase."""
    text = " ".join(str(info.description).partition("\n\n")[0].split())
    return text[0].lower() + text[1:-1] if text.endswith(".") else text


def _wrong(kind: type[Options], error: ValidationError, values: Mapping[str, Any]) -> str:
    details = error.errors()[0]
    name, cause = str(details["loc"][0]), details.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if details["type"] == "extra_forbidden":
        return f"{name}: {kind.__name__} has no such option{hint(name, kind.model_fields)}"
    info = kind.model_fields[name]
    return f"{name} = {values[name]!r}: must be {metadata(info, 'legal')} ({phrase(info)})"


def hint(name: str, known: Iterable[str]) -> str:
    """Hint that follows the name of an unknown option in an error."""
    options = [*known]
    near = difflib.get_close_matches(name, options, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(options)}"
