"""A pipeline's state as flat tables with keys that do not depend on the layout.

``model/NAME`` is a weight, a buffer or a module's extra state, ``ema/NAME`` the average of a weight,
``optimizer/NAME/SLOT`` its optimiser state, ``residual/NAME/RANK`` what a worker has lost of its gradient,
``options/NAME`` the optimiser's class and options;
``scheduler/STAGE`` is the learning rate's schedule, ``averaged/STAGE`` the number of updates in averages,
``loss_scale/STAGE`` the loss scale, the same for all stages.
NAME is the first name in the model.

Invariant: tensors are not copied here; a writer copies only what it writes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.common.tensors.dtypes import sum_dtype
from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.state_format import (
    BY_STAGE,
    RESIDUAL,
    StateName,
    assembled,
    refuse_other_ranks,
)

from .files import DTYPES, dtype_name
from .index import Index, Stored

_LOG = logging.getLogger(__name__)

MODEL, AVERAGE, OPTIMIZER, OPTIONS = "model", "ema", "optimizer", "options"
SCHEDULER, AVERAGED = "scheduler", "averaged"


def key_of(name: StateName) -> str:
    """Key of a part of the state.

    >>> key_of(StateName("optimizer", "0.weight", "exp_avg")), key_of(StateName("optimizer", "0.weight"))
    ('optimizer/0.weight/exp_avg', 'options/0.weight')
    """
    if name.kind == RESIDUAL:
        return f"{RESIDUAL}/{name.of}/{name.slot}"
    if name.kind != OPTIMIZER:
        return f"{name.kind}/{name.of}"
    return f"{OPTIONS}/{name.of}" if name.slot is None else f"{OPTIMIZER}/{name.of}/{name.slot}"


def state_name(key: str) -> StateName:
    """The part of the state with a key."""
    kind, _, of = key.partition("/")
    if kind in (OPTIMIZER, RESIDUAL):
        name, _, slot = of.rpartition("/")
        return StateName(kind, name, slot)
    if kind == OPTIONS:
        return StateName(OPTIMIZER, of)
    return StateName(kind, int(of) if kind in BY_STAGE else of)


def first_names(pipeline: Pipeline) -> dict[str, str]:
    """First names by every further name of a weight of the model; the same on all workers."""
    weights = pipeline.weights
    firsts = {full: first for names in weights.names for full, first in names if full != first}
    for first, further in weights.aliases.items():
        firsts |= {name: firsts.get(first, first) for name in further if name != first}
    return firsts


def at_hand(pipeline: Pipeline) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of this worker: tensors unchanged, including DTensors, and other objects."""
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    for entry, value in _entries(pipeline):
        key = key_of(entry)
        if isinstance(value, Tensor):
            tensors[key] = value.detach()
            dtype_name(value.dtype, key)
        else:
            objects[key] = value
    return tensors, objects


def _entries(pipeline: Pipeline) -> Iterator[tuple[StateName, Any]]:
    weights, first = pipeline.weights, first_names(pipeline)
    classes = {
        name: type(optimizer).__name__
        for stage, optimizer in weights.optimizers.items()
        for name in weights.updated_names(stage).values()
    }
    for entry, value in weights.state.entries():
        if entry.kind == MODEL:
            yield entry._replace(of=first.get(str(entry.of), entry.of)), value
        elif _is_options(entry):
            yield entry, {"optimizer": classes[str(entry.of)], "options": value}
        else:
            yield entry, value


def _is_options(entry: StateName) -> bool:
    return entry.kind == OPTIMIZER and entry.slot is None


def changing_in_forward(pipeline: Pipeline, tensors: Iterable[str]) -> set[str]:
    """Keys of local tensors that a forward may change: buffers, and weights that were seen to change."""
    weights = pipeline.weights
    steady = {first for names in weights.names for _, first in names} - weights.mutations.mutated_weights
    kinds = ((key, *key.partition("/")[::2]) for key in tensors)
    return {key for key, kind, name in kinds if kind == MODEL and name not in steady}


