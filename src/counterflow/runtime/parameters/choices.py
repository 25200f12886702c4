"""Choices of what is trained, which all workers that hold a parameter make alike.

Invariant: nothing is frozen or unfrozen before all workers know that they agree.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import cast

from counterflow.errors import ConfigError

from ..messages.values import number_of
from ..transport.base import Transport


def refuse_other_choices(
    choices: Mapping[int, Mapping[str, bool]], tied: Container[str], transport: Transport
) -> None:
    """Refuse choices that differ by worker; all workers call it.

    Args:
        choices: of this worker, by stage and by the parameter's name.
        tied: names of parameters that several stages share.
        transport: transport between the workers.

    Raises:
        ConfigError: a parameter is to be trained on one worker, and frozen on another.
    """
    short: dict[int | str, float] = {
        stage: float(number_of(*sorted(of_stage.items()))) for stage, of_stage in choices.items()
    }
    short |= {
        name: float(on) for of_stage in choices.values() for name, on in of_stage.items() if name in tied
    }
    rows = cast("list[dict[int | str, float]]", transport.gather_objects(short))
    known: dict[int | str, float] = {}
    if all(known.setdefault(key, number) == number for row in rows for key, number in row.items()):
        return
    named = {name: on for of_stage in choices.values() for name, on in of_stage.items()}
    first: dict[str, tuple[int, bool]] = {}
    for rank, row in enumerate(cast("list[dict[str, bool]]", transport.gather_objects(named))):
        for name, on in row.items():
            source, other = first.setdefault(name, (rank, on))
            if other != on:
                trains, freezes = (source, rank) if other else (rank, source)
                raise ConfigError(
                    f"set_trainable: rank {trains} trains {name}, and rank {freezes}, which holds it too, "
                    "freezes it; let the function give the same for a name on all workers"
                )
