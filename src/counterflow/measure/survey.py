"""Measures layers, steps and links on all workers of a machine or a cluster at the same time.

In a run they compute at the same time too, and share caches, memory and power.

Invariant: nothing is guessed. What was not measured (a second node) is omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch

from counterflow.errors import ConfigError
from counterflow.planning.inputs.profile import Profile
from counterflow.runtime.transport.kinds import GLOO, LOCAL, NCCL
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import RankInfo, current_transport, rank_info

from .group_results import joined_lengths, joined_sizes
from .layer_chain import LayerChain
from .layer_costs import assembled, layers_with_loss
from .layer_groups import groups_of, values_of
from .layer_times import AtLengths, AtSize, LayerTimer, LengthTimer, StepOverheads, StepTimer, timed
from .links import Travel, measure_links
from .machine import cores
from .measuring_progress import Progress, reported
from .subject_pipeline import Subject, SubjectSource, runnable_sizes

_Result = TypeVar("_Result")

_Travels = tuple[tuple[Travel, ...], tuple[Travel, ...]]
"""Messages and all-reduces of two workers."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Results of a survey.

    Attributes:
        device: device of each worker: cuda or cpu.
        nodes: number of machines.
        workers: number of workers of each machine.
        threads: number of threads of each worker.
        by_size: costs of layers at each size of micro-batches.
        overheads: seconds of a step in addition to its ops and the optimiser.
        inside: messages and all-reduces of two workers of one node; empty if there is one worker.
        between: those of two workers on different nodes; empty if there is one node.
        at_lengths: costs of layers at shorter sequences; None if the model has none that slices divide.
        chain: the layers, and those of them that were measured.
        layers: costs of each kind of layer.
    """

    device: str
    nodes: int
    workers: int
    threads: int
    by_size: list[AtSize]
    chain: LayerChain
    layers: Profile
    overheads: StepOverheads
    inside: _Travels = ((), ())
    between: _Travels = ((), ())
    at_lengths: AtLengths | None = None


def survey(
    source: SubjectSource,
    sizes: Sequence[int],
    *,
    workers: int | None,
    threads: int | None,
    repeats: int,
    progress: Progress,
) -> Survey:
    """Measure a model's layers on this machine, and its links; under torchrun on all machines.

    Args:
        source: function that makes the subject of the measurement; each worker calls it.
        sizes: samples of a micro-batch, ascending.
        workers: workers of this machine; None: one per GPU, or one per core.
        threads: threads of each worker; None: the cores divided by the workers.
        repeats: number of measurements.
        progress: called with the progress.

    Raises:
        ConfigError: torchrun has started another number of workers, or not as many on each machine.
    """
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    placed = rank_info()
    nodes = machines()
    here = workers or (torch.cuda.device_count() if on_gpu else cores())
    if placed is not None:
        here = _workers_of_each_node(placed, workers)
    threads = threads or max(1, cores() // here)
    carrier = NCCL if on_gpu else GLOO
    run = partial(launch, transport=(LOCAL if here == 1 else carrier).name, device=device, threads=threads)
    with reported([("layers", len(sizes)), ("sequences", 1), ("steps", 1), ("links", 1)], progress) as done:
        if placed is not None:
            current_transport(carrier.name, device=device)
            torch.set_num_threads(threads)
            measured = _measured(source, sizes, repeats, done, pairs=_pairs(here, nodes))
        else:
            # One launch for all: a worker takes seconds to start, and more for a model of transformers.
            alone = _pairs(here, 1) if here == 2 else ()
            measured = run(_measured, source, sizes, repeats, done, pairs=alone, workers=here)[0]
            if here > 2:
                links = [run(measure_links, repeats, (0, 1), workers=2)[0]]
                measured = (*measured[:-1], links)
    chain, layers, by_size, lengths, steps, links = measured
    inside = links[0] if here > 1 else ((), ())
    between = links[-1] if nodes > 1 else ((), ())
    return Survey(device, nodes, here, threads, by_size, chain, layers, steps, inside, between, lengths)


def survey_of_workers(subject: Subject, chain: LayerChain, sizes: Sequence[int], *, repeats: int) -> Survey:
    """Measure a model's layers and links on the workers that run; all of them call it.

    Args:
        subject: subject of the measurement.
        chain: its layers that are measured.
        sizes: samples of a micro-batch, ascending.
        repeats: number of measurements.
    """
    transport, here = current_transport(), _workers_here()
    nodes = transport.world_size // here
    measured = _measured(lambda: subject, sizes, repeats, None, pairs=_pairs(here, nodes), chain=chain)
    chain, layers, by_size, lengths, steps, links = measured
    return Survey(
        *(transport.device.type, nodes, here, torch.get_num_threads(), by_size, chain, layers, steps),
        links[0] if here > 1 else ((), ()),
        links[-1] if nodes > 1 else ((), ()),
        lengths,
    )


def machines() -> int:
    """Number of machines that the workers are on."""
    placed = rank_info()
    return 1 if placed is None else placed.machines


def _workers_here() -> int:
    return current_transport().world_size // machines()


def _pairs(here: int, nodes: int) -> tuple[tuple[int, int], ...]:
    inside = ((0, 1),) if here > 1 else ()
    return (*inside, (0, here)) if nodes > 1 else inside


def _workers_of_each_node(placed: RankInfo, wanted: int | None) -> int:
    here, rest = divmod(placed.world_size, placed.machines)
    if rest:
        raise ConfigError(
            f"{placed.world_size} workers on {placed.machines} machines: all nodes need the same number; "
            "start as many on each"
        )
    if wanted not in (None, here):
        raise ConfigError(f"workers={wanted}: {placed.launcher} has started {here} on each machine; omit it")
    return here


def _measured(
    source: SubjectSource,
    sizes: Sequence[int],
    repeats: int,
    done: Path | None,
    *,
    pairs: Sequence[tuple[int, int]],
    chain: LayerChain | None = None,
) -> tuple[LayerChain, Profile, list[AtSize], AtLengths | None, StepOverheads, list[_Travels]]:
    """Run all measurements on a worker: layers at all sizes and at some lengths, steps, and links.

    Args:
        source: function that makes the subject of the measurement.
        sizes: samples of a micro-batch.
        repeats: number of measurements.
        done: file that gets a byte whenever a part is done; None: no file.
        pairs: ranks between which links are measured.
        chain: the layers that are measured; None: those of the subject.
    """
    model = source()
    chain = chain or LayerChain.of(model)
    groups = groups_of(model, chain, sizes, workers=_workers_here())
    values = values_of(model, chain)
    # Workers that share cores wait for each other, which is no disturbance.
    repeating = _workers_here() * torch.get_num_threads() <= cores()
    run = partial(timed, repeats=repeats, repeating=repeating)
    parts: list[tuple[list[AtSize], AtLengths | None]] = []
    progress = _Parts(done, len(groups))
    tried = sizes
    for group in groups:
        subject = group.subject(model, chain, values)
        sizes = runnable_sizes(subject, sizes)
        for _ in tried[len(sizes) :]:
            progress.count(None)
        by_size = [progress.count(run(LayerTimer, subject, size)) for size in sizes]
        parts.append((by_size, progress.count(run(LengthTimer, subject, sizes[0]))))
    largest = max(groups, key=lambda group: group.stop - group.start)
    if len(groups) > 1:
        subject = largest.subject(model, chain, values)
    steps = _Parts(done, 1).count(run(StepTimer, subject, sizes[len(sizes) // 2]))
    layers = layers_with_loss([model.layers[place] for place in chain.places], model.loss)
    by_size = [
        joined_sizes(groups, results, layers, model)
        for results in zip(*(part[0][-len(sizes) :] for part in parts), strict=True)
    ]
    lengths = joined_lengths(groups, [part[1] for part in parts])
    profile = assembled(layers, by_size, lengths, chain.measured_kinds)
    if len(sizes) < len(tried):
        profile = replace(profile, min_samples=sizes[0])
    if repeating:
        profile = replace(profile, waiting_share=round(fmean(times.waiting for times in by_size), 3))
    return chain, profile, by_size, lengths, steps, [measure_links(repeats, pair) for pair in pairs]


class _Parts:
    """Progress of measurements that are made once for each group.

    Args:
        file: file that gets a byte whenever a measurement of all groups is done; None: no file.
        groups: number of groups.
    """

    def __init__(self, file: Path | None, groups: int) -> None:
        self._file, self._groups, self._counted = file, groups, 0

    def count(self, result: _Result) -> _Result:
        """Count a measurement of a group, and return its result."""
        self._counted += 1
        if self._counted % self._groups == 0 and self._file is not None and current_transport().rank == 0:
            with self._file.open("ab") as file:
                file.write(b".")
        return result
