"""A run's folder: what is in it, who may write it, and how it is read back. Knows no torch.

Invariant: a run never overwrites another's files, and two processes never write one folder at a time; a file
is there whole or not at all; only ``metrics.jsonl`` grows, a line at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from counterflow import toml
from counterflow.checkpoints.index import CHECKPOINT, complete
from counterflow.errors import ConfigError, CounterflowError
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule

from . import registry
from .config import RunConfig
from .metrics import Tail, last_step, lines_of
from .report import Numbers, Summary
from .sections.keys import AUTO
from .supervision.appending import Appending
from .supervision.fence import Fence
from .supervision.lock import Lock
from .timeline import Timeline

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SCHEDULE = "schedule.json"
TIMELINE = "timeline.json"
LIVE = "live.json"
"""A step's timeline while the run goes on; gone when it has ended well."""

PICTURE = "timeline.png"
SUMMARY = "summary.json"
EVENTS = "events.jsonl"

FILES = {
    SUMMARY: "figures of the run",
    METRICS: "a line a step, and one an evaluation",
    PICTURE: "the measured timeline above the predicted one",
    TIMELINE: "the same as numbers",
    CHECKPOINT: "weights and optimiser state, a folder a checkpoint",
    CONFIG: "the resolved config",
    SCHEDULE: "the schedule",
}
"""What a run writes, and what it is."""

TENSORBOARD = "tensorboard"

_EXPORTS = {name: what for source in registry.sources() for name, what in source.exports.items()}

_OF_SOME = {
    EVENTS: "what failed, and how it went on",
    **_EXPORTS,
    TENSORBOARD: "the metrics for TensorBoard",
}
"""What one writes too that failed or was stopped, has a model that is exported, or loggers."""


