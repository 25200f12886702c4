"""A process group with NCCL's rules, for tensors on the CPU; for tests of whether a program keeps them.

Its methods are those of ``torch.distributed.ProcessGroup`` over NCCL. Messages of two ranks use a
communicator of these two, grouped ones (``batch_isend_irecv``) that of the whole group; ``Work.wait`` makes
the stream wait and returns. Each communicator of two has a stream. All collectives of a rank, in any group,
run on one stream, because a GPU need not have room for two at once, and NCCL requires that all ranks launch
them in one order.

A receive buffer is invalid (NaN, or the smallest integer) until the message is received; a message's tensors
are read as late as possible, and must not change before. Tensors of the host are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from typing_extensions import override

from counterflow.common.trees import version_of

from . import streams
from .device import current, refuse_elsewhere
from .device_memory import spoil
from .fabric import RECEIVE, SEND, AbortedError, Fabric, Launch, NcclRuleError, RankOperation
from .streams import Stream

_COLLECTIVES = "collectives"


class StrictWork(Work):
    """Work of a launch."""

    def __init__(self, launch: Launch, stream: Stream) -> None:
        super().__init__()
        self.launch = launch
        self.stream = stream

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the host continues."""
        del timeout
        (streams.current_stream() or self.stream).wait_for(self.launch)
        return True

    def is_completed(self) -> bool:
        """True if the launch has run."""
        return self.launch.over

    def is_success(self) -> bool:
        """True if the launch has run and was not aborted."""
        return self.launch.over and not self.launch.aborted

    def exception(self) -> BaseException | None:
        """Error of an aborted launch."""
        return dist.DistBackendError("NCCL communicator was aborted") if self.launch.aborted else None


class Endpoint(Protocol):
    """One rank's end of a fabric, as its groups need it."""

    fabric: Fabric
    rank: int
    stream: Stream

    def enter(self, communicator: str, members: Sequence[int]) -> None:
        """Make a communicator; wait until all members have entered."""
        ...

    def abort(self) -> None:
        """Abort all communicators of this rank."""
        ...


