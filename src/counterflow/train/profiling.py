"""Measures what a planner has to know: a model's layers on this machine, and the links between its workers.

Times are taken from steps that train: in one run each layer is a stage of its own, which gives its share; in
another the model is one stage, which gives the sum without the engine's code around each layer. The
difference is that code. All workers of the machine measure at one time, as they compute at one time in a run:
they share caches, memory and power. Layers of one class with weights of the same shapes are one kind; its
numbers are the medians over all of them.

Invariant: nothing is guessed. What was not measured (a second node) is left out, and the file says how each
number came about.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError
from counterflow.plan import Cluster, LayerProfile, Link, Model, Profile
from counterflow.runtime.launch import launch
from counterflow.runtime.links import Travel, measure_allreduces, measure_messages
from counterflow.runtime.measure import StageCost, measure_stages
from counterflow.runtime.op_times import time_ops
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.world import current_transport
from counterflow.schedule.ir import Schedule
from counterflow.schedule.schemes import gpipe

from .config import RunConfig
from .job import Job, cores, prepare

SIZES = (1, 2, 4, 8, 16, 32)
"""Samples of the micro-batches that layers are measured with, if nothing else is asked for."""

MESSAGES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the messages and all-reduces from which latency and seconds a byte are fitted."""

_GIB = 1 << 30

Told = Callable[[str, int, int], None]
"""What is measured, how many parts of it are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A model on a machine, ready to be planned."""

    model: Model
    profile: Profile
    cluster: Cluster
    messages: tuple[Travel, ...]
    allreduces: tuple[Travel, ...]


