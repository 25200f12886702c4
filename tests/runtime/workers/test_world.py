"""A process's place among its workers, and what the workers know of each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from counterflow.errors import ConfigError
from counterflow.runtime.transport import worker_watch
from counterflow.runtime.transport.base import Status, Transport
from counterflow.runtime.transport.kinds import GLOO, LOCAL, NCCL, TransportKind
from counterflow.runtime.transport.worker_watch import Failure, Watch, blame, culprit
from counterflow.runtime.workers import world
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.rank_info import RankInfo, first_host, rank_info
from counterflow.runtime.workers.world import current_transport, started_by

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = (
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID"),
    *("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NUM_TASKS"),
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nothing has started workers."""
    for name in VARIABLES + SLURM:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def torchrun(environment: pytest.MonkeyPatch, **changes: str) -> None:
    given = dict(zip(VARIABLES, ("5", "8", "1", "node3", "29500"), strict=True)) | changes
    for name, value in given.items():
        environment.setenv(name, value)


def slurm(environment: pytest.MonkeyPatch, **changes: str) -> None:
    given = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "2",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "gpu[007-009,12],login1",
    }
    for name, value in (given | changes).items():
        environment.setenv(name, value)


def test_nothing_started_workers(environment: pytest.MonkeyPatch) -> None:
    assert started_by() is None
    assert world.world_size() is None
    assert world.rank() is None
    with pytest.raises(ConfigError, match=r"launch.*torchrun.*srun"):
        current_transport()


def test_torchrun(environment: pytest.MonkeyPatch) -> None:
    torchrun(environment)
    slurm(environment)  # torchrun may itself run under Slurm
    assert started_by() == "torchrun"
    assert (world.rank(), world.world_size()) == (5, 8)
    assert rank_info() == RankInfo("torchrun", 5, 8, 1, "node3", 29500)


def test_a_place_of_another_launcher(environment: pytest.MonkeyPatch) -> None:
    """It is stated in torchrun's variables; a process that has left it may take another."""
    first = RankInfo("other", 5, 8, 1, "node3", 29500, 2, restarts=2, most_restarts=3, hosts_store=True)
    for name in first.variables():
        environment.setenv(name, "")  # so that it is gone after the test
    world.join(first)
    assert rank_info() == first
    assert (started_by(), world.most_restarts()) == ("other", 3)
    assert (os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]) == ("4", "1")
    world.leave()
    second = replace(first, rank=0, world_size=1, machines=1, hosts_store=False)
    world.join(second)
    assert rank_info() == second


def test_a_number_that_is_none(environment: pytest.MonkeyPatch) -> None:
    torchrun(environment, WORLD_SIZE="many")
    with pytest.raises(ConfigError, match='WORLD_SIZE is "many"'):
        started_by()


def test_slurm(environment: pytest.MonkeyPatch) -> None:
    slurm(environment)
    assert started_by() == "slurm"
    assert (world.rank(), world.world_size()) == (5, 8)
    port = 15_000 + (123456 + 97 * 2) % 15_000
    assert rank_info() == RankInfo("slurm", 5, 8, 1, "gpu007", port)


