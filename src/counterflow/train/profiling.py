"""Measures what a planner has to know: a model's layers on this machine, and the links between its workers.

The room ``measure`` takes the times, from steps that train; here they become the planner's files. All workers
of the machine measure at one time, as they compute at one time in a run: they share caches, memory and power.
Layers of one class with weights of the same shapes are one kind; its numbers are the medians over them.

Invariant: nothing is guessed. What was not measured (a second node) is left out, and the file says how each
number came about.
"""

from __future__ import annotations

import datetime as dt
import platform
import re
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator
from torch import nn
from torch.utils import _pytree as pytree

from counterflow.data.batches import Batches
from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.measure.layer_times import AtSize, LayerTimer, StepTimer, Subject, timed
from counterflow.measure.links import Travel, measure_allreduces, measure_messages
from counterflow.measure.machine import cores, device_name, memory_bytes
from counterflow.measure.stage_costs import StageCost
from counterflow.planning import AllReduce, Cluster, LayerProfile, LayerSkip, LayerTie, Link, Model, Profile
from counterflow.planning.inputs import files
from counterflow.runtime.parameters.gradients import sum_dtype
from counterflow.runtime.transport.kinds import GLOO, LOCAL, NCCL
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.place import Place, place
from counterflow.runtime.workers.world import current_transport
from counterflow.shown import Result

from .config import RunConfig
from .job import Job, prepare
from .node_speeds import kinds_by_speed
from .planned import kept_of

SIZES = (1, 2, 4, 8, 16, 32)
"""Samples of the micro-batches that layers are measured with, if nothing else is asked for."""

