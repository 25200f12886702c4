"""Whether a failed run is restarted, and the copies that make a restart possible.

Invariant: a run that fails twice in the same step in the same way is not restarted, unless a worker, a device
or a link was gone. A failure is noted once, by one process.
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
    """Decides whether a failed run is restarted.

    Attributes:
        folder: folder of the run.
        most: maximum restarts.
    """

    folder: Path
    most: int

    def refusal(self) -> str | None:
        """Why the run is not restarted after the last noted failure; None: restart it.

        A failure that is the run's own doing (an error in its code or data, a non-finite loss) is tried once
        more: the same failure in the same step is no accident.
        """
        failures = [event for event in of_this_start(self.folder) if event["event"] == FAILED]
        own = [failure for failure in failures[-2:] if not failure["lost"]]
        if len(own) > 1 and len({(failure["step"], _words(failure["message"])) for failure in own}) == 1:
            return f"step {failures[-1]['step']} failed twice in the same way, so it is not tried again"
        count, most = len(failures), self.most
        if count > most:
            return f"this was failure {count}, and restarts were limited to {most}" if most else ""
        return None


def _words(message: str) -> str:
    """A message without the parts that differ each time: numbers of workers, addresses and other numbers."""
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
        failed = failed_by(error, world.rank() or 0, transport).error()
        if isinstance(failed, WorkerError):
            failed.told = transport is not None and not transport.fails_first
            folder = fence.folder
            if not failed.told and folder.is_dir() and not fence.over():
                with contextlib.suppress(OSError):
                    note_failure(folder, failed, attempt, RunFolder(folder).steps() + 1)
        raise failed from error


def with_memory(config: RunConfig, max_restarts: int) -> RunConfig:
    """A config with the number of steps between copies to memory; None: as often as time allows.

    Raises:
        ConfigError: copies were asked for, but no update is complete between steps, or the system keeps no
            files in memory.
    """
    every = config.train.memory_every
    schedule = config.build_schedule()
    whole = schedule.synchronous and config.pipeline.barrier
    if every and not whole:
        raise ConfigError(
            f"train.memory_every = {every}: between steps of {schedule.scheme} without a "
            f"{'barrier' if schedule.synchronous else 'flush'} no update is complete on all workers; leave "
            "it "
            "out to restart from the last checkpoint"
        )
    there = memory.ROOT.is_dir()
    if every and not there:
        raise ConfigError(
            f"train.memory_every = {every}: this system keeps no files in memory ({memory.ROOT}); leave it "
            "out to restart from the last checkpoint"
        )
    wanted = max_restarts and whole and there and config.pipeline.transport != "local"
    if every is None and not wanted:
        every = 0
    return config.but(train={"memory_every": every})
