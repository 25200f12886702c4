"""The engine over NCCL's rules, on threads: what hung before, the schemes, failures, hosts that run ahead."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import WorkerError
from counterflow.runtime.assembly import runners
from counterflow.runtime.transport import nccl
from counterflow.runtime.transport.base import Control, Group, Status
from counterflow.runtime.transport.ordered import OrderedTransport
from counterflow.runtime.transport.progress import OPS_AHEAD, Progress
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import small_trial


@pytest.mark.parametrize(
    ("schedule", "replicas", "options"),
    [
        (schemes.gpipe(2, 3), 1, {"recompute": "stage"}),
        (schemes.dapple(2, 3), 2, {"sync": "eager"}),
        (schemes.chimera(4, 8, concat="forward-doubling"), 1, {"recompute": "layer"}),
        (schemes.gems(4, 4), 1, {"sync": "end"}),
        (schemes.interleaved(workers=3, micro_batches=3, chunks=2), 1, {}),
        (schemes.hanayo(2, 2, waves=2), 2, {"barrier": False, "clip_norm": None}),
        (schemes.zb_v(2, 3), 2, {}),
        (schemes.dualpipe(2, 4), 1, {"barrier": False, "clip_norm": None}),
        (schemes.pipedream(3, 3), 1, {}),
        (schemes.pipedream_2bw(2, 2), 2, {}),
    ],
    ids=str,
)
def test_it_agrees_with_one_process(schedule: Schedule, replicas: int, options: dict[str, Any]) -> None:
    trial = small_trial(schedule, replicas=replicas, steps=2 if schedule.synchronous else 6)
    assert trial.verify(transport="strict-nccl", **options).ok


def test_shapes_that_are_told_with_each_message() -> None:
    trial = small_trial(schemes.hanayo(2, 3, waves=2), steps=2)
    assert trial.verify(transport="strict-nccl", dynamic_shapes=True).ok


def test_messages_in_half_precision() -> None:
    trial = small_trial(schemes.chimera(2, 2), steps=3, dtype=torch.float32)
    found = trial.verify(transport="strict-nccl", compress=True)
    assert found.loss_error < 1e-3


# -- what hung before


def told(schedule: Schedule, **options: Any) -> str:
    with pytest.raises(WorkerError) as caught:
        small_trial(schedule, steps=2).verify(transport="strict-nccl", **options)
    return str(caught.value)


@pytest.mark.parametrize("schedule", [schemes.gems(4, 4), schemes.chimera(4, 5)], ids=str)
def test_groups_that_are_made_at_their_first_sum_hang(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = OrderedTransport.connect

    def pairs_only(self: OrderedTransport, peers: Iterable[int], groups: Iterable[Group] = ()) -> None:
        del groups
        connect(self, peers)

    monkeypatch.setattr(OrderedTransport, "connect", pairs_only)
    found = told(schedule)
    assert "StartSync" in found
    assert "makes sums" in found
    assert "to enter" in found


def test_pairs_that_are_made_at_their_first_message_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderedTransport, "connect", lambda *_: None)
    assert "makes the pair" in told(schemes.chimera(4, 4), sync="end")


# -- launches that hold their hosts


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Each message and sum holds its host until it is over, as with ``CUDA_LAUNCH_BLOCKING=1``."""

    def held(name: str) -> None:
        method = getattr(OrderedTransport, name)

        def call(self: OrderedTransport, *given: Any) -> Any:
            launched = method(self, *given)
            with self.progress.host_waiting(given[1] if isinstance(given[1], int) else -1):
                launched.wait()
                self.progress.synchronize()
            return launched

        monkeypatch.setattr(OrderedTransport, name, call)

    for name in ("send", "post_receive", "_collective"):
        held(name)
    monkeypatch.setattr(OrderedTransport, "launches_hold", True)
    return monkeypatch


