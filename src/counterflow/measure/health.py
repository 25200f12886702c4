"""What the machine at hand has of what Counterflow uses: versions, devices, networks, memory, limits.

Invariant: it looks and changes nothing, opens no connection, and what cannot be looked at is told as unknown.
What is found is true of this machine alone: of others in a job it says nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist

from counterflow.runtime.transport.kinds import GLOO, NCCL
from counterflow.runtime.workers import interface, world
from counterflow.shown import Result, said

from .machine import cores, memory_bytes, processor
from .storage import ADVICE, WANTED, storage_of

GIB = 2**30
_LEAST_TORCH = (2, 13)
_LEAST_SHARED = GIB // 4
_LEAST_FILES = 1024

REQUIRED = "numpy", "numba", "pydantic", "matplotlib", "safetensors"
EXTRAS = {
    "explore": ("starlette", "uvicorn"),
    "hf": ("transformers", "datasets", "tokenizers", "peft"),
    "synthesize": ("ortools",),
    "tensorboard": ("tensorboard",),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what that was.
        found: what there is, in words.
        ok: whether that will do; None where it is only told, or could not be looked at.
        advice: what to do about it; empty if nothing.
    """

    about: str
    found: str
    ok: bool | None = None
    advice: str = ""


class Doctor(Result):
    """`counterflow doctor`."""

    version: Annotated[str, said("of Counterflow")]
    ok: Annotated[bool, said("whether nothing is wrong")]
    findings: list[Finding]


def gpus() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def findings(folder: Path | None = None) -> list[Finding]:
    """All that is found, in the order in which it is told.

    Args:
        folder: where runs are to be written; None: the working folder.
    """
    storage = _storage(folder or Path())
    return [*_software(), *_devices(), *_transports(), *_networks(), *_limits(), storage, *_job()]


def _storage(folder: Path) -> Finding:
    """Whether a run in a folder can be kept from another one, and its checkpoints whole."""
    found = storage_of(folder)
    told = f"{found.kind or 'unknown'}, at {found.point}"
    if found.why:
        return Finding("storage of runs", f"{told}: {found.why}", ok=False, advice=ADVICE)
    if found.renames is None:
        return Finding("storage of runs", told, None, f"not known here; runs want that {WANTED}")
    return Finding("storage of runs", f"{told}: {WANTED}", ok=True)


def _software() -> Iterator[Finding]:
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("Python", platform.python_version())
    known = tuple(int(part) for part in torch.__version__.split(".")[:2])
    advice = "" if known >= _LEAST_TORCH else f"needs {'.'.join(map(str, _LEAST_TORCH))} or newer"
    yield Finding("torch", torch.__version__, not advice, advice)
    yield Finding("packages", ", ".join(f"{name} {_version(name)}" for name in REQUIRED))
    for extra, packages in EXTRAS.items():
        missing = [name for name in packages if _version(name) is None]
        if missing:
            advice = f'pip install "counterflow[{extra}]" where it is wanted'
            yield Finding(f"extra {extra}", f"no {', '.join(missing)}", None, advice)
        else:
            yield Finding(f"extra {extra}", ", ".join(f"{name} {_version(name)}" for name in packages))
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    advice = "" if compiler else "pipeline.compile needs a C++ compiler on the CPU"
    yield Finding("C++ compiler", compiler or "none", None, advice)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    here = os.cpu_count() or 1
    yield Finding("CPU", f"{processor()}, {cores()} of {here} cores")
    yield Finding("memory", f"{memory_bytes('cpu', 1) / GIB:.4g} GiB")
    if not gpus():
        built = torch.version.cuda
        found = f"none that torch for CUDA {built} sees" if built else "none: this torch is for the CPU"
        yield Finding("GPUs", found, None, "workers compute on the CPU")
        return
    for index in range(gpus()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        used = f"{free / GIB:.4g} of {total / GIB:.4g} GiB free"
        kind = f"{about.name}, compute capability {about.major}.{about.minor}"
        advice = "" if free > total / 2 else "another process has half of it or more"
        yield Finding(f"GPU {index}", f"{kind}, {used}", None if advice else True, advice)


def _transports() -> Iterator[Finding]:
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    yield Finding(
        GLOO.name, "there" if gloo else "missing", gloo, "" if gloo else "install a torch with Gloo"
    )
    advice = "install a torch with NCCL" if gpus() and not nccl else ""
    yield Finding(NCCL.name, "there" if nccl else "missing", False if advice else None, advice)
    taken = (
        f"{NCCL} for up to {gpus()} workers, {GLOO} for more" if nccl and gpus() else f"{GLOO}, on the CPU"
    )
    yield Finding("transport auto", taken)


def _networks() -> Iterator[Finding]:
    with contextlib.suppress(OSError):
        found = [f"{name} {address}" for address, name in interface.interfaces().items()]
        yield Finding("networks", ", ".join(found) or "none with an IPv4 address")
    address = interface.address_of_this_host()
    name = socket.gethostname()
    chosen = os.environ.get(interface.CHOICE)
    if chosen is not None:
        known = chosen in {known for _, known in socket.if_nameindex()}
        advice = "" if known else f"there is no network of that name here; change {interface.CHOICE}"
        yield Finding(interface.CHOICE, chosen, known, advice)
    elif interface.is_loopback(address):
        advice = f"for several machines: set {interface.CHOICE} if the network over which they meet is not it"
        yield Finding("name of this host", f"{name} leads to {address or 'nothing'}", None, advice)
    else:
        yield Finding("name of this host", f"{name} leads to {address}")
    try:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
        ports = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
        yield Finding("ports", " to ".join(ports) or "there", True)
    except OSError as error:
        yield Finding("ports", f"none: {error.strerror}", False, "workers meet over ports of 127.0.0.1")


def _limits() -> Iterator[Finding]:
    try:
        shared = shutil.disk_usage("/dev/shm")  # noqa: S108  (looked at, not written)
        enough = shared.free >= _LEAST_SHARED
        advice = "" if enough else "NCCL and copies for restarts need it; docker run --shm-size"
        free = f"{shared.free / GIB:.4g} of {shared.total / GIB:.4g} GiB free"
        yield Finding("shared memory", free, enough or None, advice)
    except OSError:
        yield Finding("shared memory", "no /dev/shm", None, "copies for restarts are kept nowhere")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shown = "without limit" if files == resource.RLIM_INFINITY else f"{files:,}"
    enough = files == resource.RLIM_INFINITY or files >= _LEAST_FILES
    yield Finding("open files", shown, enough or None, "" if enough else f"ulimit -n {_LEAST_FILES} or more")
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding("OMP_NUM_THREADS", threads or "not set: cores are shared out among workers")


def _job() -> Iterator[Finding]:
    started = world.started_by()
    if started is not None:
        place = f"rank {world.rank()} of {world.world_size()}"
        yield Finding("started by", f"{started}, {place}")
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    if given:
        yield Finding("NCCL settings", " ".join(given))


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8")
    return ""
