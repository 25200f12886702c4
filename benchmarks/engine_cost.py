"""What a step costs the engine itself: Python, without computation and without messages.

    python benchmarks/engine_cost.py [--repeats 5] [--profile] [--only chimera]

Every worker of a schedule runs alone in this process, on a transport that takes every send and has every
receive ready, with layers of one multiplication of four numbers. The table gives microseconds an action by
kind, the mean of all workers, the median of several steps; `bare` is what the same layers, loss and
backwards take when called by a loop that does nothing else, so that the difference is the engine's.

A second table has stages of linear layers: what a backward in two ops takes longer than in one, and what a
recomputed layer takes longer than an ideal replay, which is one more forward.

Times are of this thread's processor, not of the wall, so that a busy machine changes them little.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from kit import arguments, keep, machine, machine_line
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import counterflow as cf
from counterflow.program.actions import Action, Compute, Matching, Receive, Send
from counterflow.runtime.execution import weighing
from counterflow.runtime.execution.tasks import ReceiveTask, SendTask
from counterflow.runtime.mini_batch.step_report import Normaliser
from counterflow.runtime.transport.base import Group, Status, Transport
from counterflow.runtime.transport.kinds import LOCAL
from counterflow.schedule.ir import OpKind

SHAPE = (1, 4)
DEVICE = torch.device("cpu")
"""Where everything is computed; the one-GPU programme sets another."""
NO_BARRIER = ", no barrier"
"""Of a schedule's name: steps follow each other without one."""


class Ready:
    """Something in flight that is done."""

    def __init__(self, tensors: Sequence[Any] = ()) -> None:
        self.tensors = list(tensors)

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return self.tensors


class Anything(dict[int, tuple[int, float]]):
    """Shapes and digests of every stage, all equal."""

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, _: int) -> tuple[int, float]:
        return 0, 0.0


weighing.refuse_no_graph = lambda _: None  # the workers with the loss are not there
weighing.Workers.weight = lambda *_: (1.0, Normaliser.SAMPLES)  # nor is what their losses weigh


class Alone(Transport):
    """A worker without the others: what it sends vanishes, what it receives is there."""

    kind = LOCAL
    matching = Matching.TAG

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = DEVICE
        self.timeout_seconds = 60.0
        self.status = Status(rank)
        self.units: dict[int, tuple[int, bool]] = {}  # by tag, tensors, and of activations or not
        self.new_buffers = True  # they may hold anything; later steps use them again

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Ready:
        return Ready()

    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Ready:
        if self.new_buffers:
            for buffer in buffers:
                buffer.detach().zero_()
        return Ready()

    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Ready:
        return Ready()

    def receive_described(self, peer: int, tag: int) -> Ready:
        units, activation = self.units[tag]
        head = [torch.empty(0, dtype=torch.uint8)] if activation else []
        return Ready([*head, *(torch.zeros(SHAPE, device=DEVICE, requires_grad=True) for _ in range(units))])

    def group(self, ranks: Sequence[int]) -> Group:
        return Group(tuple(ranks))

    def all_reduce(self, tensor: Tensor, group: Group) -> Ready:
        return Ready()

    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Ready:
        received.copy_(sent)
        return Ready()

    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        return

    def get_ready(self) -> None:
        return

    def spread(self, tensor: Tensor, source: int) -> None:
        return

    def start_gather(self, values: Sequence[float]) -> Ready:
        return Ready([list(values)] * self.world_size)

    def gather_objects(self, value: object) -> list[object]:
        of_stages = isinstance(value, dict) and not any(isinstance(key, str) for key in value)
        return [Anything() if of_stages else value] * self.world_size

    def statuses(self) -> list[Status | None]:
        return [self.status]

    def fail(self, error: BaseException) -> None:
        return

    def close(self) -> None:
        return


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))  # no vector: its gradient may wait

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def pipeline(
    schedule: cf.Schedule,
    worker: int,
    *,
    barrier: bool,
    layer: Callable[[], nn.Module] = Scale,
    a_stage: int = 1,
    recompute: str = "none",
) -> cf.Pipeline:
    alone = Alone(worker, schedule.workers)
    made = cf.Pipeline(
        [layer() for _ in range(schedule.stages * a_stage)],
        loss,
        schedule,
        cuts=[number * a_stage for number in range(1, schedule.stages)],
        recompute=recompute,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        transport=alone,
        digest_every=0,
        barrier=barrier,
    )
    made._engine.witness._other_calls = ""  # the workers that it compares are not there
    alone.units = {
        task.envelope.number: (len(task.envelope.of), not task.envelope.gradient)
        for tasks in made._engine.runner.lists
        for task in tasks
        if isinstance(task, SendTask | ReceiveTask)
    }
    return made


