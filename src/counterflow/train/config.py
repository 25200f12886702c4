"""A training run as data: every key with its type, default, meaning and legal values.

Invariant: a ``RunConfig`` that exists is one that can start: its schedule builds, its model has a layer
for every stage, its samples fill every micro-batch. What a key means is said here and nowhere else.
Reading files and wording errors is ``load.py``'s business; torch is not imported.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails

from counterflow import toml
from counterflow.errors import ConfigError, ScheduleError
from counterflow.execution import Configured, phrase, said
from counterflow.models.shapes import EXAMPLE, SHAPES, Family
from counterflow.program.check import check
from counterflow.runtime.transport.kinds import kinds
from counterflow.schedule import registry
from counterflow.schedule.formats import loads
from counterflow.schedule.ir import OptionValue, Schedule
from counterflow.schedule.scheme import DEPTH, Option, OptionType

SCHEME = "chimera"
"""The scheme of the built-in example, and of any config that names none."""

WORKERS = 4
"""Workers of the built-in example, and of any scheme that is given no depth."""

_RATE_TIMES_WIDTH = 0.64  # what narrow and wide models are both trained well with: 0.01 at 64, 0.0005 at 1280
_MOST_WARMUP = 2000

_BYTE_VALUES = 256  # tokens of the data; BERT's mask token is one more

HUGGING_FACE = "huggingface"
"""The kind of a model of transformers."""

_FINE_TUNING_RATE, _ADAPTERS_RATE = 2e-5, 2e-4
_MOST_POSITIONS = 1024


def _key(default: Any, about: str, legal: str, **limits: Any) -> Any:
    """A key: its default, what it means, and what it may be in the words of an error."""
    return Field(default, description=about, json_schema_extra={"legal": legal}, **limits)


def _as_path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(value)
    return Path(value)


AUTO = "auto"
"""``train.resume``: go on in the run's own folder, wherever it got to. ``pipeline.transport``: what fits."""


def _as_resumed(value: object) -> Path | str:
    return AUTO if value == AUTO else _as_path(value)


def _as_transport(name: str) -> str:
    if name not in _TRANSPORTS:
        raise ValueError(name)
    return name


PathKey = Annotated[Path, BeforeValidator(_as_path)]
ResumeKey = Annotated[Path | str, BeforeValidator(_as_resumed)]
_TRANSPORTS = AUTO, *(kind.name for kind in kinds(trains=True))
TransportKey = Annotated[str, AfterValidator(_as_transport)]
WholeNumbers = Annotated[tuple[int, ...], Strict(False)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Strict(False)
]


def _count(default: int | None, about: str, most: int, *, least: int = 1) -> Any:
    """A key that is a whole number, with the most that can be meant: more is refused before it is built."""
    return _key(default, about, f"a whole number, {least} to {most:,}", ge=least, le=most)


_MANY = 1_000_000_000
"""The most of what takes neither time nor memory before it is reached."""

_MOST_TOKENS = 2**27
"""Of the mini-batch of a replica: a gigabyte; the largest models are trained on some 2²⁴ in all."""

_PATH = "a path, in quotes"
_SHARE = "a number from 0 to less than 1"


class Key(NamedTuple):
    """What is said of a key: what it means, and what it may be in the words of an error."""

    about: str
    legal: str


