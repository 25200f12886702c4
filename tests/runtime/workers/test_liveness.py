"""A worker whose process is gone is missed soon, where no launcher looks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from counterflow.runtime.transport import liveness
from counterflow.runtime.transport.base import Status
from counterflow.runtime.transport.liveness import NextWorker
from counterflow.runtime.transport.worker_watch import Watch

WORKER = """
import sys, time
from torch.distributed import TCPStore
from counterflow.runtime.transport.base import Status
from counterflow.runtime.transport.worker_watch import Watch
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
watch = Watch(store, Status(1), 2, timeout_seconds=300.0, break_waits=lambda: None, end=lambda why: None)
print("here", flush=True)
if sys.stdin.readline():
    watch.stop()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_worker_that_is_killed_under_nobodys_eyes_is_missed_in_seconds(
    killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", WORKER, str(store.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        broken = threading.Event()
        monkeypatch.setattr(Watch, "_await_end", lambda *_: None)
        watch = Watch(store, Status(0), 2, timeout_seconds=300.0, break_waits=broken.set, end=lambda _: None)
        watch._post_seconds = 0.2  # 5 in earnest
        try:
            if killed:
                other.send_signal(signal.SIGKILL)
                other.wait()
                watch._thread.join(20)
                assert not watch._thread.is_alive()
                found = watch.failure()
                assert found is not None
                assert found.rank == 1
                assert found.why.startswith(f"its process {other.pid} on ")
                assert found.why.endswith(" is gone; perhaps it was killed")
                assert watch.is_first  # nobody else reports it
            else:
                other.stdin.write("end\n")
                other.stdin.close()
                other.wait()
                time.sleep(1.0)  # five looks
                assert watch._thread.is_alive()
                assert watch.failure() is None
        finally:
            other.kill()
            watch.stop()


def test_a_worker_of_another_machine_is_missed_when_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = HashStore(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    mine, theirs = NextWorker(0, 2, silent_seconds=60.0), NextWorker(1, 2, silent_seconds=60.0)
    assert mine.loss_reason(store) is None
    monkeypatch.setattr(liveness, "_machine", lambda: "there")
    theirs.publish_process(store)
    monkeypatch.undo()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    for number, now in enumerate((10.0, 50.0)):
        clock[0] = now
        store.set("status/1", str(number))
        assert mine.loss_reason(store) is None
    clock[0] = 109.0
    assert mine.loss_reason(store) is None
    clock[0] = 111.0
    why = mine.loss_reason(store)
    assert why is not None
    assert why.startswith("nothing is heard of it on ")
    assert why.endswith(" for 61 s")
    theirs.publish_end(store)
    assert mine.loss_reason(store) is None


def test_where_a_launcher_looks_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    watch = Watch(HashStore(), Status(0), 2, timeout_seconds=1.0, break_waits=lambda: None)
    assert watch._next_worker is None
    watch.stop()