def mini_batch(schedule: cf.Schedule) -> Tensor:
    """One sample for each piece that a backward runs on."""
    parts = max(op.parts for op in schedule.ops())
    return torch.ones(schedule.micro_batches * parts * SHAPE[0], SHAPE[1])


def nanoseconds() -> int:
    """Processor time of this thread; with a GPU the time, as autograd has a thread of its own for that."""
    return time.thread_time_ns() if DEVICE.type == "cpu" else time.perf_counter_ns()


def micros(run: Callable[[], object], times: int) -> float:
    """Processor time of one call, the median."""
    taken = []
    for _ in range(times):
        begin = nanoseconds()
        run()
        taken.append(nanoseconds() - begin)
    return statistics.median(taken) / 1e3


class Clock:
    """Times handlers by the kind of their action."""

    def __init__(self, rest_seconds: float) -> None:
        self.rest_seconds = rest_seconds
        self.nanos: dict[str, int] = defaultdict(int)
        self.counts: dict[str, int] = defaultdict(int)

    def around(self, run: Callable[[], None], kind: str) -> Callable[[], None]:
        def timed() -> None:
            if self.rest_seconds:
                time.sleep(self.rest_seconds)
            begin = nanoseconds()
            run()
            self.nanos[kind] += nanoseconds() - begin
            self.counts[kind] += 1

        return timed


_KINDS = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD: "backward",
    OpKind.INPUT_GRADIENT: "input gradient",
    OpKind.WEIGHT_GRADIENTS: "weights' gradients",
}


def kind_of(action: Action) -> str:
    """What an action's time is told under."""
    match action:
        case Compute(op):
            return _KINDS[op.kind]
        case Send():
            return "send"
        case Receive():
            return "receive"
        case _:
            return "sync and update"


def bare() -> dict[str, float]:
    """A forward and a backward that nobody looks after, in microseconds."""
    layer = Scale().to(DEVICE)
    layer.weight.grad = torch.zeros(1, 1, device=DEVICE)
    gradient = torch.ones(SHAPE, device=DEVICE)
    inputs = [torch.ones(SHAPE, device=DEVICE, requires_grad=True) for _ in range(256)]
    edges: list[Any] = []

    def forwards() -> None:
        edges[:] = [get_gradient_edge(layer(value)) for value in inputs]

    def backwards() -> None:
        for edge in edges:
            torch.autograd.backward((edge,), (gradient,))

    forward, backward = [], []
    for _ in range(11):
        forward.append(micros(forwards, 1) / len(inputs))
        backward.append(micros(backwards, 1) / len(inputs))
        for value in inputs:
            value.grad = None
    return {"forward": statistics.median(forward), "backward": statistics.median(backward)}


def cost(
    schedule: cf.Schedule,
    repeats: int,
    rest_seconds: float,
    *,
    first: bool,
    barrier: bool,
    workers: Sequence[int] = (),
    **layers: Any,
) -> dict[str, float]:
    """Microseconds by kind of action; ``first``: of steps that learn shapes and count bytes."""
    clock = Clock(rest_seconds)
    whole, actions, steps = 0.0, 0, 0
    rows = mini_batch(schedule)
    for worker in workers or range(schedule.workers):
        made = pipeline(schedule, worker, barrier=barrier, **layers)
        step = partial(made.step, rows, rows)
        if not first:
            for _ in range(3):
                step()
        assert isinstance(made.transport, Alone)
        made.transport.new_buffers = False
        lists = [list(tasks) for tasks in made._engine.runner.lists]
        for task in (task for tasks in lists for task in tasks):
            task.run = clock.around(task.run, kind_of(task.action))
        tasks = lists[0]
        times = 1 if first else repeats
        whole += micros(step, times) * times
        actions += len(tasks) * times
        steps += times
    found = {kind: clock.nanos[kind] / 1e3 / clock.counts[kind] for kind in clock.nanos}
    inside = sum(clock.nanos.values()) / 1e3
    return found | {
        "an action": whole / actions,
        "beside actions, a step": (whole - inside) / steps,
        "a step": whole / steps,
    }


