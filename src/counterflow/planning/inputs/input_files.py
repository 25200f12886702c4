"""Clusters, profiles and models as files: TOML to read and edit, or the same data as JSON.

Invariant: ``load_*`` returns a value equal to the one that ``dumps`` wrote. A message names the file, the key
and the legal values. pydantic parses the data types and checks their form; the data types check ranges.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from counterflow.common import toml
from counterflow.common.text_files import read_text
from counterflow.errors import ConfigError

from .cluster import Cluster, Link, NodeKind
from .layer_parts import Contexts, Division, Experts, InputTensors
from .model import ConfigValue, LayerSkip, LayerTie, Model, TrainValue
from .profile import LayerProfile, Profile

_T = TypeVar("_T")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _RunOfLayers(_Table):
    kind: str
    count: Annotated[int, Field(ge=1, le=100_000)] = 1


class _ModelFile(_Table):
    name: str
    optimizer_states: float = 2.0
    input_bytes: float = 0.0
    source: str = ""
    layers: list[_RunOfLayers]
    train: dict[str, TrainValue] = {}
    config: dict[str, dict[str, ConfigValue]] = {}
    skips: list[LayerSkip] = []
    ties: list[LayerTie] = []

    def value(self) -> Model:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        kinds = tuple(run.kind for run in self.layers for _ in range(run.count))
        return Model(**values | {"layers": kinds, "skips": tuple(self.skips), "ties": tuple(self.ties)})


_CLUSTER = TypeAdapter(Cluster)
_PROFILE = TypeAdapter(Profile)
_MODEL = TypeAdapter(_ModelFile)


def load_cluster(path: Path | str) -> Cluster:
    """The cluster in a file.

    Raises:
        ConfigError: the file cannot be read, or has another form; the message says where.
    """
    return read_cluster(_text(path), str(path))


def load_profile(path: Path | str) -> Profile:
    """The profile in a file.

    Raises:
        ConfigError: the file cannot be read, or has another form; the message says where.
    """
    return read_profile(_text(path), str(path))


def load_model(path: Path | str) -> Model:
    """The model in a file.

    Raises:
        ConfigError: the file cannot be read, or has another form; the message says where.
    """
    return read_model(_text(path), str(path))


def read_cluster(text: str, name: str) -> Cluster:
    """The cluster in a file's text; TOML, or JSON if the file's name ends in ``.json``.

    Raises:
        ConfigError: the text has another form; the message says where, and begins with the name.
    """
    return _value(text, name, _CLUSTER)


def read_profile(text: str, name: str) -> Profile:
    """The profile in a file's text, as in ``read_cluster``."""
    return _value(text, name, _PROFILE)


def read_model(text: str, name: str) -> Model:
    """The model in a file's text, as in ``read_cluster``."""
    table = _value(text, name, _MODEL)
    try:
        return table.value()
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def dumps(value: Cluster | Profile | Model) -> str:
    """A cluster, profile or model as a TOML file."""
    return tomlkit.dumps(as_data(value))


def as_data(
    value: Cluster
    | NodeKind
    | Profile
    | Model
    | LayerProfile
    | Division
    | Experts
    | Contexts
    | InputTensors
    | Link
    | LayerSkip
    | LayerTie,
) -> dict[str, Any]:
    """A cluster, profile or model as plain data, without keys that have no value."""
    names = [field.name for field in fields(value) if getattr(value, field.name) is not None]
    data = {name: getattr(value, name) for name in names}
    if isinstance(value, Model):
        data["layers"] = [{"kind": kind, "count": count} for kind, count in value.runs()]
        data["skips"] = [as_data(skip) for skip in value.skips]
        data["ties"] = [as_data(tie) for tie in value.ties]
    if isinstance(value, Cluster):
        data["kinds"] = [as_data(kind) for kind in value.kinds]
    for name, part in data.items():
        if isinstance(part, (Link, Division, Experts, Contexts, InputTensors)):
            data[name] = as_data(part)
        elif isinstance(part, Mapping):
            data[name] = {k: as_data(v) if isinstance(v, LayerProfile) else v for k, v in part.items()}
    return {name: part for name, part in data.items() if part or not isinstance(part, (Mapping, list))}


def _value(text: str, name: str, form: TypeAdapter[_T]) -> _T:
    try:
        # As JSON, because pydantic's strict mode accepts a table for a data type only from JSON.
        return form.validate_json(json.dumps(_read(text, name), default=_no_json))
    except ValidationError as error:
        # A misspelt key first: it explains the missing one.
        problems = sorted(error.errors(), key=lambda e: e["type"] not in _UNKNOWN_KEY)
        lines = [f"{name}: {_problem_text(problem)}" for problem in problems[:5]]
        raise ConfigError("\n".join(lines)) from None
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"{name}: {error}") from None


def _no_json(value: object) -> Any:
    raise TypeError(f"{value} is a date or a time; write it in quotes")


_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


def _problem_text(problem: Any) -> str:
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in problem["loc"]).lstrip(".")
    if problem["type"] in _UNKNOWN_KEY:
        return f"{place}: unknown key"
    if problem["type"] == "missing":
        return f"{place}: is missing"
    if problem["type"] == "value_error":  # the message of a data type
        return f"{place}.{problem['ctx']['error']}" if place else str(problem["ctx"]["error"])
    message = problem["msg"][0].lower() + problem["msg"][1:]
    got = problem["input"]
    shown = "a table" if isinstance(got, Mapping) else json.dumps(got, default=str)
    where = f"{place}: " if place else ""
    return f"{where}{message}, got {shown if len(shown) <= 60 else shown[:57] + '…'}"


def _text(path: Path | str) -> str:
    return read_text(Path(path), "is a folder, not a file")


def _read(text: str, name: str) -> Any:
    is_json = name.endswith(".json")
    try:
        data = json.loads(text) if is_json else tomllib.loads(text)
        legal = toml.has_only_legal_numbers(data)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{name}: not {'JSON' if is_json else 'TOML'}: {error}") from None
    except ValueError:  # Python limits the digits of a number
        raise ConfigError(f"{name}: a number has thousands of digits; is the file damaged?") from None
    if not legal:
        raise ConfigError(f"{name}: a whole number has more than 64 bits; is the file damaged?")
    return data
