"""Whether a run that failed is begun again, and what is kept so that it can be.

Invariant: what fails in the same step in the same way twice is not tried a third time, unless a worker, a
device or a link was gone; and a failure is noted once, by one process.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from counterflow.checkpoints import memory
from counterflow.errors import ConfigError, CounterflowError, WorkerError
from counterflow.runtime.workers import world
from counterflow.runtime.workers.failures import failed_by

from ..config import RunConfig
from ..folder import RunFolder
from .events import FAILED, Event, note, of_this_start
from .fence import Fence


@dataclass(frozen=True, slots=True)
class Restarts:
    """Whether a run that failed is to be tried again.

    Attributes:
        folder: of the run.
        most: so many times.
    """

    folder: Path
    most: int

    def refusal(self) -> str | None:
        """Why not, after the last failure that was noted; None: try again.

        A failure that is the run's own doing (an error in its code or data, a loss that is not finite) is
        tried once more: the same in the same step is no accident.
        """
        failures = [event for event in of_this_start(self.folder) if event["event"] == FAILED]
        own = [failure for failure in failures[-2:] if not failure["lost"]]
        if len(own) > 1 and len({(failure["step"], _words(failure["message"])) for failure in own}) == 1:
            return f"step {failures[-1]['step']} failed twice in the same way, so that it is not tried again"
        count, most = len(failures), self.most
        if count > most:
            return f"this was failure {count}, and {most} restarts were allowed" if most else ""
        return None


def _words(message: str) -> str:
    """A message without what differs each time: numbers, of workers and addresses too."""
    return re.sub(r"0x[0-9a-f]+|[\d.]+", "#", message)


def note_failure(folder: Path, error: CounterflowError, attempt: int, step: int) -> Event:
    """Note a failure in a run's folder."""
    found = error if isinstance(error, WorkerError) else WorkerError()
    return note(
        folder,
        FAILED,
        attempt=attempt,
        step=step,
        worker=found.worker,
        action=found.action,
        message=str(error),
        lost=found.lost,
    )


@contextlib.contextmanager
def telling(attempt: int, fence: Fence) -> Iterator[None]:
    """As a worker of torchrun or Slurm: tell the others of a failure; the first one to fail notes it.

    Nothing is noted for an attempt that is over, but for one that ends between the question and the line.
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
        failed = failed_by(error, world.rank() or 0, transport).error()
        if isinstance(failed, WorkerError):
            failed.told = transport is not None and not transport.fails_first
            folder = fence.folder
            if not failed.told and folder.is_dir() and not fence.over():
                with contextlib.suppress(OSError):
                    note_failure(folder, failed, attempt, RunFolder(folder).steps() + 1)
        raise failed from error


def with_memory(config: RunConfig, max_restarts: int) -> RunConfig:
    """A config that says how often weights are copied to memory; None: as often as time allows.

    Raises:
        ConfigError: copies were asked for, and between steps there is nothing whole to copy, or there is no
            memory to copy to.
    """
    every = config.train.memory_every
    schedule = config.build_schedule()
    whole = schedule.synchronous and config.pipeline.barrier
    if every and not whole:
        raise ConfigError(
            f"train.memory_every = {every}: between steps of {schedule.scheme} without a "
            f"{'barrier' if schedule.synchronous else 'flush'} no update is whole on all workers; leave it "
            "out, and a restart goes on from the last checkpoint"
        )
    there = memory.ROOT.is_dir()
    if every and not there:
        raise ConfigError(
            f"train.memory_every = {every}: this system keeps no files in memory ({memory.ROOT}); leave it "
            "out, and a restart goes on from the last checkpoint"
        )
    wanted = max_restarts and whole and there and config.pipeline.transport != "local"
    if every is None and not wanted:
        every = 0
    return config.but(train={"memory_every": every})
