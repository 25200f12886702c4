"""How a run executes, and how its mini-batches are cut: two records, whose fields are all the options.

Invariant: an option's name, default, meaning and legal values stand here and nowhere else. The ``[pipeline]``
table of a config is an ``Execution``; ``Pipeline`` takes both records; the comparison between workers,
``verify``, measurements and plans read their fields. What an option does is not here, nor is torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, Strict, ValidationError
from pydantic import ValidationInfo as Info
from pydantic.fields import FieldInfo

from .errors import ConfigError
from .program.lowering import OpTimes
from .schedule.modes import Recompute, Sync

_MANY = 1_000_000_000
"""The most of what takes neither time nor memory before it is reached."""


def option(
    default: Any, legal: str, *, no_key: str | None = None, may_differ: bool = False, **limits: Any
) -> Any:
    """An option; what it means is told below it, in the first paragraph for the comment of a config's key.

    Args:
        default: where it is not given.
        legal: what it may be, in the words of an error.
        no_key: why a config has no key for it; None: it has.
        may_differ: whether workers may be given other values.
        limits: as pydantic takes them.
    """
    extra: dict[str, Any] = {"legal": legal, "no_key": no_key, "may_differ": may_differ}
    return Field(default, json_schema_extra=extra, exclude=no_key is not None, **limits)


def _dtype_name(value: object, info: Info) -> object:
    """A dtype of torch by its name.

    Raises:
        ConfigError: it is float16.
    """
    if (type(value).__module__, type(value).__name__) != ("torch", "dtype"):
        return value
    if str(value) == "torch.float16":
        raise ConfigError(
            f"{info.field_name}=torch.float16 wants its losses scaled, and gradients that are too small are "
            "lost in silence without; give torch.bfloat16"
        )
    return str(value).removeprefix("torch.")


LowPrecision = Annotated[Literal["bfloat16"] | None, BeforeValidator(_dtype_name)]
"""By name, so that files have it; a dtype of torch is one too."""


class Options(BaseModel):
    """A record of options. Values are checked strictly: "4" is no number, 1 is not true.

    Raises:
        ConfigError: an option is unknown, or its value is not legal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    if not TYPE_CHECKING:

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise ConfigError(_wrong(type(self), error, given)) from None

    @classmethod
    def about(cls, name: str) -> str:
        """What an option means, in a phrase."""
        return phrase(cls.model_fields[name])

    def agreed(self) -> dict[str, object]:
        """The options of which all workers have to be given the same."""
        return {
            name: getattr(self, name)
            for name, info in type(self).model_fields.items()
            if not said(info, "may_differ")
        }

    def but(self, **changed: Any) -> Self:
        """The same with other values, which are not checked."""
        return self.model_copy(update=changed)


