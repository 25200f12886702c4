"""The verbs that need a whole model, as functions: plan, predict, verify, train; records in, records out.

Each calls one function of its room. What commands do beside (flags, bars, tables) is in ``cli``. The other
verbs are functions of their own rooms: ``simulate``, ``check``, ``draw``, ``compare``, ``synthesize``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .planning.inputs import files
from .planning.inputs.cluster import Cluster
from .planning.inputs.model import Model
from .planning.inputs.profile import Profile
from .planning.predict import predict as _predict
from .planning.prediction import Configuration, Prediction
from .planning.search.constraints import Constraints
from .planning.search.found import Found
from .planning.search.search import Progress, search
from .planning.task import Task
from .schedule import registry
from .schedule.ir import OptionValue, Schedule

if TYPE_CHECKING:
    from torch import nn

    from .execution import Batching, Execution
    from .runtime.mini_batch.losses import LossFunction
    from .runtime.parameters.optimizers import MakeOptimizer, MakeScheduler
    from .training import Callback, RunConfig
    from .training.report import RunResult
    from .verification.agreement import Agreement, MiniBatches


def plan(
    model: Model | Path | str | None = None,
    profile: Profile | Path | str | None = None,
    cluster: Cluster | Path | str | None = None,
    mini_batch: int | None = None,
    *,
    example: str | None = None,
    constraints: Constraints | None = None,
    count: int = 10,
    progress: Progress | None = None,
    **limits: Any,
) -> Found:
    """Find the best scheme, depth, width, micro-batch and recomputation for a model on a cluster.

    Args:
        model: what is trained, as a record or a TOML file.
        profile: what its layers cost on a device; likewise.
        cluster: the devices and their links; likewise.
        mini_batch: samples of one update, over all replicas.
        example: a paper's run by its name (``counterflow plan --list``), in place of what is not given.
        constraints: what a plan has to be.
        count: how many of the best plans are returned, 1 or more.
        progress: called with candidates decided, candidates in all, and the current activity.
        limits: fields of ``Constraints``, in place of the record.

    Returns:
        The best plans (``best``), the best of each scheme, and what became of all candidates.

    Raises:
        ConfigError: an input is missing or damaged, or a limit is unknown or not legal.
        PlanError: no candidate meets the limits, or none fits.

    >>> found = plan(example="chimera-bert48", schemes=("dapple", "chimera"), depths=(4,))
    >>> found.best[0].play.configuration.scheme
    'chimera'
    """
    given = {
        "model": _record(model, files.load_model),
        "profile": _record(profile, files.load_profile),
        "cluster": _record(cluster, files.load_cluster),
        "mini_batch": mini_batch,
    }
    task = Task.of(
        example,
        {name: value for name, value in given.items() if value is not None},
        lambda missing: f"plan needs {', '.join(missing)}; give them, or an example's name",
    )
    if constraints is not None and limits:
        raise ConfigError(f"{', '.join(limits)}: given beside constraints; put them into the record")
    if unknown := limits.keys() - set(Constraints.__dataclass_fields__):
        known = ", ".join(Constraints.__dataclass_fields__)
        raise ConfigError(f"{min(unknown)}: plan has no such limit; its limits: {known}")
    constraints = constraints or Constraints(**limits)
    return search(
        task.model, task.profile, task.cluster, task.mini_batch, constraints, count=count, progress=progress
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
    **sizes: OptionValue,
) -> Prediction:
    """Predict the step and the memory of one configuration of a model on a cluster.

    Args:
        model: what is trained, as a record or a TOML file.
        profile: what its layers cost on a device; likewise.
        cluster: the devices and their links; likewise.
        configuration: how it is trained; or the name of a scheme, with the three that follow.
        mini_batch: samples that the step is counted for; None: those of one update.
        replicas: pipeline groups.
        samples: of a micro-batch.
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
        _record(model, files.load_model),
        _record(profile, files.load_profile),
        _record(cluster, files.load_cluster),
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
    seed: int = 0,
    execution: Execution | None = None,
    batching: Batching | None = None,
    **options: Any,
) -> Agreement:
    """Train with one process and with a pipeline on this machine, and compare their numbers.

    Args:
        schedule: what the pipeline executes: a schedule, or the name of a scheme.
        layers: the model, which is not changed; None: a small transformer in float64.
        loss_function: output of the last layer and target to the mean loss over the samples; with ``layers``.
        batches: mini-batches by step and replica; with ``layers``.
        optimizer: a function of parameters to an optimiser; with ``layers``.
        scheduler: a function of an optimiser to a learning-rate scheduler.
        replicas: pipeline groups for the small model.
        steps: updates of the small model; None: 3, or of an asynchronous scheme 5 after its warm-up.
        transport: what carries the workers' messages, by its name as for ``launch``.
        seed: of all random draws.
        execution: how the pipeline executes the schedule.
        batching: how mini-batches are cut.
        options: sizes of the scheme that is named, fields of the two records, and arguments of ``Pipeline``.

    Returns:
        The largest relative errors of losses, norms, gradients and weights; ``ok`` if all are tolerable.

    Raises:
        ConfigError: the pipeline cannot run this, or the model is given in part.
        WorkerError: a worker failed.
    """
    from .training.trial import small_trial, updates_compared  # noqa: PLC0415 - torch takes seconds
    from .verification.agreement import verify as compare  # noqa: PLC0415

    sizes = {name: options.pop(name) for name in [*options] if name in registry.options()}
    schedule = registry.schedule_of(schedule, sizes)
    options |= {"transport": transport, "seed": seed, "execution": execution, "batching": batching}
    model = {"layers": layers, "loss_function": loss_function, "batches": batches, "optimizer": optimizer}
    absent = [name for name, value in model.items() if value is None]
    if not absent:
        return compare(schedule, scheduler=scheduler, **model, **options)  # type: ignore[arg-type]
    if len(absent) < len(model) or scheduler is not None:
        raise ConfigError(f"verify needs {' and '.join(absent)}; give the whole model, or nothing of it")
    count = steps or updates_compared(schedule, replicas=replicas)
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
        callbacks: each is called while the run goes on, as ``counterflow.training.Callback`` says.
        scheme: the scheme, in place of the config's.
        workers: of a pipeline group; likewise.
        steps: updates; likewise.
        out: folder of the results; likewise.
        keys: any keys of the config: ``{"model.hidden": 128}``.
        max_restarts: restart the workers at most this many times after a failure.

    Returns:
        The summary of the run and its folder; None on workers of torchrun or Slurm other than rank 0, and if
        the run was complete before.

    Raises:
        ConfigError: the config is wrong, or the run cannot be started.
        WorkerError: a worker failed; what was reached is in the folder.
        KeyboardInterrupt: the run was stopped before its first step.
    """
    from .training import load_config  # noqa: PLC0415 - torch takes seconds
    from .training.report import RunResult  # noqa: PLC0415
    from .training.run import run  # noqa: PLC0415

    if config is None or isinstance(config, str | Path):
        changed = {"scheme": scheme, "workers": workers, "steps": steps, "out": out}
        config = load_config(config, _as_sets(keys or {}), **changed)  # type: ignore[arg-type]
    elif keys or any(given is not None for given in (scheme, workers, steps, out)):
        raise ConfigError(
            "train: a RunConfig is changed by load_config or model_copy; leave out the other keys"
        )
    found = run(config, *callbacks, max_restarts=max_restarts)
    return None if found is None else RunResult(*found)


def _as_sets(keys: Mapping[str, Any]) -> list[str]:
    """Keys with values, as ``--set`` takes them."""
    from . import toml  # noqa: PLC0415

    return [f"{key}={toml.dumps(value)}" for key, value in keys.items()]


def _record(given: Any, load: Callable[[Path], Any]) -> Any:
    """A record, read from a file where a path is given."""
    return load(Path(given)) if isinstance(given, str | Path) else given
