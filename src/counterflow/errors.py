"""Every error Counterflow raises on purpose.

Invariant: an error says the rule, the place, what was expected and what was found, and what to change.
``ConfigError`` means the request was wrong (exit code 2); the others mean the work failed (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection


class CounterflowError(Exception):
    """Base class of all errors that Counterflow raises on purpose."""


class ConfigError(CounterflowError, ValueError):
    """The request is wrong: an unknown scheme, an illegal option, a damaged file."""


class ScheduleError(CounterflowError):
    """A schedule breaks a rule of the checker."""


class DeadlockError(ScheduleError):
    """A schedule's workers wait for each other in a circle; the message shows the circle."""


class PlanError(CounterflowError):
    """No plan satisfies the constraints."""


class WorkerError(CounterflowError):
    """A worker died, hung or raised while a schedule was running.

    Attributes:
        consequence: whether the error only follows from another worker that is gone or late.
        reported: whether another worker reports the same error.
        lost: whether a worker, a device or a link is gone, so a restart may succeed.
        worker: the rank to blame; None: unknown.
        action: what that worker was doing, as far as it is known.
    """

    consequence: bool = False
    lost: bool = False
    reported: bool = False
    worker: int | None = None
    action: str = ""


def hint(name: str, known: Collection[str], shown: Collection[str] | None = None) -> str:
    """The end of an error that refuses a name: the known name that was perhaps meant, and all known names.

    >>> hint("dappel", ["dapple", "gpipe"]), hint("?", ["dapple"])
    ("; did you mean 'dapple'? Known: dapple, gpipe", '. Known: dapple')

    Args:
        name: the name that was given.
        known: all legal names.
        shown: the legal names that are listed; None: all.
    """
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    return f"{meant} Known: {', '.join(known if shown is None else shown)}"