MESSAGES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the messages and all-reduces from which latency and seconds a byte are fitted."""

_POLL_SECONDS = 0.2
"""How often it is looked how far the workers are."""

Progress = Callable[[str, int, int], None]
"""What is measured, how many parts of it are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A model on a machine, ready to be planned."""

    model: Model
    profile: Profile
    cluster: Cluster
    messages: tuple[Travel, ...]
    allreduces: tuple[Travel, ...]
    between: tuple[tuple[Travel, ...], tuple[Travel, ...]] = ((), ())
    """Messages and all-reduces of two workers on different nodes."""


_AsData = Annotated[dict[str, Any], BeforeValidator(files.as_data)]


class Profiled(Result):
    """`counterflow profile`: what it wrote into the three files."""

    model: _AsData
    profile: _AsData
    cluster: _AsData


def measure(
    config: RunConfig,
    *,
    sizes: Sequence[int] = SIZES,
    workers: int | None = None,
    repeats: int = 5,
    progress: Progress = lambda *_: None,
) -> Measured:
    """Measure a config's model and this machine.

    Args:
        config: its model, data, optimiser and device count; its schedule does not.
        sizes: samples of a micro-batch, each 1 or more.
        workers: that this machine is to have as a cluster's node; None: a GPU each, or a core.
        repeats: of each measurement, whose median counts.
        progress: called as it goes on.

    Raises:
        ConfigError: no sizes, or one below 1.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"sizes = {list(sizes)}: give one size of a micro-batch or more, each 1 or more")
    job = prepare(config)
    subject = subject_of(job)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    placed = place()
    nodes = 1 if placed is None else placed.machines
    here = workers or (torch.cuda.device_count() if on_gpu else cores())
    if placed is not None:
        here = _workers_of_each_node(placed, workers)
    threads = config.train.threads or max(1, cores() // here)
    about = device_name(device, threads)
    carrier = NCCL if on_gpu else GLOO
    run = partial(launch, transport=(LOCAL if here == 1 else carrier).name, device=device, threads=threads)
    parts = [("layers", len(sizes)), ("steps", 1), ("links", 1)]
    between: _Travels = (), ()
    with _reported(parts, progress) as done:
        if placed is not None:
            current_transport(carrier.name, device=device)
            torch.set_num_threads(threads)
            pairs = _pairs(here, nodes)
            by_size, (gap, around), found = _measured(subject, sizes, repeats, done, pairs=pairs)
            messages, sums = found[0] if here > 1 else ((), ())
            between = found[-1] if nodes > 1 else between
        else:
            # One launch for all: a worker takes seconds to start, and a model of transformers many.
            alone = _pairs(here, 1) if here == 2 else ()
            by_size, (gap, around), found = run(
                _measured, subject, sizes, repeats, done, pairs=alone, workers=here
            )[0]
            if here > 2:
                found = [run(_links, repeats, (0, 1), workers=2)[0]]
            messages, sums = found[0] if found else ((), ())
    profile = profile_of(job, about, by_size, gap, around, how=f"measured, median of {repeats}")
    inputs, _ = job.made.batches.batch(0, 1, replica=0, replicas=1)
    model = Model(
        name=job.about.model,
        layers=tuple(kinds_of(job.layers)),
        optimizer_states=round(by_size[-1].update.states, 3),
        input_bytes=float(sum(t.nbytes for t in _tensors(inputs))),
        train=config.model.given(),
        source="counterflow profile",
        config=kept_of(config),
        skips=skips_of(by_size[-1]),
        ties=ties_of(job.layers),
    )
    link, other = fitted(messages), fitted(between[0] or messages)
    cluster = Cluster(
        name=f"{platform.node() or 'this machine'}",
        nodes=nodes,
        devices=here,
        memory_bytes=memory_bytes(device, here),
        inside=link,
        between=other,
        allreduce_inside=fitted(sums, begins=2) if sums else None,
        allreduce_between=fitted(between[1], begins=2) if between[1] else None,
        shared_adapter=nodes > 1,
        allreduce=AllReduce.HIERARCHICAL if on_gpu else AllReduce.RING,
        cores=None if on_gpu else cores(),
        kinds=kinds_by_speed([one.by_worker for one in by_size], nodes),
        sources={
            "memory_bytes": "as the machine tells, divided among its workers",
            "inside": f"fitted to messages of {_range(messages)}" if messages else "one worker: not used",
            "between": f"fitted to messages of {_range(between[0])}" if between[0] else "one node: not used",
            "allreduce_inside": f"fitted to all-reduces of 2 workers of {_range(sums)}" if sums else "",
            "allreduce_between": f"fitted to all-reduces of 2 workers of {_range(between[1])}"
            if between[1]
            else "",
            "shared_adapter": "taken: the workers of a node have one way out" if nodes > 1 else "",
        },
    )
    return Measured(model, profile, cluster, messages, sums, between)


def _pairs(here: int, nodes: int) -> tuple[tuple[int, int], ...]:
    """Ranks that are measured: two of one node, then two of different nodes."""
    inside = ((0, 1),) if here > 1 else ()
    return (*inside, (0, here)) if nodes > 1 else inside


def _workers_of_each_node(placed: Place, wanted: int | None) -> int:
    here, rest = divmod(placed.world_size, placed.machines)
    if rest:
        raise ConfigError(
            f"{placed.world_size} workers on {placed.machines} machines: a cluster's nodes have as many each"
        )
    if wanted not in (None, here):
        raise ConfigError(f"workers={wanted}: {placed.by} has started {here} on each machine; leave it out")
    return here


def subject_of(job: Job) -> Subject:
    """What is timed of a job: its layers in their precision, without what a run does beside."""
    asked = job.config.pipeline
    return Subject(
        layers=job.layers,
        loss=job.made.loss,
        optimizer=job.optimizer,
        batch=partial(_batch, job.made.batches),
        seed=job.config.train.seed,
        execution=Execution(
            autocast=asked.autocast, compute_dtype=asked.compute_dtype, compile=asked.compile, digest_every=0
        ),
    )


def _batch(batches: Batches, samples: int) -> tuple[Any, Any]:
    return batches.batch(0, samples, replica=0, replicas=1)


def profile_of(
    job: Job, machine: str, by_size: Sequence[AtSize], gap: float, around: float, *, how: str
) -> Profile:
    """The profile of a model's layers.

    Args:
        job: the model.
        machine: what was measured, in words.
        by_size: what layers cost at each size of micro-batches.
        gap: seconds between two ops.
        around: seconds of a step beside its ops and the optimiser.
        how: how times were measured.
    """
    today = dt.date.today().isoformat()
    return replace(
        assembled(job.layers, by_size),
        name=f"{platform.node() or 'this machine'}, {today}",
        machine=machine,
        date=today,
        update_seconds_per_byte=statistics.median(each.update_seconds_per_byte for each in by_size),
        op_overhead_seconds=gap + statistics.median(each.overhead_seconds for each in by_size),
        step_overhead_seconds=around,
        sources={
            "layers": f"{how}; layers of one kind: median over them; halves of split backwards in proportion",
            "update_seconds_per_byte": f"{job.config.optimizer.name}: measured, median",
            "op_overhead_seconds": "measured: between two ops, and what a stage more adds to its layers",
            "step_overhead_seconds": "measured: a step without its ops and the optimiser",
            "norm_peak_bytes": "measured, like all peaks: what torch's allocator gave",
        },
    )


def assembled(layers: Sequence[nn.Module], by_size: Sequence[AtSize]) -> Profile:
    """A profile of what was measured of layers and updates, and nothing else."""
    kinds = kinds_of(layers)
    update = by_size[-1].update
    return Profile(
        name="",
        machine="",
        date="",
        layers={
            kind: layer_profile([i for i, other in enumerate(kinds) if other == kind], by_size, layers)
            for kind in dict.fromkeys(kinds)
        },
        update_together=update.together,
        norm_bytes_per_byte=update.norm_bytes_per_byte,
        norm_peak_bytes=float(update.norm_peak_bytes),
    )


def skips_of(measured: AtSize) -> tuple[LayerSkip, ...]:
    """What layers save for later ones, measured with each layer as a stage."""
    return tuple(
        LayerSkip(layer, skip.targets, skip.size_bytes / (1 if skip.once else measured.size), skip.once)
        for layer, cost in enumerate(measured.costs)
        for skip in cost.skips
    )


def ties_of(layers: Sequence[nn.Module]) -> tuple[LayerTie, ...]:
    """The weights that layers share.

    >>> tied = [nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)]
    >>> tied[2].weight = tied[0].weight
    >>> ties_of(tied)
    (LayerTie(layers=(0, 2), size_bytes=16.0, trained=True, low_precision=False),)
    """
    having: dict[int, tuple[nn.Parameter, list[int]]] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            having.setdefault(id(parameter), (parameter, []))[1].append(number)
    return tuple(
        LayerTie(tuple(numbers), float(shared.nbytes), shared.requires_grad, _is_low(shared))
        for shared, numbers in having.values()
        if len(numbers) > 1
    )


_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where a word of a class's name begins."""


def kinds_of(layers: Sequence[nn.Module]) -> list[str]:
    """Each layer's kind: its class, and a number where weights of a class differ in shape or are frozen.

    >>> kinds_of([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 1)])
    ['linear', 'layer-norm', 'linear', 'linear-2']
    """
    known: dict[str, list[tuple[object, ...]]] = {}
    found = []
    for layer in layers:
        name = _WORDS.sub("-", type(layer).__name__).lower()
        shapes = tuple(
            (key, tuple(value.shape), value.requires_grad) for key, value in layer.named_parameters()
        )
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


_Travels = tuple[tuple[Travel, ...], tuple[Travel, ...]]


def _measured(
    subject: Subject,
    sizes: Sequence[int],
    repeats: int,
    done: Path,
    *,
    pairs: Sequence[tuple[int, int]],
) -> tuple[list[AtSize], tuple[float, float], list[_Travels]]:
    """What a worker runs: layers at all sizes, steps, and links.

    Args:
        subject: what is timed.
        sizes: samples of a micro-batch.
        repeats: of each measurement.
        done: gets a byte whenever a part is done.
        pairs: ranks between which links are measured.
    """

    def finished(what: Any) -> Any:
        if current_transport().rank == 0:
            with done.open("ab") as file:
                file.write(b".")
        return what

    by_size = [finished(timed(LayerTimer, subject, size, repeats)) for size in sizes]
    steps = finished(timed(StepTimer, subject, sizes[len(sizes) // 2], repeats))
    return by_size, steps, [_links(repeats, pair) for pair in pairs]


@contextmanager
def _reported(parts: Sequence[tuple[str, int]], progress: Progress) -> Iterator[Path]:
    """Gives a file that grows by a byte with each thing done, and tells it meanwhile, part by part.

    Args:
        parts: what is done, and how many things that is; the last is done when the context ends.
        progress: told of each from none to all.
    """
    due = deque[tuple[int, str, int, int]]()
    before = 0
    for part, count in parts:
        due += [(before + done, part, done, count) for done in range(count + 1)]
        before += count

    def tell(known: int) -> None:
        while due and due[0][0] <= known:
            progress(*due.popleft()[1:])

    ended = threading.Event()
    with TemporaryDirectory(prefix="counterflow-") as folder:
        path = Path(folder) / "done"
        path.touch()

        def watch() -> None:
            while not ended.wait(_POLL_SECONDS):
                tell(path.stat().st_size)

        watcher = threading.Thread(target=watch, name="counterflow profile", daemon=True)
        tell(0)
        watcher.start()
        try:
            yield path
        finally:
            ended.set()
            watcher.join()
        tell(before)


def _links(repeats: int, pair: tuple[int, int]) -> _Travels:
    """What messages and all-reduces of two workers take; all call it."""
    transport = current_transport()
    times = 3 * repeats
    return (
        measure_messages(transport, MESSAGES, repeats=times, pair=pair),
        measure_allreduces(transport, MESSAGES, repeats=times, ranks=pair),
    )


def layer_profile(
    members: Sequence[int], by_size: Sequence[AtSize], layers: Sequence[nn.Module]
) -> LayerProfile:
    """A kind's curves, from the layers of that kind."""

    def median(of: Callable[[AtSize, int], float]) -> tuple[float, ...]:
        return tuple(statistics.median(of(one, i) for i in members) for one in by_size)

    def half(of: Callable[[StageCost], float]) -> tuple[float, ...]:
        """Seconds as in a step: the share that they are of the whole backward where both were alone."""

        def seconds(one: AtSize, i: int) -> float:
            cost = one.costs[i]
            return one.backward[i] * of(cost) / cost.backward_seconds if cost.backward_seconds else 0.0

        return median(seconds)

    largest = by_size[-1]
    return LayerProfile(
        samples=tuple(float(one.size) for one in by_size),
        forward_seconds=median(lambda one, i: one.forward[i]),
        backward_seconds=median(lambda one, i: one.backward[i]),
        saved_bytes=median(lambda one, i: one.costs[i].activation_bytes),
        weights_bytes=float(largest.costs[members[0]].weight_bytes),
        output_bytes=max(largest.costs[i].output_bytes for i in members) / largest.size,
        input_gradient_seconds=half(lambda cost: cost.input_gradient_seconds),
        weight_gradients_seconds=half(lambda cost: cost.weight_gradients_seconds),
        kept_bytes=median(lambda one, i: one.costs[i].kept_bytes),
        cast_bytes=float(largest.costs[members[0]].cast_bytes),
        frozen_bytes=float(sum(p.nbytes for p in layers[members[0]].parameters() if not p.requires_grad)),
        kept_input_bytes=median(
            lambda one, i: one.costs[i].activation_bytes - one.costs[i].beyond_input_bytes
        ),
        kept_output_bytes=median(lambda one, i: one.costs[i].workspace.kept_output_bytes),
        forward_peak_bytes=median(lambda one, i: one.costs[i].workspace.forward_peak_bytes),
        backward_peak_bytes=median(lambda one, i: one.costs[i].workspace.backward_peak_bytes),
        input_gradient_peak_bytes=median(lambda one, i: one.costs[i].workspace.input_gradient_peak_bytes),
        weight_gradients_peak_bytes=median(lambda one, i: one.costs[i].workspace.weight_gradients_peak_bytes),
        kept_anyway_bytes=median(lambda one, i: one.costs[i].layer_input_bytes - one.costs[i].input_bytes),
        held_input_bytes=median(lambda one, i: one.costs[i].held_input_bytes),
        kept_gradient_bytes=median(lambda one, i: one.costs[i].workspace.kept_gradient_bytes),
        update_peak_bytes=float(max(largest.update.layers[i] for i in members)),
        parameter_bytes=tuple(float(p.nbytes) for p in layers[members[0]].parameters() if p.requires_grad),
        low_precision_bytes=float(
            sum(p.nbytes for p in layers[members[0]].parameters() if p.requires_grad and _is_low(p))
        ),
    )


def _is_low(parameter: nn.Parameter) -> bool:
    """Whether its gradient takes twice its bytes."""
    return sum_dtype(parameter.dtype) is not parameter.dtype


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _range(travels: Sequence[Travel]) -> str:
    return f"{travels[0].size_bytes:,} to {travels[-1].size_bytes:,} bytes"
