"""Launches: results, errors that name the cause, and nothing left running."""

from __future__ import annotations

import errno
import multiprocessing
import operator
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from counterflow.common.external_signals import end_fork_server
from counterflow.errors import ConfigError, DeadlockError, WorkerError
from counterflow.runtime.transport.kinds import GLOO, NCCL
from counterflow.runtime.workers import children, scratch
from counterflow.runtime.workers.launch import launch, launch_watched
from counterflow.runtime.workers.processes import start_method
from counterflow.runtime.workers.world import Defaults, current_transport


class Job:
    """A function of this file that another process finds by the path; pytest's module names mean nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return operator.getitem, (File(), self.function.__name__)


class File:
    def __reduce__(self) -> Any:
        return runpy.run_path, (__file__,)


def note_pid(folder: str) -> None:
    """Tell the test this worker's process."""
    (Path(folder) / f"pid-{os.getpid()}").touch()


def gone(folder: Path, count: int, within_seconds: float = 0.0) -> bool:
    """Whether all of ``count`` processes have ended."""
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    assert len(pids) == count
    deadline = time.monotonic() + within_seconds
    while alive := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() >= deadline:
            print("alive:", alive)  # noqa: T201 - shown if the test fails
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@Job
def square(number: int, *, folder: str) -> tuple[int, int, int, int]:
    note_pid(folder)
    print("a worker's line")  # noqa: T201
    return int(os.environ["RANK"]), number**2, torch.get_num_threads(), current_transport().world_size


@Job
def raise_value_error(folder: str) -> None:
    """Worker 1 raises; worker 0 waits for it."""
    note_pid(folder)
    transport = current_transport()
    if transport.rank == 1:
        raise ValueError("of worker 1")
    transport.receive([torch.empty(1)], 1, 1).wait()


@Job
def be_killed(folder: str) -> None:
    note_pid(folder)
    transport = current_transport()
    transport.gather([1.0])
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.receive([torch.empty(1)], 1, 1).wait()


@Job
def hang(folder: str) -> None:
    note_pid(folder)
    transport = current_transport()
    transport.gather([1.0])
    if transport.rank == 1:
        transport.status.now("Forward F3.2")
        time.sleep(600)
    transport.receive([torch.empty(1)], 1, 1).wait()


