"""The transports: a record for each, and the only list of them.

Invariant: whatever lists the transports, or needs a fact of one, reads these records. A transport of an upper
room or of a user is registered: `counterflow.testing` does so. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from counterflow.errors import ConfigError

__all__ = ["GLOO", "LOCAL", "NCCL", "TransportKind", "kind_of", "kinds", "register"]


@dataclass(frozen=True, slots=True)
class TransportKind:
    """Facts by which a transport is chosen.

    Attributes:
        name: name in options and commands.
        about: description in a few words.
        home: ``module:class`` that makes it. Of threads this is their hub, called with the number of workers
            and ``timeout_seconds``; of processes the transport, called with its device and the timeout.
        threads: True if the workers are threads of one process.
        gpu_each: True if each worker needs its own GPU.
        trains: True if a run may choose it; the rest are instruments for tests.
        backend: torch's name of the backend of its process group.
    """

    name: str
    about: str
    home: str
    threads: bool = False
    gpu_each: bool = False
    trains: bool = True
    backend: str = "gloo"

    def load(self) -> Any:
        """Import the class that makes it."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(module), name)

    def __str__(self) -> str:
        return self.name


_KINDS: dict[str, TransportKind] = {}


def register(kind: TransportKind) -> TransportKind:
    """Add a transport under its name, for ``launch``, ``verify`` and all that list the transports."""
    _KINDS[kind.name] = kind
    return kind


_HERE = __name__.rpartition(".")[0]

GLOO = register(TransportKind("gloo", "processes, messages over TCP", f"{_HERE}.gloo:GlooTransport"))
NCCL = register(
    TransportKind(
        "nccl",
        "processes with a GPU each",
        f"{_HERE}.nccl:NcclTransport",
        gpu_each=True,
        backend="cpu:gloo,cuda:nccl",
    )
)
LOCAL = register(TransportKind("local", "threads of one process", f"{_HERE}.local:Hub", threads=True))


def kinds(*, trains: bool | None = None) -> tuple[TransportKind, ...]:
    """The transports, in the order in which they were registered.

    Args:
        trains: only those that a run may choose (True), or may not choose (False).
    """
    return tuple(kind for kind in _KINDS.values() if trains in (None, kind.trains))


def kind_of(name: str) -> TransportKind:
    """The transport of a name.

    Raises:
        ConfigError: there is no such transport.
    """
    if name not in _KINDS:
        raise ConfigError(f'unknown transport "{name}"; there are {", ".join(_KINDS)}')
    return _KINDS[name]