class Section(BaseModel):
    """One table of the config file. Keys are checked strictly: ``"4"`` is no number, 1 is not true."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def keys_known(cls) -> dict[str, Key]:
        """Every key that it may have."""
        return {
            name: Key(phrase(info), str(said(info, "legal")))
            for name, info in cls.model_fields.items()
            if not said(info, "no_key")
        }

    def given(self) -> dict[str, Any]:
        """The keys that have a value, in the order of the file."""
        fields = type(self).model_fields.items()
        values = {name: getattr(self, name) for name, info in fields if not said(info, "no_key")}
        return {name: value for name, value in values.items() if value is not None}

    def about(self, key: str) -> str:
        """What a key of it means."""
        return self.keys_known()[key].about


class ModelSection(Section):
    """What is trained. A model with a name has a shape, which may be changed key by key."""

    kind: str = _key(
        "gpt",
        "architecture, or the name of a model",
        f"gpt, bert, {HUGGING_FACE}, or one of {', '.join(SHAPES)}",
    )
    path: str | None = _key(
        None,
        f"{HUGGING_FACE}: a folder with a model and its tokenizer, or its name on the hub",
        "a text, in quotes",
    )
    fresh: bool | None = _key(
        None,
        f"{HUGGING_FACE}: whether weights are made anew by the model's rules; read from the folder if not",
        "true or false",
    )
    dtype: Literal["float32", "bfloat16"] | None = _key(
        None,
        f"{HUGGING_FACE}: what weights are trained in, however they are stored; float32 where not given",
        "float32 or bfloat16, in quotes",
    )
    layers: int = _count(EXAMPLE.layers, "transformer blocks, without embedding and head", 10_000)
    hidden: int = _count(EXAMPLE.hidden, "width of the hidden states", 1_000_000)
    heads: int = _count(EXAMPLE.heads, "attention heads; a divisor of hidden", 1_000_000)
    positions: int = _count(EXAMPLE.positions, "tokens of a sample", 10_000_000)
    vocabulary: int = _count(
        _BYTE_VALUES, "number of different tokens; as many as the data has where not given", 100_000_000
    )
    dropout: float = _key(EXAMPLE.dropout, "share of activations set to zero in training", _SHARE, ge=0, lt=1)
    tied: bool = _key(False, "whether the head uses the embedding's weights", "true or false")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Take from a preset, or from the data, what is not given."""
        kind = data.get("kind", "gpt") if isinstance(data, dict) else None
        if not isinstance(kind, str):
            return data
        if kind == HUGGING_FACE:
            return _of_hugging_face(data)
        for name in ("path", "fresh", "dtype"):
            if data.get(name) is not None:
                raise ConfigError(
                    f'model.{name}: is for model.kind = "{HUGGING_FACE}", and it is {toml.shown(kind)}; '
                    f'leave it out, or set model.kind = "{HUGGING_FACE}"'
                )
        preset = SHAPES.get(kind)
        if preset is None:
            if kind not in list(Family):
                raise ConfigError(
                    _unknown(
                        "model.kind", kind, [*(family.value for family in Family), HUGGING_FACE, *SHAPES]
                    )
                )
            return {"vocabulary": _BYTE_VALUES + (kind == Family.BERT), **data}
        return {name: getattr(preset, name) for name in preset.__slots__ if name in cls.model_fields} | data

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if self.is_hugging_face:
            return self
        if self.hidden % self.heads:
            below = max(self.heads, self.hidden - self.hidden % self.heads)
            raise ConfigError(
                f"model.hidden = {self.hidden}: must be a multiple of model.heads = {self.heads}; "
                f"nearest: {below} or {below + self.heads}"
            )
        least = _BYTE_VALUES + (self.family is Family.BERT)
        if self.vocabulary < least:
            parts = "256 bytes and the mask token" if self.family is Family.BERT else "256 bytes"
            raise ConfigError(
                f"model.vocabulary = {self.vocabulary}: must be {least} or more: the data has {parts}"
            )
        return self

    def given(self) -> dict[str, Any]:
        """The keys that have a value; of a model of transformers not those that its folder tells."""
        found = super().given()
        return (
            {name: found[name] for name in _OF_HUGGING_FACE if name in found}
            if self.is_hugging_face
            else found
        )

    @property
    def is_hugging_face(self) -> bool:
        """Whether it is a model of transformers."""
        return self.kind == HUGGING_FACE

    @property
    def family(self) -> Family:
        """Whether it is a GPT or a BERT; for models that are not of transformers."""
        preset = SHAPES.get(self.kind)
        return preset.family if preset else Family(self.kind)

    @property
    def all_layers(self) -> int:
        """Layers between which it can be cut into stages: embedding, blocks, head."""
        return self.layers + 2


_OF_HUGGING_FACE = "kind", "path", "fresh", "dtype", "positions"
"""The keys of a model of transformers."""


