"""Interface of a transport: messages and collectives of one rank, and the control plane beside them.

Invariant: messages between two ranks are sent and received in one order, the same on both, in both directions
(``program/lowering.py`` ensures it); a transport may match them by that order or by tag.
It knows ranks, tensors and tags, nothing of stages or schedules.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from counterflow.program.actions import Matching

from .kinds import TransportKind

MOST_TAGS = 2**29 - 2
"""Tags are smaller than this."""


class PeerLost(Exception):  # noqa: N818 - internal: the interpreter turns it into a WorkerError
    """Another rank is gone: its connection broke, or it reported a failure."""

    def __init__(self, rank: int | None, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class PeerReturned(PeerLost):
    """A rank has returned from its function while this one waits for it."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            rank,
            f"worker {rank} has returned from its function, and others wait for it; let all workers make "
            "the same calls",
        )


class TimedOut(Exception):  # noqa: N818 - internal: the interpreter turns it into a WorkerError
    """A wait that exceeded the timeout."""

    def __init__(self, rank: int | None, seconds: float, message: str = "nothing came") -> None:
        super().__init__(f"{message} within {seconds:g} s")
        self.rank = rank


@dataclass(slots=True)
class Status:
    """Current activity of a worker, for the error messages of workers that wait for it.

    ``str(doing)`` describes its action. ``waiting_for`` is the rank it waits for, -1 if it waits for several
    (a collective), None if it computes. ``since`` is in seconds of ``time.monotonic``. ``returned`` is
    True once its function has returned.
    """

    rank: int
    doing: object = "starting"
    waiting_for: int | None = None
    since: float = field(default_factory=time.monotonic)
    returned: bool = False

    def now(self, doing: object) -> None:
        """Note that the worker begins something that waits for no other worker."""
        self.doing = doing
        self.waiting_for = None
        self.since = time.monotonic()


class Pending(Protocol):
    """A send, a receive or a collective in flight."""

    def done(self) -> bool:
        """True if ``wait`` would return at once."""

    def wait(self) -> object:
        """Return when it is done (on a GPU: when later work on the current stream may use it).

        Raises:
            PeerLost: the other side is gone.
            TimedOut: it took longer than the transport's timeout.
        """


class Described(Protocol):
    """A receive of tensors whose shapes are sent with the data."""

    def wait(self) -> list[Tensor]:
        """Return the tensors, with ``requires_grad`` as on the sender; raises as ``Pending.wait`` does."""


class Gathering(Protocol):
    """A gather in flight."""

    def wait(self) -> list[list[float]]:
        """Return all ranks' values, by rank; raises as ``Pending.wait`` does."""


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks that take part in collectives together; ``handle`` is the transport's own."""

    ranks: tuple[int, ...]
    handle: object = None


def member(group: Group) -> ProcessGroup:
    """The process group of a group that this rank is in."""
    assert isinstance(group.handle, ProcessGroup), "only members of a group take part in its collectives"
    return group.handle