class Execution(Options):
    """How a schedule is executed."""

    recompute: Annotated[Recompute, Strict(False)] = option(
        Recompute.NONE, f"one of {', '.join(Recompute)}", may_differ=True
    )
    """What is computed again in a backward, to save memory."""

    sync: Annotated[Sync, Strict(False)] = option(Sync.EAGER_OPT, f"one of {', '.join(Sync)}")
    """When gradients are summed over the copies of a stage."""

    op_times: SkipValidation[OpTimes | None] = option(
        None, "the start and the end of every op", no_key="it is a table, of a simulation"
    )
    """Start and end of every op, by which ``sync="eager-opt"`` decides.

    As ``Simulation.op_times`` of the schedule with the model's costs gives it; by default of forwards
    that take 1 and backwards that take 2.
    """

    compress: bool = option(False, "true or false")
    """Whether messages between workers go in half precision where that loses little.

    The first step's never do. Source: WPipe, appendix A.3.
    """

    compile: bool | str = option(False, "true, false, or the name of a backend, in quotes", may_differ=True)
    """Whether stages are compiled by torch.

    Their layers go through ``torch.compile``; the name of its backend may be given.
    """

    autocast: LowPrecision = option(None, "bfloat16, in quotes")
    """Compute in this type; in the weights' own where not given.

    Layers run in it where torch deems that safe. A weight is cast once for each version, not for each
    micro-batch.
    """

    compute_dtype: LowPrecision = option(None, "bfloat16, in quotes")
    """Have the weights in this type while layers run, and update and save them in their own; in place of
    autocast.

    So is the model's input; its output is float32 again. The parameters stay as they are: gradients are
    added, updates made and states saved in their precision (master weights).
    """

    clip_norm: float | None = option(None, "a number, 0 or more", ge=0)
    """Largest norm of the whole gradient; 0 does not clip.

    Gradients of a larger global norm are scaled down to it; None is never, as 0. In asynchronous schemes each
    stage is clipped by its own norm, to ``clip_norm / sqrt(stages)``.
    """

    skip_non_finite: bool = option(
        False, "true or false", no_key="a run ends at a loss that is not finite, and says so"
    )
    """Whether a mini-batch with a loss or a gradient that is not finite updates nothing.

    So it is on all workers, and ``Step.skipped`` says so; else such a mini-batch is an error. For schemes
    in synchronous schemes.
    """

    barrier: bool = option(True, "true or false")
    """Whether steps end on all workers; without, updates wait for their own stages, to clip for all.

    Without a barrier a worker goes on with the next step of a synchronous schedule as soon as its own
    stages are updated. Numbers are the same, bit for bit; a later step tells loss and norm
    (``Step.reports_step``), and ``Pipeline.flush`` ends what is in flight. With ``clip_norm`` or
    ``skip_non_finite`` updates still wait for the norm of all stages.
    """

    zero_stage: int = option(0, "a whole number, 0 to 1", ge=0, le=1)
    """1: of the workers that hold a weight one keeps its optimiser state, updates it and sends it to the
    others (ZeRO stage 1).

    Those are the copies of its stage and the replicas; it is sent when a step ends. Numbers are the same,
    bit for bit; each worker's optimiser is made of the weights it updates. For synchronous schemes, with
    a barrier, without ``parallelize`` (where ``fully_shard`` shards gradients and weights too), and for
    optimisers that look at each parameter for itself.
    """

    deferred_batch_norm: bool = option(
        False, "true or false", no_key="no model of the model section has a batch norm"
    )
    """Whether running statistics of batch norms are updated once a step.

    So they are by the mean and variance of the whole mini-batch over all micro-batches, copies and
    replicas, and not by each micro-batch's in turn. Each micro-batch is normalised by its own. For
    synchronous schemes.
    """

    digest_every: int = option(100, f"a whole number, 0 to {_MANY:,}", ge=0, le=_MANY)
    """Steps between comparisons of the copies of every stage; 0 does not compare.

    Likewise the mini-batches that the workers of a replica are given; threads' always are. Without a
    barrier or a flush a later step tells of copies that differ; if asynchronous only ``Pipeline.flush``
    compares buffers.
    """

    timeout_seconds: float | None = option(
        None, "a number of seconds, more than 0, at most 1000000", may_differ=True, gt=0, le=1e6
    )
    """How long a worker waits for a message before the run is ended.

    By default as at the launch, or 300.
    """

    count_memory_steps: int = option(
        2,
        f"a whole number, 0 to {_MANY:,}",
        no_key="what is measured is the run's own",
        may_differ=True,
        ge=0,
        le=_MANY,
    )
    """First steps in which the bytes saved for backward are counted."""

    @property
    def max_norm(self) -> float | None:
        """The largest norm of the whole gradient; None: any."""
        return self.clip_norm or None

    @property
    def waits_for_norm(self) -> bool:
        """Whether no update may be made before the gradient norm of all stages is known."""
        return self.max_norm is not None or self.skip_non_finite

    @property
    def computes_in(self) -> str | None:
        """The lower precision, by its name, in which layers compute; None: their weights' own."""
        return self.compute_dtype or self.autocast


class Configured(Execution):
    """How a run of a config is executed: the same, with the defaults of ``counterflow train``."""

    compile: bool = option(False, "true or false", may_differ=True)
    """Whether stages are compiled by torch."""

    clip_norm: float = option(1.0, "a finite number, 0 or more", ge=0, allow_inf_nan=False)
    """Largest norm of the whole gradient; 0 does not clip."""

    timeout_seconds: float = option(
        300.0, "a number of seconds, more than 0, at most 1000000", may_differ=True, gt=0, le=1e6
    )
    """How long a worker waits for a message before the run is ended."""


