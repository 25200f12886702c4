"""Signals leave a note; what they meant before is put back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterflow.common.external_signals import EXTERNAL_SIGNALS
from counterflow.training.supervision import stopping
from counterflow.training.supervision.stopping import STOP, Phase, listen, listening


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    STOP.forget()
    yield
    STOP.forget()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75)],
)
def test_a_signal_is_noted(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with listening():
        assert not STOP
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # once more is the same
        assert STOP.signal == number
        assert STOP.exit_code == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("phase", [Phase.LEAVE, Phase.UNWIND, Phase.FINISH])
def test_after_the_end_of_a_run_a_signal_changes_nothing(phase: Phase) -> None:
    """Until the process is gone, if it is the command's own."""
    before = {number: signal.getsignal(number) for number in EXTERNAL_SIGNALS}
    try:
        with listening(ends_process=True), STOP.during(phase):
            STOP.ended = True
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        assert not STOP
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_under_nohup_a_terminal_may_go() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not STOP
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_batch_system_may_repeat_itself() -> None:
    with listening(), STOP.during(Phase.FINISH):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert STOP.signal == signal.SIGUSR1


def test_ctrl_c_once_more_ends_what_would_be_finished() -> None:
    def twice() -> None:
        with listening(), STOP.during(Phase.FINISH):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert not STOP.early


@pytest.mark.parametrize("number", EXTERNAL_SIGNALS)
def test_while_workers_start_a_signal_unwinds(number: signal.Signals) -> None:
    def unwind() -> None:
        with listening(), STOP.during(Phase.UNWIND, then=Phase.FINISH):
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)  # nor is the unwinding disturbed

    with pytest.raises(KeyboardInterrupt):
        unwind()
    assert STOP.signal == number
    assert STOP.early


def test_a_signal_that_came_before_unwinds() -> None:
    with listening():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), STOP.during(Phase.UNWIND):
            pytest.fail("nobody looked")


def test_once_a_step_is_made_it_is_finished() -> None:
    with listening(), STOP.during(Phase.UNWIND, then=Phase.FINISH):
        STOP.step_done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert STOP.phase is Phase.FINISH
    assert (STOP.exit_code, STOP.early, STOP.phase) == (75, False, Phase.NOTE)


def test_a_step_that_nobody_has_heard_of_yet_is_finished_too() -> None:
    """Its workers made it, and the process that the signal reaches has not looked since."""
    with listening(), STOP.during(Phase.UNWIND, then=Phase.FINISH, trains=lambda: True):
        os.kill(os.getpid(), signal.SIGTERM)
        assert STOP.phase is Phase.FINISH
    with (
        pytest.raises(KeyboardInterrupt),
        listening(),
        STOP.during(Phase.UNWIND, then=Phase.FINISH, trains=lambda: False),
    ):
        os.kill(os.getpid(), signal.SIGTERM)


STUCK = """
import contextlib, multiprocessing, os, signal, sys, time
from counterflow.training.supervision import stopping
from counterflow.training.supervision.stopping import STOP, Phase, listening

if __name__ == "__main__":
    stopping.PATIENCE_SECONDS = 0.1
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    with listening(), STOP.during(Phase[sys.argv[1]]):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.Signals[sys.argv[2]])
            if sys.argv[1] == "FINISH":
                os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("phase", "number", "code", "told"),
    [
        ("LEAVE", "SIGINT", 130, "Stopped\n"),
        ("LEAVE", "SIGHUP", 75, "Stopped by SIGHUP\n"),
        ("UNWIND", "SIGINT", 130, "Stopped\n"),
        ("UNWIND", "SIGTERM", 75, "Stopped by SIGTERM\n"),
        ("FINISH", "SIGINT", 130, "Stopped\n"),
    ],
)
def test_a_main_thread_that_does_not_end_is_ended(phase: str, number: str, code: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK, phase, number], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (code, told)
    deadline = time.monotonic() + 100
    while _runs(int(done.stdout)):  # nor are its children left
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_threads_do_not_listen() -> None:
    before = signal.getsignal(signal.SIGINT)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(listen()))
    thread.start()
    thread.join()
    assert found == [{}]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_that_is_gone_is_not_written_to() -> None:
    terminal, shown = os.openpty()
    os.close(terminal)
    try:
        with pytest.raises(OSError, match="Input/output"):
            os.write(shown, b"more")
        stopping._leave([shown])
        assert os.write(shown, b"more") == 4
    finally:
        os.close(shown)
