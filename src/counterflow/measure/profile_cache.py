"""Profiles that are measured once: kept in a folder named by a digest.

The folder is in ``$COUNTERFLOW_CACHE`` or ``~/.cache/counterflow``, and contains the planner's three files.
The digest is of all that costs depend on: code, operators and weights of the model and the loss, options of
the optimizer, machines, execution, sizes, and torch's settings.

Invariant: what is read is complete, as a file appears when it is written; a damaged one is measured again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from counterflow.common.plurals import plural
from counterflow.common.tensors.float32_precision import Float32Precision
from counterflow.errors import ConfigError
from counterflow.runtime.transport.kinds import GLOO, NCCL

from .content_digests import optimizer_content
from .layer_chain import LayerChain
from .machine import cores, device_name, worker_bytes
from .model_profile import Description, Measurement, measure_model
from .subject_pipeline import Subject, SubjectSource
from .survey import machines

CACHE = "COUNTERFLOW_CACHE"
"""Environment variable with the folder of cached profiles."""

LOG = logging.getLogger("counterflow.auto")

_METHOD = 7
"""Number of the way of measuring; another one makes kept profiles stale."""

REPEATS = 5
"""Number of measurements."""


def folder_of(
    subject: Subject,
    chain: LayerChain,
    sizes: Sequence[int],
    *,
    transport: str,
    workers: int,
    device: str,
    threads: int,
) -> Path:
    """The folder of a subject's profile on this machine.

    Args:
        subject: subject of the measurement.
        chain: its layers that are measured.
        sizes: samples of the measured micro-batches.
        transport: name of the transport.
        workers: workers of each machine.
        device: their device, cuda or cpu.
        threads: threads of each.
    """
    parts = (
        (_METHOD, torch.__version__),
        (chain.digest, chain.input_bytes),
        optimizer_content(subject.optimizer),
        [*sizes],
        subject.execution.agreed(),
        (transport, workers, machines()),
        device_name(device, threads),
        _settings(),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    root = os.environ.get(CACHE)
    return (Path(root) if root else Path.home() / ".cache" / "counterflow") / "profiles" / digest


def _settings() -> tuple[object, ...]:
    # torch's switches that change how fast its kernels are
    mkldnn, cudnn = torch.backends.mkldnn, torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        [getattr(mkldnn, name, None) for name in ("enabled", "deterministic")],
        [getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")],
        Float32Precision.current().by_backend,
    )


def read(folder: Path, device: str) -> Measurement | None:
    """The measurement in a folder, with a worker's memory as it is now; None: there is none that can be read.

    Args:
        folder: the folder.
        device: device of the workers, cuda or cpu.
    """
    try:
        measurement = Measurement.load(folder)
    except (OSError, ConfigError):
        return None
    cluster = measurement.cluster
    memory = worker_bytes(device, cluster.devices)
    return replace(measurement, cluster=replace(cluster, memory_bytes=memory))


def write(measurement: Measurement, folder: Path) -> None:
    """Keep a measurement, if the folder can be written."""
    try:
        measurement.save(folder)
    except OSError as error:
        LOG.warning("the profile could not be kept: %s", error)


def announce(chain: LayerChain, workers: int, folder: Path) -> None:
    """Say that a measurement begins."""
    LOG.warning(  # the level that is shown unless logging is set up
        "measuring %d of %d layers on %s, once; the profile is kept in %s",
        *(len(chain.places), len(chain.kinds), plural(workers, "worker"), folder),
    )


def measure_once(
    source: SubjectSource,
    description: Description,
    sizes: Sequence[int],
    *,
    workers: int | None = None,
    threads: int | None = None,
) -> Measurement:
    """The cached profile of a model on workers of this machine; measured if there is none.

    Args:
        source: function that makes the subject; each worker calls it.
        description: words about it.
        sizes: samples of the measured micro-batches.
        workers: number of workers; None: one per GPU, or one per core.
        threads: threads of each worker; None: the cores divided by the workers.
    """
    subject, on_gpu = source(), torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    workers = workers or (torch.cuda.device_count() if on_gpu else cores())
    threads = threads or max(1, cores() // workers)
    chain = LayerChain.of(subject)
    folder = folder_of(
        *(subject, chain, sizes),
        transport=(NCCL if on_gpu else GLOO).name,
        workers=workers,
        device=device,
        threads=threads,
    )
    measurement = read(folder, device)
    if measurement is None:
        announce(chain, workers, folder)
        measurement = measure_model(
            source, description, sizes=sizes, workers=workers, threads=threads, repeats=REPEATS
        )
        write(measurement, folder)
    return measurement
