"""Steps that follow each other without a barrier, ours beside torch's, on emulated devices.

    python benchmarks/back_to_back.py [--depths 4 8] [--messages 4KiB 4MiB] [--steps 20] [--repeats 5]
        [--device host stream] [--bare]

Claims, with messages of 4 KiB, one copy of the model and no higher peak than 1F1B's first worker: a step
takes at most 1.04 times the work N(F + I + W) at D = 4 and 1.06 at D = 8, and at least 8 % less than the
best of torch's.

Devices, stages and contenders are those of `emulated_device.py`: F = I = W = 20 ms a micro-batch for what a
worker holds, N = 2 D, as many processes as workers. A run is so many steps, each with an optimiser's step,
and nothing between them on either side (`Pipeline(barrier=False)`); its time is from one agreed start until
the last worker has made its last update, divided by the steps. Contenders take turns. `ideal` is that time
if messages, Python and optimisers cost nothing: the first fill and the last drain are in it.

There are two devices, alike for all contenders. `host`: an op sleeps in the thread that asks for it, so that
all that the host does between two ops adds to them. `stream`: ops queue up, as on a GPU, and the host goes on
meanwhile; it waits for the device where it reads what that computed (Counterflow the loss and the norm of
each step, torch's schedules nothing) and at the end.

`--bare` adds what the orders whose backwards are all split take without an engine: a loop of Gloo's sends and
receives and autograd, split by hand for this one model, with an optimiser, and nothing else.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from emulated_device import (
    BACKWARD_SECONDS,
    BYTES,
    FORWARD_SECONDS,
    SAMPLES,
    THEIR_SCHEDULES,
    Groups,
    Ours,
    Row,
    Stream,
    Theirs,
    add_sizes,
    against,
    in_a_row,
    message_seconds,
    note,
    our_orders,
    our_schedules,
    precise_sleep,
    sleepers,
    take_device,
    timed,
    trivial_loss,
    undisturbed,
)
from kit import arguments, keep, load, machine, machine_line
from torch import Tensor
from torch.autograd.graph import GradientEdge

import counterflow as cf
from counterflow.program.actions import Compute, Matching, Receive, Send
from counterflow.program.lowering import lower
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.ir import OpKind

GOALS = {4: 1.04, 8: 1.06}
"""By depth: a step over the work, with one copy of the model and 1F1B's memory."""

GAIN = 0.08