def test_results(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = launch(square, 3, workers=2, folder=str(tmp_path), threads=1)
    assert results == [(0, 9, 1, 2), (1, 9, 1, 2)]
    assert gone(tmp_path, 2)
    output, errors = capfd.readouterr()
    assert output == "a worker's line\n" * 2
    assert errors == ""


@Job
def look() -> tuple[int, str | None, float]:
    """The process this one was forked from, a variable, and a draw."""
    print("looking")  # noqa: T201
    return os.getppid(), os.environ.get("COUNTERFLOW_TEST"), float(np.random.random())  # noqa: NPY002


def test_forked_workers_are_as_if_started_anew(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = launch(look, workers=2)
    monkeypatch.setenv("COUNTERFLOW_TEST", "set since")
    assert capfd.readouterr().out == "looking\n" * 2
    second = launch(look, workers=2)
    assert [variable for _, variable, _ in first + second] == [None, None, "set since", "set since"]
    assert len({draw for _, _, draw in first + second}) == 4
    assert len({parent for parent, _, _ in first + second}) == 1  # imports once
    assert os.getpid() not in {parent for parent, _, _ in first}


@Job
def load() -> tuple[str, list[int]]:
    """How processes of a worker are started, and what those of a data loader give, which no pickle could."""
    numbers: Any = [1, 2, 3, 4]
    loader: Any = DataLoader(numbers, batch_size=2, num_workers=1, collate_fn=lambda few: sum(few) + 1)
    return multiprocessing.get_start_method(), list(loader)


def test_processes_of_a_worker_are_started_as_those_of_the_launch() -> None:
    context = multiprocessing.get_context()
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        assert launch(load, workers=1, transport="gloo") == [("fork", [4, 8])]
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert multiprocessing.get_context() is context


def test_workers_of_gpus_are_not_forked() -> None:
    assert start_method(Defaults(NCCL)) == "spawn"
    assert start_method(Defaults(GLOO, torch.device("cuda"))) == "spawn"


def test_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError) as caught:
        launch(raise_value_error, str(tmp_path), workers=2)
    assert str(caught.value) == "worker 1: ValueError: of worker 1"
    assert "raise ValueError" in caught.value.__notes__[0]
    assert gone(tmp_path, 2)
    assert capfd.readouterr() == ("", "")


def test_a_killed_worker(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^worker 1 was killed by SIGKILL"):
        launch(be_killed, str(tmp_path), workers=2)
    assert gone(tmp_path, 2)


@Job
def end_without_a_word(folder: str) -> None:
    note_pid(folder)
    if os.environ["RANK"] == "1":
        while len([*Path(folder).iterdir()]) < 2:  # the other one is to be seen as well
            time.sleep(0.01)
        os._exit(0)
    time.sleep(600)


def test_a_worker_that_ends_without_a_word_and_as_if_all_were_well(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^worker 1 ended with exit code 0 without an error message"):
        launch(end_without_a_word, str(tmp_path), workers=2)
    assert gone(tmp_path, 2)


@Job
def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_in_a_worker_is_a_failure() -> None:
    with pytest.raises(WorkerError, match=r"^worker \d: KeyboardInterrupt"):
        launch(raise_interrupt, workers=2)


@Job
def wait_for_the_end(folder: str) -> None:
    note_pid(folder)
    time.sleep(600)


def test_who_watches_a_launch_ends_it(tmp_path: Path) -> None:
    def watch(_: Callable[[int], None]) -> None:
        if len(list(tmp_path.glob("pid-*"))) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch_watched(watch, wait_for_the_end, str(tmp_path), workers=2)
    assert gone(tmp_path, 2)


def test_interrupted_while_the_process_to_fork_from_still_loads(tmp_path: Path) -> None:
    """That process sends a signal as soon as it runs: then it imports torch, and the launch waits for it."""
    (tmp_path / "counterflow_test_interrupts.py").write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)\n"
    )
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from counterflow.runtime.workers import processes\n"
        "from counterflow.runtime.workers.launch import launch\n"
        "processes._IMPORTED.insert(0, 'counterflow_test_interrupts')\n"
        "if __name__ == '__main__':\n"
        "    launch(print, workers=1)\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        timeout=200,
        check=False,
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_a_hanging_worker(tmp_path: Path) -> None:
    expected = r"^worker 1 has been in Forward F3\.2.* s; worker 0 waited for worker 1, and nothing came"
    with pytest.raises(WorkerError, match=expected):
        launch(hang, str(tmp_path), workers=2, timeout_seconds=2.0)
    assert gone(tmp_path, 2)


SCRIPT = """
import os, sys, time
from pathlib import Path
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport

def work(folder):
    current_transport().gather([1.0])
    Path(folder, f"pid-{os.getpid()}").touch()
    time.sleep(600)

if __name__ == "__main__":
    launch(work, sys.argv[1], workers=1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_launch(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(script), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("pid-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == -number
    if number is signal.SIGINT:
        assert gone(tmp_path, 1)
        assert errors.count("Traceback") == 1
        assert errors.endswith("KeyboardInterrupt\n")
    else:
        assert gone(tmp_path, 1, within_seconds=10.0)  # nobody is left to wait for it
        assert len([*tmp_path.glob("counterflow-*"), *tmp_path.glob("pymp-*")]) == 2
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scratch.remove_abandoned()
    assert not [*tmp_path.glob("counterflow-*"), *tmp_path.glob("pymp-*")]


def test_a_folder_of_a_process_that_lives_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("counterflow-ab", "pymp-cd", "counterflow-ef"):
        (tmp_path / name).mkdir()
    (tmp_path / "counterflow-ef" / "counterflow.lock").touch()
    (tmp_path / "pymp-gh").symlink_to(tmp_path / "counterflow-ef")
    with scratch.launch_folder() as folder:
        (folder / "task").touch()
        scratch.remove_abandoned()
        assert (folder / "task").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counterflow-ab", "pymp-cd", "pymp-gh"]


def test_a_server_that_is_killed_while_it_loads_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports nothing from the current folder, either."""
    monkeypatch.chdir(tmp_path)
    for name in ("selectors", "statistics"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    connect = forkserver.connect_to_new_process

    def killed(descriptors: list[int]) -> Any:
        connections = connect(descriptors)
        end_fork_server()
        return connections

    def full(_: list[int]) -> Any:
        raise OSError(errno.EAGAIN, "Try again")

    end_fork_server()
    for replacement, message in (
        (killed, "the process that starts the workers was killed by SIGKILL; perhaps the machine ran out"),
        (full, "no further process can be started: Try again"),
    ):
        monkeypatch.setattr(forkserver, "connect_to_new_process", replacement)
        with pytest.raises(WorkerError, match=f"^{message}") as caught:
            launch(dict, workers=2)
        assert caught.value.lost
    monkeypatch.setattr(forkserver, "connect_to_new_process", connect)
    assert launch(dict, workers=2) == [{}, {}]


@Job
def stopped(folder: str) -> None:
    """Worker 1 is stopped, as by a debugger, and worker 0 waits for it."""
    note_pid(folder)
    transport = current_transport()
    transport.gather([1.0])
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    transport.receive([torch.empty(1)], 1, 1).wait()


def test_a_stopped_worker_is_told_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(children, "_MOMENT_SECONDS", 0.2)
    with pytest.raises(WorkerError, match=r"worker 0 waited for worker 1"):
        launch(stopped, str(tmp_path), workers=2, timeout_seconds=2.0)
    assert gone(tmp_path, 2)
    (line,) = [line for line in caplog.messages if "waiting for worker" in line]
    assert "worker 0 waited for worker 1, and nothing came" in line
    assert line.endswith("; waiting for worker 1 to end, 30 s at most")


def test_threads_give_results() -> None:
    before = torch.get_num_threads()

    def work(base: int) -> tuple[int, int]:
        transport = current_transport()
        rows = transport.gather([float(transport.rank)])
        return base + transport.rank, int(sum(row[0] for row in rows))

    assert launch(work, 10, workers=4, transport="local") == [(10, 6), (11, 6), (12, 6), (13, 6)]
    assert torch.get_num_threads() == before


def test_threads_have_their_share_of_cores() -> None:
    assert launch(torch.get_num_threads, workers=2, transport="local", threads=3) == [3, 3]


def test_an_error_in_a_thread() -> None:
    def work() -> None:
        transport = current_transport()
        if transport.rank == 2:
            raise ValueError("of worker 2")
        transport.receive([torch.empty(1)], 2, 1).wait()

    with pytest.raises(WorkerError, match=r"^worker 2: ValueError: of worker 2$") as caught:
        launch(work, workers=3, transport="local")
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_ours_in_a_thread() -> None:
    def work() -> None:
        raise ConfigError("three stages for two layers")

    with pytest.raises(ConfigError, match=r"^three stages for two layers$"):
        launch(work, workers=2, transport="local")


def test_an_error_that_follows_is_not_told() -> None:
    """The interpreter marks errors that another worker's failure caused."""
    first = threading.Event()

    def work() -> None:
        transport = current_transport()
        if transport.rank == 0:
            error = WorkerError("worker 0, action 3: lost worker 1")
            error.consequence = True
            first.set()
            raise error
        first.wait()
        raise DeadlockError("of worker 1")

    with pytest.raises(DeadlockError, match=r"^of worker 1$"):
        launch(work, workers=2, transport="local")


def test_a_hanging_thread() -> None:
    release = threading.Event()

    def work() -> None:
        transport = current_transport()
        if transport.rank == 1:
            transport.status.now("Forward F3.2")
            release.wait()
        else:
            transport.receive([torch.empty(1)], 1, 1).wait()

    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"^worker 1 has been in Forward F3\.2 for"):
        launch(work, workers=2, transport="local", timeout_seconds=0.3)
    assert time.monotonic() - began < 20
    release.set()


def test_an_interrupted_launch_of_threads() -> None:
    """Ctrl-C comes to the main thread; the threads' waits end."""
    ended = threading.Event()

    def work() -> None:
        try:
            current_transport().receive([torch.empty(1)], 0, 1).wait()
        finally:
            ended.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(work, workers=1, transport="local", timeout_seconds=60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.wait(10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "at least 1"),
        ({"workers": 400_000}, "workers=400,000; at most 1,024 are started on one machine"),
        ({"workers": 2, "timeout_seconds": 0.0}, "more than 0"),
        ({"workers": 2, "transport": "mpi"}, 'unknown transport "mpi"'),
        ({"workers": 1000, "transport": "nccl"}, "1000 workers, and .* GPUs here"),
    ],
)
def test_a_wrong_request(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(os.getpid, **options)


def test_a_function_that_others_cannot_find() -> None:
    with pytest.raises(ConfigError, match='top level of a module, or transport="local"'):
        launch(lambda: None, workers=2)
    advice = r"give other arguments .*, or transport=\"local"
    with Path(os.devnull).open() as file, pytest.raises(ConfigError, match=advice):
        launch(print, file, workers=2)


def on_a_gpu() -> None:
    current_transport(device="cuda")


def test_threads_without_the_device_that_they_are_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the launch, and in the pipeline: neither computes on the CPU instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="local on cuda: torch finds no GPU here; choose the CPU"):
        launch(os.getpid, workers=2, transport="local", device="cuda")
    with pytest.raises(ConfigError, match="local on cuda: torch finds no GPU here; choose the CPU"):
        launch(on_a_gpu, workers=1, transport="local")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r'on cpu; its device is .*: give launch device="cuda"'):
        launch(on_a_gpu, workers=1, transport="local")


