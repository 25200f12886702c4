"""A run's folder: its files, its lock, and how it is read back. torch is not imported.

Invariant: a run never overwrites another's files, and two processes never write one folder at a time; a file
exists whole or not at all; only ``metrics.jsonl`` grows, line by line.
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

from counterflow.checkpoints.index import CHECKPOINT, complete
from counterflow.common import toml
from counterflow.errors import ConfigError, CounterflowError, WorkerError
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule

from . import source_registry
from .config import RunConfig
from .metrics import Tail, last_step, lines_of
from .sections.keys import AUTO
from .supervision.appending import Appending
from .supervision.exclusive import Fence, Lock
from .timeline import Timeline
from .training_report import Numbers, Summary

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SCHEDULE = "schedule.json"
TIMELINE = "timeline.json"
LIVE = "live.json"
"""A step's timeline while the run is in progress; removed when it has ended well."""

PICTURE = "timeline.png"
SUMMARY = "summary.json"
EVENTS = "events.jsonl"

FILES = {
    SUMMARY: "figures of the run",
    METRICS: "one line per step and per evaluation",
    PICTURE: "the measured timeline above the predicted one",
    TIMELINE: "the timelines as numbers",
    CHECKPOINT: "weights and optimiser state, one folder per checkpoint",
    CONFIG: "the resolved config",
    SCHEDULE: "the schedule",
}
"""Files that every run writes, and what they contain."""

TENSORBOARD = "tensorboard"

_EXPORTS = {name: what for source in source_registry.sources() for name, what in source.exports.items()}

_OF_SOME = {
    EVENTS: "failures and restarts",
    **_EXPORTS,
    TENSORBOARD: "the metrics for TensorBoard",
}
"""Files of runs that failed or were stopped, export their model, or have loggers."""


