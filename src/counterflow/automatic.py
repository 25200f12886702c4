"""``schedule="auto"``: measure the model on its workers, plan within their memory, and say what was chosen.

The profile is cached by a digest of model, machine and sizes, in ``$COUNTERFLOW_CACHE`` or
``~/.cache/counterflow``. It is the mechanism of ``Pipeline`` and of the trainers of transformers.

Invariant: all workers choose the same schedule, as the first one plans; what is trained is not changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any, cast

import torch

from . import __version__
from .drawing.time_units import bytes_text
from .errors import ConfigError, CounterflowError
from .execution import Execution
from .measure.layer_chain import LayerChain
from .measure.layer_times import Subject
from .measure.machine import device_name
from .measure.model_profile import INPUTS, Description, Measurement, measurement_of
from .measure.survey import survey_of_workers
from .measure.user_model import RepeatedSamples
from .planning.inputs import input_files
from .planning.prediction import Parts
from .planning.search.constraints import Constraints
from .planning.search.search import search
from .planning.search.search_result import TOLERANCE, Plan, SearchResult
from .runtime.mini_batch.samples import samples_in
from .runtime.parameters.optimizers import Parameters
from .runtime.pipeline import AUTO, CHOOSERS, Pipeline, ScheduleChoice, ScheduleRequest
from .runtime.transport.base import Transport
from .schedule.modes import Recompute
from .schedule.registry import schedule_of

__all__ = ["CACHE", "Pipeline", "choose", "sizes_of", "survey_of_workers", "text_of"]

_LOG = logging.getLogger("counterflow.auto")

CACHE = "COUNTERFLOW_CACHE"
"""Environment variable with the folder of cached profiles."""

REPEATS = 5
"""Number of measurements, of which the median counts."""

_SHOWN = 0.005
"""Share of a step from which a loss is named."""

_SIZES = 3
"""Number of sizes of micro-batches that are measured."""


def choose(request: ScheduleRequest, transport: Transport) -> ScheduleChoice:
    """The planned schedule of a model on its workers, all of which call it.

    Raises:
        ConfigError: nothing fits into the workers' memory, or the example cannot be cut.
    """
    samples = samples_in(request.example[0], 0)
    workers = request.workers or transport.world_size
    sizes = sizes_of(samples, workers, request.micro_batch)
    subject = _subject(request, samples)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        planner_inputs = _measured(subject, sizes, transport)
    answer: Any = None
    if transport.rank == 0:
        assert planner_inputs is not None
        try:
            answer = _planned(
                planner_inputs, samples * (transport.world_size // workers), sizes, workers, request.execution
            )
        except CounterflowError as error:
            answer = str(error)
    options = transport.gather_objects(answer)[0]
    if isinstance(options, str):
        raise ConfigError(f'schedule="auto": {options}')
    (plan, text) = cast("tuple[dict[str, Any], str]", options)
    if transport.rank == 0:
        _LOG.warning("%s", text)  # the level that is shown unless logging is set up
    execution = request.execution.but(recompute=plan.get("recompute", Recompute.NONE))
    return ScheduleChoice(schedule_of(plan["schedule"], {}), tuple(plan["cuts"]), execution, text)


def sizes_of(samples: int, workers: int, micro_batch: int | None = None) -> list[int]:
    """Sizes of micro-batches that are measured and tried: the largest with a micro-batch a worker, and less.

    >>> sizes_of(32, 4), sizes_of(6, 2), sizes_of(3, 4)
    ([2, 4, 8], [1, 2], [1])
    >>> sizes_of(32, 4, micro_batch=3)
    [3]
    """
    if micro_batch is not None:
        return [micro_batch]
    largest = max(1, samples // workers)
    powers = [1 << power for power in range(largest.bit_length()) if not samples % (1 << power)]
    return powers[-_SIZES:]


def _subject(request: ScheduleRequest, samples: int) -> Subject:
    execution = request.execution
    return Subject(
        layers=[*request.layers],
        loss=cast("Any", request.loss),
        optimizer=request.optimizer,
        batch=RepeatedSamples(request.example, samples),
        seed=execution.seed,
        execution=Execution(
            autocast=execution.autocast,
            compute_dtype=execution.compute_dtype,
            compile=execution.compile,
            digest_every=0,
        ),
        batching=request.batching,
        fills_meta=True,
    )


def _measured(subject: Subject, sizes: list[int], transport: Transport) -> Measurement | None:
    """The profile, on the first worker; measured by all unless the first one has it."""
    optimizer = subject.optimizer(Parameters([("weight", torch.nn.Parameter(torch.zeros(1, 1)))]))
    chain = LayerChain.of(subject)
    folder = _cache_folder(subject, chain, sizes, optimizer, transport)
    cached = _cached(folder) if transport.rank == 0 else None
    if transport.gather_objects(cached is not None)[0]:
        return cached
    workers = transport.world_size
    if transport.rank == 0:
        _LOG.warning(
            'schedule="auto": measuring %d of %d layers on %d worker%s, once; the profile is kept in %s',
            *(len(chain.places), len(chain.kinds), workers, "s" * (workers > 1), folder),
        )
    survey = survey_of_workers(subject, chain, sizes, repeats=REPEATS)
    description = Description("model", type(optimizer).__name__, "cf.profile")
    measurement = measurement_of(survey, description, repeats=REPEATS)
    if transport.rank == 0:
        try:
            measurement.save(folder)
        except OSError as error:
            _LOG.warning('schedule="auto": the profile could not be kept: %s', error)
    return measurement


def _cache_folder(
    subject: Subject,
    chain: LayerChain,
    sizes: list[int],
    optimizer: torch.optim.Optimizer,
    transport: Transport,
) -> Path:
    switches = {name: value for name, value in optimizer.defaults.items() if isinstance(value, bool)}
    parts = (
        (__version__, torch.__version__),
        (chain.digest, chain.input_bytes),
        (type(optimizer).__name__, sorted(switches.items())),
        getattr(subject.loss, "__qualname__", type(subject.loss).__name__),
        sizes,
        subject.execution.agreed(),
        (transport.kind, transport.world_size),
        device_name(transport.device.type, torch.get_num_threads()),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    root = os.environ.get(CACHE)
    return (Path(root) if root else Path.home() / ".cache" / "counterflow") / "profiles" / digest


def _cached(folder: Path) -> Measurement | None:
    model, profile, cluster = (folder / f"{name}.toml" for name in INPUTS)
    try:
        return Measurement(
            input_files.load_model(model),
            input_files.load_profile(profile),
            input_files.load_cluster(cluster),
            (),
            (),
        )
    except (OSError, ConfigError):
        return None


def _planned(
    inputs: Measurement, samples: int, sizes: list[int], workers: int, execution: Execution
) -> tuple[dict[str, Any], str]:
    chosen = execution.recompute
    constraints = Constraints(
        depths=(workers,),
        samples=tuple(sizes),
        slices=(1,),
        zero_stages=(0,),
        sync=(execution.sync,),
        recompute=tuple(Recompute) if chosen is Recompute.NONE else (chosen,),
    )
    result = search(inputs.model, inputs.profile, inputs.cluster, samples, constraints, count=2)
    return result.simplest().pipeline_options, text_of(result)


def text_of(result: SearchResult) -> str:
    """The choice in one line: its step, where that is lost, its memory, and the second-best scheme."""
    plan = result.simplest()
    parts = plan.play.parts()
    losses = {name: getattr(parts, name) for name in Parts.__slots__ if name != "compute"}
    limit = max(losses, key=lambda name: losses[name])
    text = f'schedule="auto": {_named(plan)}, {_milliseconds(plan)} a step planned'
    if losses[limit] >= _SHOWN * plan.seconds:
        text += f" ({losses[limit] / plan.seconds:.0%} of it {limit})"
    peak = max(plan.prediction.peak_bytes)
    text += f", {bytes_text(peak)} of {bytes_text(result.usable_bytes)}"
    schemes = [second for second in result.of_schemes if second is not plan]
    if not schemes:
        return f"{text}; no other scheme is possible"
    second = schemes[0]
    text += f"; second-best {_named(second)}: {_milliseconds(second)}"
    if second.seconds < plan.seconds:
        text += f" (within {TOLERANCE:.0%} the simpler one is taken)"
    return text


def _milliseconds(plan: Plan) -> str:
    return f"{1e3 * plan.seconds:.4g} ms"


def _named(plan: Plan) -> str:
    configuration = plan.play.configuration
    options = ", ".join(f"{name}={value}" for name, value in configuration.options)
    suffix = "" if configuration.recompute is Recompute.NONE else f", recompute={configuration.recompute}"
    return f"{configuration.scheme}({options}){suffix}"


CHOOSERS[AUTO] = choose
