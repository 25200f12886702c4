"""Placements as ``--placement`` says them: by a name, a table, or a file that contains a table.

Invariant: in the placement that is returned every worker holds a stage, and there are no more stages than can
be ordered. The order of ops is not decided here.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path

from counterflow.common.text_files import read_text
from counterflow.errors import ConfigError
from counterflow.schedule.placement import Placement, bidirectional, linear, looped, wave
from counterflow.schedule.scheme import MOST_OPS


class Placed(StrEnum):
    """The placements that have a name."""

    STRAIGHT = "straight"
    LOOP = "loop"
    VEE = "vee"
    WAVE = "wave"
    TWO_WAY = "two-way"


_TABLE = re.compile(r"\s*\d+\s*([,/]\s*\d+\s*)+")
_FORM = "the worker of each stage, as in 0,1,1,0, and / between pipes, as in 0,1/1,0"


def placement_of(
    text: str, workers: int | None, *, chunks: int | None, waves: int | None, pairs: int | None
) -> Placement:
    """The placement that flags describe.

    Raises:
        ConfigError: the flags describe no placement, or contradict each other.
    """
    numbers = {
        Placed.LOOP: ("--chunks", chunks),
        Placed.WAVE: ("--waves", waves),
        Placed.TWO_WAY: ("--pairs", pairs),
    }
    for only, (flag, value) in numbers.items():
        if value is not None and text != only:
            raise ConfigError(f"{flag} {value}: only for --placement {only}; here it is {text}")
    for flag, value in (("--workers", workers), *numbers.values()):
        if value is not None and not 1 <= value <= MOST_OPS:
            raise ConfigError(f"{flag} {value}: must be 1 or more, and at most {MOST_OPS:,}")
    if text not in list(Placed):
        return _of_user(text, workers)
    if workers is None:
        raise ConfigError(f"--placement {text}: the number of workers is missing; give --workers")
    if workers * 2 * max(chunks or 1, waves or 2) > MOST_OPS:
        raise ConfigError(f"--workers {workers}: at most {MOST_OPS:,} stages are ordered; choose fewer")
    return {
        Placed.STRAIGHT: lambda: linear(workers),
        Placed.LOOP: lambda: looped(workers, chunks or 2),
        Placed.VEE: lambda: wave(workers, 1),
        Placed.WAVE: lambda: wave(workers, waves or 2),
        Placed.TWO_WAY: lambda: bidirectional(workers, pairs or 1),
    }[Placed(text)]()


def _of_user(text: str, workers: int | None) -> Placement:
    if _TABLE.fullmatch(text):
        table = [[int(number) for number in pipe.split(",")] for pipe in text.split("/")]
    elif Path(text).is_file():
        table = _read(Path(text))
    else:
        raise ConfigError(
            f"--placement {text}: not a placement, table or file; "
            f"give {', '.join(Placed)}, a file, or {_FORM}"
        )
    if len({len(pipe) for pipe in table}) != 1:
        lengths = " and ".join(str(len(pipe)) for pipe in table)
        raise ConfigError(f"--placement {text}: pipes have {lengths} stages; give all pipes the same number")
    if len(table) * len(table[0]) > MOST_OPS:
        raise ConfigError(f"--placement {text}: at most {MOST_OPS:,} stages are ordered; choose fewer")
    holders = {worker for pipe in table for worker in pipe}
    missing = next(worker for worker in range(len(holders) + 1) if worker not in holders)
    if missing < len(holders):
        raise ConfigError(f"--placement {text}: worker {missing} holds no stage; number workers from 0 on")
    if workers is not None and workers != len(holders):
        raise ConfigError(f"--workers {workers}: --placement {text} has {len(holders)}; leave it out")
    return Placement(len(holders), tuple(map(tuple, table)))


def _read(path: Path) -> list[list[int]]:
    try:
        data = json.loads(read_text(path, "is a folder", place=f"--placement {path}"))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"--placement {path}: {error}; give a schedule, or JSON as in [[0, 1, 1, 0]]"
        ) from None
    except RecursionError:
        raise ConfigError(
            f"--placement {path}: nested too deeply; give a schedule, or JSON as in [[0, 1, 1, 0]]"
        ) from None
    if isinstance(data, dict):
        data = data.get("placement")
    pipes = data if isinstance(data, list) and data and isinstance(data[0], list) else [data]
    for pipe in pipes:
        if not isinstance(pipe, list) or not pipe or any(type(n) is not int or n < 0 for n in pipe):
            raise ConfigError(f"--placement {path}: not a table of workers; give JSON as in [[0, 1, 1, 0]]")
    return pipes