class RunFolder:
    """The folder that a run writes. ``open`` makes and locks it for a run; workers receive its path."""

    def __init__(self, path: Path, fence: Fence | None = None) -> None:
        self.path = path
        self.fence = fence or Fence(path)
        self._tail = Tail(path / METRICS)
        self._last = 0
        """The last step that was read."""
        self.latest = -1
        """The last step that ``new_records`` read last, also if the run made it before."""
        self._lock: Lock | None = None
        self._metrics: Appending | None = None
        """The metrics file; None unless this process writes it."""

    @classmethod
    def open(
        cls,
        config: RunConfig,
        schedule: Schedule,
        start: Path | None,
        history: bytes,
        *,
        restart: bool = False,
    ) -> RunFolder:
        """The folder of a run, with its config and schedule: a new one, or the one in which the run resumes.

        Args:
            config: config of the run.
            schedule: schedule that it runs.
            start: checkpoint that it resumes from.
            history: metrics until that checkpoint.
            restart: whether the run already began in this folder.

        Raises:
            ConfigError: the folder contains another run, another process writes it, or it cannot be made.
        """
        path = folder_of(config)
        try:
            path.mkdir(parents=True, exist_ok=config.train.out is not None or start is not None)
        except FileExistsError:
            if path.is_dir():  # another run took this number
                return cls.open(config, schedule, start, history, restart=restart)
            raise ConfigError(f"{path}: is, or lies in, a file; results need a folder") from None
        except NotADirectoryError:
            raise ConfigError(f"{path}: is, or lies in, a file; results need a folder") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        folder = cls(path)
        try:
            folder._lock = Lock(path)
            folder._begin(config, schedule, start, history, restart)
        except OSError as error:
            folder.close()
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        except CounterflowError as error:
            folder.close()
            raise ConfigError(str(error)) from None
        return folder

    def _existing(self, *, goes_on: bool) -> list[str]:
        existing = [name for name in FILES if (self.path / name).exists()]
        if existing and not goes_on:
            raise ConfigError(
                f"{self.path}: contains a run already ({existing[0]}); name another folder, remove this one, "
                f"or resume that run: train.resume = {toml.shown(str(self.path))}"
            )
        return existing

    @classmethod
    def tried(cls, config: RunConfig, start: Path | None) -> Path:
        """The folder that ``open`` would write. Writing is tested, and the folder left as it was.

        Raises:
            ConfigError: as in ``open``.
        """
        path = folder_of(config)
        goes_on = config.train.resume == AUTO or (start is not None and _is_in(start, path))
        created: list[Path] = []
        try:
            for folder in reversed([path, *path.parents]):
                if not folder.exists():
                    folder.mkdir()
                    created.append(folder)
            if not path.is_dir():
                raise ConfigError(f"{path}: is, or lies in, a file; results need a folder")
            cls(path)._existing(goes_on=goes_on)  # noqa: SLF001 - its own class
            with tempfile.TemporaryFile(dir=path):
                pass
        except NotADirectoryError:
            raise ConfigError(f"{path}: is, or lies in, a file; results need a folder") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        finally:
            for folder in reversed(created):
                folder.rmdir()
        return path

    def _begin(
        self, config: RunConfig, schedule: Schedule, start: Path | None, history: bytes, restart: bool
    ) -> None:
        goes_on = restart or config.train.resume == AUTO or (start is not None and _is_in(start, self.path))
        existing = self._existing(goes_on=goes_on)
        for name in (SUMMARY, TIMELINE, PICTURE, LIVE):  # events of the end before
            (self.path / name).unlink(missing_ok=True)
        replace_file(self.path / CONFIG, config.to_toml().encode())
        self.put_schedule(schedule)
        begun = goes_on and METRICS in existing
        if not begun:  # only the others know where a resumed run begins
            self.rewind(history)
        self._last = last_step(history)

    def put_schedule(self, schedule: Schedule) -> None:
        """Write the schedule."""
        replace_file(self.path / SCHEDULE, dumps(schedule).encode())

    def rewind(self, history: bytes) -> None:
        """Cut the metrics at the step from which the run resumes, so they contain each step once."""
        self.fence.check()
        replace_file(self.path / METRICS, history)
        self._metrics = None

    def close(self) -> None:
        """Unlock the folder for other processes."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def remove_empty(self) -> None:
        """Remove the folder of a run that made no step, now or before."""
        metrics = self.path / METRICS
        if not metrics.exists() or metrics.stat().st_size or self.has_checkpoint:
            return
        for name in (*FILES, *_OF_SOME, LIVE):
            drafts = self.path.glob(f".{name}.*")  # drafts of a worker that was killed meanwhile
            for path in (self.path / name, *drafts):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        self.fence.end()
        self.close()
        with contextlib.suppress(OSError):  # the folder contains the user's own files
            self.path.rmdir()

    # -- writing

    def record(self, line: Numbers) -> None:
        """Add a line to the metrics, without a long wait for storage that is full, slow or hangs."""
        self._appending().add((json.dumps(line) + "\n").encode())

    def settle(self) -> None:
        """Wait for lines of the metrics that are not yet in the file."""
        self._appending().settle()

    @property
    def history(self) -> bytes:
        """The metrics in the file."""
        if self._metrics is None:
            return (self.path / METRICS).read_bytes()
        return b"".join(self.history_until_now()())

    def history_until_now(self) -> Callable[[], Iterator[bytes]]:
        """The metrics up to now; the function reads them piece by piece, and may be called by a thread."""
        metrics = self._appending()
        return partial(metrics.pieces, metrics.size)

    def _appending(self) -> Appending:
        if self._metrics is None:
            self._metrics = Appending(self.path / METRICS, over=self.fence.over)
        return self._metrics

    def put_live(self, timeline: Timeline) -> None:
        """Write a timeline for those who look at the run in progress; a full disk does not stop the run."""
        with contextlib.suppress(CounterflowError):
            self.fence.check()
            replace_file(self.path / LIVE, timeline.dumps().encode(), lasts=False)

    def put_timeline(self, timeline: Timeline) -> None:
        """Write the timeline and its picture."""
        self.fence.check()
        (self.path / LIVE).unlink(missing_ok=True)
        replace_file(self.path / TIMELINE, timeline.dumps().encode())
        from counterflow.drawing import draw_charts  # noqa: PLC0415  (matplotlib takes a while)

        draw_charts(timeline.charts(), self.path / PICTURE)

    def put_summary(self, summary: Summary) -> None:
        """Write the summary."""
        self.fence.check()
        replace_file(self.path / SUMMARY, (json.dumps(dataclasses.asdict(summary), indent=2) + "\n").encode())

    # -- reading

    def new_records(self) -> list[Numbers]:
        """The lines of the metrics that were added since the last call, without steps that are repeated.

        Raises:
            WorkerError: the file was removed.
        """
        try:
            replaced, lines = self._tail.read()
        except FileNotFoundError:
            raise WorkerError(
                f"{self.path / METRICS} was removed while the run writes it; start the run again"
            ) from None
        if replaced:  # the metrics were cut where the run resumes
            self.latest = -1
        new = [line for line in lines if not replaced or line["step"] > self._last]
        self.latest = int(lines[-1]["step"]) if lines else self.latest
        self._last = max([self._last, *(int(line["step"]) for line in new)])
        return new

    def finished(self, steps: int) -> bool:
        """True if a run of this many steps has ended in this folder."""
        try:
            summary = json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(summary, dict) and summary.get("steps") == steps and summary.get("stopped") is False

    def steps(self) -> int:
        """Number of updates made, according to the metrics; 0 if they were removed."""
        try:
            return last_step(self.history)
        except FileNotFoundError:
            return 0

    def files(self) -> dict[str, str]:
        """The files that exist: each file's path and what it contains."""
        return {
            str(self.path / name): what
            for name, what in (FILES | _OF_SOME).items()
            if (self.has_checkpoint if name == CHECKPOINT else (self.path / name).exists())
        }

    @property
    def has_checkpoint(self) -> bool:
        """True if a run can resume from this folder."""
        return bool(complete(self.path / CHECKPOINT))