class RunFolder:
    """Where a run writes. ``open`` makes it for a run, and locks it; a worker is told the path."""

    def __init__(self, path: Path, fence: Fence | None = None) -> None:
        self.path = path
        self.fence = fence or Fence(path)
        self._tail = Tail(path / METRICS)
        self._last = 0
        """The last step that was read."""
        self.latest = -1
        """The last step in what ``new_records`` read last, also if it was made before."""
        self._lock: Lock | None = None
        self._metrics: Appending | None = None
        """Whoever writes has it."""

    @classmethod
    def open(
        cls, config: RunConfig, schedule: Schedule, start: Path | None, history: bytes, *, again: bool = False
    ) -> RunFolder:
        """The folder of a run, with its config and schedule: a new one, or the one that it goes on in.

        Args:
            config: of the run.
            schedule: what it runs.
            start: the checkpoint that it goes on from.
            history: the metrics until then.
            again: whether the run was begun there before.

        Raises:
            ConfigError: the folder holds another run, another process writes it, or it cannot be made.
        """
        path = folder_of(config)
        try:
            path.mkdir(parents=True, exist_ok=config.train.out is not None or start is not None)
        except FileExistsError:
            if path.is_dir():  # another run took the number
                return cls.open(config, schedule, start, history, again=again)
            raise ConfigError(f"{path}: is, or lies in, a file; results need a folder") from None
        except NotADirectoryError:
            raise ConfigError(f"{path}: is, or lies in, a file; results need a folder") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        folder = cls(path)
        try:
            folder._lock = Lock(path)
            folder._begin(config, schedule, start, history, again)
        except OSError as error:
            folder.close()
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        except CounterflowError as error:
            folder.close()
            raise ConfigError(str(error)) from None
        return folder

    def _taken(self, *, goes_on: bool) -> list[str]:
        """The files of a run that are there.

        Raises:
            ConfigError: there are some, and no run goes on here.
        """
        taken = [name for name in FILES if (self.path / name).exists()]
        if taken and not goes_on:
            raise ConfigError(
                f"{self.path}: holds a run already ({taken[0]}); name another folder, remove this one, or go "
                f"on with that run: train.resume = {toml.shown(str(self.path))}"
            )
        return taken

    @classmethod
    def tried(cls, config: RunConfig, start: Path | None) -> Path:
        """The folder that ``open`` would write; it is tried, and left as it was.

        Raises:
            ConfigError: as of ``open``.
        """
        path = folder_of(config)
        goes_on = config.train.resume == AUTO or (start is not None and _is_in(start, path))
        made: list[Path] = []
        try:
            for folder in reversed([path, *path.parents]):
                if not folder.exists():
                    folder.mkdir()
                    made.append(folder)
            if not path.is_dir():
                raise ConfigError(f"{path}: is, or lies in, a file; results need a folder")
            cls(path)._taken(goes_on=goes_on)  # noqa: SLF001 - its own class
            with tempfile.TemporaryFile(dir=path):
                pass
        except NotADirectoryError:
            raise ConfigError(f"{path}: is, or lies in, a file; results need a folder") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        finally:
            for folder in reversed(made):
                folder.rmdir()
        return path

    def _begin(
        self, config: RunConfig, schedule: Schedule, start: Path | None, history: bytes, again: bool
    ) -> None:
        goes_on = again or config.train.resume == AUTO or (start is not None and _is_in(start, self.path))
        taken = self._taken(goes_on=goes_on)
        for name in (SUMMARY, TIMELINE, PICTURE, LIVE):  # of the end before
            (self.path / name).unlink(missing_ok=True)
        whole(self.path / CONFIG, config.to_toml().encode())
        self.put_schedule(schedule)
        if not goes_on or not taken:  # who goes on knows only with the others from where
            self.rewind(history)
        self._last = last_step(history)

    def put_schedule(self, schedule: Schedule) -> None:
        """Write what is run."""
        whole(self.path / SCHEDULE, dumps(schedule).encode())

    def rewind(self, history: bytes) -> None:
        """Let the metrics be those until where the run goes on, so that they will have each step once."""
        self.fence.check()
        whole(self.path / METRICS, history)
        self._metrics = None

    def close(self) -> None:
        """Let other processes write there."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def remove_empty(self) -> None:
        """Take away a run that did not make a single step, and none before."""
        if (self.path / METRICS).stat().st_size or self.has_checkpoint:
            return
        for name in (*FILES, *_OF_SOME, LIVE):
            drafts = self.path.glob(f".{name}.*")  # of a worker that was killed meanwhile
            for found in (self.path / name, *drafts):
                if found.is_dir():
                    shutil.rmtree(found, ignore_errors=True)
                else:
                    found.unlink(missing_ok=True)
        self.fence.end()
        self.close()
        with contextlib.suppress(OSError):  # the user's own files are in it
            self.path.rmdir()

    # -- writing

    def record(self, line: Numbers) -> None:
        """Add a line to the metrics, without waiting long for storage that is full, slow or hangs."""
        self._appending().add((json.dumps(line) + "\n").encode())

    def settle(self) -> None:
        """Wait for lines of the metrics that are not in the file yet."""
        self._appending().settle()

    @property
    def history(self) -> bytes:
        """The metrics as they are."""
        if self._metrics is None:
            return (self.path / METRICS).read_bytes()
        return b"".join(self.history_until_now()())

    def history_until_now(self) -> Callable[[], Iterator[bytes]]:
        """The metrics as they are now, read piece by piece when it is called, perhaps by a thread."""
        metrics = self._appending()
        return partial(metrics.pieces, metrics.size)

    def _appending(self) -> Appending:
        if self._metrics is None:
            self._metrics = Appending(self.path / METRICS, over=self.fence.over)
        return self._metrics

    def put_live(self, timeline: Timeline) -> None:
        """Write a timeline for those who look at the run while it goes on; a full disk stops nobody."""
        with contextlib.suppress(CounterflowError):
            self.fence.check()
            whole(self.path / LIVE, timeline.dumps().encode(), lasts=False)

    def put_timeline(self, timeline: Timeline) -> None:
        """Write the timeline and its picture."""
        self.fence.check()
        (self.path / LIVE).unlink(missing_ok=True)
        whole(self.path / TIMELINE, timeline.dumps().encode())
        from counterflow.drawing import draw_charts  # noqa: PLC0415  (matplotlib takes a while)

        draw_charts(timeline.charts(), self.path / PICTURE)

    def put_summary(self, summary: Summary) -> None:
        """Write the summary."""
        self.fence.check()
        whole(self.path / SUMMARY, (json.dumps(dataclasses.asdict(summary), indent=2) + "\n").encode())

    # -- reading

    def new_records(self) -> list[Numbers]:
        """The lines of the metrics that were added since the last call; of steps made again, none."""
        again, every = self._tail.read()
        if again:  # it was put back to where the run goes on
            self.latest = -1
        found = [line for line in every if not again or line["step"] > self._last]
        self.latest = int(every[-1]["step"]) if every else self.latest
        self._last = max([self._last, *(int(line["step"]) for line in found)])
        return found

    def finished(self, steps: int) -> bool:
        """Whether a run of so many steps has come to its end here."""
        try:
            found = json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(found, dict) and found.get("steps") == steps and found.get("stopped") is False

    def steps(self) -> int:
        """Updates made, as the metrics tell."""
        return last_step(self.history)

    def files(self) -> dict[str, str]:
        """What is there: each file's path and what it is."""
        return {
            str(self.path / name): what
            for name, what in (FILES | _OF_SOME).items()
            if (self.has_checkpoint if name == CHECKPOINT else (self.path / name).exists())
        }

    @property
    def has_checkpoint(self) -> bool:
        """Whether a run can go on from here."""
        return bool(complete(self.path / CHECKPOINT))