def measure(
    config: RunConfig,
    *,
    sizes: Sequence[int] = SIZES,
    workers: int | None = None,
    repeats: int = 5,
    told: Told = lambda *_: None,
) -> Measured:
    """Measure a config's model and this machine.

    Args:
        config: its model, data, optimiser and device count; its schedule does not.
        sizes: samples of a micro-batch, each 1 or more.
        workers: that this machine is to have as a cluster's node; None: a GPU each, or a core.
        repeats: of each measurement, whose median counts.
        told: called as it goes on.

    Raises:
        ConfigError: no sizes, or one below 1.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"sizes = {list(sizes)}: give one size of a micro-batch or more, each 1 or more")
    job = prepare(config)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    here = workers or (torch.cuda.device_count() if on_gpu else cores())
    threads = config.train.threads or max(1, cores() // here)
    about = _device_name(device, threads)
    carrier: Literal["local", "gloo", "nccl"] = "local" if here == 1 else "nccl" if on_gpu else "gloo"
    today = dt.date.today().isoformat()
    run = partial(launch, workers=here, transport=carrier, device=device, threads=threads)
    by_size: list[_AtSize] = []
    for number, size in enumerate(sizes):
        told("layers", number, len(sizes))
        by_size.append(run(_layers, job, size, repeats)[0])
    told("layers", len(sizes), len(sizes))
    update = statistics.median(each.update_seconds_per_byte for each in by_size)
    told("steps", 0, 1)
    gap, around = run(_steps, job, sizes[len(sizes) // 2], repeats, update)[0]
    told("steps", 1, 1)
    kinds = kinds_of(job.layers)
    how = f"measured, median of {repeats}; layers of one kind: median over them"
    profile = Profile(
        name=f"{platform.node() or 'this machine'}, {today}",
        machine=about,
        date=today,
        layers={
            kind: _layer([i for i, other in enumerate(kinds) if other == kind], sizes, by_size)
            for kind in dict.fromkeys(kinds)
        },
        update_seconds_per_byte=update,
        op_overhead_seconds=gap + statistics.median(each.overhead_seconds for each in by_size),
        step_overhead_seconds=around,
        sources={
            "layers": how,
            "update_seconds_per_byte": f"{config.optimizer.name}: measured, median",
            "op_overhead_seconds": "measured: between two ops, and what a stage more adds to its layers",
            "step_overhead_seconds": "measured: a step without its ops and the optimiser",
        },
    )
    told("links", 0, 1)
    messages: tuple[Travel, ...] = ()
    sums: tuple[Travel, ...] = ()
    if here > 1:
        messages, sums = launch(
            _links,
            repeats,
            workers=2,
            transport=carrier,
            device=device,
            threads=threads,
        )[0]
    told("links", 1, 1)
    inputs, _ = job.batches.batch(0, 1, replica=0, replicas=1)
    model = Model(
        name=job.about.model,
        layers=tuple(kinds),
        optimizer_states=_states(config),
        input_bytes=float(sum(t.nbytes for t in _tensors(inputs))),
        train=config.model.model_dump(exclude_none=True, mode="json"),
        source="counterflow profile",
    )
    link = fitted(messages)
    cluster = Cluster(
        name=f"{platform.node() or 'this machine'}",
        nodes=1,
        devices=here,
        memory_bytes=_memory(device, here),
        inside=link,
        between=link,
        allreduce_inside=fitted(sums, begins=2) if sums else None,
        cores=None if on_gpu else cores(),
        sources={
            "memory_bytes": "as the machine tells, divided among its workers",
            "inside": f"fitted to messages of {_range(messages)}" if messages else "one worker: not used",
            "between": "one node: not used",
            "allreduce_inside": f"fitted to all-reduces of 2 workers of {_range(sums)}" if sums else "",
        },
    )
    return Measured(model, profile, cluster, messages, sums)


def kinds_of(layers: Sequence[nn.Module]) -> list[str]:
    """Each layer's kind: its class, and a number where one class has weights of several shapes.

    >>> kinds_of([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1)])
    ['linear', 'relu', 'linear', 'linear-2']
    """
    known: dict[str, list[tuple[object, ...]]] = {}
    found = []
    for layer in layers:
        name = type(layer).__name__.lower()
        shapes = tuple((key, tuple(value.shape)) for key, value in layer.named_parameters())
        of_class = known.setdefault(name, [])
        if shapes not in of_class:
            of_class.append(shapes)
        number = of_class.index(shapes) + 1
        found.append(name if number == 1 else f"{name}-{number}")
    return found


def fitted(travels: Sequence[Travel], *, begins: int = 1) -> Link:
    """The link whose latency and seconds a byte come nearest to what was measured, in proportion to it.

    Args:
        travels: sizes and seconds; none: a link that costs nothing.
        begins: latencies in one of them: 2 in an all-reduce of two workers, which sends its bytes once.

    >>> link = fitted([Travel(0, 1.0), Travel(10, 2.0), Travel(20, 3.0)])
    >>> round(link.latency_seconds, 6), round(link.seconds_per_byte, 6)
    (1.0, 0.1)
    """
    if not travels:
        return Link(0.0, 0.0)
    rows = np.array([[1 / t.seconds, t.size_bytes / t.seconds] for t in travels])
    latency, each = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    return Link(max(0.0, float(latency)) / begins, max(0.0, float(each)))


MICRO_BATCHES = 4
"""Of a step that is timed, on each stage."""


@dataclass(frozen=True, slots=True)
class _AtSize:
    """What layers cost at a size of micro-batches; ``overhead_seconds``: of an op, beside its layers."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    costs: tuple[StageCost, ...]
    overhead_seconds: float
    update_seconds_per_byte: float


def _layers(job: Job, size: int, repeats: int) -> _AtSize:
    """What each layer costs at a size, and the optimiser's seconds for a byte of weights."""
    count = len(job.layers)
    batch = job.batches.batch(0, size * MICRO_BATCHES, replica=0, replicas=1)
    one = _pipeline(job, gpipe(1, MICRO_BATCHES))
    together = time_ops(one, *batch, repeats=repeats)
    update = _median_seconds(one, repeats, lambda: [o.step() for o in one.weights.optimizers.values()])
    each = _pipeline(job, gpipe(1, MICRO_BATCHES, groups=count))
    apart = time_ops(each, *batch, repeats=repeats)
    costs = measure_stages(each, *batch, repeats=1)
    forward, in_forward = without_overhead(apart.forward, together.forward[0])
    backward, in_backward = without_overhead(apart.backward, together.backward[0])
    weights = sum(cost.weight_bytes for cost in costs)
    return _AtSize(forward, backward, tuple(costs), (in_forward + in_backward) / 2, update / weights)


