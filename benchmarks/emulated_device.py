"""Schedules on an emulated device: stages that sleep, over Gloo, one process a worker.

    python benchmarks/emulated_device.py [--depths 4 8] [--messages 4KiB 4MiB] [--repeats 7] [--only chimera]

Claims: with messages of 4 KiB a measured step takes at most 1.03 of the simulated one for every synchronous
scheme; our best schedule at equal work is faster than the best of torch.distributed.pipelining; and the
schedules that both have are no slower here.

A worker's share of the model takes 20 ms forward and 40 ms backward a micro-batch. It is one stage, or,
where a scheme puts several chunks of one pipe on a worker, as many stages of a part of that time each. A
scheme with two directions cuts the model into D stages and holds several of them, whole, of different pipes.
Sleeping needs no core, so that many workers run on two.

Equal work: each contender cuts the same sleeping model, sleeps the same total (checked), and makes an SGD
step. Backwards have two halves, the gradient of the input and that of the weight, 20 ms each, as two nodes
of autograd's graph; zero-bubble schedules really run them apart. The first stage begins with a layer that
needs no input gradient, as embeddings do: torch runs all of that stage's backward as the weight's then.

What the machine itself takes is measured in the same turns (`--bare`): a loop of Gloo's sends, receives and
sleeps in the schedule's order, and nothing else; and the same loop around the stages under autograd, with an
optimiser's step at the end. That one does all that an engine on torch must do, but nothing that makes it one:
no copies to sum, no loss or norm to agree on, no shapes to check, no error to report.

A step is timed alone: all workers start at one agreed time, and it ends when the last worker returns from
it with its weights updated. Contenders take turns (A B C A B C), so that noise hits all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as theirs
from kit import arguments, keep, load, machine, machine_line
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _ComputationType as Kind

import counterflow as cf
from counterflow.common.tensors import devices
from counterflow.program.actions import Compute, Matching, Receive, Send
from counterflow.program.lowering import lower
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.ir import OpKind, Product

FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.040
SAMPLES = 4
"""Of a micro-batch; halved backwards need two."""
GOAL = 1.03
BYTES = {"4KiB": 4 << 10, "4MiB": 4 << 20}


# The device


SPIN_SECONDS = 0.0001
"""A sleep ends this much early, the rest is waited for in a loop: Linux wakes a sleeper some 50 µs late."""


_STAMP = ctypes.c_double * 2


class Device:
    """Sleeps in place of computing, and counts for how long it was asked to: a device that is the host.

    What the host does between two ops adds to their time.
    """

    def __init__(self) -> None:
        self._times = _STAMP()  # of the machine, not of layers, whose Python values the engine compares

    @property
    def asked_seconds(self) -> float:
        """Seconds for which it was asked to compute."""
        return self._times[0]

    @asked_seconds.setter
    def asked_seconds(self, seconds: float) -> None:
        self._times[0] = seconds

    @property
    def free(self) -> float:
        """Time at which its queue is empty."""
        return self._times[1]

    @free.setter
    def free(self, seconds: float) -> None:
        self._times[1] = seconds

    def compute(self, begin: float, seconds: float, ready: float = 0.0) -> float:
        """Until ``seconds`` after ``begin``, when the stage's code was entered; when that is."""
        del ready
        self.asked_seconds += seconds
        sleep_until(begin + seconds)
        return begin + seconds

    def ready(self, tensor: Tensor) -> float:
        """When a tensor's content is there, if that may be later than the tensor."""
        del tensor
        return 0.0

    def made(self, tensor: Tensor, when: float) -> None:
        """Note it."""

    def synchronize(self) -> None:
        """Wait until all that was asked for is done."""


class Stream(Device):
    """A device with a queue, as a GPU is: an op begins when it was launched, those before it are over and its
    input is there, and the host goes on meanwhile.

    Messages go at once, ahead of their content: in the first 16 bytes of each is when that is made, and by
    whom. It is with another worker a message's time later.

    Args:
        rank: this worker's.
        link_seconds: what a message takes.
    """

    def __init__(self, rank: int, link_seconds: float) -> None:
        super().__init__()
        self.rank, self.link_seconds = rank, link_seconds

    def compute(self, begin: float, seconds: float, ready: float = 0.0) -> float:
        """Ask for an op; when it will be over."""
        self.asked_seconds += seconds
        self.free = max(begin, self.free, ready) + seconds
        return self.free

    def ready(self, tensor: Tensor) -> float:
        """See ``Device``."""
        when, rank = _STAMP.from_address(tensor.data_ptr())
        if rank not in range(1000) or not 0 < when < time.perf_counter() + 1000:
            return 0.0  # nobody's: torch learns shapes with memory that nobody has written to
        return float(when) + (self.link_seconds if rank != self.rank else 0.0)

    def made(self, tensor: Tensor, when: float) -> None:
        """See ``Device``."""
        _STAMP.from_address(tensor.data_ptr())[:] = (when, self.rank)

    def synchronize(self) -> None:
        """See ``Device``."""
        sleep_until(self.free)


