"""Choices of what is trained, which all workers that hold a parameter make alike.

Invariant: nothing is frozen or unfrozen before all workers know that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import cast

from torch import nn

from counterflow.common.numbering import number_of
from counterflow.errors import ConfigError

from ..mesh.parallel_dims import ParallelDims
from ..transport.base import Transport

Parameters = Mapping[int, Mapping[str, nn.Parameter]]
"""A worker's parameters, by stage and by name."""

Choices = Mapping[int, Mapping[str, bool]]
"""For each of them, whether it is trained."""


def trainable_choices(parameters: Parameters, chosen: Callable[[str], bool]) -> Choices:
    """A user's choices; what has no gradient in any case is not asked for.

    Args:
        parameters: those of this worker.
        chosen: the user's function of a name.
    """
    return {
        stage: {
            name: (p.is_floating_point() or p.is_complex()) and bool(chosen(name))
            for name, p in named.items()
        }
        for stage, named in parameters.items()
    }


def choose(parameters: Parameters, choices: Choices, dims: ParallelDims) -> None:
    """Freeze and unfreeze parameters.

    Args:
        parameters: those of this worker.
        choices: what is chosen for each.
        dims: record of the parallel dimensions.

    Raises:
        ConfigError: FSDP holds one that changes; nothing is changed then.
    """
    pairs = [
        (name, p, choices[stage][name])
        for stage, stage_parameters in parameters.items()
        for name, p in stage_parameters.items()
    ]
    for name, parameter, on in pairs:
        if dims.weight(name).reduced and on != parameter.requires_grad:
            raise ConfigError(
                f"{name} is sharded by fully_shard, which knows from the first step on what is trained; "
                "freeze it in parallelize(), before fully_shard, or in the model"
            )
    for _, parameter, on in pairs:
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(on)


def check_same_choices(choices: Choices, tied: Container[str], transport: Transport) -> None:
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
            source, trains_first = first.setdefault(name, (rank, on))
            if trains_first != on:
                trains, freezes = (source, rank) if trains_first else (rank, source)
                raise ConfigError(
                    f"set_trainable: rank {trains} trains {name}, and rank {freezes}, which holds it too, "
                    "freezes it; let the function give the same for a name on all workers"
                )
