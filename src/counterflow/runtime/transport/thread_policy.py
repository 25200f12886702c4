"""Scheduling policy of the threads that Gloo starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def batch_policy() -> Iterator[None]:
    """Start threads within that do not preempt others when they wake up (``SCHED_BATCH``, of Linux alone).

    A thread of Gloo polls while another one has the lock of its connection. If it preempts the thread that
    has the lock, which is in a system call that woke it up, it polls until its time slice ends: about 3 ms
    for each message of two workers that send to each other (``benchmarks/gloo_policy.py``). A thread that
    does not preempt others runs on an idle core, or after them. Threads inherit the policy of the one that
    starts them.
    """
    changed = False
    with suppress(AttributeError, OSError):  # another system, or one that does not allow it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
