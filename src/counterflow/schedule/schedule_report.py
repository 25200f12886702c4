"""Schedules, ops and schemes as ``--json`` prints them. Nothing is printed here."""

from __future__ import annotations

from typing import Annotated

from counterflow.common.json_models import Options, Part, Result, describe, reads


class OpShown(Part):
    """An op."""

    kind: Annotated[
        str,
        describe(
            "F forward, B backward, I input gradient, W weight gradients, R recomputation",
            "op.kind.value",
            "kind.value",
        ),
    ]
    stage: Annotated[int, describe("from 0")]
    pipe: Annotated[int, describe("from 0")]
    micro_batches: Annotated[
        list[int], describe("numbers of the micro-batches that are computed together, from 0")
    ]
    part: Annotated[int, describe("number of the part, from 0")]
    parts: Annotated[int, describe("number of parts into which the work on the micro-batch is divided")]
    version: Annotated[int, describe("updates that the weights have seen")]


class Scheduled(Result):
    """The name of a schedule."""

    model_config = reads("schedule")

    scheme: Annotated[str, describe("name of the scheme")]
    options: Annotated[Options, describe("the scheme's options")]
    workers: Annotated[int, describe("workers of one pipeline group")]


class Sized(Scheduled):
    """The name and size of a schedule."""

    stages: int
    pipes: int
    micro_batches: Annotated[int, describe("micro-batches of one update")]


class OptionShown(Part):
    """An option of a scheme."""

    name: str
    legal: Annotated[str, describe("legal range, for people")]
    required: bool
    default: Annotated[int | str | bool | None, describe("default", "usual")]
    help: str


class SchemeShown(Part):
    """A scheme."""

    name: str
    aliases: list[str]
    summary: str
    source: Annotated[str, describe("publication")]
    synchronous: Annotated[bool, describe("whether a flush comes before each update")]
    directions: str
    options: list[OptionShown]


class Schemes(Result):
    """`counterflow schemes`."""

    schemes: list[SchemeShown]