def sleep_until(deadline: float) -> None:
    while (left := deadline - time.perf_counter()) > 0:
        if left > SPIN_SECONDS:
            time.sleep(left - SPIN_SECONDS)


DEVICE = Device()


class Arriving(devices.HostCopy):
    """A number that a stream computes: who reads it waits until the stream has come to it."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__(numbers)
        self.there = DEVICE.free if isinstance(DEVICE, Stream) else 0.0

    def read(self) -> Any:
        """See ``Later``."""
        sleep_until(self.there)
        return super().read()


def take_device(device: Device) -> None:
    """Let all contenders of this process compute on it."""
    global DEVICE  # noqa: PLW0603 - the stages are modules that know no settings
    DEVICE = device
    devices.HostCopy = Arriving  # type: ignore[misc]
    devices.holds_host = lambda _: isinstance(device, Stream)


REST_SECONDS = 0.005
"""What is measured of a step is told so much later: workers that share a core are not held up by it."""


def precise_sleep() -> float:
    """Let this thread's sleeps end on time (Linux adds 50 µs by default); by how much they are late yet."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, in ns; threads begun later inherit it
    late = []
    for _ in range(51):
        begin = time.perf_counter()
        late.append(-DEVICE.compute(begin, 0.005) + time.perf_counter())
    return statistics.median(late)


def undisturbed() -> bool:
    """Let nothing else on the machine delay this process, if that is allowed; whether it is.

    A worker of this benchmark is ready to run for a few percent of the time only. What else runs on its
    core (a browser, the other benchmarks' leftovers) may keep it waiting for a time slice of 3 ms.
    """
    try:
        for thread in Path("/proc/self/task").iterdir():  # threads begun later inherit it
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
    except (OSError, AttributeError):
        return False
    return True


class Clock:
    """When the backward of one unit was entered, and how far its halves have come."""

    __slots__ = ("entered", "now", "passed_on", "ready")
    now: float
    entered: float
    """When autograd came to the product: the weight's half begins there if it runs alone."""
    ready: float
    """When the gradient of the output is there."""
    passed_on: bool
    """Whether the input's gradient is made; the weight's, if it is not, begins where it was entered."""


def blank(like: Tensor, shape: torch.Size) -> Tensor:
    """Zeros, so that the first step's checks find them alike; if it is large, what its memory contains.

    Memory is not what is measured.
    """
    return like.new_zeros(shape) if shape.numel() <= BYTES["4KiB"] // 4 else like.new_empty(shape)


class InputHalf(torch.autograd.Function):
    """The backward's half that makes the gradient of the input; what goes on from it is a single number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float, clock: Clock) -> Tensor:
        ctx.seconds, ctx.clock, ctx.shape = seconds, clock, value.shape
        clock.passed_on = False
        return value.new_zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        made = blank(gradients[0], ctx.shape)
        ctx.clock.now = DEVICE.compute(ctx.clock.now, ctx.seconds, ctx.clock.ready)
        DEVICE.made(made, ctx.clock.now)
        ctx.clock.passed_on = True
        return made, None, None


class WeightHalf(torch.autograd.Function):
    """The backward's half that makes the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float, clock: Clock) -> Tensor:
        ctx.seconds, ctx.clock = seconds, clock
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        clock = ctx.clock
        clock.now = DEVICE.compute(clock.entered if clock.passed_on else clock.now, ctx.seconds, clock.ready)
        return gradients[0], None, None


