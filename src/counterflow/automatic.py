"""``schedule="auto"``: measure the model on its workers, plan within their memory, and say what was chosen.

It is the mechanism of ``Pipeline``, of the trainers of transformers, and of ``counterflow train``.

Invariant: all workers choose the same schedule, as the first one plans; what is trained is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from .common.number_texts import byte_size
from .errors import ConfigError, CounterflowError
from .execution import Execution
from .measure import profile_cache
from .measure.layer_chain import LayerChain
from .measure.model_profile import Description, Measurement, measurement_of
from .measure.optimizer_trial import optimizer_name
from .measure.subject_pipeline import Subject
from .measure.survey import machines, survey_of_workers
from .measure.user_model import RepeatedSamples
from .planning.prediction import Parts, seconds_text
from .planning.search.constraints import Constraints
from .planning.search.search import search
from .planning.search.search_result import TOLERANCE, Plan, SearchResult
from .planning.search.space import COPIES
from .runtime.mini_batch.samples import samples_in
from .runtime.pipeline import AUTO, CHOOSERS, Pipeline, ScheduleChoice, ScheduleRequest
from .runtime.transport.base import Transport
from .schedule.modes import Recompute
from .schedule.registry import schedule_of

__all__ = ["Pipeline", "choose", "planned", "sizes_of", "survey_of_workers", "text_of"]

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
            mini_batch = samples * (transport.world_size // workers)
            result = planned(planner_inputs, mini_batch, sizes, workers, request.execution)
            plan = result.simplest()
            peak = max(plan.prediction.peak_bytes)
            answer = plan.pipeline_options, (plan.seconds, peak, text_of(result))
        except CounterflowError as error:
            answer = str(error)
    options = transport.gather_objects(answer)[0]
    if isinstance(options, str):
        raise ConfigError(f'schedule="auto": {options}')
    arguments, facts = cast("tuple[dict[str, Any], tuple[float, float, str]]", options)
    if transport.rank == 0:
        profile_cache.LOG.warning("%s", facts[-1])  # the level that is shown unless logging is set up
    execution = request.execution.but(recompute=arguments.get("recompute", Recompute.NONE))
    schedule = schedule_of(arguments["schedule"], {})
    return ScheduleChoice(schedule, tuple(arguments["cuts"]), execution, *facts)


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
        execution=execution.of_measurement(),
        batching=request.batching,
        fills_meta=True,
    )


def _measured(subject: Subject, sizes: list[int], transport: Transport) -> Measurement | None:
    """The profile, on the first worker; measured by all unless the first one has it."""
    chain, workers = LayerChain.of(subject), transport.world_size
    folder = profile_cache.folder_of(
        *(subject, chain, sizes),
        transport=transport.kind.name,
        workers=workers // machines(),
        device=transport.device.type,
        threads=torch.get_num_threads(),
    )
    first = transport.rank == 0
    cached = profile_cache.read(folder, transport.device.type) if first else None
    if transport.gather_objects(cached is not None)[0]:
        return cached
    if first:
        profile_cache.announce(chain, workers, folder)
    survey = survey_of_workers(subject, chain, sizes, repeats=profile_cache.REPEATS)
    description = Description("model", optimizer_name(subject.optimizer), "cf.profile")
    measurement = measurement_of(survey, description, repeats=profile_cache.REPEATS)
    if first:
        profile_cache.write(measurement, folder)
    return measurement


def planned(
    inputs: Measurement, samples: int, sizes: Sequence[int], workers: int, execution: Execution
) -> SearchResult:
    """The plans of one pipeline over some workers, with the micro-batches that were measured.

    Args:
        inputs: the measured model.
        samples: samples of a mini-batch, over all replicas.
        sizes: samples of the measured micro-batches.
        workers: number of workers of a pipeline.
        execution: options of the run; recomputation that is none may be planned.

    Raises:
        PlanError: nothing fits into the workers' memory.
    """
    chosen = execution.recompute
    constraints = Constraints(
        depths=(workers,),
        samples=tuple(sizes),
        slices=(1,),
        zero_stages=(execution.zero_stage,),
        sync=(execution.sync,),
        recompute=tuple(Recompute) if chosen is Recompute.NONE else (chosen,),
    )
    return search(inputs.model, inputs.profile, inputs.cluster, samples, constraints, count=2)


def text_of(result: SearchResult) -> str:
    """The choice in one line: its step, where that is lost, its memory, and the second-best scheme."""
    plan = result.simplest()
    parts = plan.play.parts()
    losses = {name: getattr(parts, name) for name in Parts.__slots__ if name != "compute"}
    limit = max(losses, key=lambda name: losses[name])
    text = f'schedule="auto": {_named(plan)}, {_step_text(plan)} a step planned'
    if losses[limit] >= _SHOWN * plan.seconds:
        text += f" ({losses[limit] / plan.seconds:.0%} of it {limit})"
    peak = max(plan.prediction.peak_bytes)
    text += f", {byte_size(peak)} of {byte_size(result.usable_bytes)}"
    for omission in result.omissions:
        if omission.what.endswith(COPIES):
            text += f"; without {omission.what}: {omission.reason}"
    schemes = [second for second in result.of_schemes if second is not plan]
    if not schemes:
        return f"{text}; no other scheme is possible"
    second = schemes[0]
    text += f"; second-best {_named(second)}: {_step_text(second)}"
    if second.seconds < plan.seconds:
        text += f" (within {TOLERANCE:.0%} the simpler one is taken)"
    return text


def _step_text(plan: Plan) -> str:
    return seconds_text(plan.seconds, plan.play.range_seconds)


def _named(plan: Plan) -> str:
    configuration = plan.play.configuration
    options = ", ".join(f"{name}={value}" for name, value in configuration.options)
    suffix = "" if configuration.recompute is Recompute.NONE else f", recompute={configuration.recompute}"
    return f"{configuration.scheme}({options}){suffix}"


CHOOSERS[AUTO] = choose