def folder_of(config: RunConfig) -> Path:
    """The folder that a run writes: ``train.out``, the folder of the run that it resumes, or a new numbered
    one.
    """
    resumed = config.train.resume
    if config.train.out is None and isinstance(resumed, Path):
        run = run_of(resumed)
        if run is not None:
            return run
    return config.results_folder()


def run_of(path: Path) -> Path | None:
    """The folder of the run that a path belongs to: the run's folder, its checkpoints, or one of them."""
    return next((p for p in (path, *path.absolute().parents[:3]) if is_run(p)), None)


def _is_in(start: Path, folder: Path) -> bool:
    return start.resolve().is_relative_to(folder.resolve())


def is_run(path: Path) -> bool:
    """True if the folder contains a run."""
    return path.is_dir() and (path / METRICS).exists()


def read_schedule(path: Path) -> Schedule:
    """The schedule of a run.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    return loads(_text_of(path, SCHEDULE), str(path / SCHEDULE))


def read_timeline(path: Path, schedule: Schedule | None = None) -> Timeline:
    """The timeline of a run; while it is in progress, that of a recent step, or of two steps if asynchronous.

    Args:
        path: folder of the run.
        schedule: schedule of the run; None: the one in the folder.

    Raises:
        ConfigError: the file is missing or damaged.
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
            f"{path}: this run has no {name}: it is still in progress, or ended before the file was written"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path / name}: cannot be read: {error}") from None


def read_metrics(path: Path) -> list[Numbers]:
    """All lines of a run's metrics."""
    return lines_of((path / METRICS).read_bytes())


def replace_file(path: Path, data: bytes, *, lasts: bool = True) -> None:
    """Write a file that appears, or replaces the one before, when it is complete.

    Args:
        path: path of the file.
        data: content of the file.
        lasts: whether to wait until the file would survive a crash of the machine.
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
    finally:  # also if a signal ends the process here
        draft.unlink(missing_ok=True)