class StrictGroup(ProcessGroup):
    """One rank's end of a group.

    Args:
        endpoint: endpoint of this rank.
        ranks: the members, in order.
        name: name of the group on all members.
    """

    def __init__(self, endpoint: Endpoint, ranks: Sequence[int], name: str) -> None:
        super().__init__(ranks.index(endpoint.rank), len(ranks))  # type: ignore[call-arg]
        self.endpoint = endpoint
        self.ranks = tuple(ranks)
        self.title = name
        self._communicators: set[str] = set()
        self._group: list[RankOperation] | None = None

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it
        """Name of the backend, for torch."""
        return "strict_nccl"

    # -- messages

    @override
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """NCCL knows no tags."""
        del tag
        return self._message(SEND, tensors, dst)

    @override
    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        del tag
        for tensor in tensors:
            spoil(tensor)
        return self._message(RECEIVE, tensors, src)

    def _message(self, kind: str, tensors: list[Tensor], peer: int) -> Work:
        (tensor,) = tensors
        peer_rank = self.ranks[peer]
        pair = tuple(sorted((self.endpoint.rank, peer_rank)))
        name = f"the pair {pair[0]}-{pair[1]} of {self.title}"
        part = self._part(kind, tensor, name, peer_rank)
        if self._group is not None:
            part.communicator = self.title
            self._group.append(part)
            return _GROUPED
        self._make(name, pair)
        return self._launch(name, (part,))

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._group = []

    def _end_coalescing(self, device: torch.device) -> Work:
        del device
        parts, self._group = self._group, None
        self._make(self.title, self.ranks)
        return self._launch(_COLLECTIVES, tuple(parts or ()))

    # -- collectives

    @override
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        del timeout
        (tensor,) = [tensors] if isinstance(tensors, Tensor) else tensors
        op = opts.reduceOp if hasattr(opts, "reduceOp") else opts or ReduceOp.SUM
        return self._collective("all-reduce", tensor, _reduction(getattr(op, "op", op)))

    @override
    def broadcast(self, tensors: Any, opts: Any, timeout: Any = None) -> Work:  # type: ignore[override]
        del timeout
        (tensor,) = [tensors] if isinstance(tensors, Tensor) else tensors
        root = opts if isinstance(opts, int) else opts.rootRank
        return self._collective(f"broadcast of rank {self.ranks[root]}", tensor, str(root))

    @override
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        del opts, timeout
        (rows,), (tensor,) = outputs, inputs
        return self._collective("all-gather", tensor, "stack", rows)

    @override
    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> Work:
        """All rows have one length."""
        del output_sizes, sizes, opts
        place = self.ranks.index(self.endpoint.rank)
        return self._collective("all-to-all", tensor, "stack", _AllToAllOutput(output, place))

    @override
    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        """Over NCCL it holds the host."""
        del opts, timeout
        with streams.as_the_network():
            token = torch.zeros(1)
        work = self._collective("barrier", token, "sum")
        self.endpoint.stream.wait_for(work.launch)
        self.endpoint.stream.synchronize("is in a barrier")
        return work

    @override
    def abort(self) -> None:
        self.endpoint.abort()

    @override
    def shutdown(self) -> None: ...

    def _collective(
        self, kind: str, tensor: Tensor, how: str, rows: Sequence[Tensor] | _AllToAllOutput | None = None
    ) -> StrictWork:
        self._make(self.title, self.ranks)
        part = self._part(kind, tensor, self.title)
        part.how, part.data = how, (tensor, -1, rows)
        return self._launch(_COLLECTIVES, (part,))

    # -- parts of launches

    def _part(self, kind: str, tensor: Tensor, communicator: str, peer: int = -1) -> RankOperation:
        refuse_elsewhere(tensor)
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")  # the message of ProcessGroupNCCL
        size = f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        data = (tensor, version_of(tensor))
        return RankOperation(kind, self.endpoint.rank, communicator, size, peer, data=data)

    def _make(self, name: str, members: Sequence[int]) -> None:
        if name not in self._communicators:
            try:
                self.endpoint.enter(name, members)
            except AbortedError as error:
                raise dist.DistBackendError(str(error)) from error
            self._communicators.add(name)

    def _launch(self, stream: str, parts: tuple[RankOperation, ...]) -> StrictWork:
        if (pretended := current()) is not None:
            pretended.launched()
        stream_now = streams.current_stream() or self.endpoint.stream
        launch = Launch(self.endpoint.rank, stream, parts, stream_now.pending)
        try:
            self.endpoint.fabric.launch(launch)
        except AbortedError as error:
            raise dist.DistBackendError(str(error)) from error
        return StrictWork(launch, self.endpoint.stream)


class _GroupedWork(Work):
    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        return True


_GROUPED = _GroupedWork()


class _AllToAllOutput(NamedTuple):
    output: Tensor  # a row of each rank
    place: int  # of this rank in the group


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - documented as it


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "stack": lambda stacked: stacked,
}


def _reduction(op: Any) -> str:
    known = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
    name = next((name for name, reduction in known.items() if reduction == op), None)
    if name is None:
        raise NotImplementedError(f"all-reduce by {op}")
    return name


def move(parts: Sequence[RankOperation]) -> None:
    """Carry out operations that met, between threads of one process.

    Raises:
        NcclRuleError: a tensor was changed while it was sent.
    """
    with streams.as_the_network():
        inputs = [_read(part) for part in parts if part.kind != RECEIVE]
        how = parts[0].how
        if parts[0].kind == SEND:
            receivers, result = parts[1:], inputs[0]
        else:
            receivers = parts
            result = inputs[int(how)] if how.isdecimal() else _REDUCTIONS[how](torch.stack(inputs))
        for part in receivers:
            tensor, _, *rest = part.data
            if rest and isinstance(rest[0], _AllToAllOutput):
                rest[0].output.data.copy_(result[:, rest[0].place])
            elif rest and rest[0] is not None:
                for row, result_row in zip(rest[0], result, strict=True):
                    row.data.copy_(result_row)
            else:
                tensor.data.copy_(result.reshape(tensor.shape))


def _read(part: RankOperation) -> Tensor:
    tensor, version = part.data[:2]
    if part.kind == SEND and version_of(tensor) != version:
        raise NcclRuleError(f"a tensor was changed in place while it was sent: {part}")
    return cast("Tensor", tensor.detach())