@pytest.mark.usefixtures("holding")
@pytest.mark.parametrize(
    ("schedule", "replicas", "options"),
    [
        (schemes.dapple(3, 4), 1, {}),
        (schemes.gems(2, 3), 1, {"sync": "eager"}),
        (schemes.chimera(4, 5), 1, {"sync": "eager-opt", "barrier": False, "clip_norm": None}),
        (schemes.interleaved(workers=4, micro_batches=4, chunks=2), 1, {}),
        (schemes.interleaved_zb(4, 8, chunks=2), 1, {}),
        (schemes.gpipe(3, 1, groups=2), 2, {"sync": "eager"}),
        (schemes.wpipe(3, 3), 1, {}),
    ],
    ids=str,
)
def test_launches_may_hold_their_hosts(schedule: Schedule, replicas: int, options: dict[str, Any]) -> None:
    trial = small_trial(schedule, replicas=replicas, steps=2 if schedule.synchronous else 6)
    assert trial.verify(transport="strict-nccl", **options).ok


def test_sums_that_begin_early_would_hold_workers_for_ever(holding: pytest.MonkeyPatch) -> None:
    holding.setattr(runners, "when_summed", lambda asked, _: asked)
    assert "StartSync" in told(schemes.gems(2, 3), sync="eager")


# -- communicators


def test_sums_of_the_same_ranks_share_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    group = OrderedTransport.group

    def counted(self: OrderedTransport, ranks: Sequence[int]) -> Group:
        if self.rank == 0:
            made.append(tuple(ranks))
        return group(self, ranks)

    monkeypatch.setattr(OrderedTransport, "group", counted)
    schedule = schemes.interleaved(workers=2, micro_batches=2, chunks=8)
    assert small_trial(schedule, replicas=2, steps=2).verify(transport="strict-nccl").ok
    assert made == [(0, 1, 2, 3), (0, 2), (1, 3)]  # of a tied weight, and of all of a worker's eight stages


class Options:
    """What torch's of NCCL have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self._timeout: timedelta | None = None


class NoControl:
    """A control plane that makes no groups, and notes the options of those that it is asked for."""

    rank, world_size, timeout_seconds = 0, 2, 60.0

    def __init__(self) -> None:
        self.status = Status(0)
        self.made_with: list[Options | None] = []

    def new_group(self, ranks: object, backend: str, timeout: timedelta, options: Options | None) -> object:
        assert backend == "nccl"
        assert options is None or options._timeout == timeout
        self.made_with.append(options)
        return object()


@pytest.fixture
def _torch_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.distributed, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False
    )
    for name in ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CGA_CLUSTER_SIZE", "TORCH_NCCL_HIGH_PRIORITY"):
        monkeypatch.delenv(name, raising=False)


def groups_of_nccl() -> list[Options | None]:
    """The options of each process group that NCCL's transport asks torch for."""
    transport, control = nccl.NcclTransport.__new__(nccl.NcclTransport), NoControl()
    OrderedTransport.__init__(transport, cast("Control", control), torch.device("cpu"))
    transport._data_groups = []
    transport.make_groups()
    transport.group((0, 1))
    return control.made_with


@pytest.mark.usefixtures("_torch_with_nccl")
def test_messages_have_priority_and_few_blocks_and_sums_what_nccl_chooses() -> None:
    *messages, sums = groups_of_nccl()
    assert sums is None
    assert len(messages) == 2
    for options in messages:
        assert options is not None
        assert options.is_high_priority_stream
        assert vars(options.config) == {"max_ctas": 4, "cga_cluster_size": 0}


@pytest.mark.usefixtures("_torch_with_nccl")
def test_what_nccls_variables_say_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MIN_CTAS", "8")
    monkeypatch.setenv("NCCL_CGA_CLUSTER_SIZE", "2")
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    options = groups_of_nccl()[0]
    assert options is not None
    assert not options.is_high_priority_stream
    assert vars(options.config) == {}


def test_a_torch_without_nccl_has_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    assert nccl.message_options(timedelta(seconds=1)) is None


# -- failures