def test_slurm_with_an_address(environment: pytest.MonkeyPatch) -> None:
    slurm(environment, MASTER_ADDR="10.0.0.1", MASTER_PORT="4000", SLURM_STEP_NODELIST="a,b")
    assert rank_info() == RankInfo("slurm", 5, 8, 1, "10.0.0.1", 4000)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": "4294967291"},  # the batch script itself
        {"SLURM_STEP_ID": "4294967290"},  # an interactive step
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in a larger job
    ],
)
def test_not_a_step_of_workers(environment: pytest.MonkeyPatch, changes: dict[str, str]) -> None:
    slurm(environment, **changes)
    assert started_by() is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("a,b,c", "a"),
        ("n[1-4]", "n1"),
        ("n[003,5-7]", "n003"),
        ("rack[1-2]-n[08-9]-ib,x", "rack1-n08-ib"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_no_first_host() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        first_host("")


def test_unknown_transport() -> None:
    with pytest.raises(ConfigError, match='unknown transport "mpi"; there are gloo, nccl, local'):
        current_transport("mpi")


def test_local_only_in_a_launch(environment: pytest.MonkeyPatch) -> None:
    torchrun(environment)
    with pytest.raises(ConfigError, match="launch"):
        current_transport("local")


def test_nccl_wants_a_gpu(environment: pytest.MonkeyPatch) -> None:
    torchrun(environment)
    with pytest.raises(ConfigError, match="choose gloo"):
        current_transport("nccl", device="cpu")


@pytest.mark.parametrize(
    "case",
    [
        (torchrun, NCCL, None, 8, "cuda:1"),
        (slurm, NCCL, None, 8, "cuda:1"),
        (slurm, NCCL, None, 1, "cuda:0"),  # srun --gpus-per-task=1: each sees its own
        (torchrun, GLOO, None, 8, "cpu"),
        (torchrun, GLOO, "cuda", 8, "cuda:1"),
        (torchrun, NCCL, "cuda:3", 8, "cuda:3"),
    ],
)
def test_a_process_has_the_gpu_of_its_local_rank(
    environment: pytest.MonkeyPatch, case: tuple[Any, TransportKind, str | None, int, str]
) -> None:
    start, kind, asked, gpus, found = case
    start(environment)
    current: list[torch.device] = []
    environment.setattr(torch.cuda, "is_available", lambda: True)
    environment.setattr(torch.cuda, "device_count", lambda: gpus)
    environment.setattr(torch.cuda, "set_device", current.append)
    here = rank_info()
    assert here is not None
    given = None if asked is None else torch.device(asked)
    assert str(world._set_device(kind, given, here.local_rank)) == found
    assert [str(device) for device in current] == ([found] if found != "cpu" else [])


def test_fewer_gpus_than_local_ranks(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(torch.cuda, "is_available", lambda: True)
    environment.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match="local rank 5, and 4 GPUs"):
        world._set_device(NCCL, None, 5)


def test_in_a_thread() -> None:
    def look() -> tuple[int | None, int | None, TransportKind, bool]:
        transport = current_transport()
        return world.rank(), world.world_size(), transport.kind, current_transport("local") is transport

    assert launch(look, workers=2, transport="local") == [
        (0, 2, LOCAL, True),
        (1, 2, LOCAL, True),
    ]

    def ask_for_gloo() -> None:
        current_transport("gloo")

    with pytest.raises(ConfigError, match="has no gloo"):
        launch(ask_for_gloo, workers=1, transport="local")


SCRIPT = """
import torch
from counterflow.runtime.transport.base import PeerLost
from counterflow.runtime.workers.world import current_transport

transport = current_transport(timeout_seconds=60)
print(transport.gather([transport.rank]))
transport.send([torch.ones(1)], 1 - transport.rank, 1)  # never received
try:
    if transport.rank == 1:
        raise ValueError("of rank 1")
    transport.receive([torch.empty(1)], 1, 2).wait()
except (PeerLost, ValueError) as error:
    transport.fail(error)
    print(error)
    raise SystemExit(3)
"""


def test_workers_of_slurm(environment: pytest.MonkeyPatch) -> None:
    """Without an agent: they meet, and after a failure each ends by itself, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm(environment, SLURM_NTASKS="2", SLURM_JOB_NODELIST="localhost", MASTER_PORT=str(port))
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [worker.communicate(timeout=60) for worker in workers]
    assert ended == [
        ("[[0.0], [1.0]]\nworker of rank 1 failed: ValueError: of rank 1\n", ""),
        ("[[0.0], [1.0]]\nof rank 1\n", ""),
    ]
    assert [worker.returncode for worker in workers] == [3, 3]


def computing(rank: int, since: float = 0.0) -> Status:
    return Status(rank, "Forward F3.2", None, since)


def waiting(rank: int, whom: int, since: float = 0.0) -> Status:
    return Status(rank, "ReceiveActivation", whom, since)


def test_blame_follows_who_waits() -> None:
    statuses = [waiting(0, 1), waiting(1, 3), computing(2), computing(3)]
    assert blame(statuses, 0) is statuses[3]
    assert blame(statuses, 2) is statuses[2]


def test_blame_of_a_circle() -> None:
    assert blame([waiting(0, 1), waiting(1, 2), waiting(2, 1)], 0) is None


def test_blame_of_a_collective() -> None:
    everybody = -1
    late = [waiting(0, everybody), computing(1, since=5.0), waiting(2, everybody), computing(3, since=2.0)]
    assert blame(late, 0) is late[3]
    elsewhere = [waiting(0, everybody), waiting(1, 2), computing(2), waiting(3, everybody)]
    assert blame(elsewhere, 3) is elsewhere[2]
    stuck_elsewhere = [waiting(0, everybody), waiting(1, 0), waiting(2, everybody)]
    assert blame(stuck_elsewhere, 0) is None
    assert blame([waiting(0, everybody), waiting(1, everybody)], 0) is None


def test_blame_of_one_that_was_never_heard_of() -> None:
    found = blame([waiting(0, 1, since=3.0), None], 0)
    assert found == Status(1, "starting", None, 3.0)


def test_culprit_of_whom_nothing_is_heard_does_nothing_that_is_known() -> None:
    cut_off = SimpleNamespace(rank=0, statuses=lambda: [waiting(0, 1), None])
    assert culprit(cast("Transport", cut_off)) == "nothing is heard of worker 1"


class Ended:
    def __init__(self) -> None:
        self.broken = threading.Event()
        self.ended = threading.Event()
        self.why = ""

    def end(self, why: str) -> None:
        self.why = why
        self.ended.set()


@pytest.fixture
def pair() -> Iterator[tuple[Watch, Watch, Ended]]:
    """The watches of two workers that share a store, and what becomes of the second."""
    store, fate = HashStore(), Ended()
    first = Watch(store, Status(0), 2, timeout_seconds=1.0, break_waits=lambda: None, end=lambda _: None)
    second = Watch(store, Status(1), 2, timeout_seconds=1.0, break_waits=fate.broken.set, end=fate.end)
    yield first, second, fate
    first.stop()
    second.stop()


def test_watches_post_statuses(pair: tuple[Watch, Watch, Ended]) -> None:
    first, second, _ = pair
    second.statuses()[1].now("Forward F3.2")  # type: ignore[union-attr]
    deadline = time.monotonic() + 10
    while (seen := first.statuses()[1]) is None or seen.doing != "Forward F3.2":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert seen.waiting_for is None
    assert 0 <= time.monotonic() - seen.since < 10


def test_a_silent_worker_is_stuck(pair: tuple[Watch, Watch, Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = pair
    mine = second.statuses()[1]
    assert mine is not None
    mine.waiting_for = 0
    second.stop()
    deadline = time.monotonic() + 10
    while (seen := first.statuses()[1]) is None or "silent" not in str(seen.doing):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert seen.waiting_for is None


def test_a_failure_ends_who_does_not_notice(
    pair: tuple[Watch, Watch, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "_GRACE_SECONDS", 0.2)
    first, second, fate = pair
    first.post_failure(ValueError("of worker 0"))
    second.post_failure(ValueError("later"))  # only the first counts
    assert second.failure() == Failure(0, "ValueError: of worker 0")
    assert (first.is_first, second.is_first) == (True, False)
    assert first.failure() is None
    assert fate.broken.wait(10)
    assert fate.ended.wait(10)
    assert fate.why == "worker 0 failed: ValueError: of worker 0"


def test_a_failure_spares_who_ends(pair: tuple[Watch, Watch, Ended]) -> None:
    first, second, fate = pair
    first.post_failure(ValueError("of worker 0"))
    assert fate.broken.wait(10)
    second.stop()
    assert not fate.ended.is_set()


class Device:
    """One that works until it meets an error; then every question is answered with that."""

    def __init__(self) -> None:
        self.broken = False

    def status(self) -> Status:
        if self.broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return Status(0)

    def look(self) -> None:
        self.status()


def test_a_device_error_is_told_as_one_and_the_watch_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "_GRACE_SECONDS", 0.2)
    store, device, fate, others = HashStore(), Device(), Ended(), Ended()
    first = Watch(
        store,
        Status(0),
        2,
        timeout_seconds=2.0,
        break_waits=fate.broken.set,
        look=device.look,
        device_status=device.status,
        end=fate.end,
    )
    second = Watch(store, Status(1), 2, timeout_seconds=2.0, break_waits=others.broken.set, end=others.end)
    why = "device of rank 0: AcceleratorError: CUDA error: an illegal memory access was encountered"
    try:
        device.broken = True
        assert fate.broken.wait(10)
        assert others.broken.wait(10)
        assert second.failure() == Failure(0, why)
        assert str(first.device_error) == why
        mine = first.statuses()[0]
        assert mine is not None
        assert mine.doing == "starting"  # the host's, since the device tells nothing any more
        assert others.ended.wait(10)
        assert others.why == f"worker 0 failed: {why}"
        assert first._thread.is_alive()
        assert not first._store_gone
        assert fate.ended.wait(10)  # who has been told may have something to save, not for ever
    finally:
        first.stop()
        second.stop()


class CutOff:
    """A store that answers until it is cut off; then each call waits, as over a network without an answer."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.cut = False
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.cut:
                self.over.wait()
            return getattr(self.store, name)(*args)

        return call


def test_a_worker_that_is_cut_off_from_the_store_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "_GRACE_SECONDS", 0.2)
    store, fate, status = CutOff(), Ended(), Status(1)
    mine = Watch(
        store,  # type: ignore[arg-type]
        status,
        2,
        timeout_seconds=0.5,
        break_waits=fate.broken.set,
        end=fate.end,
    )
    store.cut = True
    status.waiting_for = 0
    try:
        assert mine.failure() is None  # who waits for the others' news does not wait for ever
        mine.post_failure(ValueError("here"))
        assert fate.ended.wait(10)
        assert "cannot be reached" in fate.why
    finally:
        store.over.set()
        mine.stop()


def test_one_worker_needs_nobody_to_start_it() -> None:
    """In a process of its own: it begins torch.distributed."""
    program = (
        "import torch, counterflow as cf\n"
        "layers = [torch.nn.Linear(2, 2) for _ in range(2)]\n"
        "schedule = cf.schemes.dapple(1, 2)\n"
        "sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)\n"
        "with cf.Pipeline(layers, torch.nn.functional.mse_loss, schedule, optimizer=sgd) as pipeline:\n"
        "    print(pipeline.step(torch.ones(4, 2), torch.ones(4, 2)).samples)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("4\n", 0), ran.stderr


def test_one_worker_outlives_its_error() -> None:
    """A notebook's process ended as soon as the timeout was over, and with it whatever it held."""
    fate, status = Ended(), Status(0)
    mine = Watch(HashStore(), status, 1, timeout_seconds=0.1, break_waits=fate.broken.set, end=fate.end)
    mine.post_failure(ValueError("here"))
    assert not fate.ended.wait(1)
    mine.stop()
