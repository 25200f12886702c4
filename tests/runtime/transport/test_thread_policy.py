"""Gloo's threads preempt nobody, and the thread that starts them keeps its policy."""

from __future__ import annotations

import os
import threading

import pytest

from counterflow.runtime.transport.thread_policy import batch_policy

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="policies of Linux")


def policy_of_new_thread() -> int:
    policies: list[int] = []
    thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return policies[0]


def test_threads_that_start_within_have_the_policy_and_later_ones_do_not() -> None:
    with batch_policy():
        assert policy_of_new_thread() == os.SCHED_BATCH
    assert policy_of_new_thread() == os.sched_getscheduler(0) == os.SCHED_OTHER


def test_an_error_restores_the_policy() -> None:
    with pytest.raises(ValueError, match="within"), batch_policy():
        raise ValueError("within")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_the_user_chose_stays() -> None:
    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with batch_policy():
            policies.append(os.sched_getscheduler(0))
        policies.append(os.sched_getscheduler(0))

    policies: list[int] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_IDLE, os.SCHED_IDLE]


def test_a_system_that_does_not_allow_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with batch_policy():
        assert policy_of_new_thread() == os.SCHED_OTHER
