"""Continuing a run with fewer workers: when a worker stays away, and what the remaining ones run.

Invariant: mini-batches and the size of micro-batches stay the same, so the learning curve does too. The
planner chooses among synchronous schemes by estimated costs of layers; nothing is measured, because the
workers have just failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError, PlanError
from counterflow.measure.equal_layers import kinds_of
from counterflow.measure.machine import cores, memory_bytes
from counterflow.planning import Cluster, LayerProfile, Link, Model, Profile
from counterflow.planning.cost.device_placement import Arrangement
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.schedule.modes import Recompute

from ..config import RunConfig
from ..job import Job, operations, prepare
from ..planned import carried_tables, planned_config
from ..sections.training_section import PlanSection
from .events import FAILED, RESTARTED, Event, of_this_start, read

_TRIES = 4
"""Further attempts within the time that a worker may stay away."""

_OPS_A_SECOND, _MESSAGE_SECONDS, _BYTES_A_SECOND, _OP_SECONDS = 1e10, 1e-4, 1e9, 1e-4
"""Estimates for a core and Gloo; for GPUs all are larger, in about the same proportions."""

_STATES = {"sgd": 1.0, "adam": 2.0, "adamw": 2.0}


class Absence:
    """Measures how long a worker has stayed away, in the process that starts the workers.

    Args:
        folder: folder of the run.
        after_seconds: how long a worker may stay away; None: for ever.
        now: the time, in seconds.
        sleep: waits this many seconds.
    """

    def __init__(
        self,
        folder: Path,
        after_seconds: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.after_seconds = folder, after_seconds
        self._now, self._sleep = now, sleep
        self._since = 0.0

    def over(self, failed: Event) -> bool:
        """True if the run continues without a worker after a failure; if not, waits before another attempt.

        Args:
            failed: the event of the failure.
        """
        if self.after_seconds is None or not failed["lost"]:
            return False
        returned = not failed["attempt"] or any(
            event["event"] == RESTARTED and event["attempt"] == failed["attempt"]
            for event in of_this_start(self.folder)
        )
        if returned:
            self._since = self._now()
        away = self._now() - self._since
        if away >= self.after_seconds:
            return True
        if not returned:
            self._sleep(min(self.after_seconds / _TRIES, self.after_seconds - away))
        return False


def wait_for_others(folder: Path, after_seconds: float) -> None:
    """Wait, as one of too few workers, until the missing ones have been away for this long.

    torchrun restarts all workers if the missing ones return meanwhile.
    """
    failures = [event for event in read(folder) if event["event"] == FAILED]
    since = datetime.fromisoformat(failures[-1]["time"]).timestamp() if failures else time.time()
    time.sleep(min(after_seconds, max(0.0, since + after_seconds - time.time())))


def with_fewer(config: RunConfig, processes: int) -> RunConfig:
    """A config with the same training for fewer workers, as the planner chooses it.

    Args:
        config: config of the run.
        processes: number of workers, over all replicas.

    Raises:
        ConfigError: no plan exists for this many workers.
    """
    job = prepare(config, ())
    pipeline, train = config.pipeline, config.train
    on_gpu = job.config.pipeline.transport == "nccl"
    optimizer, profile = config.optimizer, _profile(job)
    model = Model(
        name=job.about.model,
        layers=tuple(kinds_of(job.layers)),
        optimizer_states=_STATES[optimizer.name] if optimizer.name != "sgd" or optimizer.momentum else 0.0,
        train=config.model.values(),
        config=carried_tables(job.config),
    )
    link = Link(_MESSAGE_SECONDS, 1 / _BYTES_A_SECOND)
    cluster = Cluster(
        name="those that are left",
        nodes=1,
        devices=processes,
        memory_bytes=memory_bytes("cuda" if on_gpu else "cpu", processes),
        inside=link,
        between=link,
        cores=None if on_gpu else max(processes, cores()),
    )
    micro, rest = divmod(train.samples, job.schedule.micro_batches)
    mini_batch = train.samples * pipeline.replicas
    recompute = tuple(Recompute) if pipeline.recompute is Recompute.NONE else (pipeline.recompute,)
    constraints = Constraints(
        samples=None if rest else (micro,),
        recompute=recompute,
        sync=(pipeline.sync,),
        arrangements=(Arrangement.PIPELINE_INSIDE,),
        zero_stages=(pipeline.zero_stage,),
    )
    try:
        result = search(model, profile, cluster, mini_batch, constraints, count=1)
    except PlanError as error:
        raise ConfigError(
            f"{plural(processes, 'worker')} {'is' if processes == 1 else 'are'} left, but no plan runs "
            f"on them: {error}"
        ) from error
    planned = planned_config(model, profile, cluster, result.best[0].play.prediction())
    same = {"transport": pipeline.transport, "sync": pipeline.sync}
    run = {"out": train.out, "resume": train.resume}  # it is the same run, which goes on
    return planned.but(pipeline=same, train=run).model_copy(update={"plan": PlanSection()})


def without_device(visible: str | None, count: int, gone: int | None, needed: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES without a device that is gone.

    >>> without_device(None, 4, 1, 3), without_device("4,5,6", 3, 2, 2), without_device(None, 3, None, 3)
    ('0,2,3', '4,5', '0,1,2')

    Args:
        visible: current value; None: not set.
        count: number of visible devices.
        gone: rank of the worker whose device is gone; None: unknown.
        needed: number of devices that are needed.
    """
    devices = visible.split(",") if visible else [str(number) for number in range(count)]
    if gone is not None and len(devices) > needed:
        devices = [name for rank, name in enumerate(devices) if rank != gone]
    return ",".join(devices[:needed])


def leave_out(worker: int | None, needed: int) -> None:
    """Hide the GPU of a worker from the workers that are started next."""
    if torch.cuda.is_available():
        name = "CUDA_VISIBLE_DEVICES"
        os.environ[name] = without_device(os.environ.get(name), torch.cuda.device_count(), worker, needed)


def _profile(job: Job) -> Profile:
    positions, hidden = job.bundle.batches.positions, job.config.model.hidden
    costs = operations(job.bundle, job.layers, 1)
    layers = {}
    for kind, layer, cost in zip(kinds_of(job.layers), job.layers, costs, strict=True):
        widths = sum(weight.shape[-1] for weight in layer.parameters() if weight.dim() > 1)
        layers[kind] = LayerProfile(
            samples=(1.0,),
            forward_seconds=(cost / _OPS_A_SECOND,),
            backward_seconds=(2 * cost / _OPS_A_SECOND,),
            saved_bytes=(8.0 * positions * widths,),
            weights_bytes=float(sum(weight.nbytes for weight in layer.parameters())),
            buffer_bytes=float(sum(buffer.nbytes for buffer in layer.buffers())),
            output_bytes=4.0 * positions * hidden,
        )
    return Profile(name="estimated", machine="", date="", layers=layers, op_overhead_seconds=_OP_SECONDS)
