"""Which workers there are, and this one's place among them: from a launch, torchrun, Slurm or the user.

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
from torch.distributed.rendezvous import rendezvous

from counterflow.errors import ConfigError, WorkerError

from ..transport.base import Lost, TimedOut, Transport
from ..transport.control import ProcessControl
from ..transport.gpu_environment import before_cuda
from ..transport.kinds import GLOO, NCCL, TransportKind, kind_of
from . import interface
from .meeting import Meeting, meet, wait_for_store
from .place import Place, place


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a launch chose for its workers."""

    kind: TransportKind | None = None
    device: torch.device | None = None
    timeout_seconds: float = 300.0


class _Thread(threading.local):
    transport: Transport | None = None


class _Process:
    """What this process has."""

    def __init__(self) -> None:
        self.defaults = Defaults()
        self.transports: list[Transport] = []
        self.world: object = None  # the process group they are of
        self.began_world = False
        self.met: tuple[Store, Meeting] | None = None
        self.begun = 0  # process groups of that meeting


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
    torch.distributed, which is initialised here from torchrun's or Slurm's variables if nobody has.
    All workers make this call, and with the same arguments.

    Args:
        kind: the name of a transport, as ``"gloo"``; None: what the launch or the process group says, else
            NCCL if this worker has a GPU, else Gloo.
        device: where this worker computes; ``"cuda"`` is the GPU of its local rank. None: that GPU for NCCL,
            the CPU for Gloo.
        timeout_seconds: how long anything is waited for; None: as launched, else 300. The first call decides.
        alone: whether one worker is enough, so that nothing has to start it.

    Raises:
        ConfigError: nothing has started several workers, or kind or device is not to be had.
        WorkerError: not all workers came within the timeout, or one was lost on the way.
    """
    wanted = kind_of(kind) if kind is not None else None
    local = _thread.transport
    if local is not None:
        if wanted is not None and not wanted.threads:
            raise ConfigError(
                f'this worker is a thread of launch(…, transport="{local.kind}"); it has no {kind}'
            )
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
    for made in _process.transports:
        if wanted in (None, made.kind) and device in (None, made.device, torch.device(made.device.type)):
            return made
    return _make(wanted, device, timeout_seconds or defaults.timeout_seconds, alone=alone)


def _make(
    wanted: TransportKind | None, device: torch.device | None, timeout_seconds: float, *, alone: bool
) -> Transport:
    before_cuda()
    here = place()
    if dist.is_initialized():
        wanted = wanted or _best(device, dist.get_backend_config())
        where = _device(wanted, device, here.local_rank if here else dist.get_rank())
    elif here is not None:
        wanted = wanted or _best(device, NCCL.backend)
        where = _device(wanted, device, here.local_rank)
        _begin(wanted, here, timeout_seconds)
    elif alone:
        wanted = wanted or _best(device, NCCL.backend)
        where = _device(wanted, device, 0)
        _begin(wanted, None, timeout_seconds)
    else:
        raise ConfigError(
            "no other workers: start them with counterflow.launch(function, workers=4) on one machine, "
            "with torchrun --nproc-per-node 4 script.py, or with srun --ntasks 4 python script.py"
        )
    try:
        transport: Transport = wanted.load()(where, timeout_seconds)
    except (Lost, TimedOut) as error:
        raise WorkerError(f"the workers did not all come together: {error}") from error
    if _process.world is None:
        atexit.register(_at_exit)
    _process.world = dist.group.WORLD
    _process.transports.append(transport)
    return transport


def started_by() -> str | None:
    """What started this process as one of several workers, by its environment; None if nothing did."""
    here = place()
    return here.by if here else None


def most_restarts() -> int:
    """How often the launcher may start these workers again."""
    here = place()
    return here.most_restarts if here else 0


def join(here: Place) -> None:
    """Put this process at a place among others that a launcher started; everything later finds it there."""
    os.environ.update(here.variables())


def leave() -> None:
    """End what this process has with the others; a process that lives on may join others then."""
    _at_exit()
    _process.transports.clear()
    _process.world, _process.began_world, _process.met, _process.begun = None, False, None, 0


def attempt(timeout_seconds: float) -> int:
    """How often these workers were started before, as all of them agree; each one calls it.

    torchrun starts them again after a failure, and when a machine comes or goes.

    Raises:
        WorkerError: not all workers came within the timeout.
    """
    here = place()
    return 0 if here is None else _met(here, timeout_seconds)[1].attempt


def told_by_first(make: Callable[[], str], timeout_seconds: float) -> str:
    """A text made by rank 0, on all started workers; each one calls this once.

    Raises:
        WorkerError: rank 0 does not report it within the timeout.
    """
    here = place()
    if here is None:
        return make()
    store, meeting = _met(here, timeout_seconds)
    key = f"{meeting.name}/told"
    if here.rank == 0:
        store.set(key, make())
    with _told_who_is_missing(here, timeout_seconds):
        return str(store.get(key).decode())


def world_size() -> int | None:
    """How many workers were started, before anything is initialised; None if this is the only process."""
    if _thread.transport is not None:
        return _thread.transport.world_size
    if dist.is_initialized():
        return dist.get_world_size()
    here = place()
    return here.world_size if here else None


def rank() -> int | None:
    """The number of this worker among those that were started; None if this is the only process."""
    if _thread.transport is not None:
        return _thread.transport.rank
    if dist.is_initialized():
        return dist.get_rank()
    here = place()
    return here.rank if here else None


def enter(transport: Transport | None) -> None:
    """Make a transport the one of the current thread; for ``launch``."""
    _thread.transport = transport


def set_defaults(defaults: Defaults) -> None:
    """Note what the launch of this process chose; for ``launch``."""
    _process.defaults = defaults


def existing_transport() -> Transport | None:
    """The transport of this worker if it has made one; for ``launch``."""
    return _thread.transport or next(iter(_process.transports), None)


def _best(device: torch.device | None, backends: str) -> TransportKind:
    on_gpu = device is None or device.type == "cuda"
    if on_gpu and NCCL.name in backends and torch.cuda.is_available() and dist.is_nccl_available():
        return NCCL
    return GLOO


def _device(kind: TransportKind, asked: torch.device | None, local_rank: int) -> torch.device:
    """The device of a worker; it becomes the current one."""
    device = asked or torch.device("cuda" if kind.gpu_each else "cpu")
    if kind.gpu_each and device.type != "cuda":
        raise ConfigError(f"{kind} carries CUDA tensors, and the device is {device}; choose gloo, or a GPU")
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"{kind} on {device}: torch finds no GPU here; choose gloo on the CPU")
    count = torch.cuda.device_count()
    if device == torch.device("cuda"):  # no index
        if kind.gpu_each and 1 < count <= local_rank:
            raise ConfigError(f"local rank {local_rank}, and {count} GPUs: {kind} needs one a worker")
        device = torch.device("cuda", local_rank % count)  # of one visible GPU, each worker sees its own
    torch.cuda.set_device(device)
    return device


def _begin(kind: TransportKind, here: Place | None, timeout_seconds: float) -> None:
    """Initialise torch.distributed, not bound to a device (``ProcessControl.new_group``). None: for one."""
    if kind == NCCL and not dist.is_nccl_available():
        raise ConfigError("this torch has no nccl; choose gloo")
    limit = timedelta(seconds=timeout_seconds)
    if here is None:
        dist.init_process_group(kind.backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
        _process.began_world = True
        return
    if here.machines > 1:
        interface.choose(here.address)
    store, meeting = _met(here, timeout_seconds)
    _process.begun += 1
    with _told_who_is_missing(here, timeout_seconds):
        dist.init_process_group(
            kind.backend,
            store=PrefixStore(f"{meeting.name}/{_process.begun}", store),
            rank=here.rank,
            world_size=here.world_size,
            timeout=limit,
        )
    _process.began_world = True


def _met(here: Place, timeout_seconds: float) -> tuple[Store, Meeting]:
    """The store of these workers, and what they agreed on there."""
    if _process.met is None:
        limit = timedelta(seconds=timeout_seconds)
        where = f"tcp://{_in_url(here.address)}:{here.port}"
        with _told_who_is_missing(here, timeout_seconds):
            if here.keeps_store:
                wait_for_store(here.address, here.port, timeout_seconds)
            store, _, _ = next(rendezvous(where, here.rank, here.world_size, timeout=limit))
            _process.met = store, meet(store, here.rank, here.world_size, here.restarts, timeout_seconds)
    return _process.met


@contextlib.contextmanager
def _told_who_is_missing(here: Place, timeout_seconds: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(
            f"not all {here.world_size} workers came to {here.address}, port {here.port}, within "
            f"{timeout_seconds:g} s: {str(error).splitlines()[0]}"
            + (
                f"; if the machines share several networks, name one in {interface.CHOICE}"
                * (here.machines > 1)
            )
        ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _close() -> None:
    for transport in _process.transports:
        transport.close()
    _process.transports.clear()


def _control(transport: Transport) -> ProcessControl:
    assert isinstance(transport.control, ProcessControl), "only processes have made transports here"
    return transport.control


def _at_exit() -> None:
    """Close what was opened; after a failure not the process group, which may wait for a lost worker."""
    failed = any(_control(transport).failed for transport in _process.transports)
    here = place()
    hosts = dist.is_initialized() and dist.get_rank() == 0 and not (here is not None and here.keeps_store)
    for transport in _process.transports:
        _control(transport).leave(hosts_store=hosts)
        transport.close()
    if _process.began_world and dist.is_initialized() and not failed:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