def test_a_launch_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match="torchrun has started 1 process; start 2, or give launch w"):
        launch(os.getpid, workers=2)
    monkeypatch.setenv("COUNTERFLOW_STARTED_BY", "launch")
    with pytest.raises(ConfigError, match="already a worker"):
        launch(os.getpid, workers=2)


def listening() -> list[str]:
    """In which networks the store of this launch is reached: /proc's words for addresses."""
    current_transport().gather([])
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and local.endswith(port):
                found.append(local.removesuffix(port))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_store_of_one_machine_is_reached_from_there_alone() -> None:
    assert launch(listening, workers=1) == [["0100007F"]]  # 127.0.0.1


_LATE_WORKER = """
import time

import torch

import counterflow as cf
from counterflow.runtime.workers import threads
from counterflow.runtime.workers.world import current_transport

threads._GRACE_SECONDS = 0.05


def work():
    if current_transport().rank == 0:
        raise RuntimeError("mine")
    weight = torch.randn(300, 300, requires_grad=True)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        output = weight
        for _ in range(10):
            output = torch.tanh(output @ weight)
            output.register_hook(lambda gradient: None)
        output.sum().backward()


cf.launch(work, workers=2, transport="local", threads=1)
"""


def test_a_thread_that_computes_at_the_end_of_the_process_does_not_abort_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LATE_WORKER], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "worker 0: RuntimeError: mine" in done.stderr
    assert "terminate called" not in done.stderr
