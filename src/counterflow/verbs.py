"""The verbs that need a whole model, as functions from records to records: plan, predict, verify, train.

Each calls one function of its room. Flags, bars and tables of commands are in ``cli``. The other
verbs are functions of their own rooms: ``simulate``, ``check``, ``draw``, ``compare``, ``synthesize``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from .errors import ConfigError
from .execution import Execution
from .planning.inputs import input_files
from .planning.inputs.cluster import Cluster
from .planning.inputs.model import Model
from .planning.inputs.profile import Profile
from .planning.predict import predict as _predict
from .planning.prediction import Configuration, Prediction
from .planning.search.constraints import Constraints, cuts_of
from .planning.search.search import Progress, search
from .planning.search.search_result import SearchResult
from .planning.task import PlanningTask
from .schedule import registry
from .schedule.ir import Schedule
from .schedule.scheme_keywords import Sizes

if TYPE_CHECKING:
    from torch import nn

    from .execution import Batching
    from .measure.model_profile import Measurement
    from .runtime.mini_batch.loss_output import LossFunction
    from .runtime.parameters.optimizers import MakeOptimizer, MakeScheduler
    from .training import Callback, RunConfig
    from .training.training_report import RunResult
    from .verification.training_agreement import MiniBatches, TrainingAgreement

_SIZES = (1, 2, 4, 8)
"""Default samples of the measured micro-batches."""


def plan(
    model: Model | Measurement | nn.Module | Sequence[nn.Module] | Path | str | None = None,
    profile: Profile | Path | str | None = None,
    cluster: Cluster | Path | str | None = None,
    mini_batch: int | None = None,
    *,
    example: str | tuple[Any, Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: MakeOptimizer | None = None,
    sizes: Sequence[int] | None = None,
    constraints: Constraints | None = None,
    count: int = 10,
    progress: Progress | None = None,
    **limits: Any,
) -> SearchResult:
    """Find the best scheme, depth, width, micro-batch and recomputation for a model on a cluster.

    Args:
        model: what is trained, as a record or a TOML file; or the result of ``profile``, with which profile
            and cluster are given, too. A module or a list of layers is measured as ``profile`` measures it,
            on as many workers as this machine has, or as the one in ``depths``; once, since the profile is
            kept.
        profile: costs of its layers on a device, as a record or a TOML file.
        cluster: the devices and their links, as a record or a TOML file.
        mini_batch: samples of one update, over all replicas; of a module by default those of its example.
        example: a paper's run by its name (``counterflow plan --list``), in place of what is not given; for a
            module a mini-batch, inputs and targets.
        loss: loss function of a module, as of ``profile``.
        optimizer: function that makes the optimizer of a module; None: AdamW.
        sizes: samples of the micro-batches with which a module is measured; None: 1, 2, 4 and 8, as far as
            the example has samples.
        constraints: constraints on a plan.
        count: how many of the best plans are returned, 1 or more.
        progress: called with candidates decided, candidates in all, and the current activity.
        limits: fields of ``Constraints``, in place of the record; a value alone is one of one value.

    Returns:
        The best plans (``best``), the best of each scheme, and statistics of the search.

    Raises:
        ConfigError: an input is missing or damaged, or a limit is unknown or not legal.
        PlanError: no candidate meets the limits, or none fits.

    >>> found = plan(example="chimera-bert48", schemes=("dapple", "chimera"), depths=(4,))
    >>> found.best[0].play.configuration.scheme
    'chimera'
    """
    if constraints is not None and limits:
        raise ConfigError(f"{', '.join(limits)}: given in addition to constraints; put them into the record")
    if unknown := limits.keys() - set(Constraints.__dataclass_fields__):
        known = ", ".join(Constraints.__dataclass_fields__)
        raise ConfigError(f"{min(unknown)}: unknown limit; plan accepts {known}")
    cuts = limits.pop("cuts") if isinstance(limits.get("cuts"), str) else None
    constraints = constraints or Constraints(**limits)
    if _is_module(model):
        if profile is not None:
            raise ConfigError("profile: given in addition to a module, which is measured; leave it out")
        if loss is None or not isinstance(example, tuple):
            raise ConfigError("plan needs loss and example=(inputs, targets) to measure a module; give both")
        depths = constraints.depths
        workers = depths[0] if depths is not None and len(depths) == 1 else None
        model, samples = _measured(cast("Any", model), loss, example, optimizer, sizes=sizes, workers=workers)
        mini_batch, example = mini_batch or samples, None
    elif isinstance(example, tuple) or any(option is not None for option in (loss, optimizer, sizes)):
        raise ConfigError(
            "loss, optimizer, sizes and example=(inputs, targets) are for a module; leave them out"
        )
    if model is not None and not isinstance(model, Model | Path | str):
        if profile is not None:
            raise ConfigError("profile: given in addition to a measurement, which has one; leave it out")
        measurement = cast("Measurement", model)
        profile, cluster = measurement.profile, cluster or measurement.cluster
        model = measurement.model
    options = {
        "model": _record(model, input_files.load_model),
        "profile": _record(profile, input_files.load_profile),
        "cluster": _record(cluster, input_files.load_cluster),
        "mini_batch": mini_batch,
    }
    task = PlanningTask.of(
        example,
        {name: value for name, value in options.items() if value is not None},
        lambda missing: f"plan needs {', '.join(missing)}; give these, or the name of an example",
    )
    if cuts is not None:
        constraints = replace(constraints, cuts=cuts_of(cuts, task.model))
    return search(
        task.model, task.profile, task.cluster, task.mini_batch, constraints, count=count, progress=progress
    )


def _is_module(model: object) -> bool:
    return isinstance(model, list | tuple) or hasattr(model, "parameters")


def _measured(
    model: nn.Module | Sequence[nn.Module],
    loss: Callable[[Any, Any], Any],
    example: tuple[Any, Any],
    optimizer: MakeOptimizer | None,
    *,
    sizes: Sequence[int] | None,
    workers: int | None,
) -> tuple[Measurement, int]:
    from .measure.model_profile import Description  # noqa: PLC0415 - torch takes seconds
    from .measure.profile_cache import measure_once  # noqa: PLC0415
    from .measure.user_model import DEFAULT_OPTIMIZER, UserModel  # noqa: PLC0415

    source = UserModel(model, loss, example, optimizer or DEFAULT_OPTIMIZER)
    description = Description(type(model).__name__, source.optimizer_name, "cf.profile")
    sizes = sizes or [size for size in _SIZES if size <= source.samples]
    return measure_once(source, description, sizes, workers=workers), source.samples


def profile(
    model: nn.Module | Sequence[nn.Module],
    loss: Callable[[Any, Any], Any],
    *,
    example: tuple[Any, Any],
    optimizer: MakeOptimizer | None = None,
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    sizes: Sequence[int] = _SIZES,
    workers: int | None = None,
    threads: int | None = None,
    repeats: int = 5,
    execution: Execution | None = None,
    name: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Measurement:
    """Measure the layers of any model on this machine, and the links between its workers, for ``plan``.

    Layers are timed in training steps of all workers at the same time; of equal layers in a row one is
    measured, of small ones up to four. Workers are processes, so a script calls this under
    ``if __name__ == "__main__":``. Under torchrun all workers call it and measure, on all machines.

    Args:
        model: any module, whose layers are found; an ``nn.Sequential``, or a list of layers. It is copied,
            and stays as it is. On the meta device it needs no memory; measured layers get any weights, in
            groups that fit into a worker's memory, or into ``$COUNTERFLOW_WORKER_BYTES``.
        loss: loss function of the model's output and the targets, as of ``Pipeline``.
        example: a mini-batch, inputs and targets as in ``Pipeline.step``, with the samples in dimension 0;
            mini-batches of other sizes repeat its samples.
        optimizer: function that makes an optimizer of parameters; None: AdamW.
        list_layers: function that lists the layers of a module; None: they are found.
        sizes: samples of the micro-batches that are measured.
        workers: number of workers of this machine; None: one per GPU, or one per core.
        threads: threads of each worker; None: the cores divided by the workers.
        repeats: number of measurements, of which the median counts.
        execution: options of the run, of which precision and compilation are measured.
        name: name of the model; None: its class.
        progress: called with the activity, measurements made, and measurements in all.

    Returns:
        The model, its profile and the cluster, as ``plan`` takes them.

    Raises:
        ConfigError: layers cannot be found, the example does not fit, a size is below 1, or a layer does not
            fit into a worker.
        WorkerError: a worker failed.
    """
    from .measure.model_profile import Description, measure_model  # noqa: PLC0415 - torch takes seconds
    from .measure.user_model import DEFAULT_OPTIMIZER, UserModel  # noqa: PLC0415

    source = UserModel(
        model, loss, example, optimizer or DEFAULT_OPTIMIZER, list_layers, execution or Execution()
    )
    return measure_model(
        source,
        Description(name or type(model).__name__, source.optimizer_name, "cf.profile"),
        sizes=sizes,
        workers=workers,
        threads=threads,
        repeats=repeats,
        progress=progress or (lambda *_: None),
    )


def predict(
    model: Model | Path | str,
    profile: Profile | Path | str,
    cluster: Cluster | Path | str,
    configuration: Configuration | str,
    *,
    mini_batch: int | None = None,
    replicas: int = 1,
    samples: int = 1,
    **sizes: Unpack[Sizes],
) -> Prediction:
    """Predict the step and the memory of one configuration of a model on a cluster.

    Args:
        model: what is trained, as a record or a TOML file.
        profile: costs of its layers on a device, as a record or a TOML file.
        cluster: the devices and their links, as a record or a TOML file.
        configuration: how the model is trained: a record, or the name of a scheme with the three arguments
            that follow.
        mini_batch: samples of one mini-batch; None: those of one update.
        replicas: number of pipeline groups.
        samples: samples of a micro-batch.
        sizes: options of the scheme.

    Raises:
        ConfigError: a file is damaged, the scheme has no such schedule, the model has too few layers, or the
            cluster too few devices.
    """
    if isinstance(configuration, str):
        schedule = registry.schedule_of(configuration, sizes)
        configuration = Configuration(schedule.scheme, schedule.options, replicas, samples)
    elif sizes:
        raise ConfigError(f"{', '.join(sizes)}: the configuration has its own sizes; leave these out")
    return _predict(
        _record(model, input_files.load_model),
        _record(profile, input_files.load_profile),
        _record(cluster, input_files.load_cluster),
        configuration,
        mini_batch=mini_batch,
    )


def verify(
    schedule: Schedule | str,
    layers: Sequence[nn.Module] | None = None,
    loss_function: LossFunction | None = None,
    batches: MiniBatches | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    replicas: int = 1,
    steps: int | None = None,
    transport: str = "local",
    execution: Execution | None = None,
    batching: Batching | None = None,
    **options: Any,
) -> TrainingAgreement:
    """Train with one process and with a pipeline on this machine, and compare their numbers.

    Args:
        schedule: what the pipeline executes: a schedule, or the name of a scheme.
        layers: the model, which is not changed; None: a small transformer in float64.
        loss_function: function of the last layer's output and the target that returns the mean loss over the
            samples; required with ``layers``.
        batches: mini-batches by step and replica; required with ``layers``.
        optimizer: a function that makes an optimiser of parameters; required with ``layers``.
        scheduler: a function that makes a learning-rate scheduler of an optimiser.
        replicas: number of pipeline groups for the small model.
        steps: updates of the small model; None: 3, or 5 after the warm-up of an asynchronous scheme.
        transport: name of the transport that carries the workers' messages, as for ``launch``.
        execution: how the pipeline executes the schedule.
        batching: how mini-batches are cut.
        options: sizes of the scheme that is named, fields of the two records, and arguments of ``Pipeline``.

    Returns:
        The largest relative errors of losses, norms, gradients and weights; ``ok`` if all are within the
        tolerance.

    Raises:
        ConfigError: the pipeline cannot run this, or the model is given in part.
        WorkerError: a worker failed.
    """
    from .execution import Flat, records  # noqa: PLC0415
    from .training.trial import small_trial, updates_compared  # noqa: PLC0415 - torch takes seconds
    from .verification.training_agreement import verify as compare  # noqa: PLC0415

    sizes = {name: options.pop(name) for name in [*options] if name in registry.options()}
    schedule = registry.schedule_of(schedule, sizes)
    options |= {"transport": transport, "execution": execution, "batching": batching}
    model = {"layers": layers, "loss_function": loss_function, "batches": batches, "optimizer": optimizer}
    absent = [name for name, value in model.items() if value is None]
    if not absent:
        return compare(schedule, scheduler=scheduler, **model, **options)  # type: ignore[arg-type]
    if len(absent) < len(model) or scheduler is not None:
        raise ConfigError(f"verify needs {' and '.join(absent)}; give the whole model, or none of its parts")
    count = steps or updates_compared(schedule, replicas=replicas)
    flat = {name: value for name, value in options.items() if name in Flat.__annotations__}
    seed = records(execution, batching, flat)[0].seed
    trial = small_trial(schedule, replicas=replicas, steps=count, seed=seed)
    return trial.verify(flush_after=() if schedule.synchronous else (count - 3,), **options)


def train(
    config: RunConfig | Path | str | None = None,
    *callbacks: Callback,
    scheme: str | None = None,
    workers: int | None = None,
    steps: int | None = None,
    out: Path | str | None = None,
    keys: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
) -> RunResult | None:
    """Train a model as a config says, on workers of this machine or as one that torchrun or Slurm started.

    Args:
        config: what to train: a record, a TOML file, or None for the built-in example.
        callbacks: called during the run, see ``counterflow.training.Callback``.
        scheme: the scheme, in place of the config's.
        workers: workers of a pipeline group, in place of the config's.
        steps: number of updates, in place of the config's.
        out: folder of the results, in place of the config's.
        keys: any keys of the config: ``{"model.hidden": 128}``.
        max_restarts: restart the workers at most this many times after a failure.

    Returns:
        The summary of the run and its folder; None on workers of torchrun or Slurm other than rank 0, and if
        the run was complete before.

    Raises:
        ConfigError: the config is wrong, or the run cannot be started.
        WorkerError: a worker failed; the folder contains what was reached.
        KeyboardInterrupt: the run was stopped before its first step.
    """
    from .training import load_config  # noqa: PLC0415 - torch takes seconds
    from .training.run import run  # noqa: PLC0415
    from .training.training_report import RunResult  # noqa: PLC0415

    if config is None or isinstance(config, str | Path):
        changed = {"scheme": scheme, "workers": workers, "steps": steps, "out": out}
        config = load_config(config, _as_sets(keys or {}), **changed)  # type: ignore[arg-type]
    elif keys or any(value is not None for value in (scheme, workers, steps, out)):
        raise ConfigError("train: a RunConfig is changed by its model_copy; leave out the keys")
    result = run(config, *callbacks, max_restarts=max_restarts)
    return None if result is None else RunResult(*result)


def _as_sets(keys: Mapping[str, Any]) -> list[str]:
    from .common import toml  # noqa: PLC0415

    return [f"{key}={toml.dumps(value)}" for key, value in keys.items()]


def _record(record: Any, load: Callable[[Path], Any]) -> Any:
    return load(Path(record)) if isinstance(record, str | Path) else record