class Output(torch.autograd.Function):
    """Where a backward begins."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, shape: torch.Size, clock: Clock) -> Tensor:
        ctx.clock = clock
        return blank(value, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.now = time.perf_counter()
        ctx.clock.ready = DEVICE.ready(gradients[0])
        return gradients[0].new_ones(1, 1), None, None


def slept(
    value: Tensor,
    weight: Tensor,
    begin: float,
    seconds: tuple[float, float, float],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A stage's output after a sleep, and its state; to autograd a product with a weight, from which both
    halves of the backward go on.

    A forward makes its graph first and sleeps then, so that it takes as long as it is to from when its code
    is entered to when it returns; a backward's halves make what they give before they sleep.

    Args:
        value: what the stage is given.
        weight: of one element.
        begin: when the stage's code was entered.
        seconds: of the forward, and of the backward's halves: the input's gradient, the weight's.
        state: what the slice before left.
    """
    forward, inputs, weights = seconds
    clock = Clock()
    clock.now = begin
    hidden = InputHalf.apply(value, inputs, clock)
    if state is not None:
        hidden = hidden + state
    product = hidden @ WeightHalf.apply(weight, weights, clock)
    if product.grad_fn is not None:
        product.grad_fn.register_prehook(partial(_entered, clock))
    output: Tensor = Output.apply(product, value.shape, clock)
    DEVICE.made(output, DEVICE.compute(begin, forward, DEVICE.ready(value)))
    return output, hidden


def _entered(clock: Clock, _: tuple[Tensor, ...]) -> None:
    clock.entered = time.perf_counter()


class Sleep(nn.Module):
    """The layers of a stage."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, value: Tensor) -> Tensor:
        begin = time.perf_counter()
        work = self.share * value.shape[0] / SAMPLES
        half = work * BACKWARD_SECONDS / 2
        return slept(value, self.weight, begin, (work * FORWARD_SECONDS, half, half))[0]


class Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        del weight
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0].new_zeros(1)


class First(nn.Module):
    """A first layer of next to no time (an embedding): it needs no input gradient, those behind it do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = Shown.apply(value, self.weight)
        return output


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.output = output.shape
        return output.new_ones(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].new_zeros(ctx.output)  # of a constant, as the check of losses sees it
        DEVICE.made(gradient, 0.0)
        return gradient


def trivial_loss(output: Tensor, target: Tensor) -> Tensor:
    del target
    loss: Tensor = Loss.apply(output)
    return loss


# The contenders


@dataclass
class Row:
    """A line of the table; times in seconds."""

    name: str
    ours: bool
    copies: float
    peak: float
    """Most activations of a worker, in those of one worker's share of the model; 0: none are saved."""
    ideal: float
    with_messages: float | None
    """Simulated with messages that take as long as measured; None for torch's."""
    steps: list[float]
    busy: list[float]
    """Of each step, the processor time of all workers together."""

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def ratio(self) -> float:
        return self.median / self.ideal


