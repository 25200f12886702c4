"""The schemes by name: collects the records of ``schemes/*.py``, and accepts further ones.

A new scheme is a file in ``schemes/`` with its builder and its record, ``SCHEME``; or a user's own record,
passed to ``register``. Commands, config files, planner and pictures know schemes only by their records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from counterflow.errors import ConfigError, hint

from . import schemes
from .ir import OptionValue, Schedule
from .scheme import DEPTH, PERIODS, SLICED, SLICES, NumberLoop, Option, OptionType, Scheme

SCHEMES: dict[str, Scheme] = {}
"""Every registered scheme by its name; ``register`` adds to it."""


def register(scheme: Scheme) -> None:
    """Register a scheme, so everything that accepts a scheme's name knows it.

    Raises:
        ConfigError: its name or an alias is taken, it has no option for its workers or, if asynchronous, for
            its periods, or another scheme has an option of this name with another type.
    """
    for name in (scheme.name, *scheme.aliases):
        if find(name) is not None:
            raise ConfigError(f"scheme {scheme.name}: the name {name!r} is taken; choose another name")
    if not any(option.name in DEPTH for option in scheme.options):
        raise ConfigError(f"scheme {scheme.name}: needs an option for its workers: {' or '.join(DEPTH)}")
    if not scheme.synchronous and scheme.option(PERIODS.name) is None:
        raise ConfigError(f"scheme {scheme.name}: asynchronous, so it needs the option {PERIODS.name}")
    known = options()
    for option in scheme.options:
        for scheme_name, same in known.get(option.name, {}).items():
            if (option.kind, option.words) != (same.kind, same.words):
                raise ConfigError(
                    f"scheme {scheme.name}: its option {option.name} is {option.values}, but {scheme_name}'s "
                    "option of this name "
                    f"is {same.values}; choose another name"
                )
    SCHEMES[scheme.name] = scheme


@contextmanager
def registered(scheme: Scheme) -> Iterator[Scheme]:
    """``register`` for the duration of a ``with`` block."""
    register(scheme)
    try:
        yield scheme
    finally:
        del SCHEMES[scheme.name]


def find(name: str) -> Scheme | None:
    """The scheme of that name or alias; None if there is none.

    Case, hyphens and underscores do not count, nor does the ``Schedule`` with which torch's classes begin.

    >>> [known.name for known in map(find, ["1F1B", "ZBV", "DualPipeV", "ScheduleInterleaved1F1B"]) if known]
    ['dapple', 'zb-v', 'dualpipe-v', 'interleaved']
    """
    known = SCHEMES.get(name)
    return known or next((scheme for scheme in SCHEMES.values() if _folded(name) in _spellings(scheme)), None)


def _folded(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower().removeprefix("schedule")


def _spellings(scheme: Scheme) -> set[str]:
    return {_folded(name) for name in (scheme.name, *scheme.aliases)}


def title(name: str) -> str:
    """Name of a scheme for people: that of the papers first, if it is another one.

    >>> title("1f1b"), title("zb-v"), title("computed")
    ('1F1B (dapple)', 'zb-v', 'computed')
    """
    known = find(name)
    return name if known is None else known.title


def scheme(name: str) -> Scheme:
    """The scheme of that name or alias.

    Raises:
        ConfigError: the scheme is unknown; the message lists all names and the nearest one.
    """
    known = find(name)
    if known is None:
        names = [*SCHEMES, *(alias for scheme in SCHEMES.values() for alias in scheme.aliases)]
        shown = [scheme.title for scheme in SCHEMES.values()]
        raise ConfigError(f"unknown scheme {name!r}{hint(name.lower(), names, shown)}")
    return known


def options() -> dict[str, dict[str, Option]]:
    """Every option by its name, then by scheme: workers first, then options that several schemes share.

    ``slices``, which every synchronous scheme accepts, is included.
    """
    by_name: dict[str, dict[str, Option]] = {name: {} for name in DEPTH}
    for known in SCHEMES.values():
        for option in known.options:
            by_name.setdefault(option.name, {})[known.name] = option
        if known.option(PERIODS.name) is None:
            by_name.setdefault(SLICES, {}).setdefault(known.name, SLICED)
    names = sorted(by_name, key=lambda name: (name not in DEPTH, len(by_name[name]) < 2))
    return {name: by_name[name] for name in names if by_name[name]}


def option(scheme: str, name: str) -> Option | None:
    """Meaning of an option of a schedule: as its scheme says, or, for an unknown scheme, as any other
    does.
    """
    known = find(scheme)
    of_scheme = known and known.option(name)
    return of_scheme or next(iter(options().get(name, {}).values()), None)


def about(known: Mapping[str, Option]) -> str:
    """Meaning of an option for each scheme that has it, for people; ``known`` is a value of ``options()``."""
    schemes: dict[str, list[str]] = {}
    for scheme, option in known.items():
        default = (
            "" if option.usual is None or option.kind is OptionType.FLAG else f", default {option.usual}"
        )
        name = scheme if option is not SLICED else "every synchronous scheme"
        schemes.setdefault(option.help + default, []).append(name)
    return "; ".join(f"{text} ({', '.join(dict.fromkeys(names))})" for text, names in schemes.items())


def build(
    name: str,
    options: Mapping[str, OptionValue],
    compiled: Callable[[NumberLoop], NumberLoop] | None = None,
) -> Schedule:
    """The schedule of the scheme ``name`` with ``options``; its depth is given as ``stages`` or ``workers``.

    Args:
        name: name of the scheme, or an alias.
        options: values by name of the option.
        compiled: as of ``Scheme.schedule``.

    Raises:
        ConfigError: the scheme is unknown; an option is unknown, missing or illegal; the schedule has too
            many ops.

    >>> str(build("1f1b", {"workers": 2, "micro_batches": 2}))
    'dapple(stages=2, micro_batches=2)'
    """
    record = scheme(name)
    record.refuse_unknown(options)
    record.refuse_missing_or_illegal(options, {record.depth if name in DEPTH else name for name in options})
    for depth in DEPTH:
        if depth in options:
            if type(options[depth]) is not int:
                raise ConfigError(f"{depth}={options[depth]!r}: must be a whole number")
            record.refuse_too_large({**options, record.depth: options[depth]})
    return record.schedule(options, compiled)


_CALL = re.compile(r"\s*([^\s()]+)\s*(?:\(([^()]*)\))?\s*")
_SIZE = re.compile(r"\s*(\w+)\s*=\s*([\w+-]+)\s*")
_FLAGS = {"true": True, "false": False}


def schedule_of(subject: Schedule | str, sizes: Mapping[str, Any]) -> Schedule:
    """A schedule from whatever is accepted as one: a schedule, or a scheme's name with its sizes.

    Args:
        subject: a schedule; or a scheme's name, with or without sizes in brackets, in the form that schedules
            print.
        sizes: options of the scheme.

    Raises:
        ConfigError: the text has another form, the scheme is unknown or refuses the options, or sizes are
            given with a schedule.

    >>> str(schedule_of("zb-v", {"workers": 4, "micro_batches": 8}))
    'zb-v(workers=4, micro_batches=8)'
    >>> str(schedule_of("zb-v(workers=4, micro_batches=8)", {}))
    'zb-v(workers=4, micro_batches=8)'
    """
    if isinstance(subject, Schedule):
        if sizes:
            raise ConfigError(
                f"{', '.join(sizes)}: {subject} has its own sizes; leave these out, or give the scheme's name"
            )
        return subject
    if not isinstance(subject, str):
        raise ConfigError(
            f"{subject!r} is not a schedule; give one of cf.schemes, or a scheme's name with its sizes"
        )
    call = _CALL.fullmatch(subject)
    parts = [part for part in (call[2] or "").split(",") if part.strip()] if call else []
    sizes_read = [_SIZE.fullmatch(part) for part in parts]
    if call is None or None in sizes_read:
        raise ConfigError(
            f"{subject!r} is not a scheme with its sizes; write it like zb-v(workers=4, micro_batches=8)"
        )
    read = {size[1]: _read(size[2]) for size in sizes_read if size is not None}
    if twice := read.keys() & sizes.keys():
        raise ConfigError(f"{min(twice)} is given twice: in {subject!r}, and as a keyword; give it once")
    return build(call[1], {**read, **sizes})


def _read(value: str) -> OptionValue:
    return int(value) if value.isdecimal() else _FLAGS.get(value.lower(), value)


for _module in iter_modules(schemes.__path__):
    _record = getattr(import_module(f"{schemes.__name__}.{_module.name}"), "SCHEME", None)
    if _record is not None:
        register(_record)
