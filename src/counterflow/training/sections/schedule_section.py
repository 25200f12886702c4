"""The table ``[schedule]``: the order of ops, by a scheme with its options or by a file."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from counterflow.common import toml
from counterflow.common.options import option
from counterflow.common.text_files import read_text
from counterflow.errors import ConfigError, ScheduleError
from counterflow.program.checker import check
from counterflow.schedule import registry
from counterflow.schedule.formats import loads
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.scheme import DEPTH, Option, OptionType

from .keys import AUTO, PATH, Key, PathKey, Section

SCHEME = "chimera"
"""The scheme of the built-in example, and of any config that names none."""

WORKERS = 4
"""Workers of the built-in example, and of any scheme without a depth."""

_WORKERS = DEPTH[1]

_UNPLANNED = "dapple"
"""Scheme that stands for one that is not planned yet."""


class ScheduleSection(Section):
    """The order of ops: a scheme with its options, or a schedule file, which fixes them.

    The schemes' options are further keys, which the schemes' records define. ``auto`` has one key, workers;
    until it is planned its schedule is 1F1B of one micro-batch.
    """

    model_config = ConfigDict(extra="allow")

    scheme: str | None = option(
        None,
        "a name, in quotes",
        description=f"name of the scheme; {AUTO}: measured and planned; default: {SCHEME}",
    )

    file: PathKey | None = option(None, PATH)
    """A schedule file, in place of a scheme."""

    @classmethod
    def keys_known(cls) -> dict[str, Key]:
        """The table's own keys, and every option of every scheme."""
        options = registry.options().items()
        return super().keys_known() | {
            name: Key(registry.about(known), _legal(next(iter(known.values())))) for name, known in options
        }

    def values(self) -> dict[str, Any]:
        """The keys that have a value: the table's own, then the scheme's options in their order."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        known = registry.find(self.scheme) if self.scheme is not None else None
        order = [option.name for option in known.options] if known else []
        return super().values() | {name: extra[name] for name in [*order, *extra] if name in extra}

    def about(self, key: str) -> str:
        """Meaning of a key; an option's meaning for this scheme."""
        option = registry.option(self.scheme, key) if self.scheme is not None else None
        return option.help if option else super().about(key)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("file") is not None:
            return data
        keys = {name: value for name, value in data.items() if value is not None}
        keys.setdefault("scheme", SCHEME)
        if not isinstance(keys["scheme"], str):
            return data
        if keys["scheme"] == AUTO:
            keys.setdefault(_WORKERS, WORKERS)
            return keys
        try:
            scheme = registry.scheme(keys["scheme"])
        except ConfigError as error:
            raise ConfigError(f"schedule.scheme: {error}") from None
        if not keys.keys() & set(DEPTH):
            keys[scheme.depth] = WORKERS
        workers = keys.get(scheme.depth)
        if type(workers) is int and any(option.name == "micro_batches" for option in scheme.missing(keys)):
            keys["micro_batches"] = max(1, 2 * workers)
        return keys

    @model_validator(mode="after")
    def _check_options(self) -> ScheduleSection:
        known = registry.options()
        wrong: list[InitErrorDetails] = []
        for name, value in (self.model_extra or {}).items():
            if name not in known:
                wrong.append(InitErrorDetails(type="extra_forbidden", loc=(name,), input=value))
            elif value is not None and not _is_of_kind(next(iter(known[name].values())), value):
                wrong.append(InitErrorDetails(type="int_type", loc=(name,), input=value))
        if wrong:
            raise ValidationError.from_exception_data("schedule", wrong)
        return self

    @model_validator(mode="after")
    def _check(self) -> ScheduleSection:
        extra = [f"schedule.{name}" for name in self.values() if name != "file"]
        if self.file is not None and extra:
            raise ConfigError(
                f"schedule.file = {toml.dumps(self.file)}: a file fixes the scheme and its options; "
                f"leave out {', '.join(extra)}"
            )
        if self.planned and (decided := [name for name in self.options() if name != _WORKERS]):
            raise ConfigError(
                f'schedule.scheme = "{AUTO}": decides schedule.{decided[0]}; leave it out, or name the scheme'
            )
        return self

    @property
    def planned(self) -> bool:
        """True if the schedule is planned when the run starts."""
        return self.scheme == AUTO

    def options(self) -> dict[str, OptionValue]:
        """The scheme's options that have a value."""
        return {name: value for name, value in self.values().items() if name not in ("scheme", "file")}

    @cached_property
    def built(self) -> Schedule:
        """The schedule; built once, so the schedule that was checked is the one that runs.

        Raises:
            ConfigError: the scheme cannot be built with these options; the file cannot be read, is damaged,
                or does not pass the checker.
        """
        if self.file is None:
            assert self.scheme is not None
            scheme, options = self.scheme, self.options()
            if self.planned:
                scheme, options = _UNPLANNED, {"stages": options[_WORKERS], "micro_batches": 1}
            try:
                return registry.build(scheme, options)
            except ConfigError as error:
                raise ConfigError(_in_keys(str(error))) from None
        place = f"schedule.file = {toml.dumps(self.file)}"
        missing = "; `counterflow export SCHEME` writes one"
        text = read_text(self.file, "cannot be read: Is a directory", place=place, if_missing=missing)
        schedule = loads(text, place)
        try:
            check(schedule)
        except ScheduleError as error:
            raise ConfigError(f"{place}: does not pass the checker: {error}") from error
        return schedule


def _legal(option: Option) -> str:
    if option.kind is OptionType.WORD:
        return f"one of {', '.join(option.words)}, in quotes"
    return ", or ".join([option.kind.value, *map(toml.shown, option.words)])


_LENGTHS = re.compile(r"[\d+]+")
"""A text that may be lengths of slices."""


def _is_of_kind(option: Option, value: object) -> bool:
    if isinstance(value, str):
        return bool(option.words) or (option.lengths and _LENGTHS.fullmatch(value) is not None)
    return type(value) is {OptionType.FLAG: bool, OptionType.NUMBER: int}.get(option.kind)


def _in_keys(message: str) -> str:
    """A scheme's message in which options are spelled as keys of the file.

    >>> _in_keys("stages=3: must be even")
    'schedule.stages = 3: must be even'
    """
    text = re.sub(rf"(?<![\w.])({'|'.join(registry.options())})=", r"schedule.\1 = ", message)
    return text if text.startswith("schedule.") else f"schedule: {text}"