def without_overhead(apart: Sequence[float], together: float) -> tuple[tuple[float, ...], float]:
    """Layers' seconds that add up to what they take together, and what each took more alone.

    The time of the layers together has that overhead once as well; it is taken out.

    >>> without_overhead((2.0, 4.0), 5.0)
    ((1.0, 3.0), 1.0)
    >>> without_overhead((2.0, 4.0), 9.0)  # nothing more: in proportion
    ((3.0, 6.0), 0.0)
    """
    more = (sum(apart) - together) / (len(apart) - 1) if len(apart) > 1 else 0.0
    if more <= 0.0:
        return tuple(seconds * together / sum(apart) for seconds in apart), 0.0
    return tuple(max(0.0, seconds - more) for seconds in apart), more


def _steps(job: Job, size: int, repeats: int, update: float) -> tuple[float, float]:
    """What lies between ops, and around them in a step, of a pipeline over all workers."""
    workers = current_transport().world_size
    if workers > len(job.layers):
        workers = 1
    pipeline = _pipeline(job, gpipe(workers, 2 * MICRO_BATCHES))
    samples = size * pipeline.schedule.micro_batches
    times = time_ops(pipeline, *job.batches.batch(0, samples, replica=0, replicas=1), repeats=repeats)
    held = [
        sum(p.nbytes for layer in stage.layers for p in layer.module.parameters())
        for stage in pipeline.stages.values()
    ]
    most = max(row[0] for row in pipeline.transport.gather([float(sum(held))]))
    return times.gap_seconds, max(0.0, times.around_seconds - update * most)


def _pipeline(job: Job, schedule: Schedule) -> Pipeline:
    return Pipeline(
        job.layers,
        job.loss,
        schedule,
        optimizer=job.optimizer,
        seed=job.config.train.seed,
        autocast=torch.bfloat16 if job.config.pipeline.autocast else None,
        digest_every=0,
    )


def _median_seconds(pipeline: Pipeline, repeats: int, call: Callable[[], object]) -> float:
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if pipeline.device.type == "cuda":
            torch.cuda.synchronize(pipeline.device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def _links(repeats: int) -> tuple[tuple[Travel, ...], tuple[Travel, ...]]:
    """What messages and all-reduces of two workers take."""
    transport = current_transport()
    times = 3 * repeats
    return (
        measure_messages(transport, MESSAGES, repeats=times),
        measure_allreduces(transport, MESSAGES, repeats=times),
    )


def _layer(members: Sequence[int], sizes: Sequence[int], by_size: Sequence[_AtSize]) -> LayerProfile:
    """A kind's curves, from the layers of that kind."""

    def median(of: Callable[[_AtSize, int], float]) -> tuple[float, ...]:
        return tuple(statistics.median(of(one, i) for i in members) for one in by_size)

    largest = by_size[-1].costs
    after = [largest[i + 1].input_bytes for i in members if i + 1 < len(largest)]
    return LayerProfile(
        samples=tuple(map(float, sizes)),
        forward_seconds=median(lambda one, i: one.forward[i]),
        backward_seconds=median(lambda one, i: one.backward[i]),
        saved_bytes=median(lambda one, i: one.costs[i].activation_bytes),
        weights_bytes=float(largest[members[0]].weight_bytes),
        output_bytes=max(after, default=0) / sizes[-1],
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _states(config: RunConfig) -> float:
    """Bytes of optimiser state for each byte of weights."""
    if config.optimizer.name == "adamw":
        return 2.0
    return 1.0 if config.optimizer.momentum else 0.0


def _memory(device: str, workers: int) -> float:
    """Bytes of memory of a worker."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / workers


def _device_name(device: str, threads: int) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    used = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{cores()} cores of {processor()}, {used} a worker, torch {torch.__version__}"


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _range(travels: Sequence[Travel]) -> str:
    return f"{travels[0].size_bytes:,} to {travels[-1].size_bytes:,} bytes"
