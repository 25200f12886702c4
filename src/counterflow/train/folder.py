"""A run's folder: what is in it, who may write it, and how it is read back. Knows no torch.

Invariant: a run never overwrites another's files, and a file is there whole or not at all; only
``metrics.jsonl`` grows, a line at a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from counterflow.errors import ConfigError, CounterflowError
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule

from .config import RunConfig
from .report import Numbers, Summary
from .timeline import Timeline, timeline_from

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SCHEDULE = "schedule.json"
TIMELINE = "timeline.json"
PICTURE = "timeline.png"
SUMMARY = "summary.json"
CHECKPOINT = "checkpoint"
INDEX = "checkpoint.json"
"""In that folder: says what belongs to the checkpoint."""

FILES = {
    SUMMARY: "figures of the run",
    METRICS: "a line a step, and one an evaluation",
    PICTURE: "the measured timeline above the predicted one",
    TIMELINE: "the same as numbers",
    CHECKPOINT: "weights and optimiser state, a file a stage",
    CONFIG: "the resolved config",
    SCHEDULE: "the schedule",
}
"""What a run writes, and what it is."""

MODEL, ADAPTER = "model", "adapter"

_OF_TRANSFORMERS = {
    MODEL: "the model, as from_pretrained of transformers reads it",
    ADAPTER: "the adapters, as from_pretrained of peft reads them",
}
"""What one of a model of transformers writes too."""


class RunFolder:
    """Where a run writes. Made by ``create`` for a new run; a worker is told the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._rest = ""

    @classmethod
    def create(cls, config: RunConfig, schedule: Schedule) -> RunFolder:
        """A new run's folder, with its config and schedule.

        Raises:
            ConfigError: the folder holds another run, or cannot be made or written.
        """
        path = config.results_folder()
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = [name for name in FILES if (path / name).exists()]
            if taken:
                raise ConfigError(
                    f"{path}: holds a run already ({taken[0]}); name another folder, or remove this one"
                )
            folder = cls(path)
            (path / CONFIG).write_text(config.to_toml(), encoding="utf-8")
            (path / SCHEDULE).write_text(dumps(schedule), encoding="utf-8")
            (path / METRICS).touch()
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"{path}: is, or lies in, a file; results need a folder") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        return folder

    def remove_empty(self) -> None:
        """Take away a run that did not make a single step."""
        if (self.path / METRICS).stat().st_size:
            return
        for name in FILES | _OF_TRANSFORMERS:
            if name in (CHECKPOINT, *_OF_TRANSFORMERS):
                shutil.rmtree(self.path / name, ignore_errors=True)
            else:
                (self.path / name).unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError:  # the user's own files are in it
            return

    # -- writing

    def record(self, line: Numbers) -> None:
        """Add a line to the metrics; it is on disk at once, whatever happens next."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def put_timeline(self, timeline: Timeline) -> None:
        """Write the timeline and its picture."""
        with whole(self.path / TIMELINE) as file:
            file.write(timeline.dumps().encode())
        from counterflow.draw import draw_charts  # noqa: PLC0415  (matplotlib takes a while)

        draw_charts(timeline.charts(), self.path / PICTURE)

    def put_summary(self, summary: Summary) -> None:
        """Write the summary."""
        with whole(self.path / SUMMARY) as file:
            file.write((json.dumps(dataclasses.asdict(summary), indent=2) + "\n").encode())

    # -- reading

    def new_records(self) -> list[Numbers]:
        """The lines of the metrics that were added since the last call."""
        with (self.path / METRICS).open(encoding="utf-8") as file:
            file.seek(self._read)
            text = self._rest + file.read()
            self._read = file.tell()
        *lines, self._rest = text.split("\n")
        return [json.loads(line) for line in lines]

    def steps(self) -> int:
        """Updates made, as the metrics tell."""
        return max((int(line["step"]) for line in RunFolder(self.path).new_records()), default=0)

    def files(self) -> dict[str, str]:
        """What is there: each file's path and what it is."""
        return {
            str(self.path / name): what
            for name, what in (FILES | _OF_TRANSFORMERS).items()
            if (self.has_checkpoint if name == CHECKPOINT else (self.path / name).exists())
        }

    @property
    def has_checkpoint(self) -> bool:
        """Whether a run can go on from here."""
        return (self.path / CHECKPOINT / INDEX).exists()


def is_run(path: Path) -> bool:
    """Whether a run has been written there."""
    return path.is_dir() and (path / METRICS).exists()


def read_timeline(path: Path) -> Timeline:
    """The timeline of a run.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    texts = []
    for name in (SCHEDULE, TIMELINE):
        try:
            texts.append((path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: this run has no {name}: it is still under way, or ended before it was written"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path / name}: cannot be read: {error}") from None
    schedule = loads(texts[0], str(path / SCHEDULE))
    return timeline_from(texts[1], schedule, str(path / TIMELINE))


def read_metrics(path: Path) -> list[Numbers]:
    """All lines of a run's metrics."""
    return RunFolder(path).new_records()


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that appears, or replaces what was there, when it is complete."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CounterflowError(f"cannot write {path}: {error.strerror or error}") from error