OURS = (
    *("dapple", "interleaved chunks=2", "chimera direct", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"),
    *("interleaved-zb chunks=2", "chimera split"),
)
"""Those that the engine does not run are left out."""


@dataclass(frozen=True)
class Settings:
    """What is run: sizes of messages, steps in a row, turns, and which contenders."""

    payloads: tuple[str, ...]
    steps: int
    repeats: int
    only: tuple[str, ...]
    device: str
    bare: bool

    def takes(self, name: str) -> bool:
        """Whether a contender was asked for."""
        return not self.only or any(word in name for word in self.only)


class Bare:
    """An order whose backwards are all split, by a loop that knows the model and does nothing twice."""

    suffix = ", no engine"

    def __init__(self, name: str, schedule: cf.Schedule, size: int, steps: int, transport: Any) -> None:
        ideal = in_a_row(our_orders(schedule), steps) / steps
        self.row = Row(name + self.suffix, False, 1.0, 0.0, ideal, None, [], [])
        self.lane = dist.group.WORLD._get_backend(torch.device("cpu"))
        program = lower(schedule, matching=Matching.TAG)
        sends = [self.key(a.output) for actions in program.actions for a in actions if isinstance(a, Send)]
        self.tags = {key: tag for tag, key in enumerate(sends)}
        self.todo = program.actions[transport.rank]
        self.last = schedule.stages - 1
        self.modules = sleepers(schedule.stages, schedule.workers)
        held = {a.op.stage for a in self.todo if isinstance(a, Compute)}
        parameters = [p for stage in held for p in self.modules[stage].parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        shape = SAMPLES, size // 4 // SAMPLES
        mine = [self.key(a.output) for a in self.todo if isinstance(a, Receive)]
        self.buffers = [{key: torch.zeros(shape) for key in mine} for _ in range(2)]
        self.begun = 0
        self.leaving: list[tuple[Any, Tensor]] = []
        self.graphs: dict[Any, tuple[Tensor, Tensor, Tensor | None]] = {}
        self.waiting: dict[Any, list[tuple[Any, Tensor, tuple[Tensor, ...]]]] = {}
        self.there: dict[Any, Tensor] = {}

    @staticmethod
    def key(op: Any, ahead: int = 0) -> tuple[Any, ...]:
        """Of what an op makes, or what is made ``ahead`` stages on."""
        return op.kind.is_forward, op.stage + ahead, op.micro_batches

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        del targets
        odd = self.begun % 2  # two steps may be in flight
        first, buffers = odd * len(self.tags), self.buffers[odd]
        self.begun += 1
        leaving, self.leaving = self.leaving, []
        arriving: dict[Any, Any] = {}
        for action in self.todo:
            if isinstance(action, Receive):
                key = self.key(action.output)
                arriving[key] = self.lane.recv([buffers[key]], action.peer, first + self.tags[key])
            elif isinstance(action, Send):
                key = self.key(action.output)
                sent = self.there.pop(key)
                self.leaving.append((self.lane.send([sent], action.peer, first + self.tags[key]), sent))
            elif isinstance(action, Compute):
                op = action.op
                taken = self.key(op, -1 if op.kind.is_forward else 1)
                if op.kind is not OpKind.WEIGHT_GRADIENTS and taken in arriving:
                    arriving.pop(taken).wait()
                    self.there[taken] = buffers[taken]
                self.compute(op, self.there.pop(taken, inputs[:SAMPLES]), (op.stage, op.micro_batches))
        for work, _ in leaving:
            work.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def compute(self, op: Any, taken: Tensor, graph: Any) -> None:
        """An op on what it takes."""
        module, backward = self.modules[op.stage], torch.autograd.Variable._execution_engine.run_backward
        if op.kind is OpKind.FORWARD:
            root = None if op.stage else module[0](taken)
            value = (taken if root is None else root).detach().requires_grad_()
            output = module(value) if root is None else module[1](value)
            if op.stage < self.last:
                self.there[self.key(op)] = output.detach()
            self.graphs[graph] = output, value, root
        elif op.kind is OpKind.INPUT_GRADIENT:
            output, value, root = self.graphs.pop(graph)
            if op.stage == self.last:
                (taken,) = torch.autograd.grad(trivial_loss(output, output), output)
            product = GradientEdge(output.grad_fn.next_functions[0][0], 0)
            found, reached = backward(
                (output,),
                (taken,),
                True,
                False,
                (value, product),
                allow_unreachable=True,
                accumulate_grad=False,
            )
            weight = module.weight if root is None else module[1].weight
            self.waiting[graph] = [(product, reached, (weight,))]
            if root is not None:
                self.waiting[graph].append((root, found, ()))
            else:
                self.there[self.key(op)] = found
        else:
            for place, gradient, weights in self.waiting.pop(graph):
                backward(
                    (place,), (gradient,), False, False, weights, allow_unreachable=True, accumulate_grad=True
                )

    def end(self) -> None:
        """Let go of what was sent."""
        for work, _ in self.leaving:
            work.wait()
        self.leaving.clear()


def work(settings: Settings, count: int) -> dict[str, list[Row]]:
    """What every worker runs; the rows by size of message, with the seconds of a step."""
    torch.set_num_threads(1)
    first, late = undisturbed(), precise_sleep()
    transport = current_transport()
    workers, rank = transport.world_size, transport.rank
    slowest = max(row[0] for row in transport.gather([late]))
    note(rank, f"D={workers} N={count}: sleeps end {slowest * 1e6:.0f} µs late, real-time priority: {first}")
    groups = Groups(transport)
    return {payload: _race(settings, count, payload, transport, groups) for payload in settings.payloads}


def _race(settings: Settings, count: int, payload: str, transport: Any, groups: Groups) -> list[Row]:
    workers, rank, steps = transport.world_size, transport.rank, settings.steps
    message = message_seconds(transport, BYTES[payload])
    found = our_schedules(workers, count)
    if settings.device == "stream":
        take_device(Stream(rank, message))
    contenders: list[Ours | Theirs | Bare] = [
        Ours(name, found[name], message, groups, barrier=False)
        for name in OURS
        if name in found and settings.takes(name)
    ]
    names = [name for name in THEIR_SCHEDULES if "GPipe" not in name and settings.takes(name)]
    for contender in contenders:
        assert isinstance(contender, Ours)
        contender.row.ideal = in_a_row(our_orders(contender.pipeline.schedule), steps) / steps
    if settings.bare:
        contenders += [
            Bare(name, found[name], BYTES[payload], steps, transport)
            for name in ("zb-h2", "zb-v")
            if name in found and settings.takes(name)
        ]
    contenders += [Theirs(name, count, rank, workers, steps=steps) for name in names]
    inputs = torch.zeros(count * SAMPLES, BYTES[payload] // 4 // SAMPLES)
    targets = torch.zeros(count * SAMPLES)

    def several(contender: Ours | Theirs | Bare, number: int) -> None:
        for _ in range(number):
            contender.step(inputs, targets)

    for contender in contenders:
        several(contender, 3)  # the first learns shapes, two count bytes
        contender.end()
    expected = steps * count * workers * (FORWARD_SECONDS + BACKWARD_SECONDS)
    for turn in range(settings.repeats):
        gc.collect()
        gc.freeze()
        for contender in contenders:
            taken, slept, busy = timed(partial(several, contender, steps), transport)
            contender.end()
            assert abs(slept - expected) < 1e-6 * steps, (contender.row.name, slept, expected)
            contender.row.steps.append(taken / steps)
            contender.row.busy.append(busy / steps)
        note(rank, f"D={workers} N={count} {payload}: turn {turn + 1}")
    return [contender.row for contender in contenders]


def table(rows: Sequence[Row], depth: int, count: int) -> list[str]:
    """The contenders, and how ours stand to the goals."""
    work_seconds = count * (FORWARD_SECONDS + BACKWARD_SECONDS)
    lines = [
        f"the work N(F + I + W): {work_seconds * 1e3:.0f} ms",
        "",
        "| schedule | copies of the model | peak | ms a step | least .. most | over the work "
        "| ideal ms | ratio | processor ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.copies:g} | {f'{row.peak:g}' if row.peak else ''} | {row.median * 1e3:.1f} "
        f"| {min(row.steps) * 1e3:.1f} .. {max(row.steps) * 1e3:.1f} "
        f"| {row.median / work_seconds:.3f} | {row.ideal * 1e3:.1f} | {row.ratio:.3f} "
        f"| {statistics.median(row.busy) * 1e3:.0f} |"
        for row in rows
    ]
    return [*lines, "", *_verdict(rows, depth, work_seconds)]


def _verdict(rows: Sequence[Row], depth: int, work_seconds: float) -> list[str]:
    own = [row for row in rows if row.ours and row.copies <= 1 and row.peak <= depth]
    others = [row for row in rows if row.name in THEIR_SCHEDULES]
    if not own:
        return []
    mine = min(own, key=lambda row: row.median)
    goal = f" (goal: {GOALS[depth]})" if depth in GOALS else ""
    lines = [
        "our best with one copy and no more activations than 1F1B: "
        f"{mine.name}, {mine.median / work_seconds:.3f} of the work{goal}"
    ]
    if others:
        best = min(others, key=lambda row: row.median)
        lines.append(f"against the best of torch (goal: {GAIN:.0%}): {against(mine, best)}")
    return lines


def main() -> None:
    parser = arguments(__doc__, "back_to_back.*")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8], help="workers; N is twice as many")
    add_sizes(parser)
    parser.add_argument("--steps", type=int, default=20, help="steps in a row")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name has one of these words")
    parser.add_argument(
        "--device", nargs="+", choices=("host", "stream"), default=["host"], help="where ops run"
    )
    parser.add_argument("--bare", action="store_true", help="also what orders take without an engine")
    options = parser.parse_args()
    about = machine()
    lines = [
        f"# python benchmarks/back_to_back.py, {machine_line(about)}",
        f"# medians of {options.repeats} runs of {options.steps} steps; F = I = W = 20 ms a worker and "
        "micro-batch",
    ]
    data: list[dict[str, object]] = []
    for device in options.device:
        settings = Settings(
            tuple(options.payloads),
            options.steps,
            options.repeats,
            tuple(options.only),
            device,
            options.bare,
        )
        for depth in options.depths:
            count = 2 * depth
            found = cf.launch(work, settings, count, workers=depth, transport="gloo", threads=1)[0]
            for payload, rows in found.items():
                title = f"## D={depth}, N={count}, messages of {payload}, device: {device}"
                lines += ["", title, "", *table(rows, depth, count)]
                about_rows = {"device": device, "depth": depth, "micro_batches": count, "payload": payload}
                data += [{**about_rows, **asdict(row)} for row in rows]
    about["load_after"] = round(load(), 2)
    print("\n".join(lines))
    if options.keep:
        keep("back_to_back", lines, {"machine": about, "rows": data})


if __name__ == "__main__":
    main()
