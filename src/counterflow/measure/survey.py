"""Measures layers, steps and links on all workers of a machine, or of a cluster, at one time.

They compute at one time in a run too: they share caches, memory and power.

Invariant: nothing is guessed. What was not measured (a second node) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from counterflow.errors import ConfigError
from counterflow.runtime.transport.kinds import GLOO, LOCAL, NCCL
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.place import Place, place
from counterflow.runtime.workers.world import current_transport

from .layer_times import AtSize, LayerTimer, StepTimer, Subject, timed
from .links import Travel, measure_links
from .machine import cores
from .progress import Progress, reported

_Travels = tuple[tuple[Travel, ...], tuple[Travel, ...]]
"""Messages and all-reduces of two workers."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was measured.

    Attributes:
        device: of each worker: cuda or cpu.
        nodes: machines.
        workers: of each of them.
        threads: with which each computed.
        by_size: what layers cost at each size of micro-batches.
        gap_seconds: between two ops.
        around_seconds: of a step beside its ops and the optimiser.
        inside: messages and all-reduces of two workers of one node; empty where there is one worker.
        between: those of two workers on different nodes; empty where there is one node.
    """

    device: str
    nodes: int
    workers: int
    threads: int
    by_size: list[AtSize]
    gap_seconds: float
    around_seconds: float
    inside: _Travels = ((), ())
    between: _Travels = ((), ())


def survey(
    subject: Subject,
    sizes: Sequence[int],
    *,
    workers: int | None,
    threads: int | None,
    repeats: int,
    progress: Progress,
) -> Survey:
    """Measure a model's layers on this machine, and its links; under torchrun on all machines.

    Args:
        subject: what is timed.
        sizes: samples of a micro-batch, from the least.
        workers: of this machine; None: a GPU each, or a core.
        threads: that each computes with; None: the cores shared out.
        repeats: of each measurement, whose median counts.
        progress: called as it goes on.

    Raises:
        ConfigError: torchrun has started another number of workers, or not as many on each machine.
    """
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    placed = place()
    nodes = 1 if placed is None else placed.machines
    here = workers or (torch.cuda.device_count() if on_gpu else cores())
    if placed is not None:
        here = _workers_of_each_node(placed, workers)
    threads = threads or max(1, cores() // here)
    carrier = NCCL if on_gpu else GLOO
    run = partial(launch, transport=(LOCAL if here == 1 else carrier).name, device=device, threads=threads)
    with reported([("layers", len(sizes)), ("steps", 1), ("links", 1)], progress) as done:
        if placed is not None:
            current_transport(carrier.name, device=device)
            torch.set_num_threads(threads)
            by_size, steps, found = _measured(subject, sizes, repeats, done, pairs=_pairs(here, nodes))
        else:
            # One launch for all: a worker takes seconds to start, and a model of transformers many.
            alone = _pairs(here, 1) if here == 2 else ()
            by_size, steps, found = run(_measured, subject, sizes, repeats, done, pairs=alone, workers=here)[
                0
            ]
            if here > 2:
                found = [run(measure_links, repeats, (0, 1), workers=2)[0]]
    inside = found[0] if here > 1 else ((), ())
    between = found[-1] if nodes > 1 else ((), ())
    return Survey(device, nodes, here, threads, by_size, *steps, inside, between)


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
    return by_size, steps, [measure_links(repeats, pair) for pair in pairs]
