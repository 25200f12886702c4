"""The workers of a run and this one's rank among them: from a launch, torchrun, Slurm or the user.

Invariant: a process has one transport of a kind, which all pipelines in it share; it is closed when the
process ends. It starts no processes (``launch.py`` does, and torchrun and Slurm do).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from counterflow.common import network_interfaces
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError, WorkerError

from ..transport.base import PeerLost, TimedOut, Transport
from ..transport.control import ProcessControl
from ..transport.gpu_environment import before_cuda
from ..transport.kinds import GLOO, NCCL, TransportKind, kind_of
from .rank_info import RankInfo, rank_info
from .rendezvous import Rendezvous, meet, wait_for_store

__all__ = [
    "Defaults",
    "RankInfo",
    "attempt",
    "current_transport",
    "enter",
    "existing_transport",
    "join",
    "leave",
    "most_restarts",
    "rank",
    "rank_info",
    "refuse_missing_gpu",
    "set_defaults",
    "started_by",
    "text_from_first",
    "world_size",
]


@dataclass(frozen=True, slots=True)
class Defaults:
    """Options of a launch for its workers."""

    kind: TransportKind | None = None
    device: torch.device | None = None
    timeout_seconds: float = 300.0


class _Thread(threading.local):
    transport: Transport | None = None


class _Process:
    def __init__(self) -> None:
        self.defaults = Defaults()
        self.transports: list[Transport] = []
        self.world: object = None  # the process group they are of
        self.began_world = False
        self.rendezvous: tuple[Store, Rendezvous] | None = None
        self.process_groups = 0  # begun at that rendezvous


_thread = _Thread()
_process = _Process()


def current_transport(
    kind: str | None = None,
    *,
    device: torch.device | str | None = None,
    timeout_seconds: float | None = None,
    alone: bool = False,
) -> Transport:
    """The transport of this worker; the same one each time.

    In a thread of a launch it is the thread's. Otherwise it is one over
    torch.distributed, which is initialised here from torchrun's or Slurm's variables unless it is.
    All workers make this call, and with the same arguments.

    Args:
        kind: the name of a transport, as ``"gloo"``; None: that of the launch or the process group, else NCCL
            if this worker has a GPU, else Gloo.
        device: device of this worker's computation; ``"cuda"`` is the GPU of its local rank. None: that GPU
            for NCCL, the CPU for Gloo.
        timeout_seconds: maximum time of any wait; None: as launched, else 300. The first call decides.
        alone: True if a single worker is enough, which no launcher has to start.

    Raises:
        ConfigError: nothing has started several workers, or kind or device is not available.
        WorkerError: not all workers joined within the timeout, or one was lost.
    """
    wanted = kind_of(kind) if kind is not None else None
    local = _thread.transport
    if local is not None:
        if wanted is not None and not wanted.threads:
            raise ConfigError(
                f'this worker is a thread of launch(…, transport="{local.kind}"); it has no {kind}'
            )
        _refuse_other_device(local, device)
        if timeout_seconds is not None:
            local.wait_at_most(timeout_seconds)
        return local
    if wanted is not None and wanted.threads:
        raise ConfigError(f'transport "{kind}" is for workers started by launch(…, transport="{kind}")')
    defaults = _process.defaults
    wanted = wanted or defaults.kind
    device = torch.device(device) if device is not None else defaults.device

    if _process.world is not dist.group.WORLD:  # the last one's owner has ended it
        _close()
    for transport in _process.transports:
        same_device = device in (None, transport.device, torch.device(transport.device.type))
        if wanted in (None, transport.kind) and same_device:
            return transport
    return _make(wanted, device, timeout_seconds or defaults.timeout_seconds, alone=alone)


def _refuse_other_device(transport: Transport, device: torch.device | str | None) -> None:
    chosen = None if device is None else torch.device(device)
    if chosen in (None, transport.device, torch.device(transport.device.type)):
        return
    refuse_missing_gpu(chosen, transport.kind)
    raise ConfigError(
        f'this worker is a thread of launch(…, transport="{transport.kind}") on {transport.device}; its '
        f'device is that of the launch: give launch device="{device}"'
    )


def refuse_missing_gpu(device: torch.device | None, kind: TransportKind) -> None:
    """Refuse a CUDA device where torch finds none.

    Raises:
        ConfigError: it finds none.
    """
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        on_cpu = "the CPU" if kind.threads else f"{GLOO} on the CPU"
        raise ConfigError(f"{kind} on {device}: torch finds no GPU here; choose {on_cpu}")


def _make(
    wanted: TransportKind | None, device: torch.device | None, timeout_seconds: float, *, alone: bool
) -> Transport:
    before_cuda()
    info = rank_info()
    if dist.is_initialized():
        wanted = wanted or _best(device, dist.get_backend_config())
        target = _set_device(wanted, device, info.local_rank if info else dist.get_rank())
    elif info is not None:
        wanted = wanted or _best(device, NCCL.backend)
        target = _set_device(wanted, device, info.local_rank)
        _begin(wanted, info, timeout_seconds)
    elif alone:
        wanted = wanted or _best(device, NCCL.backend)
        target = _set_device(wanted, device, 0)
        _begin(wanted, None, timeout_seconds)
    else:
        raise ConfigError(
            "no other workers: start them with counterflow.launch(function, workers=4) on one machine, "
            "with torchrun --nproc-per-node 4 script.py, or with srun --ntasks 4 python script.py"
        )
    try:
        transport: Transport = wanted.load()(target, timeout_seconds)
    except (PeerLost, TimedOut) as error:
        raise WorkerError(f"not all workers joined: {error}") from error
    if _process.world is None:
        atexit.register(_at_exit)
    _process.world = dist.group.WORLD
    _process.transports.append(transport)
    return transport


def started_by() -> str | None:
    """Launcher that started this process as one of several workers, by its environment; None if none did."""
    info = rank_info()
    return info.launcher if info else None


def most_restarts() -> int:
    """Maximum number of restarts of these workers by the launcher."""
    info = rank_info()
    return info.most_restarts if info else 0


def join(info: RankInfo) -> None:
    """Set the rank of this process among those that a launcher started, for all later calls."""
    os.environ.update(info.variables())


def leave() -> None:
    """Close the transports of this process, which may then join other workers."""
    _at_exit()
    _process.transports.clear()
    _process.world, _process.began_world, _process.rendezvous, _process.process_groups = None, False, None, 0


def attempt(timeout_seconds: float) -> int:
    """Number of earlier starts of these workers, as all of them agree; each worker calls it.

    torchrun starts them again after a failure, and when a machine comes or goes.

    Raises:
        WorkerError: not all workers joined within the timeout.
    """
    info = rank_info()
    return 0 if info is None else _rendezvous(info, timeout_seconds)[1].attempt


def text_from_first(make: Callable[[], str], timeout_seconds: float) -> str:
    """Text that rank 0 makes, on all started workers; each worker calls this once.

    Raises:
        WorkerError: rank 0 does not report it within the timeout.
    """
    info = rank_info()
    if info is None:
        return make()
    store, agreement = _rendezvous(info, timeout_seconds)
    key = f"{agreement.name}/told"
    if info.rank == 0:
        store.set(key, make())
    with _missing_workers_reported(info, timeout_seconds):
        return str(store.get(key).decode())


def world_size() -> int | None:
    """Number of started workers, before anything is initialised; None if this is the only process."""
    if _thread.transport is not None:
        return _thread.transport.world_size
    if dist.is_initialized():
        return dist.get_world_size()
    info = rank_info()
    return info.world_size if info else None


def rank() -> int | None:
    """Rank of this worker among those that were started; None if this is the only process."""
    if _thread.transport is not None:
        return _thread.transport.rank
    if dist.is_initialized():
        return dist.get_rank()
    info = rank_info()
    return info.rank if info else None


def enter(transport: Transport | None) -> None:
    """Set the transport of the current thread; for ``launch``."""
    _thread.transport = transport


def set_defaults(defaults: Defaults) -> None:
    """Set the options of the launch of this process; for ``launch``."""
    _process.defaults = defaults


def existing_transport() -> Transport | None:
    """Transport of this worker, if it has made one; for ``launch``."""
    return _thread.transport or next(iter(_process.transports), None)


def _best(device: torch.device | None, backends: str) -> TransportKind:
    on_gpu = device is None or device.type == "cuda"
    if on_gpu and NCCL.name in backends and torch.cuda.is_available() and dist.is_nccl_available():
        return NCCL
    return GLOO


def _set_device(kind: TransportKind, device: torch.device | None, local_rank: int) -> torch.device:
    device = device or torch.device("cuda" if kind.gpu_each else "cpu")
    if kind.gpu_each and device.type != "cuda":
        raise ConfigError(f"{kind} carries CUDA tensors, and the device is {device}; choose gloo, or a GPU")
    if device.type != "cuda":
        return device
    refuse_missing_gpu(device, kind)
    count = torch.cuda.device_count()
    if device == torch.device("cuda"):  # no index
        if kind.gpu_each and 1 < count <= local_rank:
            raise ConfigError(
                f"local rank {local_rank}, and {plural(count, 'GPU')}: {kind} needs one a worker"
            )
        device = torch.device("cuda", local_rank % count)  # of one visible GPU, each worker sees its own
    torch.cuda.set_device(device)
    return device


def _begin(kind: TransportKind, info: RankInfo | None, timeout_seconds: float) -> None:
    if kind == NCCL and not dist.is_nccl_available():
        raise ConfigError("this torch has no nccl; choose gloo")
    limit = timedelta(seconds=timeout_seconds)
    if info is None:
        dist.init_process_group(kind.backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
        _process.began_world = True
        return
    if info.machines > 1:
        network_interfaces.choose(info.address)
    store, agreement = _rendezvous(info, timeout_seconds)
    _process.process_groups += 1
    with _missing_workers_reported(info, timeout_seconds):
        dist.init_process_group(
            kind.backend,
            store=PrefixStore(f"{agreement.name}/{_process.process_groups}", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=limit,
        )
    _process.began_world = True


def _rendezvous(info: RankInfo, timeout_seconds: float) -> tuple[Store, Rendezvous]:
    if _process.rendezvous is None:
        limit = timedelta(seconds=timeout_seconds)
        target = f"tcp://{_in_url(info.address)}:{info.port}"
        with _missing_workers_reported(info, timeout_seconds):
            if info.hosts_store:
                wait_for_store(info.address, info.port, timeout_seconds)
            store, _, _ = next(torch_rendezvous(target, info.rank, info.world_size, timeout=limit))
            _process.rendezvous = (
                store,
                meet(store, info.rank, info.world_size, info.restarts, timeout_seconds),
            )
    return _process.rendezvous


@contextlib.contextmanager
def _missing_workers_reported(info: RankInfo, timeout_seconds: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(
            f"not all {info.world_size} workers joined at {info.address}, port {info.port}, within "
            f"{timeout_seconds:g} s: {str(error).splitlines()[0]}"
            + (
                f"; if the machines share several networks, name one in {network_interfaces.CHOICE}"
                * (info.machines > 1)
            )
        ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _close() -> None:
    for transport in _process.transports:
        transport.close()
    _process.transports.clear()


def _control(transport: Transport) -> ProcessControl:
    assert isinstance(transport.control, ProcessControl), "only processes make transports here"
    return transport.control


def _forget() -> None:
    # A fork has no thread of its transports: it must neither leave the others, nor wait for a store.
    _process.transports.clear()
    _process.began_world = False


os.register_at_fork(after_in_child=_forget)


def _at_exit() -> None:
    # After a failure not the process group, which may wait for a lost worker.
    failed = any(_control(transport).failed for transport in _process.transports)
    info = rank_info()
    hosts = dist.is_initialized() and dist.get_rank() == 0 and not (info is not None and info.hosts_store)
    for transport in _process.transports:
        _control(transport).leave(hosts_store=hosts)
        transport.close()
    if _process.began_world and dist.is_initialized() and not failed:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
