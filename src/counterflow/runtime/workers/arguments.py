"""What all workers have to give their pipelines alike: compared before anything is made of it.

Invariant: what differs would train another model in silence (cuts), or leave a worker waiting (orders).
What may differ (devices, recomputation, compilers, patience) is not looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import cast

from counterflow.errors import ConfigError
from counterflow.schedule.formats import dumps
from counterflow.schedule.ir import Schedule

from ..transport.base import Transport

_MOST = 80
"""Letters that are shown of a value."""

_MORE = {
    "cuts": "; costs that each worker measures for itself differ: let one worker measure, and send them",
}


def refuse_others(transport: Transport, schedule: Schedule, **given: object) -> None:
    """Compare what this worker was given with what the others were; all workers call it.

    Args:
        transport: how to reach them.
        schedule: compared by its form in a file.
        given: the rest, by name, compared as it is shown.

    Raises:
        ConfigError: a worker was given something else.
    """
    digest = hashlib.blake2b(dumps(schedule).encode(), digest_size=16).hexdigest()
    mine = {"schedule": (digest, str(schedule))} | {name: _shown(value) for name, value in given.items()}
    rows = cast("list[Mapping[str, tuple[str, str]]]", transport.gather_objects(mine))
    for rank, row in enumerate(rows):
        for name, (found, shown) in row.items():
            first, told = rows[0][name]
            if found != first:
                raise ConfigError(
                    f"rank 0 was given {name} = {told}, and rank {rank} "
                    + (f"{name} = {shown}" if shown != told else "another one")
                    + f"; give all workers the same{_MORE.get(name, '')}"
                )


def _shown(value: object) -> tuple[str, str]:
    """What two values differ in, and what is shown of one: of a long table its beginning."""
    text = repr(str(value) if isinstance(value, StrEnum) else value)
    if len(text) <= _MOST:
        return text, text
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), f"{text[:_MOST]}…"
