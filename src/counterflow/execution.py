"""Execution of a run, and division of its mini-batches: two records, whose fields are all the options.

Invariant: an option's name, default, meaning and legal values stand here and nowhere else. The ``[pipeline]``
table of a config is an ``Execution``; ``Pipeline`` accepts both records; the comparison between workers,
``verify``, measurements and plans read their fields. Options are implemented elsewhere, and torch is not
imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from pydantic import AfterValidator, BeforeValidator, SkipValidation, Strict

from .common.options import Options, hint, option
from .errors import ConfigError
from .program.lowering import OpTimes
from .schedule.modes import Recompute, Sync

_MANY = 1_000_000_000
"""Upper bound of numbers that cost neither time nor memory before they are reached."""


def _dtype_name(value: object) -> object:
    if (type(value).__module__, type(value).__name__) != ("torch", "dtype"):
        return value
    return str(value).removeprefix("torch.")


LowPrecision = Annotated[Literal["bfloat16", "float16"] | None, BeforeValidator(_dtype_name)]
"""A dtype by its name, so files can contain it; a torch dtype is accepted too."""

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127
"""Limits of loss scales: the normal powers of two of float32."""

SENT_SHARES = {"bfloat16": 1 / 2, "int8": (256 + 4) / (256 * 4)}
"""Bytes sent per byte of float32 gradients, by ``gradient_compression``."""


def is_scale(value: float) -> bool:
    """True if losses may be multiplied by it: a power of two, which rounds nothing."""
    return SMALLEST_SCALE <= value <= LARGEST_SCALE and math.frexp(value)[0] == 0.5


def _scale(value: float | None) -> float | None:
    if value is not None and not is_scale(value):
        raise ValueError(value)
    return value


FIRST_SCALE = 2.0**16
"""Loss scale with which float16 begins, as in ``torch.amp.GradScaler``."""


class Execution(Options):
    """Execution of a schedule."""

    recompute: Annotated[Recompute, Strict(False)] = option(Recompute.NONE, f"one of {', '.join(Recompute)}")
    """What is computed again for a backward, to save memory.

    ``stage``: the whole stage, as an op of its own before the backward, while the worker would wait for the
    gradient. ``layer``: one layer after the other, in the backward itself, so that only one is in memory.
    """

    sync: Annotated[Sync, Strict(False)] = option(Sync.EAGER_OPT, f"one of {', '.join(Sync)}")
    """When gradients are summed over the replicas of a stage."""

    op_times: SkipValidation[OpTimes | None] = option(
        None, "the start and the end of every op", no_key="it is a table, of a simulation"
    )
    """Start and end of every op, by which ``sync="eager-opt"`` decides.

    ``Simulation.op_times`` of the schedule with the model's costs; by default forwards take 1 and backwards
    2.
    """

    compress: bool = option(False, "true or false")
    """Whether messages between workers are sent in half precision if the loss of precision is small.

    Messages of the first step are never compressed. Source: WPipe, appendix A.3.
    """

    gradient_compression: Literal["bfloat16", "int8"] | None = option(None, "bfloat16 or int8, in quotes")
    """Form in which gradients are summed over replicas and directions; default: float32, in full.

    ``bfloat16`` sends half the bytes, ``int8`` a quarter: 8-bit numbers with a scale for each 256. A worker
    keeps in float32 what it loses of a weight's gradient, and sends it in later steps (error feedback); this
    is part of the training's state. Copies stay bitwise equal. For synchronous schemes, without
    ``parallelize`` and without a loss scale; gradients in float64 are summed in full.
    """

    overlap_experts: bool = option(False, "true or false")
    """Whether the all-to-all of experts runs beside the compute of another micro-batch.

    Pairs of the schedule (``with_pairs``; DualPipe is made of them) run at once: a forward, and a backward of
    another stage. Numbers are the same, bit for bit. For synchronous schemes with pairs, and workers that are
    processes; without ``autocast`` and ``compile``.
    """

    compile: bool | str = option(False, "true, false, or the name of a backend, in quotes", may_differ=True)
    """Whether torch compiles the stages; the name of a backend of ``torch.compile`` may be given.

    Consecutive layers of a stage are one function, with one graph where nothing in them breaks it. Layers are
    compiled one by one if they draw random numbers or hold skips, with ``recompute="layer"``, in slices that
    leave states, where ``parallelize`` shards them, and where the schedule splits their backward and the
    backend is neither ``inductor`` nor ``aot_eager``. ``Pipeline.compiled`` says what became of each stage.
    """

    capture: bool = option(False, "true or false", may_differ=True)
    """Whether forwards and backwards of stages are captured as CUDA graphs, and replayed in later steps.

    Each unit in flight has graphs and memory of its own. Evaluation, generation, losses and optimisers run
    plainly, and so do stages that cannot be captured: ``Pipeline.captured`` says why. Without ``compile``.
    """

    autocast: LowPrecision = option(None, "bfloat16 or float16, in quotes")
    """Compute layers in this type; default: the type of the weights.

    Layers run under autocast, so in the lower precision only if torch deems it safe. A weight is cast once
    for each version, not for each micro-batch. In float16 losses are scaled (``loss_scale``).
    """

    compute_dtype: LowPrecision = option(None, "bfloat16 or float16, in quotes")
    """Cast the weights to this type while layers run, and update and save them in their own type; an
    alternative to autocast.

    The model's input is cast too; its output is float32 again. The parameters stay as they are: gradients are
    added, updates made and states saved in their precision (master weights). In float16 losses are scaled
    (``loss_scale``).
    """

    loss_scale: Annotated[float | None, AfterValidator(_scale)] = option(
        None, "a power of 2, 2**-126 to 2**127"
    )
    """First factor of the losses, so small gradients are not lost in float16; default: 65536 in float16,
    otherwise losses are not scaled.

    It is dynamic, as ``torch.amp.GradScaler``'s: if the loss or a gradient of any worker is not finite, all
    workers skip the update (``Step.skipped``) and halve it; after ``loss_scale_interval`` updates in a row it
    is doubled. Gradients are divided by it before hooks, norm, clipping and update, and reported losses do
    not contain it. It is part of the training's state. For synchronous schemes. Source: Micikevicius et al.,
    Mixed precision training, section 3.2.
    """

    loss_scale_interval: int = option(2000, f"a whole number, 1 to {_MANY:,}", ge=1, le=_MANY)
    """Updates in a row without a skipped one after which ``loss_scale`` is doubled."""

    clip_norm: float | None = option(None, "a number, 0 or more", ge=0)
    """Maximum norm of the whole gradient; 0 does not clip.

    Gradients of a larger global norm are scaled down to it; None never clips, like 0. In asynchronous schemes
    each stage is clipped by its own norm, to ``clip_norm / sqrt(stages)``.
    """

    skip_non_finite: bool = option(
        False, "true or false", no_key="a run ends at a loss that is not finite, and says so"
    )
    """Whether a mini-batch with a non-finite loss or gradient updates nothing.

    All workers skip the update, and ``Step.skipped`` is true; otherwise such a mini-batch is an error. For
    synchronous schemes.
    """

    barrier: bool = option(True, "true or false")
    """Whether steps end on all workers together; without a barrier updates wait for their own stages only, or
    for all stages to clip.

    Without a barrier a worker goes on with the next step of a synchronous schedule as soon as its own
    stages are updated. Numbers are the same, bit for bit; a later step reports loss and norm
    (``Step.reports_step``), and ``Pipeline.flush`` ends what is in flight. With ``clip_norm`` or
    ``skip_non_finite`` updates still wait for the norm of all stages.
    """

    zero_stage: int = option(0, "a whole number, 0 to 1", ge=0, le=1)
    """1: one of the workers that hold a weight keeps its optimiser state, updates the weight and sends it to
    the others (ZeRO stage 1).

    These workers hold the replicas of the weight's stage; the weight is sent when a step ends. Numbers are
    the same, bit for bit; each worker's optimiser is made of the weights it updates. For synchronous schemes,
    with a barrier, without ``parallelize`` (where ``fully_shard`` shards gradients and weights too), and for
    optimisers that update each parameter independently.
    """

    deferred_batch_norm: bool = option(
        False, "true or false", no_key="no model of the model section has a batch norm"
    )
    """Whether running statistics of batch norms are updated once per step.

    They are updated with the mean and variance of the whole mini-batch, over all micro-batches and replicas,
    instead of each micro-batch's in turn. Each micro-batch is normalised by its own. For synchronous schemes.
    """

    digest_every: int = option(100, f"a whole number, 0 to {_MANY:,}", ge=0, le=_MANY)
    """Steps between comparisons of the replicas of every stage; 0 does not compare.

    The mini-batches that the workers of a pipeline group receive are compared in the same steps (between
    threads always). Without a barrier, and in asynchronous schemes, a later step reports replicas that
    differ; in asynchronous schemes only ``Pipeline.flush`` compares buffers.
    """

    witness_every: int = option(1000, f"a whole number, 0 to {_MANY:,}", ge=0, le=_MANY)
    """Steps between comparisons with the model's own forward; 0 does not compare.

    At steps 1, 2, 4, 8, ... and then in this interval, one micro-batch also runs through the model's own
    forward; its loss and output must be those of the pipeline.
    """

    timeout_seconds: float | None = option(
        None, "a number of seconds, more than 0, at most 1000000", may_differ=True, gt=0, le=1e6
    )
    """Seconds that a worker waits for a message before the run is ended.

    Default: the value given at the launch, or 300.
    """

    count_memory_steps: int = option(
        2,
        f"a whole number, 0 to {_MANY:,}",
        no_key="a run decides itself what it measures",
        may_differ=True,
        ge=0,
        le=_MANY,
    )
    """Number of first steps whose bytes saved for backward are counted; 0: no step's memory is checked."""

    seed: int = option(
        0,
        "a whole number, -2**63 to 2**64 - 1",
        no_key="a run has one seed, of its data too: train.seed",
        ge=-(2**63),
        lt=2**64,
    )
    """Seed of weights on the meta device and of all random draws of the layers."""

    def of_measurement(self) -> Execution:
        """The options that change what a layer costs, without checks that a measurement would time."""
        options = Execution(autocast=self.autocast, compute_dtype=self.compute_dtype, compile=self.compile)
        return options.but(digest_every=0, count_memory_steps=0)

    @property
    def max_norm(self) -> float | None:
        """Maximum norm of the whole gradient; None: no limit."""
        return self.clip_norm or None

    @property
    def waits_for_norm(self) -> bool:
        """True if every update waits for the gradient norm of all stages."""
        return self.max_norm is not None or self.skips_updates

    @property
    def first_scale(self) -> float | None:
        """Loss scale of the first step; None: losses are not scaled."""
        scales = self.loss_scale is None and self.computes_in == "float16"
        return FIRST_SCALE if scales else self.loss_scale

    @property
    def skips_updates(self) -> bool:
        """True if a mini-batch with a non-finite loss or gradient updates nothing, on any worker."""
        return self.skip_non_finite or self.first_scale is not None

    @property
    def slices(self) -> bool:
        """True if micro-batches may run in slices of their sequence."""
        return not self.deferred_batch_norm

    @property
    def computes_in(self) -> str | None:
        """Name of the lower precision in which layers compute; None: that of the weights."""
        return self.compute_dtype or self.autocast


