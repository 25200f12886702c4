"""From a TOML file and overrides to a ``RunConfig``; every error uses the user's own words.

Invariant: later layers win: built-in defaults, the file (without a file, the config of the run that is
resumed), ``--set``, then the command's own flags. A new scheme keeps the file's options that it also has
(workers and stages stand in for each other) and drops the others; an option that is given in the same layer
as the scheme must be one of the scheme's own. A message names where the value was given, the section and key,
the value, and the legal values.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from counterflow.common import toml
from counterflow.common.text_files import read_text
from counterflow.errors import ConfigError
from counterflow.schedule import registry
from counterflow.schedule.scheme import DEPTH

from .config import RunConfig
from .folder import CONFIG, run_of
from .sections.keys import AUTO, Section
from .sections.schedule_section import SCHEME
from .training_report import KeyShown

SECTIONS: dict[str, type[Section]] = {
    name: annotation
    for name, info in RunConfig.model_fields.items()
    if isinstance(annotation := info.annotation, type) and issubclass(annotation, Section)
}
"""The tables of a config file."""


def known_keys() -> list[KeyShown]:
    """Every key of a config with its default, its meaning and its legal values."""
    shown = []
    for section, model in SECTIONS.items():
        for name, (about, legal) in model.keys_known().items():
            field = model.model_fields.get(name)  # options of schemes have the scheme's own defaults
            default = field.default if field is not None else None
            shown.append(KeyShown(key=f"{section}.{name}", default=default, about=about, legal=legal))
    return shown


_Key = tuple[str, str]

_CHOICES: tuple[_Key, ...] = (("schedule", "scheme"), ("schedule", "file"))
"""Keys that decide which other keys of their section are legal."""


@dataclass(slots=True)
class _Layers:
    file: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[_Key, str] = field(default_factory=dict)

    def put(self, section: str, key: str, value: Any, place: str) -> None:
        """Set one key; sections and keys that do not exist are refused later, all together."""
        table = self.values.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
            self.places[section, key] = place

    def drop(self, section: str, key: str) -> None:
        """Put a key back to its default."""
        table = self.values.get(section)
        if isinstance(table, dict):
            table.pop(key, None)

    def change(self, section: str, key: str, value: Any, place: str) -> None:
        """Set one key and adjust the keys that depend on it; None puts the key back to its default."""
        if value is None:
            self.drop(section, key)
        elif (section, key) == ("schedule", "scheme"):
            self.put_scheme(value, place)
        else:
            if (section, key) == ("schedule", "file"):  # replaces any scheme of the layers below
                self.values["schedule"] = {}
            self.put(section, key, value, place)

    def put_scheme(self, name: object, place: str) -> None:
        """Set another scheme and keep the options of the one below that it has too; workers stand in for
        stages.
        """
        self.drop("schedule", "file")
        below = self.values.get("schedule")
        known = registry.find(str(name))
        if isinstance(below, dict) and name == AUTO != below.get("scheme"):
            workers = [below[key] for key in DEPTH if key in below]
            self.values["schedule"] = {DEPTH[1]: workers[0]} if workers else {}  # all others are planned
        if isinstance(below, dict) and known is not None and below.get("scheme", SCHEME) != name:
            for key, schemes in registry.options().items():
                if known.name not in schemes and key in below:
                    value = below.pop(key)
                    if (depth := known.in_place_of(key)) is not None:
                        below.setdefault(depth, value)
        self.put("schedule", "scheme", name, place)

    def put_workers(self, workers: int) -> None:
        """Set the workers of a pipeline group, by the option that the scheme has for them."""
        below = self.values.get("schedule", {})
        if not isinstance(below, dict):
            return
        if below.get("file") is not None:
            raise ConfigError(
                f"--workers {workers}: schedule.file = {toml.dumps(str(below['file']))} fixes the workers; "
                "use only one of them"
            )
        scheme = str(below.get("scheme", SCHEME))
        known = registry.find(scheme)
        depth = known.depth if known else DEPTH[scheme == AUTO]
        self.put("schedule", depth, workers, "--workers: ")


def load_config(
    path: Path | str | None = None,
    sets: Sequence[str] = (),
    *,
    scheme: str | None = None,
    workers: int | None = None,
    steps: int | None = None,
    out: Path | str | None = None,
) -> RunConfig:
    """The config of a run.

    Args:
        path: a TOML file; None: the config of the run that ``train.resume`` names, or the built-in example.
        sets: overrides as ``section.key=value``; the value is TOML, otherwise a text. Without a value the key
            is put back to its default.
        scheme: ``schedule.scheme``.
        workers: workers of a pipeline group: the scheme's ``stages`` or ``workers``.
        steps: ``train.steps``.
        out: ``train.out``.

    Raises:
        ConfigError: the file cannot be read; a key is unknown, or its value is not legal or does not fit
            the others.

    >>> load_config(sets=["train.steps=10"], scheme="hanayo").schedule.options()
    {'workers': 4, 'micro_batches': 8}
    """
    overrides = [(*_parse(text), "--set ") for text in sets]
    layers = _Layers("")
    if path is not None:
        layers = _Layers(str(path), _read(Path(path)))
    elif resumed := _resumed({key: value for section, key, value, _ in overrides if section == "train"}, out):
        layers = _Layers(str(resumed), _read(resumed))  # the run's own config is the one that is changed
        for key in ("resume", "out"):
            layers.drop("train", key)
    if scheme is not None:
        overrides.append(("schedule", "scheme", scheme, "--scheme: "))
    # After the scheme, so an option that the scheme does not have is refused.
    for change in sorted(overrides, key=lambda change: change[:2] not in _CHOICES):
        layers.change(*change)
    if workers is not None:
        layers.put_workers(workers)
    for key, value in (("steps", steps), ("out", out)):
        if value is not None:
            layers.put("train", key, value, f"--{key}: ")
    try:
        return RunConfig.model_validate(layers.values)
    except ValidationError as error:
        raise ConfigError(_messages(error, layers)) from None


def _resumed(train: Mapping[str, Any], out: Path | str | None) -> Path | None:
    resume, out = train.get("resume"), out if out is not None else train.get("out")
    if not isinstance(resume, str) or "\0" in resume:
        return None
    if resume != AUTO:
        run = run_of(Path(resume))
    else:
        run = Path(out) if isinstance(out, (str, Path)) and "\0" not in str(out) else None
    return run / CONFIG if run is not None and (run / CONFIG).is_file() else None


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path, "is a folder, not a config file")
    try:
        tables = tomllib.loads(text)
        legal = toml.has_only_legal_numbers(tables)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except (ValueError, RecursionError) as error:  # a number that is too long, or lists nested too deep
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
    if not legal:
        raise ConfigError(f"{path}: cannot be read as TOML: a whole number has more than 64 bits")
    return tables


def _parse(text: str) -> tuple[str, str, Any]:
    name, equals, value = text.partition("=")
    section, dot, key = (part.strip() for part in name.partition("."))
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {text}: must have the form section.key=value, as in --set train.steps=100")
    return section, key, _value(value.strip())


def _value(text: str) -> Any:
    if not text:
        return None
    try:
        values = tomllib.loads(f"value = {text}")
        legal = len(values) == 1 and toml.has_only_legal_numbers(values)
    except (ValueError, RecursionError):
        return text
    return values["value"] if legal else text


def _messages(error: ValidationError, layers: _Layers) -> str:
    problems: dict[tuple[str, ...], str] = {}
    for detail in error.errors():
        location = tuple(str(part) for part in detail["loc"][:2])
        cause = detail.get("ctx", {}).get("error")
        place = layers.file and f"{layers.file}: "
        if isinstance(cause, ConfigError):
            problems.setdefault(location, place + str(cause))
        elif detail["type"] == "extra_forbidden":
            problems.setdefault(location, layers.places.get(_pair(location), place) + _no_such(location))
        elif len(location) == 1:
            problems.setdefault(location, place + _no_section(location[0], detail["input"]))
        else:
            section, key = _pair(location)
            value = toml.shown(layers.values[section][key])
            rule = SECTIONS[section].keys_known()[key].legal
            place = layers.places.get((section, key), place)
            problems.setdefault(location, f"{place}{section}.{key} = {value}: must be {rule}")
    lines = list(problems.values())
    return lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} things are wrong:", *lines])


def _pair(location: tuple[str, ...]) -> _Key:
    return location[0], location[1] if len(location) > 1 else ""


def _no_such(location: tuple[str, ...]) -> str:
    section, key = _pair(location)
    if not key:
        homes = [f"{name}.{section}" for name, model in SECTIONS.items() if section in model.keys_known()]
        near = homes or difflib.get_close_matches(section, SECTIONS, n=1)
        return f"unknown section {section!r}{_hint(near)} Sections: {', '.join(SECTIONS)}"
    keys = list(SECTIONS[section].keys_known())
    homes = [f"{name}.{key}" for name, model in SECTIONS.items() if key in model.keys_known()]
    near = homes or [f"{section}.{name}" for name in difflib.get_close_matches(key, keys, n=1)]
    return f"{section}.{key}: unknown key{_hint(near)} Keys of {section}: {', '.join(keys)}"


def _no_section(section: str, value: object) -> str:
    return f"{section} = {toml.shown(value)}: must be a section; write [{section}], and its keys below"


def _hint(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else "."
