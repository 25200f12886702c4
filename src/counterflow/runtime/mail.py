"""One worker's messages between stages: what is posted, what has come, what is on its way out.

Invariant: a buffer goes back to the pool only when nothing refers to its content. Nothing that can wait is
done between an op and the send of its output: ``tidy`` does it after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from counterflow.schedule.actions import Receive

from .batch import Batch, Shapes
from .compression import Compression
from .tasks import Task
from .transport import Crossing, Pending, Transport
from .transport.base import Described
from .values import BufferPool, TensorSpec

_Restore = Callable[[list[Tensor], list[TensorSpec]], list[Tensor]]


class _Arrival:
    """A posted receive of known shapes; ``restore`` makes tensors of what came in another form."""

    __slots__ = ("buffers", "pending", "restore", "specs")

    def __init__(
        self,
        pending: Pending,
        buffers: list[Tensor],
        specs: list[list[TensorSpec]],
        restore: _Restore | None,
    ) -> None:
        self.pending, self.buffers, self.specs, self.restore = pending, buffers, specs, restore

    def take(self, count: int) -> tuple[list[list[Tensor]], bool]:
        """The tensors by unit, and whether they are buffers of the pool."""
        self.pending.wait()
        tensors = self.buffers
        if self.restore is not None:
            tensors = self.restore(tensors, [spec for unit in self.specs for spec in unit])
        if count == 1:
            return [tensors], True
        found, at = [], 0
        for unit in self.specs:
            found.append(tensors[at : at + len(unit)])
            at += len(unit)
        return found, True


class _DescribedArrival:
    """A posted receive whose shapes come with it."""

    __slots__ = ("pending",)

    def __init__(self, pending: Described) -> None:
        self.pending = pending

    def take(self, count: int) -> tuple[list[list[Tensor]], bool]:
        """The tensors by unit; each unit has as many."""
        tensors = self.pending.wait()
        each = len(tensors) // count
        return [tensors[i * each : (i + 1) * each] for i in range(count)], False


class Mail:
    """Sends and receives what tasks name.

    Args:
        transport: how messages travel.
        batches: the mini-batches under way, by slot; the interpreter's own list.
        compression: makes messages smaller; None: they go as they are.
    """

    def __init__(
        self, transport: Transport, batches: Sequence[Batch], compression: Compression | None
    ) -> None:
        self.transport = transport
        self.batches = batches
        self.compression = compression
        self._pool = BufferPool(transport.device)
        self._arrivals: dict[int, _Arrival | _DescribedArrival] = {}
        self._outbox: dict[int, list[Tensor]] = {}
        self._sending: deque[tuple[Pending, Sequence[Tensor]]] = deque()
        self._loose: list[tuple[list[Tensor], list[Tensor]]] = []

    def put(self, number: int, tensors: list[Tensor]) -> None:
        """Lay ready what a later task sends."""
        self._outbox[number] = tensors

    def take(self, number: int, count: int) -> tuple[list[list[Tensor]], bool]:
        """Wait for a message; its tensors by unit, and whether they are to be given back."""
        if self._loose:
            self.tidy()
        self.transport.get_ready()
        return self._arrivals.pop(number).take(count)

    def give_back(self, buffers: list[Tensor], others: list[Tensor]) -> None:
        """Give buffers back at the next pause, but for those that ``others`` share memory with."""
        if buffers:
            self._loose.append((buffers, others))

    def tidy(self) -> None:
        """Do what had time until the next pause."""
        for buffers, others in self._loose:
            used = {tensor.untyped_storage().data_ptr() for tensor in others}
            free = [b for b in buffers if b.untyped_storage().data_ptr() not in used]
            for buffer in free:
                buffer.requires_grad_(False)
            self._pool.give(free)
        self._loose.clear()

    def drain(self) -> None:
        """Wait until all is sent."""
        for pending, _ in self._sending:
            pending.wait()
        self._sending.clear()
        self.tidy()

    # -- handlers

    def send(self, task: Task) -> None:
        """Begin to send what lies ready."""
        known = self.batches[task.slot].known
        tensors: Sequence[Tensor]
        if known is None:
            tensors = self._outbox.pop(task.number)
            pending = self.transport.send_described(tensors, task.peer, task.number)
            self._keep(pending, tensors)
            return
        tensors, full = self._to_send(task, known)
        self._keep(self.transport.send(tensors, task.peer, task.number), tensors)
        if full:
            self._send_full(task, full)

    def receive(self, task: Task) -> None:
        """Post a receive."""
        if self._loose:
            self.tidy()
        batch = self.batches[task.slot]
        arrival: _Arrival | _DescribedArrival
        if batch.known is None:
            arrival = _DescribedArrival(self.transport.receive_described(task.peer, task.number))
        else:
            buffers = self._to_receive(task, batch, batch.known)
            pending = self.transport.receive(buffers, task.peer, task.number)
            arrival = _Arrival(pending, buffers, task.specs, self._restore(task, batch))
        self._arrivals[task.number] = arrival

    def exchange(self, task: Task) -> None:
        """A send and a receive that cross the peer's, in one go."""
        send, receive = sorted(task.both, key=lambda single: isinstance(single.action, Receive))
        sent_as, batch = self.batches[send.slot].known, self.batches[receive.slot]
        if sent_as is None or batch.known is None:
            for single in task.both:
                single.handler(single)
            return
        tensors, full = self._to_send(send, sent_as)
        buffers = self._to_receive(receive, batch, batch.known)
        sent, received = self.transport.exchange(
            Crossing(tensors, send.number, task.both[0] is send),
            Crossing(buffers, receive.number, task.both[0] is receive),
            task.peer,
        )
        if full:
            self._send_full(send, full)
        self._keep(sent, tensors)
        self._arrivals[receive.number] = _Arrival(
            received, buffers, receive.specs, self._restore(receive, batch)
        )

    # -- their parts

    def _look_up(self, task: Task, known: Shapes) -> None:
        """Note on a task in what shapes its message comes."""
        if task.activation:
            task.specs = [known[task.stage, unit.shape] for unit in task.units]
        else:  # the gradient of what the stage below gave
            below = task.stage - 1
            task.specs = [[s for s in known[below, unit.shape] if s.requires_grad] for unit in task.units]
        message = [spec for unit in task.specs for spec in unit]
        task.message = message if self.compression is None else self.compression.message(message)
        task.known = known

    def _to_send(self, task: Task, known: Shapes) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """A message whose shapes the receiver knows, and what has to follow it in full."""
        tensors = self._outbox.pop(task.number)
        if task.activation:
            if task.known is not known:
                self._look_up(task, known)
            _check(task, tensors)
        if self.compression is None:
            return tensors, ()
        return self.compression.pack([tensor.detach() for tensor in tensors])

    def _send_full(self, task: Task, tensors: Sequence[Tensor]) -> None:
        self._keep(self.transport.send_described(tensors, task.peer, task.number, aside=True), tensors)

    def _keep(self, pending: Pending, tensors: Sequence[Tensor]) -> None:
        """Keep what is sent until it is, and no longer."""
        sending = self._sending
        while sending and sending[0][0].done():
            sending.popleft()
        sending.append((pending, tensors))

    def _to_receive(self, task: Task, batch: Batch, known: Shapes) -> list[Tensor]:
        """Buffers for a message of known shapes."""
        if task.known is not known:
            self._look_up(task, known)
        buffers = [self._pool.take(spec) for spec in task.message]
        if self.compression is None:
            _as_leaves(buffers, task, batch)
        return buffers

    def _restore(self, task: Task, batch: Batch) -> _Restore | None:
        """What makes tensors of a compressed message."""
        return None if self.compression is None else partial(self._restored, task, batch)

    def _restored(
        self, task: Task, batch: Batch, message: list[Tensor], specs: list[TensorSpec]
    ) -> list[Tensor]:
        assert self.compression is not None

        def rest() -> list[Tensor]:
            return self.transport.receive_described(task.peer, task.number, aside=True).wait()

        tensors = self.compression.unpack(message, specs, self._pool, rest)
        _as_leaves(tensors, task, batch)
        return tensors


def _as_leaves(tensors: Sequence[Tensor], task: Task, batch: Batch) -> None:
    """Let activations be leaves that gradients are made for."""
    if task.activation and batch.training:
        specs = (spec for unit in task.specs for spec in unit)
        for tensor, spec in zip(tensors, specs, strict=True):
            if spec.requires_grad:
                tensor.requires_grad_()


def _check(task: Task, tensors: Sequence[Tensor]) -> None:
    """Refuse outputs of other shapes than those that the receiver has buffers for."""
    expected = task.specs[0] if len(task.specs) == 1 else [spec for unit in task.specs for spec in unit]
    if len(tensors) == len(expected):
        for tensor, spec in zip(tensors, expected, strict=True):
            if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                break
        else:
            return
    raise TypeError(
        f"stage {task.stage} gave {_shapes(tensors)} where it gave {_shapes(expected)} for inputs of the "
        "same shapes before; make the pipeline with dynamic_shapes=True"
    )


def _shapes(found: Sequence[Tensor | TensorSpec]) -> str:
    return ", ".join(f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in found)
