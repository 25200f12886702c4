"""What the interpreter asks of a transport.

Invariant: messages between two ranks are sent and received in one order, the same on both, whichever way
they go (``program/lowering.py`` sees to it); a transport may match them by that order or by tag.
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


class Lost(Exception):  # noqa: N818 - internal: the interpreter turns it into a WorkerError
    """Another rank is gone: its connection broke, or it reported a failure."""

    def __init__(self, rank: int | None, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class Returned(Lost):
    """A rank that others wait for has returned from its function."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            rank,
            f"worker {rank} has returned from its function, and others wait for it; let all workers make "
            "the same calls",
        )


class TimedOut(Exception):  # noqa: N818 - internal: the interpreter turns it into a WorkerError
    """What was waited for did not come within the timeout."""

    def __init__(self, rank: int | None, seconds: float) -> None:
        super().__init__(f"nothing came within {seconds:g} s")
        self.rank = rank


@dataclass(slots=True)
class Status:
    """What a worker is doing, for workers that wait for it too long.

    ``str(doing)`` describes its action. ``waiting_for`` is the rank it waits for, -1 if it waits for several
    (a collective), None if it computes. ``since`` is in seconds of ``time.monotonic``. ``returned`` says that
    its function is over.
    """

    rank: int
    doing: object = "starting"
    waiting_for: int | None = None
    since: float = field(default_factory=time.monotonic)
    returned: bool = False

    def now(self, doing: object) -> None:
        """Note that the worker begins something that needs nobody else."""
        self.doing = doing
        self.waiting_for = None
        self.since = time.monotonic()


class Pending(Protocol):
    """A send, a receive or a collective in flight."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""

    def wait(self) -> object:
        """Return when it is done (on a GPU: when later work on the current stream may use it).

        Raises:
            Lost: the other side is gone.
            TimedOut: it did not come within the transport's timeout.
        """


class Described(Protocol):
    """A receive whose shapes come with the data."""

    def wait(self) -> list[Tensor]:
        """The tensors; raises as ``Pending.wait`` does. ``requires_grad`` is as on the sender."""


class Gathering(Protocol):
    """A gather in flight."""

    def wait(self) -> list[list[float]]:
        """Everybody's values by rank; raises as ``Pending.wait`` does."""


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
            tensors: what to send.
            peer: to whom.
            tag: of the message.
        """

    @abstractmethod
    def receive_described(self, peer: int, tag: int) -> Described:
        """Begin to receive tensors of unknown shapes; does not wait."""

    @abstractmethod
    def start_gather(self, values: Sequence[float]) -> Gathering:
        """Start a gather of ``values`` (as many on each rank) as float64; messages may be sent meanwhile."""

    @abstractmethod
    def gather_objects(self, value: object) -> list[object]:
        """Everybody's picklable value by rank, on every rank. Waits; for rare, large or odd things."""

    @abstractmethod
    def spread(self, tensor: Tensor, source: int) -> None:
        """Overwrite a host tensor by that of rank ``source``, on all ranks; for rare and large things."""

    def get_ready(self) -> None:
        """Do ahead what makes later gathers quicker: called where a worker is likely to wait."""
        return  # most have nothing to do

    @abstractmethod
    def trouble(self, error: RuntimeError, peer: int, waited_seconds: float = 0.0) -> Exception:
        """What an error of torch.distributed means: a worker failed, was too slow, or is gone.

        Raises:
            RuntimeError: the error itself, if it means nothing more.
        """

    @property
    def fails_first(self) -> bool:
        """Whether no other worker's failure came before this one's, as far as is known here."""
        return True

    @abstractmethod
    def statuses(self) -> list[Status | None]:
        """What every rank does as far as is known; for messages about a worker that hangs."""

    def has_returned(self) -> None:
        """Report to the other ranks that this one's function has returned: it sends nothing more."""
        self.status.now("its end")

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this one cannot continue; only the first failure counts."""

    def close(self) -> None:
        """Give back what was opened. What others opened (a process group) stays."""
        return  # most have opened nothing


class Transport(ABC):
    """Messages and collectives of one rank: a data plane of its own, beside a control plane.

    Args:
        control: the control plane.
        device: where this worker computes, and where the tensors it sends and receives are.

    Attributes:
        kind: which transport this is.
        rank: see ``Control``, as for all that is not said here.
        world_size: how many workers there are.
        timeout_seconds: how long anything is waited for.
        status: what this worker does.
        shares_process: whether other workers are threads of the same process.
        matching: whether two ranks' messages are matched by their order, whichever way they go, or by tags.
        record_folder: where is kept what is known of a failure.
        launches_hold: whether what is launched holds its host until it is over.
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
        """Around all that a worker does that is a thread."""
        return nullcontext()

    def wait_at_most(self, seconds: float) -> None:
        """Wait for anything so long, where a pipeline says it first and the transport was made before."""
        del seconds  # processes make theirs with it

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
        """Call ``Control.send_described``; transports of devices accept their tensors too."""
        return self.control.send_described(tensors, peer, tag)

    def receive_described(self, peer: int, tag: int) -> Described:
        """Call ``Control.receive_described``."""
        return self.control.receive_described(peer, tag)

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Group:
        """A group for collectives. All ranks of the world call this with the same ranks, in one order."""

    def release(self, groups: Iterable[Group]) -> None:
        """Give groups back that no rank uses any more; all ranks call it."""
        del groups  # of most transports they are nothing but names

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
        """Note that an op was launched, where the device runs behind its host."""
        return  # most devices have ended it by now

    def stay_near(self) -> None:
        """Wait until the device is no more than a few ops behind its host: before the next one."""
        return

    # The control plane; see ``Control``

    def start_gather(self, values: Sequence[float]) -> Gathering:
        """Call ``Control.start_gather``."""
        return self.control.start_gather(values)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Everybody's ``values`` by rank, on every rank. Waits."""
        return self.start_gather(values).wait()

    def gather_objects(self, value: object) -> list[object]:
        """Call ``Control.gather_objects``."""
        return self.control.gather_objects(value)

    def spread(self, tensor: Tensor, source: int) -> None:
        """Over the control plane, whatever the data plane is."""
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
