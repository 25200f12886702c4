"""Comparison of the arguments that all workers must pass to their pipelines, before anything is made of them.

Invariant: a difference that would silently train another model (cuts, a loss), or block a worker (orders), is
an error. Arguments that may differ (devices, compilers, timeouts) are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeVar, cast

from counterflow.errors import ConfigError
from counterflow.schedule.formats import dumps
from counterflow.schedule.ir import Schedule

from ..transport.base import Transport

_V = TypeVar("_V")

_MOST, _MOST_RANKS = 80, 8
"""Maximum characters of a value, and number of ranks, in a message."""

_MORE = {
    "cuts": "; costs that each worker measures for itself differ: let one worker measure, and send them",
}


def check_same_arguments(
    transport: Transport,
    schedule: Schedule,
    details: Mapping[str, Mapping[str, str]] | None = None,
    **arguments: object,
) -> None:
    """Compare this worker's arguments with those of all workers; all workers call it.

    Args:
        transport: exchanges the arguments.
        schedule: compared by its form in a file.
        details: for an argument of several parts, a description of each; the error names the part that
            differs.
        arguments: all other arguments by name, compared by their ``repr``.

    Raises:
        ConfigError: a worker passed another argument.
    """
    details = details or {}
    digest = hashlib.blake2b(dumps(schedule).encode(), digest_size=16).hexdigest()
    row = {"schedule": (digest, str(schedule))} | {name: _shown(value) for name, value in arguments.items()}
    row |= {name: (_digest(repr(sorted(parts.items()))), "") for name, parts in details.items()}
    rows = cast("list[Mapping[str, tuple[str, str]]]", transport.gather_objects(row))
    for name, (first, shown) in rows[0].items():
        if all(r[name][0] == first for r in rows):
            continue
        if name in details:
            parts = cast("list[Mapping[str, str]]", transport.gather_objects(details[name]))
            raise _part_difference(name, parts)
        raise _difference(name, [r[name] for r in rows], shown)


def _difference(name: str, values: Sequence[tuple[str, str]], first: str) -> ConfigError:
    ranks, shown = _first_difference(values)
    return ConfigError(
        f"rank 0 was given {name} = {first}, and {ranks} "
        + (f"{name} = {shown[1]}" if shown[1] != first else "another one")
        + f"; give all workers the same{_MORE.get(name, '')}"
    )


def _part_difference(name: str, parts: Sequence[Mapping[str, str]]) -> ConfigError:
    keys = dict.fromkeys(key for row in parts for key in row)
    key = next(key for key in keys if len({row.get(key) for row in parts}) > 1)
    ranks, shown = _first_difference([row.get(key) for row in parts])
    return ConfigError(
        f"{f'{key} of ' if key else ''}the {name} is {parts[0].get(key, 'missing')} on rank 0, and "
        f"{shown or 'missing'} on {ranks}; give all workers the same"
    )


def _first_difference(values: Sequence[_V]) -> tuple[str, _V]:
    value = next(value for value in values if value != values[0])
    ranks = [str(rank) for rank, rank_value in enumerate(values) if rank_value == value]
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:_MOST_RANKS])}{more}", value


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _shown(value: object) -> tuple[str, str]:
    """Compared form of a value, and its form in messages: of a long value the beginning."""
    text = repr(str(value) if isinstance(value, StrEnum) else value)
    if len(text) <= _MOST:
        return text, text
    return _digest(text), f"{text[:_MOST]}…"