def unskippable(execution: Execution) -> str:
    """Reason why an asynchronous scheme, whose name is put before the text, cannot skip updates."""
    option, instead = "skip_non_finite", ""
    if execution.first_scale is not None:
        scale = f"the loss scale of {execution.computes_in}"
        option, instead = scale if execution.loss_scale is None else "loss_scale", ", or bfloat16"
    return (
        f"updates each stage before all gradients are known, so that {option} cannot skip an update "
        f"everywhere; take a synchronous scheme{instead}"
    )


def why_in_full(execution: Execution, scheme: str, *, synchronous: bool) -> str | None:
    """Reason why sums of gradients cannot be compressed; None: they can, or shall not be.

    Args:
        execution: how a schedule is executed.
        scheme: its scheme.
        synchronous: whether it has a flush before each update.
    """
    name = f'gradient_compression = "{execution.gradient_compression}"'
    if execution.gradient_compression is None:
        return None
    if not synchronous:
        return (
            f"{name}: {scheme} updates each stage at its own time, and sums in two exchanges end with a "
            "step; leave it out, or take a synchronous scheme"
        )
    if execution.first_scale is not None:
        return (
            f"{name} does not go with a loss scale: residuals would be of another scale when it changes; "
            "leave it out, or compute in bfloat16"
        )
    return None


