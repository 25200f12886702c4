"""Every error Counterflow raises on purpose.

Invariant: an error says the rule, the place, what was expected and what was found, and what to change.
``ConfigError`` means the request was wrong (exit code 2); the others mean the work failed (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection


class CounterflowError(Exception):
    """Base class of all errors Counterflow raises on purpose."""


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
        consequence: it only tells that another worker is gone or late.
        told: another worker tells of the same.
        lost: a worker, a device or a link is gone: the same again may go well.
        worker: the rank to blame; None: nobody knows.
        action: what that worker did, as far as was heard.
    """

    consequence: bool = False
    lost: bool = False
    told: bool = False
    worker: int | None = None
    action: str = ""


def hint(name: str, known: Collection[str], shown: Collection[str] | None = None) -> str:
    """How an error goes on that refuses a name: with the known one that was perhaps meant, and all of them.

    >>> hint("dappel", ["dapple", "gpipe"]), hint("?", ["dapple"])
    ("; did you mean 'dapple'? Known: dapple, gpipe", '. Known: dapple')

    Args:
        name: what was given.
        known: what may be.
        shown: those of them that are listed; None: all.
    """
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    return f"{meant} Known: {', '.join(known if shown is None else shown)}"