def our_schedules(depth: int, count: int) -> dict[str, cf.Schedule]:
    s = cf.schemes
    found = {
        "gpipe": s.gpipe(depth, count),
        "gpipe groups=2": s.gpipe(depth, count, groups=2),
        "dapple": s.dapple(depth, count),
        "interleaved chunks=2": s.interleaved(depth, count, chunks=2),
        "gems": s.gems(depth, count),
        "chimera direct": s.chimera(depth, count),
        "chimera forward-doubling": s.chimera(depth, count, concat="forward-doubling"),
        "chimera backward-halving": s.chimera(depth, count, concat="backward-halving"),
    }
    for pairs in (f for f in (2, 4) if (depth // 2) % f == 0):
        found[f"chimera pairs={pairs}"] = s.chimera(depth, count, pairs=pairs)
    found |= {
        "zb-h1": s.zb_h1(depth, count),
        "zb-h2": s.zb_h2(depth, count),
        "zb-v": s.zb_v(depth, count),
        "dualpipe-v": s.dualpipe_v(depth, count),
        "interleaved-zb chunks=2": s.interleaved_zb(depth, count, chunks=2),
        "chimera split": s.chimera(depth, count, split=True),
    }
    found |= {
        f"mixpipe K={depth}": s.mixpipe(depth, count, injected=depth),
        "mixpipe K=max": s.mixpipe(depth, count, injected="max"),
        "hanayo waves=1": s.hanayo(depth, count, waves=1),
        "hanayo waves=2": s.hanayo(depth, count, waves=2),
    }
    return {name: schedule for name, schedule in found.items() if runs(schedule)}


def splits(schedule: cf.Schedule) -> bool:
    """Whether a backward is two ops; the loop with autograd has none such."""
    return any(op.kind is OpKind.WEIGHT_GRADIENTS for op in schedule.ops())


def runs(schedule: cf.Schedule) -> bool:
    """Whether the engine has all the ops of a schedule."""
    try:
        refuse_what_cannot_run(schedule)
    except cf.ConfigError:
        return False
    return True


THEIR_SCHEDULES: dict[str, tuple[Any, int]] = {
    "torch GPipe": (theirs.ScheduleGPipe, 1),
    "torch 1F1B": (theirs.Schedule1F1B, 1),
    "torch Interleaved1F1B": (theirs.ScheduleInterleaved1F1B, 2),
    "torch InterleavedZeroBubble": (theirs.ScheduleInterleavedZeroBubble, 2),
    "torch ZBVZeroBubble": (theirs.ScheduleZBVZeroBubble, 2),
    "torch DualPipeV": (theirs.schedules.ScheduleDualPipeV, 2),
}
"""Name to the class and the stages a rank holds."""

SAME = {"gpipe": "torch GPipe", "dapple": "torch 1F1B", "interleaved chunks=2": "torch Interleaved1F1B"}


def simulated(schedule: cf.Schedule, message_seconds: float = 0.0) -> cf.Simulation:
    share = schedule.workers / schedule.stages
    costs = cf.Costs(forward=share * FORWARD_SECONDS, backward=share * BACKWARD_SECONDS, p2p=message_seconds)
    return cf.simulate(schedule, costs)


Layer = Callable[[float], nn.Module]
"""What makes the layers of a stage, given its share of what a worker holds."""


def sleepers(stages: int, workers: int, layer: Layer = Sleep) -> list[nn.Module]:
    """By stage its layers; the first one has another before it."""
    first, *others = (layer(workers / stages) for _ in range(stages))
    return [nn.Sequential(First(), first), *others]


class Groups:
    """The contenders share process groups: an idle one wakes a thread of each member 100 times a second."""

    def __init__(self, transport: Any) -> None:
        self.make = transport.group
        self.made: dict[tuple[tuple[int, ...], int], Any] = {}
        self.asked: Counter[tuple[int, ...]] = Counter()
        transport.group = self.get

    def get(self, ranks: Sequence[int]) -> Any:
        """The one that was made for these ranks; the stages of one pipeline do not share any."""
        key = tuple(ranks), self.asked[tuple(ranks)]
        self.asked[key[0]] += 1
        if key not in self.made:
            self.made[key] = self.make(ranks)
        return self.made[key]


class Ours:
    """A schedule of Counterflow's."""

    def __init__(
        self,
        name: str,
        schedule: cf.Schedule,
        message_seconds: float,
        groups: Groups,
        *,
        barrier: bool = True,
        layer: Layer = Sleep,
        simulate: Callable[[cf.Schedule, float], cf.Simulation] = simulated,
    ) -> None:
        groups.asked.clear()
        found, slower = simulate(schedule, 0.0), simulate(schedule, message_seconds)
        copies = sum(found.weight_copies) / schedule.stages
        peak = max(found.peak_activations) * schedule.workers / schedule.stages
        ideal, with_messages = (r.makespan if barrier else r.steady_step or 0.0 for r in (found, slower))
        self.row = Row(name, True, copies, peak, ideal, with_messages, [], [])
        first, *others = sleepers(schedule.stages, schedule.workers, layer)
        assert isinstance(first, nn.Sequential)
        self.pipeline = cf.Pipeline(
            [*first, *others],
            trivial_loss,
            schedule,
            cuts=range(2, schedule.stages + 1),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            barrier=barrier,
            witness_every=0,
        )

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.pipeline.step(inputs, targets)

    def end(self) -> None:
        """After steps without a barrier: nobody computes in it."""
        self.pipeline.flush()


class Bare:
    """A schedule of Counterflow's by a loop that only sends, receives and sleeps."""

    suffix = ", bare"
    """Of the row's name, after the schedule's."""

    def __init__(self, name: str, schedule: cf.Schedule, size: int, transport: Any) -> None:
        self.row = Row(name + self.suffix, False, 0.0, 0.0, simulated(schedule).makespan, None, [], [])
        self.lane = dist.group.WORLD._get_backend(torch.device("cpu"))
        program = lower(schedule, matching=Matching.TAG)
        sends = [a for actions in program.actions for a in actions if isinstance(a, Send)]
        self.tags = {self.key(a.output): tag for tag, a in enumerate(sends)}
        self.todo = program.actions[transport.rank]
        self.share = schedule.workers / schedule.stages
        self.sent = torch.zeros(size // 4)
        mine = [self.key(a.output) for a in self.todo if isinstance(a, Receive)]
        self.buffers = {key: torch.zeros(size // 4) for key in mine}

    @staticmethod
    def key(op: Any, ahead: int = 0) -> tuple[Any, ...]:
        """Of what an op sends, or what is sent ``ahead`` stages on: an output or an input gradient."""
        return op.kind.is_forward, op.stage + ahead, op.micro_batches, op.part

    def step(self, _: Tensor, __: Tensor) -> None:
        send, receive = self.lane.send, self.lane.recv
        arriving: dict[Any, Any] = {}
        leaving = []
        for action in self.todo:
            if isinstance(action, Receive):
                key = self.key(action.output)
                arriving[key] = receive([self.buffers[key]], action.peer, self.tags[key])
            elif isinstance(action, Send):
                leaving.append(send([self.sent], action.peer, self.tags[self.key(action.output)]))
            elif isinstance(action, Compute):
                op = action.op
                forward = action.op.kind.is_forward
                takes = forward or op.kind.gives is Product.INPUT_GRADIENT
                work = arriving.pop(self.key(op, -1 if forward else 1), None) if takes else None
                if work is not None:
                    work.wait()
                self.compute(op, forward=forward)
        for work in leaving:
            work.wait()

    def compute(self, op: Any, *, forward: bool) -> None:
        whole = FORWARD_SECONDS if forward else BACKWARD_SECONDS
        part = len(op.kind.makes) / 2 if not forward else 1.0  # one gradient of the two, or both
        seconds = op.work * self.share * whole * part
        DEVICE.compute(time.perf_counter(), seconds)


class BareAutograd(Bare):
    """The same loop around stages under autograd, with an optimiser: what any engine on torch has to do."""

    suffix = ", with autograd"

    def __init__(self, name: str, schedule: cf.Schedule, size: int, transport: Any) -> None:
        super().__init__(name, schedule, size, transport)
        ops = [action.op for action in self.todo if isinstance(action, Compute)]
        self.last = schedule.stages - 1
        self.modules = sleepers(schedule.stages, schedule.workers)
        parameters = [p for stage in {op.stage for op in ops} for p in self.modules[stage].parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        self.parts = {op.micro_batches[0]: op.parts for op in ops if op.kind is OpKind.BACKWARD}
        self.width = size // 4 // SAMPLES
        self.gradients = {n: torch.zeros(SAMPLES // n, self.width) for n in self.parts.values()}
        self.graphs: dict[tuple[int, int, int], Tensor] = {}

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        super().step(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def compute(self, op: Any, *, forward: bool) -> None:
        stage = op.stage
        if not forward:
            gradient = None if stage == self.last else self.gradients[op.parts]
            torch.autograd.backward(self.graphs.pop((stage, op.micro_batches[0], op.part)), gradient)
            return
        for number in op.micro_batches:
            parts = self.parts[number]
            for part in range(parts):
                value = torch.empty(SAMPLES // parts, self.width, requires_grad=stage > 0)
                output = self.modules[stage](value)
                graph = trivial_loss(output, output) if stage == self.last else output
                self.graphs[stage, number, part] = graph


class Theirs:
    """A schedule of torch.distributed.pipelining's."""

    def __init__(
        self, name: str, count: int, rank: int, workers: int, *, steps: int = 1, layer: Layer = Sleep
    ) -> None:
        make, chunks = THEIR_SCHEDULES[name]
        self.stages = workers * chunks
        layers = sleepers(self.stages, workers, layer)
        held = [rank, self.stages - 1 - rank if "V" in name else workers + rank][:chunks]
        device = torch.device("cpu")
        stages = [theirs.PipelineStage(layers[s], s, self.stages, device) for s in held]
        self.schedule = make(stages if chunks > 1 else stages[0], count, loss_fn=trivial_loss)
        self.first, self.last = 0 in held, self.stages - 1 in held
        parameters = [p for stage in held for p in layers[stage].parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        if make is theirs.Schedule1F1B:  # the order it lists is not the one it runs: F0 is missing at the end
            same = cf.schemes.dapple(workers, count)
            orders, peak = our_orders(same), max(simulated(same).peak_activations)
        else:
            flat = flattened(self.schedule.pipeline_order)
            orders, peak = their_orders(flat, self.stages, 1 / chunks), their_peak(flat) / chunks
        self.row = Row(name, False, 1.0, peak, in_a_row(orders, steps) / steps, None, [], [])

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.schedule.step(
            *([inputs] if self.first else []),
            target=targets if self.last else None,
            losses=[] if self.last else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> None:
        """Nothing is left to do."""


Needed = tuple[Any, Any, float]
"""An op: what others need of it, what it needs of another, and its seconds."""


def in_a_row(orders: Sequence[Sequence[Needed]], steps: int = 1) -> float:
    """Seconds of so many steps without a barrier, the first fill and the last drain with them, if messages,
    Python and optimisers cost nothing."""
    left = [[(step, *op) for step in range(steps) for op in order] for order in orders]
    at = [0] * len(left)
    ends: dict[Any, float] = {}
    clock = [0.0] * len(left)
    while any(place < len(order) for place, order in zip(at, left, strict=True)):
        before = sum(at)
        for worker, order in enumerate(left):
            while at[worker] < len(order):
                step, makes, needs, seconds = order[at[worker]]
                if needs is not None and (step, needs) not in ends:
                    break
                clock[worker] = max(clock[worker], ends.get((step, needs), 0.0)) + seconds
                ends[step, makes] = clock[worker]
                at[worker] += 1
        assert sum(at) > before, "the orders are stuck"
    return max(clock)


def our_orders(schedule: cf.Schedule) -> list[list[Needed]]:
    """A schedule's orders for ``in_a_row``."""
    share, last = schedule.workers / schedule.stages, schedule.stages - 1

    def needed(op: cf.Op) -> Needed:
        forward, kind = op.kind.is_forward, op.kind
        seconds = op.work * share * (FORWARD_SECONDS if forward else BACKWARD_SECONDS / 2 * len(kind.makes))
        if kind is OpKind.WEIGHT_GRADIENTS:
            return ("W", op), None, seconds
        before = op.stage - 1 if forward else op.stage + 1
        needs = (forward, before, op.micro_batches) if 0 <= before <= last else None
        return (forward, op.stage, op.micro_batches), needs, seconds

    return [[needed(op) for op in order] for order in schedule.orders]


def flattened(orders: dict[int, list[Any]]) -> list[list[Any]]:
    """The orders of one of torch's schedules by rank, with no action that is two."""
    return [[p for a in order if a for p in (a.sub_actions or (a,))] for _, order in sorted(orders.items())]


def their_peak(orders: Sequence[Sequence[Any]]) -> int:
    """The most forwards of a stage that a rank saves at once."""
    change = {Kind.FORWARD: 1, Kind.FULL_BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    return max(
        max(accumulate(change.get(action.computation_type, 0) for action in order)) for order in orders
    )


def their_orders(orders: Sequence[Sequence[Any]], stages: int, share: float) -> list[list[Needed]]:
    """The same for ``in_a_row``."""
    half = share * BACKWARD_SECONDS / 2
    seconds = {
        Kind.FORWARD: share * FORWARD_SECONDS,
        Kind.FULL_BACKWARD: 2 * half,
        Kind.BACKWARD_INPUT: half,
        Kind.BACKWARD_WEIGHT: half,
    }

    def needed(action: Any) -> Needed:
        stage, kind, number = action.stage_index, action.computation_type, action.microbatch_index
        lasts = seconds[kind]
        if stage == 0 and kind is not Kind.FORWARD and kind is not Kind.FULL_BACKWARD:
            lasts = 0.0 if kind is Kind.BACKWARD_INPUT else 2 * half
        if kind is Kind.BACKWARD_WEIGHT:
            return ("W", stage, number), None, lasts
        forward = kind is Kind.FORWARD
        before = stage - 1 if forward else stage + 1
        return (forward, stage, number), (forward, before, number) if 0 <= before < stages else None, lasts

    return [[needed(a) for a in order if a.computation_type in seconds] for order in orders]


# The run


@dataclass(frozen=True)
class Settings:
    payloads: tuple[str, ...]
    repeats: int
    warm_up: int
    only: tuple[str, ...]
    bare: bool


def work(settings: Settings, count: int) -> dict[str, list[Row]]:
    """What every worker runs; the rows by payload."""
    torch.set_num_threads(1)
    first = undisturbed()
    late = precise_sleep()
    transport = current_transport()
    workers, rank = transport.world_size, transport.rank
    slowest = max(row[0] for row in transport.gather([late]))
    note(rank, f"D={workers} N={count}: sleeps end {slowest * 1e6:.0f} µs late, real-time priority: {first}")

    def wanted(name: str) -> bool:
        return not settings.only or any(word in name for word in settings.only)

    found = {}
    groups = Groups(transport)
    for payload in settings.payloads:
        message = message_seconds(transport, BYTES[payload])
        note(rank, f"D={workers} N={count} {payload}: a message takes {message * 1e3:.2f} ms")
        contenders: list[Ours | Theirs | Bare] = [
            Ours(name, schedule, message, groups)
            for name, schedule in our_schedules(workers, count).items()
            if wanted(name)
        ]
        contenders += [Theirs(name, count, rank, workers) for name in THEIR_SCHEDULES if wanted(name)]
        if settings.bare:
            contenders += [
                kind(name, schedule, BYTES[payload], transport)
                for kind in (Bare, BareAutograd)
                for name, schedule in our_schedules(workers, count).items()
                if wanted(name) and (kind is Bare or not splits(schedule))
            ]
        note(rank, f"D={workers} N={count} {payload}: {len(contenders)} contenders made")
        inputs = torch.zeros(count * SAMPLES, BYTES[payload] // 4 // SAMPLES)
        targets = torch.zeros(count * SAMPLES)
        expected = count * workers * (FORWARD_SECONDS + BACKWARD_SECONDS)
        for turn in range(settings.warm_up + settings.repeats):
            take_turns(
                contenders, inputs, targets, transport, expected, turn, counts=turn >= settings.warm_up
            )
            note(rank, f"D={workers} N={count} {payload}: turn {turn + 1}")
        found[payload] = [contender.row for contender in contenders]
    return found


def take_turns(
    contenders: Sequence[Ours | Theirs | Bare],
    inputs: Tensor,
    targets: Tensor,
    transport: Any,
    expected: float,
    turn: int,
    *,
    counts: bool,
) -> None:
    """A step of each; ``expected`` are the seconds that all workers together are to sleep in it."""
    gc.collect()
    gc.freeze()  # what lives so far is many contenders'; a step should not pay for looking through it
    for contender in contenders:
        taken, asked, busy = timed(partial(contender.step, inputs, targets), transport)
        if turn:  # the first may run a stage more, to learn shapes
            assert abs(asked - expected) < 1e-6, (contender.row.name, asked, expected)
        if counts:
            contender.row.steps.append(taken)
            contender.row.busy.append(busy)


def timed(step: Callable[[], None], transport: Any) -> tuple[float, float, float]:
    """Seconds from a common start to the end of the last worker; of all workers, sleep and processor time."""
    DEVICE.synchronize()
    slept = DEVICE.asked_seconds
    start = max(row[0] for row in transport.gather([time.perf_counter()])) + 0.005  # one clock on a machine
    sleep_until(start)
    busy = time.process_time()
    step()
    DEVICE.synchronize()
    end, busy = time.perf_counter(), time.process_time() - busy
    time.sleep(REST_SECONDS)
    rows = transport.gather([end, DEVICE.asked_seconds - slept, busy])
    return max(row[0] for row in rows) - start, sum(row[1] for row in rows), sum(row[2] for row in rows)


def message_seconds(transport: Any, size: int) -> float:
    """How long one message between two workers takes, the median of some; all workers call it."""
    tensor = torch.zeros(size // 4)
    taken = []
    for turn in range(24):
        transport.gather([0.0])
        begin = time.perf_counter()
        if transport.rank == turn % 2:
            transport.send([tensor], 1 - transport.rank, 0).wait()
            transport.receive([tensor], 1 - transport.rank, 1).wait()
            taken.append((time.perf_counter() - begin) / 2)
        elif transport.rank < 2:
            transport.receive([tensor], 1 - transport.rank, 0).wait()
            transport.send([tensor], 1 - transport.rank, 1).wait()
    rows = transport.gather([statistics.median(taken) if taken else 0.0])
    return (rows[0][0] + rows[1][0]) / 2


def note(rank: int, text: str) -> None:
    if rank == 0:
        print(text, file=sys.stderr, flush=True)


# The report


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| schedule | copies of the model | measured ms | least .. most | simulated ms | ratio "
        "| with messages, ms | ratio | bare ratio | with autograd | processor ms | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_name = {row.name: row for row in rows}
    for row in rows:
        if row.name.endswith((Bare.suffix, BareAutograd.suffix)):
            continue
        loops = (by_name.get(row.name + kind.suffix) for kind in (Bare, BareAutograd))
        beside = " | ".join(f"{loop.ratio:.3f}" if loop else "" for loop in loops)
        late = "over 1.03" if row.ours and row.ratio > GOAL else ""
        more = (
            f"{row.with_messages * 1e3:.1f} | {row.median / row.with_messages:.3f}"
            if row.with_messages
            else "|"
        )
        lines.append(
            f"| {row.name} | {row.copies:g} | {row.median * 1e3:.1f} "
            f"| {min(row.steps) * 1e3:.1f} .. {max(row.steps) * 1e3:.1f} "
            f"| {row.ideal * 1e3:.1f} | {row.ratio:.3f} | {more} | {beside} "
            f"| {statistics.median(row.busy) * 1e3:.0f} | {late} |"
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    by_name = {row.name: row for row in rows}
    lines = []
    own = [row for row in rows if row.ours]
    others = [row for row in rows if row.name in THEIR_SCHEDULES]
    if own:
        worst = max(own, key=lambda row: row.ratio)
        lines.append(f"farthest from its simulation: {worst.name}, {worst.ratio:.3f} (goal: {GOAL})")
    for kind, label in ((Bare, "the bare loop"), (BareAutograd, "the loop with autograd")):
        names = [(row, row.name + kind.suffix) for row in own]
        beside = [(row, by_name[name]) for row, name in names if name in by_name]
        if beside:
            row, loop = max(beside, key=lambda pair: pair[0].median / pair[1].median)
            lines.append(f"farthest from {label}: {row.name}, {row.median / loop.median:.3f}")
    if own and others:
        best = min(others, key=lambda row: row.median)
        for copies, label in (
            (float("inf"), ""),
            (2, " with at most 2 copies of the model"),
            (1, " with 1 copy"),
        ):
            group = [row for row in own if row.copies <= copies]
            if group:
                lines.append(
                    f"our best{label} against theirs: " + against(min(group, key=lambda r: r.median), best)
                )
    for mine, other in SAME.items():
        if mine in by_name and other in by_name:
            lines.append("the same schedule: " + against(by_name[mine], by_name[other]))
    return lines


def against(mine: Row, other: Row) -> str:
    """Compared by medians; the paired steps of one turn tell how sure that is."""
    wins = sum(a < b for a, b in zip(mine.steps, other.steps, strict=True))
    times = other.median / mine.median
    return (
        f"{mine.name} {mine.median * 1e3:.1f} ms, {other.name} {other.median * 1e3:.1f} ms: "
        f"{'faster' if times >= 1 else 'SLOWER'} by {abs(1 - times):.1%}, "
        f"in {wins} of {len(mine.steps)} turns"
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The option of messages' sizes, by name or in bytes."""
    parser.add_argument(
        *("--messages", "--payloads"),
        dest="payloads",
        type=lambda text: {str(size): name for name, size in BYTES.items()}.get(text, text),
        nargs="+",
        choices=BYTES,
        default=list(BYTES),
        help="sizes, also in bytes",
    )


def main() -> None:
    parser = arguments(__doc__, "emulated_device.*")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8], help="workers; N is twice as many")
    add_sizes(parser)
    parser.add_argument("--repeats", type=int, default=7, help="steps timed of each contender")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before; the engine counts bytes in 2")
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name has one of these words")
    parser.add_argument("--bare", action="store_true", help="also time loops without an engine")
    options = parser.parse_args()
    about = machine()
    settings = Settings(
        tuple(options.payloads), options.repeats, max(1, options.warm_up), tuple(options.only), options.bare
    )
    lines = [f"# python benchmarks/emulated_device.py, {machine_line(about)}"]
    lines.append(
        f"# medians of {settings.repeats} steps; 20 ms forward, 40 ms backward a worker and micro-batch"
    )
    data: list[dict[str, object]] = []
    for depth in options.depths:
        count = 2 * depth
        found = cf.launch(work, settings, count, workers=depth, transport="gloo", threads=1)[0]
        for payload, rows in found.items():
            lines += ["", f"## D={depth}, N={count}, messages of {payload}", "", *table(rows), ""]
            lines += verdicts(rows)
            data += [{"depth": depth, "micro_batches": count, "payload": payload, **asdict(r)} for r in rows]
    about["load_after"] = round(load(), 2)
    print("\n".join(lines))
    if options.keep:
        keep("emulated_device", lines, {"machine": about, "rows": data})


if __name__ == "__main__":
    main()
