"""torchtitan's pipeline keys as our config: ``pipeline_parallel_*`` of a job's TOML file to its sections.

Invariant: stages have the same layers as in torchtitan, or it is said that they have not; no key of a
pipeline is dropped without a word. What it does not do: keys of other parallelism, model or optimiser.

Source: torchtitan's ``config/job_config.py`` and ``distributed/pipeline_parallel.py``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from counterflow.common import toml
from counterflow.common.json_models import Result, describe
from counterflow.errors import ConfigError, hint
from counterflow.schedule.layouts import LayerKind, Layout
from counterflow.schedule.layouts.megatron_layout import Stage

_SCHEDULES: dict[str, tuple[str, int | None]] = {
    "1f1b": ("dapple", 1),
    "gpipe": ("gpipe", 1),
    "interleaved1f1b": ("interleaved", None),
    "loopedbfs": ("gpipe", None),
    "interleavedzerobubble": ("interleaved-zb", None),
    "zbvzerobubble": ("zb-v", 2),
    "dualpipev": ("dualpipe-v", 2),
    "pipelineschedulesingle": ("", 1),  # with a file
    "pipelineschedulemulti": ("", None),
}
"""Scheme and number of a worker's stages by torch's name in small letters; None: any number."""

_NAMES = (
    *("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"),
    *("ZBVZeroBubble", "DualPipeV"),
)

_CHUNKS = {"interleaved": "chunks", "interleaved-zb": "chunks", "gpipe": "groups"}
"""The option of each scheme that says how many stages a worker holds."""

_PREFIX = "pipeline_parallel_"
_OLD = {
    "module_fqns_per_model_part": "pipeline_parallel_module_fqns_per_model_part",
    "batch_size": "local_batch_size",
}
"""Names by older or newer ones that mean the same."""


@dataclass(frozen=True, slots=True)
class Translated:
    """A torchtitan job's pipeline in a config's words.

    Attributes:
        sections: keys by table of a config.
        layout: the stages; None: torchtitan's file does not say how many layers there are.
        notes: what was left out, or means something else here.
    """

    sections: Mapping[str, Mapping[str, Any]]
    layout: Layout | None
    notes: tuple[str, ...]

    def to_toml(self) -> str:
        """The sections as a config file's text."""
        tables = [
            "\n".join([f"[{name}]", *(f"{key} = {toml.dumps(value)}" for key, value in keys.items())])
            for name, keys in self.sections.items()
            if keys
        ]
        return "\n\n".join(tables) + "\n"


class TranslatedShown(Result):
    """`counterflow layout --torchtitan`."""

    sections: Annotated[dict[str, dict[str, Any]], describe("keys by section of our config")]
    layout: Annotated[str | None, describe("the stages; null: the number of layers is not known")]
    notes: Annotated[list[str], describe("what was left out or means something else here")]


@dataclass(frozen=True, slots=True)
class _Keys:
    degree: int = 1
    schedule: str = "1F1B"
    schedule_csv: str = ""
    layers_per_stage: int | None = None
    first_stage_less_layers: int = 1
    last_stage_less_layers: int = 1
    microbatch_size: int = 1
    split_points: Any = None
    module_fqns_per_model_part: Any = None
    expert_parallel_overlap: bool = False


_NUMBERS = {
    "degree": 1,
    "layers_per_stage": 1,
    "first_stage_less_layers": 0,
    "last_stage_less_layers": 0,
    "microbatch_size": 1,
}
"""Keys that are whole numbers, each with the least."""


def from_torchtitan(text: str, layers: int | None = None, *, name: str = "torchtitan") -> Translated:
    r"""A config's sections for the pipeline of a torchtitan job.

    Args:
        text: the job's TOML file.
        layers: transformer layers of its model, 1 or more; None: as the file's modules say, if it lists them.
        name: what to call the file in errors.

    Raises:
        ConfigError: it is no TOML, a value is not legal, or torchtitan would refuse it, too.

    >>> job = '[parallelism]\npipeline_parallel_degree = 2\n[training]\nlocal_batch_size = 8'
    >>> print(from_torchtitan(job, layers=6).to_toml(), end="")
    [schedule]
    scheme = "dapple"
    stages = 2
    micro_batches = 8
    <BLANKLINE>
    [pipeline]
    cuts = "Et*3|t*3,L"
    <BLANKLINE>
    [train]
    samples = 8
    """
    try:
        job = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{name}: no TOML: {error}") from None
    notes: list[str] = []
    keys = _keys(job, name, notes)
    batch, replicas = _batch(job, keys, name, notes)
    micro_batches = batch // keys.microbatch_size
    schedule: dict[str, Any]
    scheme, chunks = _scheme(keys, name)
    layout = _layout(keys, layers, chunks, name)
    if keys.schedule_csv:
        schedule = {"file": keys.schedule_csv}
        notes.append(f"{_PREFIX}schedule_csv: the file fixes the micro-batches; it must have {micro_batches}")
    else:
        schedule = {"scheme": scheme, "workers" if scheme not in _BY_STAGES else "stages": keys.degree}
        schedule["micro_batches"] = micro_batches
        chunks_per_worker = (
            len(layout.stages) // keys.degree if layout is not None else chunks or _default_chunks(keys, name)
        )
        if scheme in _CHUNKS and (chunks is None or chunks_per_worker > 1):
            schedule[_CHUNKS[scheme]] = chunks_per_worker
    pipeline: dict[str, Any] = {}
    if replicas > 1:
        pipeline["replicas"] = replicas
    if layout is not None:
        pipeline["cuts"] = str(layout)
    else:
        notes.append(
            "the stages of torchtitan need the number of layers: give --layers, or cuts are balanced"
        )
    return Translated(
        {"schedule": schedule, "pipeline": pipeline, "train": {"samples": batch}}, layout, tuple(notes)
    )