def _of_hugging_face(data: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model of transformers, and what its config tells of it.

    Raises:
        ConfigError: a key is not for such a model, or its config cannot be read.
    """
    other = next(
        (name for name in data if name in ModelSection.model_fields and name not in _OF_HUGGING_FACE), None
    )
    if other is not None and data[other] is not None:
        raise ConfigError(f"model.{other}: the config of the model in model.path says it; leave it out")
    if not isinstance(data.get("path"), str) or not data["path"]:
        raise ConfigError(f'model.kind = "{HUGGING_FACE}": needs model.path, a folder or a name on the hub')
    from counterflow.models.hf.weights import (  # noqa: PLC0415  (transformers takes a while)
        most_positions,
        read_config,
    )

    found = read_config(data["path"])
    most = most_positions(found)
    positions = data.get("positions")
    if type(most) is int and type(positions) is int and positions > most:
        raise ConfigError(f"model.positions = {positions}: the model in {data['path']} takes {most} or fewer")
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in needed if not hasattr(found, name)]:
        raise ConfigError(
            f"model.path = {data['path']!r}: its {type(found).__name__} tells no {missing[0]}; models of "
            "attention layers are cut, as docs/hugging-face.md lists them; train another from Python, with "
            "list_layers"
        )
    told = {
        "layers": found.num_hidden_layers,
        "hidden": found.hidden_size,
        "heads": found.num_attention_heads,
        "vocabulary": found.vocab_size,
        "tied": bool(getattr(found, "tie_word_embeddings", False)),
    }
    if positions is None:
        told["positions"] = min(most or _MOST_POSITIONS, _MOST_POSITIONS)
    return {name: value for name, value in data.items() if value is not None or name == "positions"} | told


class DataSection(Section):
    """What it is trained on."""

    path: PathKey | None = _key(
        None, "a text file, or a folder of them; the text that ships with Python where not given", _PATH
    )
    field: str | None = _key(
        None,
        f'{HUGGING_FACE}: of a line of a JSONL file, which has its text; "text" where not given',
        "a text, in quotes",
    )
    label: str | None = _key(
        None,
        f'{HUGGING_FACE}: of a row, which has the class of its text; "label" where not given',
        "a text, in quotes",
    )
    samples: Literal["packed", "padded"] | None = _key(
        None,
        f"{HUGGING_FACE}: whether a sample is full, of texts one after another, or one text and padding; "
        "packed where not given, but padded for classifiers",
        "packed or padded, in quotes",
    )


class LoraSection(Section):
    """Adapters of peft in place of the model's own weights; only with a rank."""

    rank: int | None = _count(None, "of the adapters; the model itself is trained where not given", 1_000_000)
    alpha: float | None = _key(
        None, "adapters count alpha over rank; twice the rank where not given", "a number, more than 0", gt=0
    )
    dropout: float | None = _key(None, "share of what goes into adapters that is dropped", _SHARE, ge=0, lt=1)
    targets: Annotated[tuple[str, ...], Strict(False)] | None = _key(
        None,
        "the modules that get one; those that peft knows for the model where not given",
        "a list of names",
    )

    @model_validator(mode="after")
    def _check(self) -> LoraSection:
        if self.rank is None and self.given():
            raise ConfigError(
                f"lora.{next(iter(self.given()))}: there are no adapters without lora.rank; give it"
            )
        return self


class ScheduleSection(Section):
    """In which order: a scheme with its options, or a schedule file, which fixes them.

    The options are keys beside those here; the schemes' records say which there are.
    """

    model_config = ConfigDict(extra="allow")

    scheme: str | None = _key(None, f"name of the scheme; {SCHEME} where not given", "a name, in quotes")
    file: PathKey | None = _key(None, "a schedule file, in place of a scheme", _PATH)

    @classmethod
    def keys_known(cls) -> dict[str, Key]:
        """Its own keys, and every option of every scheme."""
        options = registry.options().items()
        return super().keys_known() | {
            name: Key(registry.about(known), _legal(next(iter(known.values())))) for name, known in options
        }

    def given(self) -> dict[str, Any]:
        """The keys that have a value: its own, then the scheme's options in their order."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        known = registry.find(self.scheme) if self.scheme is not None else None
        order = [option.name for option in known.options] if known else []
        return super().given() | {name: extra[name] for name in [*order, *extra] if name in extra}

    def about(self, key: str) -> str:
        """What a key means; an option, for this scheme."""
        option = registry.option(self.scheme, key) if self.scheme is not None else None
        return option.help if option else super().about(key)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """The built-in scheme, depth and number of micro-batches, where none are given."""
        if not isinstance(data, dict) or data.get("file") is not None:
            return data
        given = {name: value for name, value in data.items() if value is not None}
        given.setdefault("scheme", SCHEME)
        if not isinstance(given["scheme"], str):
            return data
        try:
            scheme = registry.scheme(given["scheme"])
        except ConfigError as error:
            raise ConfigError(f"schedule.scheme: {error}") from None
        if not given.keys() & set(DEPTH):
            given[scheme.depth] = WORKERS
        workers = given.get(scheme.depth)
        if type(workers) is int and any(option.name == "micro_batches" for option in scheme.missing(given)):
            given["micro_batches"] = max(1, 2 * workers)
        return given

    @model_validator(mode="after")
    def _check_options(self) -> ScheduleSection:
        """Refuse keys that are no option of any scheme, and values of another kind."""
        known = registry.options()
        wrong: list[InitErrorDetails] = []
        for name, value in (self.model_extra or {}).items():
            if name not in known:
                wrong.append(InitErrorDetails(type="extra_forbidden", loc=(name,), input=value))
            elif value is not None and not _is_of_kind(next(iter(known[name].values())), value):
                wrong.append(InitErrorDetails(type="int_type", loc=(name,), input=value))
        if wrong:
            raise ValidationError.from_exception_data("schedule", wrong)
        return self

    @model_validator(mode="after")
    def _check(self) -> ScheduleSection:
        extra = [f"schedule.{name}" for name in self.given() if name != "file"]
        if self.file is not None and extra:
            raise ConfigError(
                f"schedule.file = {toml.dumps(self.file)}: a file fixes the scheme and its options; "
                f"leave out {', '.join(extra)}"
            )
        return self

    def options(self) -> dict[str, OptionValue]:
        """The scheme's options that have a value."""
        return {name: value for name, value in self.given().items() if name not in ("scheme", "file")}

    def build(self) -> Schedule:
        """The schedule.

        Raises:
            ConfigError: the scheme cannot be built with these options; the file cannot be read, is damaged,
                or does not pass the checker.
        """
        if self.file is None:
            assert self.scheme is not None
            try:
                return registry.build(self.scheme, self.options())
            except ConfigError as error:
                raise ConfigError(_in_keys(str(error))) from None
        place = f"schedule.file = {toml.dumps(self.file)}"
        try:
            text = self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(
                f"{place}: there is no such file; `counterflow export SCHEME` writes one"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: is no text (byte {error.start} is not UTF-8)") from None
        except OSError as error:
            raise ConfigError(f"{place}: cannot be read: {error.strerror}") from None
        schedule = loads(text, place)
        try:
            check(schedule)
        except ScheduleError as error:
            raise ConfigError(f"{place}: does not pass the checker: {error}") from error
        return schedule


class PipelineSection(Section, Configured):
    """How the schedule is executed, and on what."""

    model_config = Section.model_config

    if not TYPE_CHECKING:
        __init__ = BaseModel.__init__  # what is wrong is told for the whole config

    replicas: int = _count(1, "W: copies of the whole pipeline group", 100_000)
    transport: TransportKey = _key(
        "auto",
        "what carries messages; auto: nccl where there is a GPU for each worker, else gloo on the CPU; "
        "local: workers are threads of one process",
        f"one of {', '.join(_TRANSPORTS)}",
    )
    cuts: WholeNumbers | None = _key(
        None,
        "the layers at which a new stage begins, counted from 0; balanced where not given",
        "a list of whole numbers",
    )

    @model_validator(mode="before")
    @classmethod
    def _only_keys(cls, data: Any) -> Any:
        """Refuse options of ``Pipeline`` that are no keys."""
        known = cls.keys_known()
        wrong = [
            InitErrorDetails(type="extra_forbidden", loc=(name,), input=data[name])
            for name in (data if isinstance(data, dict) else ())
            if name in cls.model_fields and name not in known
        ]
        if wrong:
            raise ValidationError.from_exception_data("pipeline", wrong)
        return data


class OptimizerSection(Section):
    """How weights are updated."""

    name: Literal["adamw", "adam", "sgd"] = _key(
        "adamw", "which optimiser of torch", "one of adamw, adam, sgd"
    )
    learning_rate: float | None = _key(
        None,
        "largest learning rate; 0.64 over the model's width where not given, of a model of transformers "
        f"{_FINE_TUNING_RATE:g}, with adapters {_ADAPTERS_RATE:g}",
        "a finite number, more than 0",
        gt=0,
    )
    weight_decay: float = _key(
        0.01, "decay of weights; norms and biases have none", "a finite number, 0 or more", ge=0
    )
    betas: Betas = _key(
        (0.9, 0.99), "adam, adamw: decay of both averages", "a list of 2 numbers, each from 0 to less than 1"
    )
    momentum: float = _key(0.0, "sgd: momentum", _SHARE, ge=0, lt=1)
    warmup_steps: int | None = _count(
        None,
        "steps in which the learning rate rises to its largest; a quarter of all where not given",
        _MANY,
        least=0,
    )
    schedule: Literal["constant", "cosine", "linear"] = _key(
        "cosine",
        "how the learning rate goes on, down to 0 but for constant",
        "one of constant, cosine, linear",
    )

    @model_validator(mode="after")
    def _check(self) -> OptimizerSection:
        unused = "betas" if self.name == "sgd" else "momentum"
        value = getattr(self, unused)
        if value != type(self).model_fields[unused].default:
            uses = "momentum" if self.name == "sgd" else "betas"
            raise ConfigError(
                f"optimizer.{unused} = {toml.shown(value)}: {self.name} has none (it has {uses}); "
                f"leave it out, or choose another optimizer.name"
            )
        return self


class TrainSection(Section):
    """For how long, and what is kept."""

    steps: int = _count(400, "mini-batches to train on, one update each", _MANY)
    samples: int = _count(64, "samples of a mini-batch for each replica", _MOST_TOKENS)
    seed: int = _key(
        0, "of the weights, the data and dropout", "a whole number, 0 to 4294967295", ge=0, lt=2**32
    )
    evaluate_every: int = _count(
        50, "loss on the validation part each so many steps; 0: at the end only", _MANY, least=0
    )
    checkpoint_every: int = _count(
        50, "write a checkpoint each so many steps; 0: at the end only", _MANY, least=0
    )
    memory_every: int | None = _count(
        None,
        "copy weights to the machines' memory each so many steps, for restarts; 0: never; where not given, "
        "as often as takes 5 % of the time at most, if restarts are allowed",
        _MANY,
        least=0,
    )
    fewer_after: float | None = _key(
        None,
        "restarts: go on with fewer workers, as the planner chooses, when one does not come back within so "
        "many seconds; where not given all are waited for",
        "a number of seconds, 0 or more, at most 1000000",
        ge=0,
        le=1e6,
    )
    ema_decay: float | None = _key(
        None,
        "keep an exponential moving average of the weights, which keeps this share of itself at an update; "
        "where not given there is none",
        _SHARE,
        ge=0,
        lt=1,
    )
    keep_last: int = _count(2, "checkpoints that are kept, the last ones", _MANY)
    keep_best: bool = _key(
        True, "whether the checkpoint of the least validation loss is kept too", "true or false"
    )
    out: PathKey | None = _key(
        None,
        "folder of the results, that all machines see; the next free runs/SCHEME-NUMBER where not given",
        _PATH,
    )
    resume: ResumeKey | None = _key(
        None,
        "a run's folder, to go on from its last checkpoint, in it where train.out is not given; "
        "auto: in train.out, from its last one or from the begin; fresh weights where not given",
        'a path, in quotes, or "auto"',
    )
    loggers: Annotated[tuple[Literal["tensorboard"], ...], Strict(False)] | None = _key(
        None,
        "what else writes the metrics, into a folder of its name in the run's; needs its extra",
        'a list; known: "tensorboard"',
    )
    threads: int | None = _count(
        None, "threads a worker computes with; the cores shared out where not given", 1_024
    )


class PlanSection(Section):
    """What ``counterflow plan`` expects of the run, told in its summary; but ``devices`` decides."""

    cluster: str | None = _key(None, "the devices it was planned for", "a text, in quotes")
    profile: str | None = _key(None, "what layers cost there", "a text, in quotes")
    mini_batch: int | None = _count(None, "samples of an update, of all replicas", _MANY)
    micro_batch: int | None = _count(None, "samples of a micro-batch", _MANY)
    arrangement: str | None = _key(
        None, "which workers share a node: pipeline-inside, replicas-inside or copies-inside", "a text"
    )
    devices: WholeNumbers | None = _key(
        None,
        "the device, or rank, counted from 0 node by node, of each worker of replica 0, of replica 1, …",
        "a list of whole numbers",
    )
    step_seconds: float | None = _key(None, "one update", "a number", ge=0)
    samples_per_second: float | None = _key(None, "throughput of all replicas", "a number", ge=0)
    bubble_ratio: float | None = _key(None, "share of a step in which a worker is idle", "a number", ge=0)
    peak_bytes: Annotated[tuple[float, ...], Strict(False)] | None = _key(
        None, "memory of each worker, without the cluster's reserve", "a list of numbers"
    )

    @model_validator(mode="after")
    def _check(self) -> PlanSection:
        if self.devices is not None and sorted(self.devices) != list(range(len(self.devices))):
            raise ConfigError(
                f"plan.devices = {toml.shown(self.devices)}: must have each device from 0 on once; leave it "
                "out to place the workers of a replica side by side"
            )
        return self

    def ranks(self, workers: int, replicas: int) -> list[tuple[int, ...]] | None:
        """The rank of each worker, by replica; None where the plan is of another layout."""
        found = self.devices
        if found is None or len(found) != workers * replicas:
            return None
        return [found[r * workers : (r + 1) * workers] for r in range(replicas)]


class RunConfig(Section):
    r"""A training run. Without arguments it is the built-in example.

    What is wrong is pydantic's ``ValidationError`` here, and a ``ConfigError`` in ``load_config``.

    >>> config = RunConfig()
    >>> str(config.build_schedule())
    'chimera(stages=4, micro_batches=8, pairs=1, concat=direct)'
    >>> print(*config.to_toml().splitlines()[:2], sep="\n")
    [model]
    kind = "gpt"  # architecture, or the name of a model
    """

    model: ModelSection = Field(default_factory=ModelSection, description="what is trained")
    data: DataSection = Field(default_factory=DataSection, description="what it is trained on")
    lora: LoraSection = Field(default_factory=LoraSection, description="adapters in place of its weights")
    schedule: ScheduleSection = Field(default_factory=ScheduleSection, description="in which order")
    pipeline: PipelineSection = Field(default_factory=PipelineSection, description="how it is executed")
    optimizer: OptimizerSection = Field(
        default_factory=OptimizerSection, description="how weights are updated"
    )
    train: TrainSection = Field(default_factory=TrainSection, description="for how long")
    plan: PlanSection = Field(default_factory=PlanSection, description="what was expected of it")

    @model_validator(mode="after")
    def _fill(self) -> RunConfig:
        """The keys whose defaults follow from other sections."""
        usual = {
            "learning_rate": self._usual_rate(),
            "warmup_steps": min(_MOST_WARMUP, self.train.steps // 4),
        }
        missing = {name: value for name, value in usual.items() if getattr(self.optimizer, name) is None}
        object.__setattr__(self, "optimizer", self.optimizer.model_copy(update=missing))
        return self

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        schedule = self.schedule.build()
        for problem in (
            self._nowhere_to_resume(),
            self._not_for_transformers(schedule),
            self._layers_missing(schedule),
            self._samples_missing(schedule),
            self._too_many_tokens(),
            self._cuts(schedule),
            self._not_sharded(schedule),
        ):
            if problem:
                raise ConfigError(problem)
        return self

    def _usual_rate(self) -> float:
        if not self.model.is_hugging_face or self.model.fresh:
            return _RATE_TIMES_WIDTH / self.model.hidden
        return _FINE_TUNING_RATE if self.lora.rank is None else _ADAPTERS_RATE

    def build_schedule(self) -> Schedule:
        """The schedule of one pipeline group; of an asynchronous scheme as many periods as it says.

        Raises:
            ConfigError: the schedule file was changed or removed after the config was read.
        """
        return self.schedule.build()

    @property
    def processes(self) -> int:
        """Workers of all replicas."""
        return self.build_schedule().workers * self.pipeline.replicas

    def expect_processes(self, processes: int) -> None:
        """Refuse a number of processes that is not workers times replicas.

        Args:
            processes: how many were started, as ``torchrun`` or Slurm tells.

        Raises:
            ConfigError: it is another number; the message says which would be legal.
        """
        workers, replicas = self.build_schedule().workers, self.pipeline.replicas
        needed = workers * replicas
        if processes == needed:
            return
        legal = f"start {needed}"
        if processes % workers == 0 and processes:
            legal += f", or set pipeline.replicas to {processes // workers}"
        raise ConfigError(
            f"{processes} processes were started, but {workers} workers a replica and {replicas} "
            f"replica{'s' if replicas > 1 else ''} need {needed}: {legal}"
        )

    def results_folder(self, runs: Path = Path("runs")) -> Path:
        """``train.out``, or the first ``runs/SCHEME-NUMBER`` that is free, counted from 1; not made."""
        if self.train.out is not None:
            return self.train.out
        name = self.schedule.scheme
        if name is None:
            assert self.schedule.file is not None
            name = self.schedule.file.stem
        number = 1
        while (runs / f"{name}-{number}").exists():
            number += 1
        return runs / f"{name}-{number}"

    def to_toml(self) -> str:
        """The resolved config as a TOML file that reads back equal; what has no value is left out.

        Raises:
            ConfigError: a path is not Unicode.
        """
        return "\n".join(self._lines()).lstrip("\n") + "\n"

    def _lines(self) -> Iterator[str]:
        for name in type(self).model_fields:
            section: Section = getattr(self, name)
            given = section.given()
            if not given:
                continue
            yield f"\n[{name}]"
            for key, value in given.items():
                yield f"{key} = {toml.dumps(value)}  # {section.about(key)}"

    def _not_sharded(self, schedule: Schedule) -> str | None:
        """What is wrong if optimiser state cannot be sharded; ``Pipeline`` refuses the same."""
        if not self.pipeline.zero_stage or (schedule.synchronous and self.pipeline.barrier):
            return None
        why = "no barrier" if schedule.synchronous else f"no flush in {schedule.scheme}"
        return (
            f"pipeline.zero_stage = 1: updated weights are sent when a step ends on all workers, and with "
            f"{why} it does not; leave one of them out"
        )

    def _nowhere_to_resume(self) -> str | None:
        """What is wrong if a run is to go on in a folder that nobody names."""
        if self.train.resume == AUTO and self.train.out is None:
            return 'train.resume = "auto": goes on in the folder train.out; give it, or --out'
        return None

    def _not_for_transformers(self, schedule: Schedule) -> str | None:
        """What is wrong if a key is for models of transformers only, or not for them."""
        if not self.model.is_hugging_face:
            keys = [f"data.{name}" for name in self.data.given() if name != "path"]
            keys += [f"lora.{name}" for name in self.lora.given()]
            if keys:
                return f'{keys[0]}: is for model.kind = "{HUGGING_FACE}"; leave it out, or set model.kind so'
        elif self.data.path is None:
            return (
                f'model.kind = "{HUGGING_FACE}": needs data.path, a text or JSONL file, or a folder of them'
            )
        elif not schedule.synchronous:
            return (
                f"schedule.scheme = {toml.shown(schedule.scheme)}: updates weights before all labels of a "
                "mini-batch are counted, by which the loss of a model of transformers is divided; take a "
                "scheme with a flush"
            )
        return None

    def _layers_missing(self, schedule: Schedule) -> str | None:
        """What is wrong if there are fewer layers than stages."""
        have = self.model.all_layers
        if have >= schedule.stages:
            return None
        least = max(1, schedule.stages - 2)
        return (
            f"model.layers = {self.model.layers}: with embedding and head these are {have} layers, fewer "
            f"than the {schedule.stages} stages of {schedule.scheme}; give model.layers = {least} or more, "
            f"or {have} stages or fewer"
        )

    def _samples_missing(self, schedule: Schedule) -> str | None:
        """What is wrong if a micro-batch, or a half of one, would have no sample."""
        parts = max((op.parts for op in schedule.ops()), default=1)
        least = parts * schedule.micro_batches
        if self.train.samples >= least:
            return None
        halves = f", each in {parts} parts" if parts > 1 else ""
        fewer = 0 if self.schedule.file else self.train.samples // parts
        legal = f", or schedule.micro_batches = {fewer} or fewer" if fewer else ""
        return (
            f"train.samples = {self.train.samples}: cannot be cut into the {schedule.micro_batches} "
            f"micro-batches of {schedule.scheme}{halves}; give train.samples = {least} or more{legal}"
        )

    def _too_many_tokens(self) -> str | None:
        """What is wrong if a mini-batch would not fit into any memory."""
        samples, positions = self.train.samples, self.model.positions
        if samples * positions <= _MOST_TOKENS:
            return None
        return (
            f"train.samples = {samples}: with model.positions = {positions} a mini-batch would have "
            f"{samples * positions:,} tokens, and at most {_MOST_TOKENS:,} are taken; give less of one"
        )

    def _cuts(self, schedule: Schedule) -> str | None:
        """What is wrong if the cuts do not make the stages."""
        cuts = self.pipeline.cuts
        if cuts is None:
            return None
        place = f"pipeline.cuts = {toml.shown(cuts)}"
        if len(cuts) != schedule.stages - 1:
            return (
                f"{place}: {len(cuts)} cuts make {len(cuts) + 1} stages, but {schedule.scheme} has "
                f"{schedule.stages}; give {schedule.stages - 1} cuts"
            )
        bounds = (0, *cuts, self.model.all_layers)
        if any(begin >= end for begin, end in pairwise(bounds)):
            return (
                f"{place}: must rise from 1 or more to {self.model.all_layers - 1} or less, so that each "
                f"stage has one of the {self.model.all_layers} layers (embedding, blocks, head)"
            )
        return None


def _legal(option: Option) -> str:
    """What an option may be in a file, in the words of an error."""
    if option.kind is OptionType.WORD:
        return f"one of {', '.join(option.words)}, in quotes"
    return ", or ".join([option.kind.value, *map(toml.shown, option.words)])


def _is_of_kind(option: Option, value: object) -> bool:
    """Whether a file's value can be one of the option; whether it is legal the scheme tells."""
    if isinstance(value, str):
        return bool(option.words)
    return type(value) is {OptionType.FLAG: bool, OptionType.NUMBER: int}.get(option.kind)


def _in_keys(message: str) -> str:
    """A scheme's message with the options it names as keys of the file.

    >>> _in_keys("stages=3: must be even")
    'schedule.stages = 3: must be even'
    """
    text = re.sub(rf"(?<![\w.])({'|'.join(registry.options())})=", r"schedule.\1 = ", message)
    return text if text.startswith("schedule.") else f"schedule: {text}"


def _unknown(place: str, value: str, known: list[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{place} = {toml.shown(value)}: unknown{hint} Known: {', '.join(known)}"
