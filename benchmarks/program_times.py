"""The simulated program and the same program run on emulated devices.

    python benchmarks/program_times.py [--cases 50] [--repeats 3] [--keep]

Claim: for 50 random (schedule, costs with messages and gradient syncs) the simulated step and a step of the
engine agree within 5 %. In the first three `eager-opt` places syncs otherwise than for F = 1 and B = 2.

An emulated device sleeps in place of computing; a link carries one message at a time in each direction and
takes its seconds for it; a gradient sync begins when all copies have started it and the syncs before it are
done, and takes its seconds. The engine runs the program lowered with the same costs, its workers as threads:
messages are handed over in memory, and taken when their link has brought them.

Ops take 30 to 160 ms, so that what the engine's Python takes of two cores is small beside them: it is in
``engine_cost.py``, not in these costs.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from emulated_device import precise_sleep, sleep_until
from kit import arguments, keep, machine_line
from torch import Tensor, nn

import counterflow as cf
from counterflow.program.actions import StartSync, Summed, WaitSync
from counterflow.runtime.transport.local import Hub, LocalTransport
from counterflow.simulation import Link

GOAL = 0.05
WIDTH = 4


class Sleeps(torch.autograd.Function):
    """Takes its time in a forward and in a backward, for as many samples as there are."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        begin = time.perf_counter()
        ctx.seconds = backward * value.shape[0]
        sleep_until(begin + forward * value.shape[0])
        return value * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        begin = time.perf_counter()
        (gradient,) = gradients
        sleep_until(begin + ctx.seconds)
        return gradient.clone(), gradient.sum().reshape(1), None, None


