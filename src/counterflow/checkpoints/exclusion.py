"""Exclusion of checkpoints that must not count: damaged ones, and those that a training has gone back behind.

Invariant: an excluded checkpoint is renamed with a warning, never removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from counterflow.errors import ConfigError

from .index import DamagedError, abandon, complete, put_aside
from .reader import Checkpoint

_LOG = logging.getLogger(__name__)


def set_aside(folder: Path, problem: str, rename: Callable[[Path], Path] = put_aside) -> None:
    """Rename a checkpoint so it does not count, and warn; on failure only warn.

    Args:
        folder: folder of the checkpoint.
        problem: reason, with its path.
        rename: renames the folder.
    """
    try:
        name = rename(folder).name
    except OSError as error:
        _LOG.warning("%s; it cannot be renamed: %s", problem, error.strerror)
    else:
        _LOG.warning("%s; it is renamed to %s", problem, name)


def set_aside_after(root: Path, step: int, verify: Callable[[Checkpoint], object] = lambda _: None) -> None:
    """Rename checkpoints of later steps than the one from which a training goes on, so they do not count.

    They are damaged, or of a training that was gone back behind: they would be the last ones, and the best
    ones, in place of those of this training. Only the single writer of the folder may call it.

    Args:
        root: folder of checkpoints.
        step: number of updates made.
        verify: raises ``DamagedError`` for a checkpoint that is damaged otherwise than in its files' lengths.
    """
    for folder in complete(root):
        if int(folder.name.partition("step-")[2].partition(".")[0]) <= step:
            continue
        try:
            verify(Checkpoint.load(folder, str(folder)))
        except DamagedError as error:
            set_aside(folder, error.problem)
        except ConfigError:  # another version
            pass
        else:
            problem = f"{folder} is of later steps than step {step}, from which this run goes on"
            set_aside(folder, problem, abandon)
