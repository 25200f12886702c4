"""Clusters, profiles and models as files: TOML to read and edit, or the same as JSON.

Invariant: what ``dumps`` writes, ``load_*`` reads back equal. A message names the file, the key and what is
legal. pydantic checks form here; ranges are the data types' own business.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeVar

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from counterflow.errors import ConfigError
from counterflow.reading import read_text

from .cluster import Cluster, Link
from .model import Model
from .profile import LayerProfile, Profile

Numbers = Annotated[tuple[float, ...], Strict(False)]
TrainValue = str | bool | int | float


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Link(_Table):
    latency_seconds: float
    seconds_per_byte: float

    def value(self) -> Link:
        return Link(self.latency_seconds, self.seconds_per_byte)


class _Cluster(_Table):
    name: str
    nodes: int
    devices: int
    memory_bytes: float
    reserve_bytes: float = 0.0
    shared_adapter: bool = False
    overlap: bool = True
    sync_slowdown: float = 0.0
    cores: int | None = None
    inside: _Link
    between: _Link
    allreduce_inside: _Link | None = None
    allreduce_between: _Link | None = None
    sources: dict[str, str] = {}

    def value(self) -> Cluster:
        given: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        for name, part in given.items():
            if isinstance(part, _Link):
                with _named(f"{name}."):
                    given[name] = part.value()
        return Cluster(**given)


class _Layer(_Table):
    samples: Numbers
    forward_seconds: Numbers
    backward_seconds: Numbers
    saved_bytes: Numbers
    weights_bytes: float
    output_bytes: float
    part_overhead_seconds: float = 0.0
    sources: dict[str, str] = {}

    def value(self) -> LayerProfile:
        return LayerProfile(**{name: getattr(self, name) for name in type(self).model_fields})


class _Profile(_Table):
    name: str
    machine: str
    date: str
    update_seconds_per_byte: float = 0.0
    op_overhead_seconds: float = 0.0
    step_overhead_seconds: float = 0.0
    sources: dict[str, str] = {}
    layers: dict[str, _Layer]

    def value(self) -> Profile:
        given = {name: getattr(self, name) for name in type(self).model_fields}
        layers = {}
        for kind, layer in self.layers.items():
            with _named(f"layers.{kind}."):
                layers[kind] = layer.value()
        return Profile(**given | {"layers": layers})


class _Run(_Table):
    kind: str
    count: Annotated[int, Field(ge=1, le=100_000)] = 1


class _Model(_Table):
    name: str
    optimizer_states: float = 2.0
    input_bytes: float = 0.0
    source: str = ""
    layers: list[_Run]
    train: dict[str, TrainValue] = {}

    def value(self) -> Model:
        given = {name: getattr(self, name) for name in type(self).model_fields}
        kinds = tuple(run.kind for run in self.layers for _ in range(run.count))
        return Model(**given | {"layers": kinds})


def load_cluster(path: Path | str) -> Cluster:
    """The cluster in a file.

    Raises:
        ConfigError: it cannot be read, or is not of the form; the message says where.
    """
    return _value(path, _Cluster)


def load_profile(path: Path | str) -> Profile:
    """The profile in a file.

    Raises:
        ConfigError: it cannot be read, or is not of the form; the message says where.
    """
    return _value(path, _Profile)


def load_model(path: Path | str) -> Model:
    """The model in a file.

    Raises:
        ConfigError: it cannot be read, or is not of the form; the message says where.
    """
    return _value(path, _Model)


def dumps(value: Cluster | Profile | Model) -> str:
    """A cluster, profile or model as a TOML file."""
    return tomlkit.dumps(as_data(value))


def as_data(value: Cluster | Profile | Model | LayerProfile | Link) -> dict[str, Any]:
    """The same as plain data; what has no value is left out."""
    names = [name for name in type(value).__slots__ if getattr(value, name) is not None]
    data = {name: getattr(value, name) for name in names}
    if isinstance(value, Model):
        data["layers"] = [{"kind": kind, "count": count} for kind, count in value.runs()]
    for name, part in data.items():
        if isinstance(part, Link):
            data[name] = as_data(part)
        elif isinstance(part, Mapping):
            data[name] = {k: as_data(v) if isinstance(v, LayerProfile) else v for k, v in part.items()}
    return {name: part for name, part in data.items() if not isinstance(part, Mapping) or part}


_T_co = TypeVar("_T_co", covariant=True)


class _Form(Protocol[_T_co]):
    """A table of a file, with the value it stands for."""

    @classmethod
    def model_validate(cls, obj: Any) -> Self: ...

    def value(self) -> _T_co: ...


def _value(path: Path | str, form: type[_Form[_T_co]]) -> _T_co:
    """What a file says, as the value it stands for."""
    read = _read(Path(path))
    try:
        found = form.model_validate(read)
    except ValidationError as error:
        # A misspelt key first: it explains the one that is missing.
        problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        lines = [f"{path}: {_told(problem)}" for problem in problems[:5]]
        raise ConfigError("\n".join(lines)) from None
    with _named(f"{path}: "):
        return found.value()


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Puts the place in front of what is wrong with a value."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None


def _told(problem: Any) -> str:
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in problem["loc"]).lstrip(".")
    if problem["type"] == "extra_forbidden":
        return f"{place}: there is no such key"
    if problem["type"] == "missing":
        return f"{place}: is missing"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    got = problem["input"]
    shown = "a table" if isinstance(got, Mapping) else json.dumps(got, default=str)
    return f"{place}: {message}, got {shown if len(shown) <= 60 else shown[:57] + '…'}"


def _read(path: Path) -> Any:
    text = read_text(path, "is a folder, not a file")
    is_json = path.suffix == ".json"
    try:
        return json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not {'JSON' if is_json else 'TOML'}: {error}") from None
