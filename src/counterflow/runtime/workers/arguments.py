"""What all workers have to give their pipelines alike: compared before anything is made of it.

Invariant: what differs would train another model in silence (cuts, a loss), or leave a worker waiting
(orders).
What may differ (devices, compilers, patience) is not looked at.
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
"""Letters that are shown of a value, and ranks."""

_MORE = {
    "cuts": "; costs that each worker measures for itself differ: let one worker measure, and send them",
}


def refuse_others(
    transport: Transport,
    schedule: Schedule,
    details: Mapping[str, Mapping[str, str]] | None = None,
    **given: object,
) -> None:
    """Compare what this worker was given with what the others were; all workers call it.

    Args:
        transport: how to reach them.
        schedule: compared by its form in a file.
        details: by the name of what is compared, its parts in words; those that differ are named.
        given: the rest, by name, compared as it is shown.

    Raises:
        ConfigError: a worker was given something else.
    """
    details = details or {}
    digest = hashlib.blake2b(dumps(schedule).encode(), digest_size=16).hexdigest()
    mine = {"schedule": (digest, str(schedule))} | {name: _shown(value) for name, value in given.items()}
    mine |= {name: (_digest(repr(sorted(parts.items()))), "") for name, parts in details.items()}
    rows = cast("list[Mapping[str, tuple[str, str]]]", transport.gather_objects(mine))
    for name, (first, shown) in rows[0].items():
        if all(row[name][0] == first for row in rows):
            continue
        if name in details:
            parts = cast("list[Mapping[str, str]]", transport.gather_objects(details[name]))
            raise _other_part(name, parts)
        raise _other(name, [row[name] for row in rows], shown)


def _other(name: str, values: Sequence[tuple[str, str]], first: str) -> ConfigError:
    """The error about an argument that ranks were given differently: by rank what is compared, and shown."""
    ranks, shown = _ranks_apart(values)
    return ConfigError(
        f"rank 0 was given {name} = {first}, and {ranks} "
        + (f"{name} = {shown[1]}" if shown[1] != first else "another one")
        + f"; give all workers the same{_MORE.get(name, '')}"
    )


def _other_part(name: str, parts: Sequence[Mapping[str, str]]) -> ConfigError:
    """The error about something of which a part differs by rank; ``parts`` by rank."""
    every = dict.fromkeys(key for row in parts for key in row)
    key = next(key for key in every if len({row.get(key) for row in parts}) > 1)
    ranks, shown = _ranks_apart([row.get(key) for row in parts])
    return ConfigError(
        f"{f'{key} of ' if key else ''}the {name} is {parts[0].get(key, 'missing')} on rank 0, and "
        f"{shown or 'missing'} on {ranks}; give all workers the same"
    )


def _ranks_apart(values: Sequence[_V]) -> tuple[str, _V]:
    """The ranks whose value is the first that is not rank 0's, in words, and that value."""
    other = next(value for value in values if value != values[0])
    ranks = [str(rank) for rank, value in enumerate(values) if value == other]
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:_MOST_RANKS])}{more}", other


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _shown(value: object) -> tuple[str, str]:
    """What two values differ in, and what is shown of one: of a long table its beginning."""
    text = repr(str(value) if isinstance(value, StrEnum) else value)
    if len(text) <= _MOST:
        return text, text
    return _digest(text), f"{text[:_MOST]}…"