class Configured(Execution):
    """Execution of a run of a config: an ``Execution`` with the defaults of ``counterflow train``."""

    compile: bool = option(False, "true or false", may_differ=True)
    """Whether torch compiles the stages."""

    clip_norm: float = option(1.0, "a finite number, 0 or more", ge=0, allow_inf_nan=False)
    """Maximum norm of the whole gradient; 0 does not clip."""

    timeout_seconds: float = option(
        300.0, "a number of seconds, more than 0, at most 1000000", may_differ=True, gt=0, le=1e6
    )
    """Seconds that a worker waits for a message before the run is ended."""


class Batching(Options):
    """Division of mini-batches into micro-batches, and facts about their shapes.

    A config has no keys for these options: dimension 0 of its data is the samples, which all have the same
    length.
    """

    input_dims: Any = option(0, "dimensions of samples")
    """Dimension of the inputs' tensors that contains the samples.

    An int for all of them, None for none (all micro-batches receive them whole), ``cf.ENTRIES`` for the
    entries of a list, or a tree of these of the inputs' structure or of its first levels, as ``in_dims`` of
    ``torch.vmap``.
    """

    target_dims: Any = option(0, "dimensions of samples")
    """Dimension of the targets' tensors that contains the samples."""

    kwarg_dims: Any = option(0, "dimensions of samples")
    """Dimension of the samples in keyword arguments to the first layer.

    A tensor that is as long as the mini-batch by coincidence is refused by name in the first one, until
    ``{"cu_seqlens": None}`` or ``{"position_ids": 1}`` says how it is cut.
    """

    output_dims: Any = option(0, "dimensions of samples")
    """Dimension of the samples in the last layer's outputs, if outputs are asked for."""

    sequence_dims: Any = option(1, "dimensions of positions")
    """Dimension of the positions in inputs, as ``input_dims``; None for what all slices get whole."""

    kwarg_sequence_dims: Any = option(1, "dimensions of positions")
    """Dimensions of the positions in keyword arguments to the first layer."""

    target_sequence_dims: Any = option(1, "dimensions of positions")
    """Dimensions of the positions in the targets' tensors, and in the last layer's output."""

    dynamic_shapes: bool = option(False, "true or false")
    """Whether shapes between stages may differ for inputs of the same shapes."""

    per_micro_batch_loss: bool = option(False, "true or false")
    """Whether the mean by samples of the losses of micro-batches, each computed alone, is trained.

    Otherwise the first mini-batch of each kind is refused if its loss, or what layers add to it, is neither a
    mean over samples nor a ``LossSum``.
    """