class Trouble(nn.Linear):
    """In its third forward it raises."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen == 3:
            raise ValueError("three is too many")
        return super().forward(x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def troubled() -> None:
    layers = [nn.Linear(4, 4), Trouble(), nn.Linear(4, 4)]
    pipeline = cf.Pipeline(
        layers,
        loss,
        schemes.dapple(stages=3, micro_batches=4),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    pipeline.step(torch.ones(8, 4), torch.zeros(8, 4))


def test_a_failure_names_worker_and_action() -> None:
    with pytest.raises(
        WorkerError,
        match=r"worker 1, action \d+: Forward F2.1, layer 1 \(Trouble\): ValueError: three is too many",
    ):
        cf.launch(troubled, workers=3, transport="strict-nccl")


# -- hosts that run ahead of their devices


class Device:
    """A device that has come to as many events as it was let."""

    def __init__(self) -> None:
        self.made = 0
        self.come = 0

    def record(self) -> Event:
        self.made += 1
        return Event(self, self.made)


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def query(self) -> bool:
        return self.device.come >= self.number

    def synchronize(self) -> None:
        self.device.come = max(self.device.come, self.number)


def test_a_host_stays_near_its_device() -> None:
    device, status = Device(), Status(0)
    progress = Progress(status, device.record)
    for number in range(1, 10):
        progress.stay_near()
        assert device.come >= number - 1 - OPS_AHEAD
        status.now(f"op {number}")
        progress.computed()
    assert device.come == 9 - 1 - OPS_AHEAD


def test_what_a_device_does_is_not_what_its_host_does() -> None:
    device, status = Device(), Status(3, "launching")
    progress = Progress(status, device.record)
    assert progress.status() is status
    came: list[bool] = []
    status.now("op 1")
    progress.computed()
    status.now("op 2")
    progress.waits(lambda: bool(came), 5)
    progress.computed()
    status.now("op 3")
    assert (progress.status().doing, progress.status().waiting_for) == ("op 1", None)
    device.come = 1
    assert (progress.status().doing, progress.status().waiting_for) == ("op 2", 5)
    came.append(True)
    assert (progress.status().doing, progress.status().waiting_for) == ("op 2", None)
    progress.synchronize()
    assert progress.status() is status
    with progress.host_waiting(4):
        assert progress.status().waiting_for == 4
    assert progress.status() is status


# -- what is kept of a failure


def test_the_flight_record_is_kept_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = iter([b"one", b"two"])
    monkeypatch.setattr(nccl, "flight_record", lambda: next(records))
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "record-"))
    transport = nccl.NcclTransport.__new__(nccl.NcclTransport)
    transport.rank, transport._data_groups = 3, []
    transport.abort()
    transport.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["record-3"]
    assert (tmp_path / "record-3").read_bytes() == b"one"


def test_the_flight_record_is_kept_in_the_runs_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nccl, "flight_record", lambda: b"one")
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", raising=False)
    transport = nccl.NcclTransport.__new__(nccl.NcclTransport)
    transport.rank, transport._data_groups, transport.record_folder = 3, [], tmp_path
    transport.abort()
    assert (tmp_path / "nccl_trace_rank_3").read_bytes() == b"one"


def test_the_flight_recorder_records_unless_it_is_said_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"]
    for name in [*names, "TORCH_NCCL_ASYNC_ERROR_HANDLING"]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    transport = nccl.NcclTransport.__new__(nccl.NcclTransport)
    monkeypatch.setattr(transport, "make_groups", lambda: None)
    transport.make_data_plane()
    assert [os.environ.get(name) for name in names] == [None, "2000"]
    monkeypatch.setenv(names[0], "7")
    monkeypatch.delenv(names[1], raising=False)
    transport.make_data_plane()
    assert os.environ[names[0]] == "7"
    assert names[1] not in os.environ


def test_an_abort_that_does_not_return_holds_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, seen = threading.Event(), []

    def abort(group: str) -> None:
        if group == "stuck":
            ended.wait()
        seen.append(group)

    monkeypatch.setattr(nccl, "abort", abort)
    monkeypatch.setattr(nccl, "flight_record", lambda: None)
    monkeypatch.setattr(nccl, "_ABORT_SECONDS", 0.01)
    transport = nccl.NcclTransport.__new__(nccl.NcclTransport)
    transport._data_groups = cast("Any", ["stuck", "other"])
    transport.abort()
    assert "stuck" not in seen
    ended.set()
    while len(seen) < 2:
        time.sleep(0.001)