def name_in_file(key: str) -> str:
    """Name of a tensor in its file: the model's name, or that name with the tensor's role.

    Names are unique, so torch.distributed.checkpoint reads all files as one.

    >>> name_in_file("optimizer/0.weight/exp_avg"), name_in_file("ema/0.weight")
    ('0.weight.exp_avg', '0.weight.ema')
    """
    kind, of, slot = state_name(key)
    slot = kind if kind == AVERAGE else f"{RESIDUAL}.{slot}" if kind == RESIDUAL else slot
    return str(of) if slot is None else f"{of}.{slot}"


def file_of(key: str, rank: int, *, tensor: bool) -> str:
    """The file in which a worker writes a key.

    >>> file_of("ema/0.weight", 1, tensor=True), file_of("scheduler/0", 1, tensor=False)
    ('ema-1.safetensors', 'objects-1.pt')
    """
    return f"{state_name(key).kind}-{rank}.safetensors" if tensor else f"objects-{rank}.pt"


_WHAT = {OPTIMIZER: "options of the optimiser for ", AVERAGE: "average of "}


def wanted(
    pipeline: Pipeline, index: Index, place: str, *, training: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parts of a checkpoint that a pipeline loads.

    Args:
        pipeline: pipeline that loads them.
        index: index of the checkpoint.
        place: name of the checkpoint, for errors.
        training: whether to load the optimiser's state too.

    Returns:
        By the pipeline's own keys, empty tensors to fill, and the checkpoint's key of each tensor and object.

    Raises:
        ConfigError: the checkpoint lacks something, or a shape differs.
    """
    entries, first, stored = dict(_entries(pipeline)), first_names(pipeline), dict[StateName, str]()
    frozen = _frozen(pipeline)
    for key in (*index.tensors, *index.objects):
        kind, of, slot = state_name(key)
        for name in (str(of), *index.aliases.get(str(of), ())) if training or kind == MODEL else ():
            entry = StateName(kind, first.get(name, name), slot)
            known = entry in entries or entry._replace(slot=None) in entries or entry in frozen
            if kind in BY_STAGE or known:
                stored[entry] = key
    if training:
        _refuse_other_residuals(pipeline, entries, stored, index)
    averaged = any(key.startswith(f"{AVERAGE}/") for key in index.tensors)
    needed = {MODEL, OPTIMIZER, *([AVERAGE] if averaged else [])} if training else {MODEL}
    for entry in entries:
        if entry.kind in needed and entry.slot is None and entry not in stored and entry not in frozen:
            raise ConfigError(
                f"{place}: has no {_WHAT.get(entry.kind, '')}{entry.of!r}; load it into the model that it "
                "was made of, with the same optimiser"
            )
    tensors = {}
    for entry, key in stored.items():
        if key in index.tensors:
            weight = index.tensors.get(f"{MODEL}/{state_name(key).of}")
            template = entry if entry.slot is None and entry in entries else StateName(MODEL, entry.of)
            like = entries[template]
            tensors[key_of(entry)] = _empty(entry, index.tensors[key], weight, like, place)
    keys = {key_of(entry): key for entry, key in stored.items()}
    dtypes = Counter(
        (dtype_of(index.tensors[keys[key]], place), tensor.dtype) for key, tensor in tensors.items()
    )
    for pair, count in dtypes.items():
        stored_dtype, pipeline_dtype = (str(dtype).removeprefix("torch.") for dtype in pair)
        if stored_dtype != pipeline_dtype:
            _LOG.warning(
                "%s: %d tensors are %s there and %s in this pipeline: converted",
                place,
                count,
                stored_dtype,
                pipeline_dtype,
            )
    return tensors, keys


def _frozen(pipeline: Pipeline) -> set[StateName]:
    # State that a frozen weight may have, from when it was trained, or not: load_state_dict takes both.
    weights = pipeline.weights
    kinds = (OPTIMIZER,) if weights.average is None else (OPTIMIZER, AVERAGE)
    return {
        StateName(kind, name)
        for gradients in weights.placement.all_gradients()
        for name, parameter in gradients.parameters.items()
        if not parameter.requires_grad and (weights.owners is None or weights.owners.owned_here(name))
        for kind in kinds
    }


def tied_keys(pipeline: Pipeline, index: Index) -> Iterator[tuple[str, str]]:
    """Pairs of keys in a checkpoint that are one weight of the pipeline; the same on all workers."""
    first, known = first_names(pipeline), dict[str, str]()
    for key in index.tensors:
        kind, of, _ = state_name(key)
        if kind == MODEL:
            first_key = known.setdefault(first.get(str(of), str(of)), key)
            if first_key != key:
                yield first_key, key


def _refuse_other_residuals(
    pipeline: Pipeline, entries: Iterable[StateName], stored: Mapping[StateName, str], index: Index
) -> None:
    saved: dict[str, list[str]] = {}
    for key in index.tensors:
        entry = state_name(key)
        if entry.kind == RESIDUAL:
            saved.setdefault(str(entry.of), []).append(str(entry.slot))
    holders = {
        name: group.ranks for group in pipeline.weights.placement.all_gradients() for name in group.residuals
    }
    for entry in entries if saved else ():
        if entry.kind == RESIDUAL:
            first = str(state_name(stored[entry]).of) if entry in stored else str(entry.of)
            if first in saved:  # else it was frozen, and begins with zero
                refuse_other_ranks(str(entry.of), saved[first], holders[str(entry.of)], str(entry.slot))


def _empty(entry: StateName, stored: Stored, weight: Stored | None, like: Tensor, place: str) -> Tensor:
    """An empty tensor for a stored one, with the layout of another tensor if the shapes are equal.

    Optimiser state in the dtype of the stored weight gets the dtype of the pipeline's weight.
    """
    if entry.kind == MODEL and stored.shape != tuple(like.shape):
        raise ConfigError(
            f"{place}: {entry.of} has shape {stored.shape}, {tuple(like.shape)} in the pipeline; load it "
            "into the model that it was made of"
        )
    dtype = torch.float32 if entry.kind == RESIDUAL else like.dtype
    dtype = sum_dtype(dtype) if entry.kind == AVERAGE else dtype
    if entry.kind == OPTIMIZER:
        stored_dtype = dtype_of(stored, place)
        follows = weight is not None and stored.dtype == weight.dtype and stored_dtype.is_floating_point
        dtype = dtype if follows and stored.shape else stored_dtype
    if is_dtensor(like) and stored.shape == tuple(like.shape):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(stored.shape, dtype=dtype)


def prepare(
    pipeline: Pipeline, state: Mapping[str, Any], place: str, *, training: bool = True, options: bool = True
) -> Callable[[], None]:
    """Check state, and return the function that loads it into a pipeline, which uses what it has a place for.

    Args:
        pipeline: pipeline that loads the state.
        state: tensors and other objects by key, with the pipeline's own names.
        place: name of the checkpoint, for errors.
        training: whether to load its optimiser's state too.
        options: whether to load the optimiser's options and the learning rate's schedule too.

    Raises:
        ConfigError: a part is missing or does not fit.
    """
    entries = {state_name(key): value for key, value in state.items()}
    model = {str(entry.of): value for entry, value in entries.items() if entry.kind == MODEL}
    model |= {name: model[first] for name, first in first_names(pipeline).items() if first in model}
    load_model = pipeline.weights.state.prepare_model(model)
    if not training:
        return load_model
    local, training_entries = (
        dict(_entries(pipeline)),
        {entry: v for entry, v in entries.items() if entry.kind != MODEL},
    )
    options_entries = {entry: training_entries.pop(entry) for entry in entries if _is_options(entry)}
    for entry, value in options_entries.items():
        stored_class, local_class = value["optimizer"], local.get(entry, value)["optimizer"]
        if stored_class != local_class:
            raise ConfigError(
                f"{place}: contains the state of {stored_class}, not of {local_class}; give the same "
                "optimiser, or load the weights only"
            )
    options_of = {entry: value["options"] for entry, value in options_entries.items()}
    training_state = assembled({**options_of, **training_entries}.items())
    if AVERAGED in training_state:
        training_state.setdefault(AVERAGE, {})  # also if this pipeline has no place for it, which is logged
    load_training = pipeline.weights.state.prepare_training(training_state, options=options)

    def load() -> None:
        load_model()
        load_training()

    return load


def dtype_of(stored: Stored, place: str) -> torch.dtype:
    """The dtype of a stored tensor.

    Raises:
        ConfigError: the dtype is unknown.
    """
    dtype = DTYPES.get(stored.dtype)
    if dtype is None:
        raise ConfigError(
            f"{place}: has a tensor of dtype {stored.dtype[:20]!r}, which this Counterflow does not support"
        )
    return dtype