class Control(ABC):
    """The control plane of one rank: messages between hosts, and reports of failed workers.

    Attributes:
        rank: this worker's number among all, from 0.
        world_size: number of workers.
        timeout_seconds: maximum time of any wait.
        status: what this worker does at the moment; the interpreter writes it.
    """

    rank: int
    world_size: int
    timeout_seconds: float
    status: Status

    @abstractmethod
    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Pending:
        """Begin to send tensors together with their shapes, dtypes and whether they require a gradient.

        Args:
            tensors: tensors to send, of any shapes.
            peer: rank of the receiver.
            tag: tag of the message.
        """

    @abstractmethod
    def receive_described(self, peer: int, tag: int) -> Described:
        """Begin to receive tensors of unknown shapes; does not wait."""

    @abstractmethod
    def start_gather(self, values: Sequence[float]) -> Gathering:
        """Start a gather of ``values`` (as many on each rank) as float64; messages may be sent meanwhile."""

    @abstractmethod
    def gather_objects(self, value: object) -> list[object]:
        """Return all ranks' picklable values, by rank. Waits; for rare or large values."""

    @abstractmethod
    def spread(self, tensor: Tensor, source: int) -> None:
        """Overwrite a host tensor by that of rank ``source``, on all ranks; for rare and large tensors."""

    def get_ready(self) -> None:
        """Post receives of later gathers ahead: called in each step, before a worker waits."""
        return  # most have nothing to do

    @abstractmethod
    def translate_error(self, error: RuntimeError, peer: int, waited_seconds: float = 0.0) -> Exception:
        """Error that explains one of torch.distributed: a worker failed, was too slow, or is gone.

        Raises:
            RuntimeError: the error itself, if it means nothing more.
        """

    @property
    def fails_first(self) -> bool:
        """True if no other worker's failure is known to precede this one's."""
        return True

    @abstractmethod
    def statuses(self) -> list[Status | None]:
        """Last known status of every rank; None if unknown. For messages about a worker that hangs."""

    def has_returned(self) -> None:
        """Report to the other ranks that this one's function has returned: it sends nothing more."""
        self.status.now("its end")

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this one cannot continue; only the first failure counts."""

    def close(self) -> None:
        """Release what this rank opened, but not a process group that the caller opened."""
        return  # most have opened nothing


class Transport(ABC):
    """Messages and collectives of one rank: a data plane with a control plane.

    Args:
        control: the control plane.
        device: device of this worker's computation, and of the tensors that it sends and receives.

    Attributes:
        kind: the transport's entry in ``kinds``.
        rank: number of this worker among all, from 0.
        world_size: number of workers.
        timeout_seconds: maximum time of any wait.
        status: current activity of this worker.
        shares_process: True if the workers are threads of one process.
        matching: how two ranks' messages are matched: by their order in both directions, or by tags.
        record_folder: folder for records of a failure.
        launches_hold: True if each launch holds its host until the launched work is done.
    """

    kind: TransportKind
    shares_process: bool = False
    matching: Matching = Matching.ORDER
    record_folder: Path = Path()
    launches_hold: bool = False

    def __init__(self, control: Control, device: torch.device) -> None:
        self.control, self.device = control, device
        self.rank, self.world_size = control.rank, control.world_size
        self.timeout_seconds, self.status = control.timeout_seconds, control.status

    def running(self) -> AbstractContextManager[None]:
        """Context of a worker's whole run, for workers that are threads."""
        return nullcontext()

    def wait_at_most(self, seconds: float) -> None:
        """Set the maximum time of a wait, if the transport was made before a pipeline chose it."""
        del seconds  # processes construct their transport with it

    # The data plane

    def connect(self, peers: Iterable[int], groups: Iterable[Group] = ()) -> None:
        """Connect to ``peers`` and in groups before messages and sums do; all workers make this call."""
        del peers, groups  # most transports are connected from the start

    _tags = 0

    def reserve_tags(self, count: int) -> int:
        """Reserve ``count`` tags that no other message uses; return the first. All ranks make the same calls.

        Tags wrap around after a very large number; tags of closed pipelines are reused.
        """
        if self._tags + count > MOST_TAGS:
            self._tags = 0
        first = self._tags
        self._tags += count
        return first

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Pending:
        """Begin to send tensors whose shapes the receiver knows. They must not change until it is done."""

    @abstractmethod
    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Pending:
        """Begin to receive into ``buffers``; does not wait."""

    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Pending:
        """Call ``Control.send_described``; transports of devices also accept device tensors."""
        return self.control.send_described(tensors, peer, tag)

    def receive_described(self, peer: int, tag: int) -> Described:
        """Call ``Control.receive_described``."""
        return self.control.receive_described(peer, tag)

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Group:
        """A group for collectives. All ranks of the world call this with the same ranks, in one order."""

    def release(self, groups: Iterable[Group]) -> None:
        """Release groups that no rank uses any more; all ranks call it."""
        del groups  # most transports hold no resources for them

    @abstractmethod
    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        """Begin to sum ``tensor`` in place over a group; bitwise the same result on all its ranks."""

    @abstractmethod
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Pending:
        """Begin to send row i of ``sent`` to the i-th rank of a group, and to receive its row there.

        Both are contiguous, of one shape and dtype; they must not be used until it is done.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        """Overwrite ``tensor`` by that of rank ``source``, on all ranks of a group."""

    def computed(self) -> None:
        """Note that an op was launched, for devices that run behind their host."""
        return  # most devices have ended it by now

    def stay_near(self) -> None:
        """Wait until the device is no more than a few ops behind its host; called before each op."""
        return

    # The control plane; see ``Control``

    def start_gather(self, values: Sequence[float]) -> Gathering:
        """Call ``Control.start_gather``."""
        return self.control.start_gather(values)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return all ranks' ``values``, by rank. Waits."""
        return self.start_gather(values).wait()

    def gather_objects(self, value: object) -> list[object]:
        """Call ``Control.gather_objects``."""
        return self.control.gather_objects(value)

    def spread(self, tensor: Tensor, source: int) -> None:
        """Call ``Control.spread``: host tensors use the control plane, whatever the data plane is."""
        self.control.spread(tensor, source)

    def get_ready(self) -> None:
        """Call ``Control.get_ready``."""
        self.control.get_ready()

    @property
    def fails_first(self) -> bool:
        """Call ``Control.fails_first``."""
        return self.control.fails_first

    def statuses(self) -> list[Status | None]:
        """Call ``Control.statuses``."""
        return self.control.statuses()

    def has_returned(self) -> None:
        """Call ``Control.has_returned``."""
        self.control.has_returned()

    def fail(self, error: BaseException) -> None:
        """Call ``Control.fail``."""
        self.control.fail(error)

    def close(self) -> None:
        """Call ``Control.close``."""
        self.control.close()
