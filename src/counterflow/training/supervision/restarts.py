"""Decision to restart a failed run, the report of failures, and the copies that make a restart possible.

Invariant: a run that fails twice in the same step in the same way is not restarted, unless a worker, a device
or a link was gone. A failure is noted once, by one process.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from counterflow.checkpoints import memory_copies
from counterflow.errors import ConfigError, CounterflowError, WorkerError
from counterflow.runtime.workers import world
from counterflow.runtime.workers.launch import launch_error

from ..config import RunConfig
from ..folder import RunFolder
from .events import FAILED, Event, note, of_this_start
from .exclusive import Fence

SHARE = 0.05
"""Maximum share of a run's time that copies cost."""

_LEAST = 2
"""Minimum steps between copies, so some steps follow no copy and show how long a step takes without one."""

_REMEMBERED = 5
"""Number of copies and steps whose median is used."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """Decides whether a failed run is restarted.

    Attributes:
        folder: folder of the run.
        most: maximum restarts.
    """

    folder: Path
    most: int

    def refusal(self) -> str | None:
        """Reason not to restart the run after the last noted failure; None: restart it.

        A failure that is the run's own doing (an error in its code or data, a non-finite loss) is tried once
        more: the same failure in the same step is no accident.
        """
        failures = [event for event in of_this_start(self.folder) if event["event"] == FAILED]
        own_failures = [
            (event["step"], _without_numbers(event["message"]))
            for event in failures[-2:]
            if not event["lost"]
        ]
        if len(own_failures) > 1 and own_failures[0] == own_failures[1]:
            return f"step {failures[-1]['step']} failed twice in the same way, so it is not tried again"
        count, most = len(failures), self.most
        if count > most:
            return f"this was failure {count}, and restarts were limited to {most}" if most else ""
        return None


def _without_numbers(message: str) -> str:
    # Numbers of workers, addresses and other numbers differ each time.
    return re.sub(r"0x[0-9a-f]+|[\d.]+", "#", message)


def note_failure(folder: Path, error: CounterflowError, attempt: int, step: int) -> Event:
    """Note a failure in a run's folder."""
    blamed = error if isinstance(error, WorkerError) else WorkerError()
    return note(
        folder,
        FAILED,
        attempt=attempt,
        step=step,
        worker=blamed.worker,
        action=blamed.action,
        message=str(error),
        lost=blamed.lost,
    )


@contextlib.contextmanager
def reporting_failures(attempt: int, fence: Fence) -> Iterator[None]:
    """Report a failure of this worker of torchrun or Slurm to the others; the first one to fail notes it.

    Nothing is noted for an attempt that is over, unless it ends between the check and the write.
    """
    try:
        yield
    except ConfigError:
        raise
    except KeyboardInterrupt as stopped:
        if (transport := world.existing_transport()) is not None:
            transport.fail(stopped)  # the others end, and nobody waits for them
        raise
    except Exception as error:
        transport = world.existing_transport()
        if transport is not None:
            transport.fail(error)
        failed = launch_error(error)
        if isinstance(failed, WorkerError):
            failed.reported = transport is not None and not transport.fails_first
            folder = fence.folder
            if not failed.reported and folder.is_dir() and not fence.over():
                with contextlib.suppress(OSError):
                    note_failure(folder, failed, attempt, RunFolder(folder).steps() + 1)
        raise failed from error


def with_memory(config: RunConfig, max_restarts: int) -> RunConfig:
    """A config with the number of steps between copies to memory; None: as often as time allows.

    Raises:
        ConfigError: copies were asked for, but no update is complete between steps, or the system keeps no
            files in memory.
    """
    interval = config.train.memory_every
    schedule = config.build_schedule()
    complete = schedule.synchronous and config.pipeline.barrier
    if interval and not complete:
        raise ConfigError(
            f"train.memory_every = {interval}: between steps of {schedule.scheme} without a "
            f"{'barrier' if schedule.synchronous else 'flush'} no update is complete on all workers; leave "
            "it "
            "out to restart from the last checkpoint"
        )
    available = memory_copies.ROOT.is_dir()
    if interval and not available:
        raise ConfigError(
            f"train.memory_every = {interval}: this system keeps no files in memory ({memory_copies.ROOT}); "
            "leave it out to restart from the last checkpoint"
        )
    wanted = max_restarts and complete and available and config.pipeline.transport != "local"
    if interval is None and not wanted:
        interval = 0
    return config.but(train={"memory_every": interval})


class CopyTurns:
    """Decides when the training's state is copied to memory: after a number of steps, or as time allows.

    The cost of a copy is measured: how long it blocks the worker that begins it, and how much longer the next
    step takes, during which it is written. All workers copy after the same steps, because they choose by the
    same numbers.

    Args:
        interval: steps between copies; None: chosen so copies cost at most ``SHARE`` of the time.
        first: number of updates made before.
    """

    def __init__(self, interval: int | None, first: int) -> None:
        self.interval = _LEAST if interval is None else interval
        """Steps between copies."""
        self._chosen = interval is None
        self._last = first
        self._blocking: deque[float] = deque(maxlen=_REMEMBERED)
        self._after: deque[float] = deque(maxlen=_REMEMBERED)
        self._plain: deque[float] = deque(maxlen=_REMEMBERED)

    def due(self, done: int) -> bool:
        """True if a copy is due after this many updates."""
        return done - self._last >= self.interval if self._chosen else done % self.interval == 0

    def copied(self, done: int, seconds: float) -> None:
        """Note a copy that was begun after ``done`` updates and blocked the worker for ``seconds``."""
        self._last = done
        self._blocking.append(seconds)

    def stepped(self, number: int, seconds: float) -> None:
        """Note a step that took ``seconds``; ``number`` updates were made before it."""
        after = self._blocking and number == self._last
        (self._after if after else self._plain).append(seconds)

    def row(self) -> list[float]:
        """Seconds of a copy on this worker, and of a step without one; 0: unknown."""
        step = statistics.median(self._plain) if self._plain else 0.0
        blocking = statistics.median(self._blocking) if self._blocking else 0.0
        late = statistics.median(self._after) - step if self._after and self._plain else 0.0
        return [blocking + max(0.0, late), step]

    def agree(self, rows: Sequence[Sequence[float]]) -> None:
        """Choose the steps between copies from all workers' ``row``."""
        cost, step = max(row[0] for row in rows), min(row[1] for row in rows)
        if self._chosen and cost and step:
            self.interval = max(_LEAST, math.ceil(cost / (SHARE * step)))