class Stage(nn.Module):
    """A stage that takes ``forward`` and ``backward`` seconds a sample."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = forward, backward

    def forward(self, value: Tensor) -> Tensor:
        return Sleeps.apply(value, self.weight, *self.seconds)


Make = Callable[[cf.Costs], tuple[list[nn.Module], Sequence[int]]]
"""From costs to layers that take so long, and where they are cut into stages."""


def whole_stages(costs: cf.Costs) -> tuple[list[nn.Module], Sequence[int]]:
    """A layer a stage, whose backward is whole."""
    assert isinstance(costs.forward, tuple)
    assert isinstance(costs.backward, tuple)
    pairs = zip(costs.forward, costs.backward, strict=True)
    return [Stage(f / WIDTH, b / WIDTH) for f, b in pairs], range(1, len(costs.forward))


@dataclass
class Network:
    """What the emulated workers share."""

    costs: cf.Costs
    lock: threading.Condition = field(default_factory=threading.Condition)
    lanes: dict[tuple[int, int], float] = field(default_factory=dict)
    arrivals: dict[tuple[int, int, int], deque[float]] = field(default_factory=lambda: defaultdict(deque))
    started: dict[tuple[int, StartSync, int, int], float] = field(default_factory=dict)
    ends: dict[tuple[int, StartSync], float] = field(default_factory=dict)
    summing: dict[int, float] = field(default_factory=dict)

    def leaves(self, sender: int, receiver: int, tag: int) -> float:
        """Note when a message that is sent now arrives."""
        with self.lock:
            begin = time.perf_counter()
            if self.costs.link is Link.ONE_AT_A_TIME:
                begin = max(begin, self.lanes.get((sender, receiver), 0.0))
            end = begin + float(self.costs.p2p)
            self.lanes[sender, receiver] = end
            self.arrivals[sender, receiver, tag].append(end)
            return end


class Late:
    """A receive whose message is there when its link has brought it."""

    def __init__(self, inner: Any, arrivals: deque[float]) -> None:
        self.inner, self.arrivals = inner, arrivals

    def done(self) -> bool:
        return self.inner.done() and self.arrivals[0] <= time.perf_counter()

    def wait(self) -> Any:
        found = self.inner.wait()
        sleep_until(self.arrivals.popleft())
        return found


class Emulated(LocalTransport):
    """Messages that take time."""

    network: Network

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        end = self.network.leaves(self.rank, peer, tag)
        done = super().send(tensors, peer, tag)
        if not self.network.costs.overlap:
            sleep_until(end)
        return done

    def receive(self, buffers: Sequence[Tensor], peer: int, tag: int) -> Any:
        return Late(super().receive(buffers, peer, tag), self.network.arrivals[peer, self.rank, tag])

    def send_described(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        return self.send(tensors, peer, tag)

    def receive_described(self, peer: int, tag: int) -> Any:
        inner = super().receive_described(peer, tag)
        return Late(inner, self.network.arrivals[peer, self.rank, tag])


class Worker:
    """A pipeline whose gradient syncs take time."""

    def __init__(
        self, schedule: cf.Schedule, costs: cf.Costs, hub: Hub, network: Network, rank: int, make: Make
    ) -> None:
        transport = Emulated(hub, rank, torch.device("cpu"))
        transport.network = network
        self.rank, self.network, self.schedule = rank, network, schedule
        layers, cuts = make(costs)
        self.pipeline = cf.Pipeline(
            layers,
            lambda output, _: output.mean(),
            schedule,
            cuts=cuts,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            transport=transport,
            sync=costs.sync_mode,
            op_times=cf.simulate(schedule, costs).op_times,
            digest_every=0,
            count_memory_steps=0,
        )
        # Threads share torch's random state and take turns for it; nothing is drawn here.
        self.pipeline.streams.shared = False
        self.step_number = 0
        handlers = self.pipeline._engine.runner._handlers
        self._start, self._wait = handlers[StartSync], handlers[WaitSync]
        handlers |= {StartSync: self.start_sync, WaitSync: self.wait_sync}
        self.pipeline._engine.runner._lists.clear()  # what was prepared with the others

    def _members(self, sync: StartSync) -> list[tuple[int, int]]:
        replicas = range(self.pipeline.replicas)
        return [(replica, worker) for replica in replicas for worker in sync.workers]

    def start_sync(self, sync: StartSync) -> None:
        network, me = self.network, (self.pipeline.replica, self.pipeline.worker)
        with network.lock:
            network.started[self.step_number, sync, *me] = time.perf_counter()
            members = self._members(sync)
            if all((self.step_number, sync, *member) in network.started for member in members):
                # All lists have the syncs of two workers in one order: those before it are placed.
                assert isinstance(network.costs.sync, tuple)
                ranks = [r * self.schedule.workers + w for r, w in members]
                begin = max(network.started[self.step_number, sync, *member] for member in members)
                begin = max(begin, *(network.summing.get(rank, 0.0) for rank in ranks))
                end = begin + network.costs.sync[sync.stage]
                network.summing.update(dict.fromkeys(ranks, end))
                network.ends[self.step_number, sync] = end
                network.lock.notify_all()
        self._start(sync)

    def wait_sync(self, sync: WaitSync) -> None:
        if sync.what is Summed.GRADIENTS:
            network, key = self.network, (self.step_number, sync.start)
            with network.lock:
                network.lock.wait_for(lambda: key in network.ends, timeout=120)
            sleep_until(network.ends[key])
        self._wait(sync)


def measured(schedule: cf.Schedule, costs: cf.Costs, repeats: int, make: Make = whole_stages) -> float:
    """Seconds of a step, the median; from the moment all workers begin to the last agreement."""
    world = schedule.workers * costs.replicas
    hub, network = Hub(world, timeout_seconds=60.0), Network(costs)
    barrier = threading.Barrier(world)
    ended: dict[int, list[float]] = defaultdict(list)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            worker = Worker(schedule, costs, hub, network, rank, make)
            batch = torch.ones(schedule.micro_batches * WIDTH, 1)
            for number in range(repeats + 2):
                worker.step_number = number
                barrier.wait(60)
                begin = time.perf_counter() + 0.02
                sleep_until(begin)
                worker.pipeline.step(batch, batch)
                ended[number].append(time.perf_counter() - begin)
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            hub.transport(rank).fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return statistics.median(max(ended[number]) for number in range(2, repeats + 2))


def literal_cases() -> Iterator[tuple[cf.Schedule, cf.Costs]]:
    """Short messages and long sums (units of 40 ms): F = 1 and B = 2 alone place these syncs elsewhere."""
    for schedule in (cf.schemes.chimera(4, 4), cf.schemes.hanayo(4, 4, 2), cf.schemes.interleaved(4, 8, 4)):
        stages, unit = schedule.stages, 0.04
        yield (
            schedule,
            cf.Costs(
                forward=(unit,) * stages,
                backward=(2 * unit,) * stages,
                p2p=0.05 * unit,
                sync=(6 * unit,) * stages,
                replicas=1 if schedule.pipes > 1 else 2,
            ),
        )


def random_cases(seed: int) -> Iterator[tuple[cf.Schedule, cf.Costs]]:
    """Schedules with a flush, with uneven stages, messages and syncs."""
    draw = random.Random(seed)
    s = cf.schemes
    while True:
        depth, n = draw.choice((2, 4)), draw.randint(2, 8)
        make: list[Callable[[], cf.Schedule]] = [
            lambda depth=depth, n=n: s.gpipe(depth, n),
            lambda depth=depth, n=n: s.gpipe(depth, n, groups=2),
            lambda depth=depth, n=n: s.dapple(depth, n),
            lambda depth=depth, n=n: s.interleaved(depth, n, chunks=2),
            lambda depth=depth, n=n: s.gems(depth, n),
            lambda depth=depth, n=n: s.chimera(depth, n),
            lambda depth=depth, n=n: s.chimera(depth, n, concat="forward-doubling"),
            lambda depth=depth, n=n: s.chimera(depth, n, concat="backward-halving"),
            lambda depth=depth, n=n: s.mixpipe(depth, n),
            lambda depth=depth, n=n: s.hanayo(depth, n, waves=draw.choice((1, 2))),
        ]
        schedule = draw.choice(make)()
        yield (
            schedule,
            cf.Costs(
                forward=tuple(draw.uniform(0.03, 0.08) for _ in range(schedule.stages)),
                backward=tuple(draw.uniform(0.04, 0.16) for _ in range(schedule.stages)),
                p2p=draw.choice((0.0, draw.uniform(0.004, 0.12))),
                link=draw.choice(list(Link)),
                overlap=draw.random() < 0.75,
                sync=tuple(draw.uniform(0.0, 0.24) for _ in range(schedule.stages)),
                sync_mode=draw.choice(("end", "eager", "eager-opt")),
                replicas=1 if schedule.pipes > 1 or draw.random() < 0.5 else 2,
            ),
        )


def main() -> None:
    """Measure and print the table."""
    parser = arguments(__doc__, "program_times.txt")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0002)  # a thread that wakes is not held up by one that computes in Python
    late = precise_sleep()
    lines = [
        f"# python benchmarks/program_times.py --cases {given.cases}, {machine_line()}",
        f"# sleeps end {late * 1e6:.0f} µs late; medians of {given.repeats} steps; goal {GOAL:.0%}",
        "",
        "| schedule | W | message ms | link | sync | simulated ms | measured ms | measured / simulated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    ratios = []
    randoms = random_cases(given.seed)
    cases = [*literal_cases(), *(next(randoms) for _ in range(given.cases - 3))]
    for schedule, costs in cases:
        simulated = cf.simulate(schedule, costs).makespan
        took = measured(schedule, costs, given.repeats)
        ratios.append(took / simulated)
        link = ("one" if costs.link is Link.ONE_AT_A_TIME else "infinite") + (
            "" if costs.overlap else ", busy"
        )
        row = (
            f"| {schedule} | {costs.replicas} | {float(costs.p2p) * 1e3:.1f} | {link} | {costs.sync_mode} | "
            f"{simulated * 1e3:.1f} | {took * 1e3:.1f} | {ratios[-1]:.3f} |"
        )
        print(row, flush=True)
        lines.append(row)
    over = sum(abs(ratio - 1) > GOAL for ratio in ratios)
    lines.append("")
    lines.append(
        f"{len(ratios)} cases: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}, "
        f"least {min(ratios):.3f}; {over} further than {GOAL:.0%}"
    )
    print("\n".join(lines[-2:]))
    if given.keep:
        keep("program_times", lines)


if __name__ == "__main__":
    main()
