"""Signals leave a note; what they meant before is put back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from counterflow.train import stopping
from counterflow.train.stopping import STOP, listen, listening


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    STOP.signal = None
    yield
    STOP.signal = None


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
    with listening(second=lambda: pytest.fail("ended at once")):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert STOP.signal == signal.SIGUSR1


def test_a_second_one_ends_it() -> None:
    called: list[int] = []

    def twice() -> None:
        with listening(second=lambda: called.append(1)):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert called == [1]


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