_BY_STAGES = "dapple", "gpipe"


def _keys(job: Mapping[str, Any], name: str, notes: list[str]) -> _Keys:
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    known = {f"{_PREFIX}{key}": key for key in _Keys.__dataclass_fields__}
    for table in ("experimental", "parallelism"):  # older files have them in the first
        section = job.get(table, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{name}: {table} = {toml.shown(section)}: must be a section")
        for written, value in section.items():
            full = str(_OLD.get(written, written))
            if full in known:
                values[known[full]], places[known[full]] = value, f"{table}.{written}"
            elif full.startswith(_PREFIX):
                suggestion = hint(full, list(known))
                notes.append(
                    f"{table}.{written}: no such key of torchtitan is known; it is left out{suggestion}"
                )
            elif full.endswith("_parallel_degree") and value not in (1, -1) and full not in _REPLICATED:
                notes.append(
                    f"{table}.{written} = {toml.shown(value)}: no key of a pipeline, so it is left out"
                )
    for key, value in values.items():
        place = f"{name}: {places[key]} = {toml.shown(value)}"
        if key in _NUMBERS and not (type(value) is int and value >= _NUMBERS[key]):
            raise ConfigError(f"{place}: must be a whole number, {_NUMBERS[key]} or more")
        if key in ("schedule", "schedule_csv") and not isinstance(value, str):
            raise ConfigError(f"{place}: must be a text")
    if values.get("expert_parallel_overlap"):
        notes.append(f"{places['expert_parallel_overlap']}: there is no such overlap here, so it is left out")
    return _Keys(**values)


_REPLICATED = ("data_parallel_replicate_degree", "data_parallel_shard_degree")


def _batch(job: Mapping[str, Any], keys: _Keys, name: str, notes: list[str]) -> tuple[int, int]:
    training, parallelism = job.get("training", {}), job.get("parallelism", {})
    if not isinstance(training, dict):
        raise ConfigError(f"{name}: training = {toml.shown(training)}: must be a section")
    local = training.get("local_batch_size", training.get("batch_size", 8))
    if type(local) is not int or local < 1 or local % keys.microbatch_size:
        raise ConfigError(
            f"{name}: training.local_batch_size = {toml.shown(local)}: must be a multiple of "
            f"{_PREFIX}microbatch_size = {keys.microbatch_size}"
        )
    replicate = parallelism.get("data_parallel_replicate_degree", 1)
    shard = parallelism.get("data_parallel_shard_degree", -1)
    if type(replicate) is not int or type(shard) is not int or replicate < 1 or shard == 0 or shard < -1:
        raise ConfigError(f"{name}: data_parallel degrees are {replicate} and {shard}: must be whole numbers")
    if shard == -1:
        notes.append("data_parallel_shard_degree = -1: takes what ranks are left; set pipeline.replicas so")
    if training.get("global_batch_size", -1) not in (-1, local * replicate * max(shard, 1)):
        notes.append(
            f"training.global_batch_size = {toml.shown(training['global_batch_size'])}: gradients of several "
            "steps add up there; here raise train.samples and schedule.micro_batches"
        )
    return local, replicate * max(shard, 1)


def _default_chunks(keys: _Keys, name: str) -> int:
    """Stages of a worker if the number of layers is unknown and the schedule takes any number."""
    if keys.layers_per_stage is not None:
        raise ConfigError(
            f"{name}: {_PREFIX}layers_per_stage = {keys.layers_per_stage}: makes as many stages as the "
            "number of layers says; give --layers"
        )
    points = keys.split_points
    if points:
        count = len(points.split(",") if isinstance(points, str) else points) + 1
        return _ranks_of(count, keys, None, name)
    return 2  # torchtitan's own


def _ranks_of(stages: int, keys: _Keys, chunks: int | None, name: str) -> int:
    degree = keys.degree
    if stages % degree or (chunks is not None and stages != degree * chunks):
        expected = f"{degree * chunks}" if chunks is not None else f"a multiple of {degree}"
        raise ConfigError(
            f"{name}: makes {stages} stages, expected {expected} for {_PREFIX}degree = {degree} and "
            f"{keys.schedule}; torchtitan refuses it, too"
        )
    return stages // degree


def _scheme(keys: _Keys, name: str) -> tuple[str, int | None]:
    """The scheme, and how many stages it holds on a worker; None: any number."""
    entry = _SCHEDULES.get(keys.schedule.lower())
    if entry is None or not (entry[0] or keys.schedule_csv):
        raise ConfigError(
            f"{name}: {_PREFIX}schedule = {toml.shown(keys.schedule)}: no schedule of torch's that is known "
            f"here{hint(keys.schedule, _NAMES)}"
        )
    return entry


def _layout(keys: _Keys, layers: int | None, chunks: int | None, name: str) -> Layout | None:
    degree = keys.degree
    if layers is not None and not 1 <= layers <= 10_000:
        raise ConfigError(f"layers={layers}: must be 1 to 10,000")
    if keys.module_fqns_per_model_part is not None:
        layout = _of_modules(keys.module_fqns_per_model_part, layers, name)
    elif keys.split_points:
        if layers is None:
            return None
        layout = _of_split_points(keys.split_points, layers, name)
    else:
        if layers is None:
            return None
        weights = keys.first_stage_less_layers, keys.last_stage_less_layers
        stages = degree * (chunks or 2)
        if keys.layers_per_stage is not None:
            stages = -(-(layers + sum(weights)) // keys.layers_per_stage)
        layout = _dealt(stages, layers, weights, name)
    _ranks_of(len(layout.stages), keys, chunks, name)
    return layout


def _dealt(stages: int, layers: int, weights: tuple[int, int], name: str) -> Layout:
    """Layers dealt out evenly, embedding and head counted as given; the first stages have what is left."""
    if stages == 1:
        return Layout.of_cuts((), layers + 2)
    layers_each, more = divmod(layers + sum(weights), stages)
    if max(1, *weights) > layers_each:
        raise ConfigError(
            f"{name}: {layers} layers, {weights[0]} for the embedding and {weights[1]} for the head, make "
            f"stages of {layers_each}, expected 1 or more and no less than either counts as; give fewer "
            "stages"
        )
    counts = [layers_each + (stage < more) for stage in range(stages)]
    counts[0] -= weights[0]
    counts[-1] -= weights[1]
    stages_of_layout: list[Stage] = [tuple([LayerKind.TRANSFORMER] * count) for count in counts]
    stages_of_layout[0] = (LayerKind.EMBEDDING, *stages_of_layout[0])
    stages_of_layout[-1] = (*stages_of_layout[-1], LayerKind.LOSS)
    return Layout(tuple(stages_of_layout))


_LAYER = re.compile(r"layers\.([0-9]{1,5})")


def _of_modules(parts: Any, layers: int | None, name: str) -> Layout:
    """The stages of lists of modules: ``[["tok_embeddings", "layers.0"], …, ["norm", "output"]]``."""
    place = f"{name}: module_fqns_per_model_part"
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts) or not parts:
        raise ConfigError(f"{place} = {toml.shown(parts)}: must be a list of lists of names")
    stages: list[Stage] = []
    numbers: list[int] = []
    for number, part in enumerate(parts):
        stage: list[LayerKind] = []
        for module in part:
            match = _LAYER.fullmatch(str(module))
            if match:
                numbers.append(int(match[1]))
                stage.append(LayerKind.TRANSFORMER)
            elif module in ("tok_embeddings", "output", "lm_head"):
                stage.append(LayerKind.EMBEDDING if module == "tok_embeddings" else LayerKind.LOSS)
            elif module != "norm":
                raise ConfigError(
                    f"{place}: part {number} has {toml.shown(module)}, expected tok_embeddings, layers.N, "
                    "norm or output"
                )
        if "norm" in part and LayerKind.LOSS not in stage:
            raise ConfigError(f"{place}: part {number} has norm without output, which are one layer here")
        stages.append(tuple(stage))
    if numbers != list(range(len(numbers))) or (layers is not None and len(numbers) != layers):
        expected = f"all {layers}" if layers is not None else "all"
        raise ConfigError(
            f"{place}: has layers {toml.shown(numbers)}, expected {expected} from 0 on, in order"
        )
    layout = Layout(tuple(stages))
    layout.refuse_misplaced()
    return layout


def _of_split_points(points: Any, layers: int, name: str) -> Layout:
    """The stages that begin at these modules, of older files: ``["layers.2", "norm"]``, or with commas."""
    names: Sequence[Any] = points.split(",") if isinstance(points, str) else points
    place = f"{name}: {_PREFIX}split_points = {toml.shown(points)}"
    if not isinstance(names, list):
        raise ConfigError(f"{place}: must be a list of names")
    cuts = []
    for module in names:
        match = _LAYER.fullmatch(str(module).strip())
        if match is None and str(module).strip() != "norm":
            raise ConfigError(f"{place}: {toml.shown(module)} begins no stage here; give layers.N or norm")
        cuts.append(1 + (layers if match is None else int(match[1])))
    if any(not before < cut < layers + 2 for before, cut in zip([0, *cuts], cuts, strict=False)):
        raise ConfigError(f"{place}: must rise, and name layers of the {layers} that there are")
    return Layout.of_cuts(tuple(cuts), layers + 2)