def layer_costs(repeats: int, turns: int = 5) -> list[str]:
    """Lines of the table of layers: medians of some turns, of a worker within the pipeline."""
    dapple, split = cf.schemes.dapple(4, 8), cf.schemes.zb_h1(4, 8)
    kind, width = partial(nn.Linear, SHAPE[1], SHAPE[1]), 8
    of = partial(cost, repeats=repeats, rest_seconds=0.0, first=False, barrier=True, workers=[1], layer=kind)
    inputs = torch.ones(SHAPE, device=DEVICE, requires_grad=True)
    layer = kind().to(DEVICE)
    rows: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        whole, parts = of(dapple), of(split)
        rows["B, one linear layer"].append(whole["backward"])
        rows["I, one linear layer"].append(parts["input gradient"])
        rows["W, one linear layer"].append(parts["weights' gradients"])
        rows["I + W over B"].append(parts["input gradient"] + parts["weights' gradients"] - whole["backward"])
        plain, again = of(dapple, a_stage=width), of(dapple, a_stage=width, recompute="layer")
        more = sum(again[op] - plain[op] for op in ("forward", "backward")) / width
        forward = micros(lambda: layer(inputs), 200)
        rows["a forward of a linear layer"].append(forward)
        rows["recompute=layer, a layer over an ideal replay"].append(more - forward)
    return [
        "# Stages of linear layers, worker 1 of 4, 8 micro-batches; microseconds of processor time",
        "",
        "| | median | least |",
        "|---|---|---|",
        *(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} |" for name, times in rows.items()),
    ]


def schedules() -> dict[str, cf.Schedule]:
    s = cf.schemes
    return {
        "dapple D=4 N=8": s.dapple(4, 8),
        "chimera D=4 N=8": s.chimera(4, 8),
        "dapple D=8 N=64": s.dapple(8, 64),
        "chimera D=8 N=64": s.chimera(8, 64),
        "chimera D=8 N=64 forward-doubling": s.chimera(8, 64, concat="forward-doubling"),
        "chimera D=8 N=64 backward-halving": s.chimera(8, 64, concat="backward-halving"),
        "hanayo P=8 N=64 waves=2": s.hanayo(8, 64, waves=2),
        "zb-v D=4 N=8": s.zb_v(4, 8),
        f"zb-v D=4 N=8{NO_BARRIER}": s.zb_v(4, 8),
    }


def profiled(schedule: cf.Schedule, repeats: int, rest_seconds: float, *, barrier: bool) -> None:
    made = pipeline(schedule, schedule.workers // 2, barrier=barrier)
    rows = mini_batch(schedule)
    for _ in range(3):
        made.step(rows, rows)
    assert isinstance(made.transport, Alone)
    made.transport.new_buffers = False
    if rest_seconds:
        clock = Clock(rest_seconds)
        for task in (task for tasks in made._engine.runner.lists for task in tasks):
            task.run = clock.around(task.run, "")
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for _ in range(repeats):
        made.step(rows, rows)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = arguments(__doc__, "engine_cost.*")
    parser.add_argument("--repeats", type=int, default=11, help="steps timed of each worker")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="schedules whose name has one of these words; layers: the second table",
    )
    parser.add_argument("--profile", action="store_true", help="where the time goes, in place of the table")
    parser.add_argument(
        "--rest",
        type=float,
        default=0.0,
        metavar="MS",
        help="sleep before each action, as a worker does: what it needs is then no more in the caches",
    )
    options = parser.parse_args()
    about = machine()
    torch.set_num_threads(1)
    chosen = {
        name: schedule
        for name, schedule in schedules().items()
        if not options.only or any(word in name for word in options.only)
    }
    gc.collect()
    gc.freeze()  # or a collection walks through all schedules within some action
    if options.profile:
        for name, schedule in chosen.items():
            print(name)
            profiled(schedule, options.repeats, options.rest / 1e3, barrier=NO_BARRIER not in name)
        return
    columns = [
        "forward",
        "backward",
        "input gradient",
        "weights' gradients",
        "send",
        "receive",
        "sync and update",
        "beside actions, a step",
        "an action",
        "a step",
    ]
    lines = [
        f"# python benchmarks/engine_cost.py, {machine_line(about)}",
        f"# microseconds of processor time, {options.rest:g} ms of rest before each action",
        "",
    ]
    lines += [f"| schedule | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    found = bare()
    lines.append(f"| bare | {found['forward']:.1f} | {found['backward']:.1f} |" + " |" * (len(columns) - 2))
    for name, schedule in chosen.items():
        for first in (False, True):
            barrier = NO_BARRIER not in name
            found = cost(schedule, options.repeats, options.rest / 1e3, first=first, barrier=barrier)
            label = f"{name}, the first step" if first else name
            lines.append(
                f"| {label} | {' | '.join(f'{found[c]:.1f}' if c in found else '' for c in columns)} |"
            )
    if not options.only or "layers" in options.only:
        lines += ["", *layer_costs(options.repeats)]
    print("\n".join(lines))
    if options.keep:
        keep("engine_cost", lines)


if __name__ == "__main__":
    main()