def folder_of(config: RunConfig) -> Path:
    """Where a run writes: ``train.out``, or where the run is that it resumes, or a new numbered folder."""
    resumed = config.train.resume
    if config.train.out is None and isinstance(resumed, Path):
        run = run_of(resumed)
        if run is not None:
            return run
    return config.results_folder()


def run_of(path: Path) -> Path | None:
    """The folder of the run that a path lies in: of the run, of its checkpoints, or of one of them."""
    return next((p for p in (path, *path.absolute().parents[:3]) if is_run(p)), None)


def _is_in(start: Path, folder: Path) -> bool:
    return start.resolve().is_relative_to(folder.resolve())


def is_run(path: Path) -> bool:
    """Whether a run has been written there."""
    return path.is_dir() and (path / METRICS).exists()


def read_schedule(path: Path) -> Schedule:
    """What a run runs.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    return loads(_text_of(path, SCHEDULE), str(path / SCHEDULE))


def read_timeline(path: Path, schedule: Schedule | None = None) -> Timeline:
    """The timeline of a run; of one that is in flight, of a step now and then, or of two asynchronous ones.

    Args:
        path: its folder.
        schedule: what it runs; None: what the folder says.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    schedule = schedule or read_schedule(path)
    name = LIVE if (path / LIVE).exists() and not (path / TIMELINE).exists() else TIMELINE
    ongoing = name == LIVE and not schedule.synchronous
    return Timeline.loads(_text_of(path, name), schedule, str(path / name), ongoing=ongoing)


def _text_of(path: Path, name: str) -> str:
    try:
        return (path / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: this run has no {name}: it is still in flight, or ended before it was written"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path / name}: cannot be read: {error}") from None


def read_metrics(path: Path) -> list[Numbers]:
    """All lines of a run's metrics."""
    return lines_of((path / METRICS).read_bytes())


def whole(path: Path, data: bytes, *, lasts: bool = True) -> None:
    """Write a file that appears, or replaces what was there, when it is complete.

    Args:
        path: where.
        data: what is in it.
        lasts: wait until it would outlast the machine's end.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            if lasts:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise CounterflowError(f"cannot write {path}: {error.strerror or error}") from error
    finally:  # also if a signal ends it here
        draft.unlink(missing_ok=True)
