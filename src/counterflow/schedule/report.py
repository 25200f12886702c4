"""Schedules, ops and schemes as ``--json`` prints them. What it does not do: print."""

from __future__ import annotations

from typing import Annotated

from counterflow.shown import Options, Part, Result, reads, said


class OpShown(Part):
    """An op."""

    kind: Annotated[
        str,
        said("F forward, B backward, I input gradient, W weight gradients", "op.kind.value", "kind.value"),
    ]
    stage: Annotated[int, said("from 0")]
    pipe: Annotated[int, said("from 0")]
    micro_batches: Annotated[list[int], said("those it works on together, from 0")]
    part: Annotated[int, said("which of `parts`, from 0")]
    parts: Annotated[int, said("in how many shares the work on its micro-batch is cut")]
    version: Annotated[int, said("updates that its weights have seen")]


class Scheduled(Result):
    """What is said of a schedule by its name."""

    model_config = reads("schedule")

    scheme: Annotated[str, said("its scheme")]
    options: Annotated[Options, said("the scheme's options")]
    workers: Annotated[int, said("of one pipeline group")]


class Sized(Scheduled):
    """What is said of a schedule by its name and size."""

    stages: int
    pipes: int
    micro_batches: Annotated[int, said("of one update")]


class OptionShown(Part):
    """An option of a scheme."""

    name: str
    legal: Annotated[str, said("its range, for people")]
    required: bool
    default: Annotated[int | str | bool | None, said("default", "usual")]
    help: str


class SchemeShown(Part):
    """A scheme."""

    name: str
    aliases: list[str]
    summary: str
    source: Annotated[str, said("who published it")]
    synchronous: Annotated[bool, said("whether a flush comes before each update")]
    directions: str
    options: list[OptionShown]


class Schemes(Result):
    """`counterflow schemes`."""

    schemes: list[SchemeShown]