class Flat(TypedDict, total=False):
    """The fields of both records as keywords, with what is accepted in place of their values."""

    recompute: Recompute | Literal["none", "stage", "layer"]
    sync: Sync | Literal["end", "eager", "eager-opt"]
    op_times: OpTimes | None
    compress: bool
    gradient_compression: Literal["bfloat16", "int8"] | None
    overlap_experts: bool
    compile: bool | str
    capture: bool
    autocast: Any
    compute_dtype: Any
    loss_scale: float | None
    loss_scale_interval: int
    clip_norm: float | None
    skip_non_finite: bool
    barrier: bool
    zero_stage: int
    deferred_batch_norm: bool
    digest_every: int
    witness_every: int
    timeout_seconds: float | None
    count_memory_steps: int
    seed: int
    input_dims: Any
    target_dims: Any
    kwarg_dims: Any
    output_dims: Any
    sequence_dims: Any
    kwarg_sequence_dims: Any
    target_sequence_dims: Any
    dynamic_shapes: bool
    per_micro_batch_loss: bool


_Record = TypeVar("_Record", bound=Options)


def records(
    execution: Execution | None,
    batching: Batching | None,
    flat: Mapping[str, Any],
    further: Iterable[str] = (),
) -> tuple[Execution, Batching]:
    """Both records, from the records and named options that are given.

    Args:
        execution: a record; None: the defaults.
        batching: a record; None: the defaults.
        flat: options of either record by name.
        further: other legal names, for the hint in an error about a misspelled one.

    Raises:
        ConfigError: an option is unknown, given twice, or has an illegal value.
    """
    known = [*Execution.model_fields, *Batching.model_fields]
    for name in flat:
        if name not in known:
            raise ConfigError(f"{name}: unknown option{hint(name, [*known, *further])}")
    return _with(Execution, "execution", execution, flat), _with(Batching, "batching", batching, flat)


def _with(kind: type[_Record], place: str, record: _Record | None, flat: Mapping[str, Any]) -> _Record:
    changes = {name: value for name, value in flat.items() if name in kind.model_fields}
    if record is None:
        return kind(**changes)
    if not isinstance(record, kind):
        raise ConfigError(f"{place} = {record!r}: must be a cf.{kind.__name__}")
    for name, value in changes.items():
        if name in record.model_fields_set:
            raise ConfigError(
                f"{name} is given twice: {value!r}, and {getattr(record, name)!r} in {place}; give it once"
            )
    further = type(record).model_fields.keys() - kind.model_fields.keys()  # of a section of a config
    if not changes and not further:
        return record
    return kind(**{name: getattr(record, name) for name in kind.model_fields} | changes)
