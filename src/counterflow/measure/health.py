"""Checks of this machine for everything that Counterflow uses: versions, devices, networks, memory, limits.

Invariant: checks change nothing and open no connection, and what cannot be checked is reported as unknown.
Findings are about this machine alone, not about others in a job.
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

from counterflow.common import network_interfaces
from counterflow.common.json_models import Result, describe
from counterflow.common.number_texts import byte_size
from counterflow.runtime.transport.kinds import GLOO, NCCL
from counterflow.runtime.workers import world

from .machine import cores, memory_bytes, processor
from .storage import ADVICE, WANTED, storage_of

GIB = 2**30
_LEAST_TORCH = (2, 11)
_LEAST_SHARED = GIB // 4
_LEAST_FILES = 1024

REQUIRED = "numpy", "numba", "pydantic", "matplotlib", "safetensors"
EXTRAS = {
    "explore": ("starlette", "uvicorn"),
    "transformers": ("transformers", "datasets", "tokenizers", "peft"),
    "synthesize": ("ortools",),
    "tensorboard": ("tensorboard",),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        about: subject of the check.
        found: finding in words.
        ok: True if the finding suffices; None if it is only information, or could not be checked.
        advice: what to change; empty if nothing.
    """

    about: str
    found: str
    ok: bool | None = None
    advice: str = ""


class Doctor(Result):
    """`counterflow doctor`."""

    version: Annotated[str, describe("version of Counterflow")]
    ok: Annotated[bool, describe("whether nothing is wrong")]
    findings: list[Finding]


def gpus() -> int:
    """Number of GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def findings(folder: Path | None = None) -> list[Finding]:
    """All findings, in the order in which they are shown.

    Args:
        folder: folder of runs; None: the working folder.
    """
    storage = _storage(folder or Path())
    return [*_software(), *_devices(), *_transports(), *_networks(), *_limits(), storage, *_job()]


def _storage(folder: Path) -> Finding:
    storage = storage_of(folder)
    text = f"{storage.kind or 'unknown'}, at {storage.point}"
    if storage.why:
        return Finding("storage of runs", f"{text}: {storage.why}", ok=False, advice=ADVICE)
    if storage.renames is None:
        return Finding("storage of runs", text, None, f"unknown; runs need that {WANTED}")
    return Finding("storage of runs", f"{text}: {WANTED}", ok=True)


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
            advice = f'pip install "counterflow[{extra}]" if it is needed'
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
    yield Finding("memory", byte_size(memory_bytes("cpu", 1)))
    if not gpus():
        built = torch.version.cuda
        text = f"none is visible to torch for CUDA {built}" if built else "none: this torch is for the CPU"
        yield Finding("GPUs", text, None, "workers compute on the CPU")
        return
    for index in range(gpus()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        used = f"{byte_size(free)} of {byte_size(total)} free"
        kind = f"{about.name}, compute capability {about.major}.{about.minor}"
        advice = "" if free > total / 2 else "another process uses half of it or more"
        yield Finding(f"GPU {index}", f"{kind}, {used}", None if advice else True, advice)


def _transports() -> Iterator[Finding]:
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    yield Finding(
        GLOO.name, "there" if gloo else "missing", gloo, "" if gloo else "install a torch with Gloo"
    )
    advice = "install a torch with NCCL" if gpus() and not nccl else ""
    yield Finding(NCCL.name, "there" if nccl else "missing", False if advice else None, advice)
    choice = (
        f"{NCCL} for up to {gpus()} workers, {GLOO} for more" if nccl and gpus() else f"{GLOO}, on the CPU"
    )
    yield Finding("transport auto", choice)


def _networks() -> Iterator[Finding]:
    with contextlib.suppress(OSError):
        addresses = [f"{name} {address}" for address, name in network_interfaces.interfaces().items()]
        yield Finding("networks", ", ".join(addresses) or "none with an IPv4 address")
    address = network_interfaces.address_of_this_host()
    name = socket.gethostname()
    chosen = os.environ.get(network_interfaces.CHOICE)
    if chosen is not None:
        known = chosen in {known for _, known in socket.if_nameindex()}
        advice = "" if known else f"no network has that name; change {network_interfaces.CHOICE}"
        yield Finding(network_interfaces.CHOICE, chosen, known, advice)
    elif network_interfaces.is_loopback(address):
        advice = f"for several machines: set {network_interfaces.CHOICE} if they meet over another network"
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
        yield Finding("ports", f"none: {error.strerror}", False, "workers connect over ports of 127.0.0.1")


def _limits() -> Iterator[Finding]:
    try:
        shared = shutil.disk_usage("/dev/shm")  # noqa: S108  (looked at, not written)
        enough = shared.free >= _LEAST_SHARED
        advice = "" if enough else "NCCL and copies for restarts need it; use docker run --shm-size"
        free = f"{byte_size(shared.free)} of {byte_size(shared.total)} free"
        yield Finding("shared memory", free, enough or None, advice)
    except OSError:
        yield Finding("shared memory", "no /dev/shm", None, "copies for restarts are not possible")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shown = "without limit" if files == resource.RLIM_INFINITY else f"{files:,}"
    enough = files == resource.RLIM_INFINITY or files >= _LEAST_FILES
    yield Finding("open files", shown, enough or None, "" if enough else f"ulimit -n {_LEAST_FILES} or more")
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding("OMP_NUM_THREADS", threads or "not set: cores are divided among workers")


def _job() -> Iterator[Finding]:
    started = world.started_by()
    if started is not None:
        place = f"rank {world.rank()} of {world.world_size()}"
        yield Finding("started by", f"{started}, {place}")
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    if settings:
        yield Finding("NCCL settings", " ".join(settings))


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8")
    return ""