class Batching(Options):
    """How mini-batches are cut into micro-batches, and what is known of them.

    A config has no keys for it: the samples of its data section come first, and have one length.
    """

    input_dims: Any = option(0, "dimensions of samples")
    """Which dimension of the inputs' tensors the samples are.

    An int for all of them, None for none (all micro-batches get them whole), ``cf.ENTRIES`` for the
    entries of a list, or a tree of these of the inputs' structure or of its first levels, as
    ``torch.vmap`` takes ``in_dims``.
    """

    target_dims: Any = option(0, "dimensions of samples")
    """Likewise of the targets."""

    kwarg_dims: Any = option(0, "dimensions of samples")
    """Likewise of keyword arguments to the first layer."""

    output_dims: Any = option(0, "dimensions of samples")
    """Likewise of what the last layer gives, where outputs are asked for."""

    sequence_dims: Any = option(1, "dimensions of positions")
    """Which dimension of the inputs' tensors the positions are, where a schedule has slices.

    An int or a tree, as for ``input_dims``; None for what all slices get whole.
    """

    target_sequence_dims: Any = option(1, "dimensions of positions")
    """Likewise of the targets, and of what the last layer gives."""

    dynamic_shapes: bool = option(False, "true or false")
    """Whether shapes between stages may differ for inputs of the same shapes."""

    per_micro_batch_loss: bool = option(False, "true or false")
    """Whether the loss is meant for each micro-batch alone, and the mean of these by samples is trained.

    Else, in the first mini-batch of each kind, a loss that is no mean over samples, and no ``LossSum``, is
    refused.
    """


class Flat(TypedDict, total=False):
    """The fields of both records as keywords, with what is taken in place of their values."""

    recompute: Recompute | str
    sync: Sync | str
    op_times: OpTimes | None
    compress: bool
    compile: bool | str
    autocast: Any
    compute_dtype: Any
    clip_norm: float | None
    skip_non_finite: bool
    barrier: bool
    zero_stage: int
    deferred_batch_norm: bool
    digest_every: int
    timeout_seconds: float | None
    count_memory_steps: int
    input_dims: Any
    target_dims: Any
    kwarg_dims: Any
    output_dims: Any
    sequence_dims: Any
    target_sequence_dims: Any
    dynamic_shapes: bool
    per_micro_batch_loss: bool


_Record = TypeVar("_Record", bound=Options)


def records(
    execution: Execution | None,
    batching: Batching | None,
    flat: Mapping[str, Any],
    beside: Iterable[str] = (),
) -> tuple[Execution, Batching]:
    """Both records, from whatever of them is given, and options by name.

    Args:
        execution: a record; None: the defaults.
        batching: likewise.
        flat: options of either by name.
        beside: what else can be given by name, for the hint at one that is misspelled.

    Raises:
        ConfigError: an option is unknown, given twice, or its value is not legal.
    """
    known = [*Execution.model_fields, *Batching.model_fields]
    for name in flat:
        if name not in known:
            raise ConfigError(f"{name}: there is no such option{_hint(name, [*known, *beside])}")
    return (
        _with(Execution, "execution", execution, flat),
        _with(Batching, "batching", batching, flat),
    )


def _with(kind: type[_Record], place: str, given: _Record | None, flat: Mapping[str, Any]) -> _Record:
    own = {name: value for name, value in flat.items() if name in kind.model_fields}
    if given is None:
        return kind(**own)
    if not isinstance(given, kind):
        raise ConfigError(f"{place} = {given!r}: must be a cf.{kind.__name__}")
    for name, value in own.items():
        if name in given.model_fields_set:
            raise ConfigError(
                f"{name} is given twice: {value!r}, and {getattr(given, name)!r} in {place}; give it once"
            )
    return kind(**{name: getattr(given, name) for name in kind.model_fields} | own) if own else given


def said(info: FieldInfo, what: str) -> Any:
    """What ``option`` was told of a field."""
    extra = info.json_schema_extra
    return extra.get(what) if isinstance(extra, Mapping) else None


def phrase(info: FieldInfo) -> str:
    """The first paragraph of a field's description, as a phrase."""
    text = " ".join(str(info.description).partition("\n\n")[0].split())
    return text[0].lower() + text[1:-1] if text.endswith(".") else text


def _wrong(kind: type[Options], error: ValidationError, given: Mapping[str, Any]) -> str:
    """The first thing that is wrong."""
    found = error.errors()[0]
    name, cause = str(found["loc"][0]), found.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if found["type"] == "extra_forbidden":
        return f"{name}: {kind.__name__} has no such option{_hint(name, kind.model_fields)}"
    info = kind.model_fields[name]
    return f"{name} = {given[name]!r}: must be {said(info, 'legal')} ({phrase(info)})"


def _hint(name: str, known: Iterable[str]) -> str:
    options = [*known]
    near = difflib.get_close_matches(name, options, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(options)}"
