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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.runtime.dtensors import is_dtensor
from counterflow.runtime.parameters.local_state import (
    BY_STAGE,
    RESIDUAL,
    StateName,
    assembled,
    refuse_other_ranks,
)
from counterflow.runtime.pipeline import Pipeline

from .files import DTYPES, dtype_name
from .index import Index, Stored

_LOG = logging.getLogger(__name__)

MODEL, AVERAGE, OPTIMIZER, OPTIONS = "model", "ema", "optimizer", "options"
SCHEDULER, AVERAGED = "scheduler", "averaged"


def key_of(kept: StateName) -> str:
    """Key of a part of the state.

    >>> key_of(StateName("optimizer", "0.weight", "exp_avg")), key_of(StateName("optimizer", "0.weight"))
    ('optimizer/0.weight/exp_avg', 'options/0.weight')
    """
    if kept.kind == RESIDUAL:
        return f"{RESIDUAL}/{kept.of}/{kept.slot}"
    if kept.kind != OPTIMIZER:
        return f"{kept.kind}/{kept.of}"
    return f"{OPTIONS}/{kept.of}" if kept.slot is None else f"{OPTIMIZER}/{kept.of}/{kept.slot}"


def kept_of(key: str) -> StateName:
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
    found = {full: first for names in weights.names for full, first in names if full != first}
    for first, every in weights.aliases.items():
        found |= {name: found.get(first, first) for name in every if name != first}
    return found


def at_hand(pipeline: Pipeline) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of this worker: tensors unchanged, including DTensors, and other objects."""
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    for kept, value in _entries(pipeline):
        key = key_of(kept)
        if isinstance(value, Tensor):
            tensors[key] = value.detach()
            dtype_name(value.dtype, key)
        else:
            objects[key] = value
    return tensors, objects


def _entries(pipeline: Pipeline) -> Iterator[tuple[StateName, Any]]:
    """State of this worker by first names, with the class of each optimiser in addition to its options."""
    weights, first = pipeline.weights, first_names(pipeline)
    classes = {
        name: type(optimizer).__name__
        for stage, optimizer in weights.optimizers.items()
        for name in weights.updated_names(stage).values()
    }
    for kept, value in weights.saved.entries():
        if kept.kind == MODEL:
            yield kept._replace(of=first.get(str(kept.of), kept.of)), value
        elif _is_options(kept):
            yield kept, {"optimizer": classes[str(kept.of)], "options": value}
        else:
            yield kept, value


def _is_options(kept: StateName) -> bool:
    return kept.kind == OPTIMIZER and kept.slot is None


def changing_in_forward(pipeline: Pipeline, tensors: Iterable[str]) -> set[str]:
    """Keys of local tensors that a forward may change: buffers, and weights that were seen to change."""
    weights = pipeline.weights
    steady = {first for names in weights.names for _, first in names} - weights.changes.in_forward
    kinds = ((key, *key.partition("/")[::2]) for key in tensors)
    return {key for key, kind, name in kinds if kind == MODEL and name not in steady}


def name_in_file(key: str) -> str:
    """Name of a tensor in its file: the model's name, or that name with the tensor's role.

    Names are unique, so torch.distributed.checkpoint reads all files as one.

    >>> name_in_file("optimizer/0.weight/exp_avg"), name_in_file("ema/0.weight")
    ('0.weight.exp_avg', '0.weight.ema')
    """
    kind, of, slot = kept_of(key)
    slot = kind if kind == AVERAGE else f"{RESIDUAL}.{slot}" if kind == RESIDUAL else slot
    return str(of) if slot is None else f"{of}.{slot}"


def file_of(key: str, rank: int, *, tensor: bool) -> str:
    """The file in which a worker writes a key.

    >>> file_of("ema/0.weight", 1, tensor=True), file_of("scheduler/0", 1, tensor=False)
    ('ema-1.safetensors', 'objects-1.pt')
    """
    return f"{kept_of(key).kind}-{rank}.safetensors" if tensor else f"objects-{rank}.pt"


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
    mine, first, stored = dict(_entries(pipeline)), first_names(pipeline), dict[StateName, str]()
    for key in (*index.tensors, *index.objects):
        kind, of, slot = kept_of(key)
        for name in (str(of), *index.aliases.get(str(of), ())) if training or kind == MODEL else ():
            own = StateName(kind, first.get(name, name), slot)
            if kind in BY_STAGE or own in mine or own._replace(slot=None) in mine:
                stored[own] = key
    if training:
        _refuse_other_residuals(pipeline, mine, stored, index)
    averaged = any(key.startswith(f"{AVERAGE}/") for key in index.tensors)
    needed = {MODEL, OPTIMIZER, *([AVERAGE] if averaged else [])} if training else {MODEL}
    for kept in mine:
        if kept.kind in needed and kept.slot is None and kept not in stored:
            raise ConfigError(
                f"{place}: has no {_WHAT.get(kept.kind, '')}{kept.of!r}; load it into the model that it was "
                "made of, with the same optimiser"
            )
    tensors = {}
    for own, key in stored.items():
        if key in index.tensors:
            weight = index.tensors.get(f"{MODEL}/{kept_of(key).of}")
            like = mine[own if own.slot is None else StateName(MODEL, own.of)]
            tensors[key_of(own)] = _empty(own, index.tensors[key], weight, like, place)
    keys = {key_of(own): key for own, key in stored.items()}
    dtypes = Counter(
        (dtype_of(index.tensors[keys[key]], place), tensor.dtype) for key, tensor in tensors.items()
    )
    for pair, count in dtypes.items():
        there, here = (str(dtype).removeprefix("torch.") for dtype in pair)
        if there != here:
            _LOG.warning(
                "%s: %d tensors are %s there and %s in this pipeline: converted", place, count, there, here
            )
    return tensors, keys


def _refuse_other_residuals(
    pipeline: Pipeline, mine: Iterable[StateName], stored: Mapping[StateName, str], index: Index
) -> None:
    """Refuse residuals of weights that other workers hold than those that wrote the checkpoint.

    Raises:
        ConfigError: they are.
    """
    saved: dict[str, list[str]] = {}
    for key in index.tensors:
        kept = kept_of(key)
        if kept.kind == RESIDUAL:
            saved.setdefault(str(kept.of), []).append(str(kept.slot))
    holders = {name: group.ranks for group in pipeline.weights.holdings.every() for name in group.residuals}
    for kept in mine if saved else ():
        if kept.kind == RESIDUAL:
            first = str(kept_of(stored[kept]).of) if kept in stored else str(kept.of)
            refuse_other_ranks(str(kept.of), saved.get(first, ()), holders[str(kept.of)], str(kept.slot))


def _empty(own: StateName, stored: Stored, weight: Stored | None, like: Tensor, place: str) -> Tensor:
    """An empty tensor for a stored one, with the layout of another tensor if the shapes are equal.

    Optimiser state in the dtype of the stored weight gets the dtype of the pipeline's weight.
    """
    if own.kind == MODEL and stored.shape != tuple(like.shape):
        raise ConfigError(
            f"{place}: {own.of} has shape {stored.shape}, {tuple(like.shape)} in the pipeline; load it into "
            "the model that it was made of"
        )
    dtype = torch.float32 if own.kind == RESIDUAL else like.dtype
    if own.kind == OPTIMIZER:
        theirs = dtype_of(stored, place)
        follows = weight is not None and stored.dtype == weight.dtype and theirs.is_floating_point
        dtype = dtype if follows and stored.shape else theirs
    if is_dtensor(like) and stored.shape == tuple(like.shape):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(stored.shape, dtype=dtype)


def load(
    pipeline: Pipeline, state: Mapping[str, Any], place: str, *, training: bool = True, options: bool = True
) -> None:
    """Load state into a pipeline, which uses the parts that it has a place for.

    Args:
        pipeline: pipeline that loads the state.
        state: tensors and other objects by key, with the pipeline's own names.
        place: name of the checkpoint, for errors.
        training: whether to load its optimiser's state too.
        options: whether to load the optimiser's options and the learning rate's schedule too.

    Raises:
        ConfigError: a part is missing or does not fit.
    """
    entries = {kept_of(key): value for key, value in state.items()}
    model = {str(kept.of): value for kept, value in entries.items() if kept.kind == MODEL}
    model |= {name: model[its] for name, its in first_names(pipeline).items() if its in model}
    pipeline.weights.saved.load_state_dict(model)
    if not training:
        return
    mine, others = dict(_entries(pipeline)), {kept: v for kept, v in entries.items() if kept.kind != MODEL}
    begins = {kept: others.pop(kept) for kept in entries if _is_options(kept)}
    for kept, value in begins.items():
        theirs, ours = value["optimizer"], mine.get(kept, value)["optimizer"]
        if theirs != ours:
            raise ConfigError(
                f"{place}: contains the state of {theirs}, not of {ours}; give the same optimiser, or load "
                "the "
                "weights only"
            )
    options_of = {kept: value["options"] for kept, value in begins.items()}
    found = assembled({**options_of, **others}.items())
    if AVERAGED in found:
        found.setdefault(AVERAGE, {})  # also if this pipeline has no place for it, which is logged
    pipeline.weights.saved.load_training_state(found, options=options)


def dtype_of(stored: Stored, place: str) -> torch.dtype:
    """The dtype of a stored tensor.

    Raises:
        ConfigError: the dtype is unknown.
    """
    found = DTYPES.get(stored.dtype)
    if found is None:
        raise ConfigError(
            f"{place}: has a tensor of dtype {stored.dtype[:20]!r}, which this Counterflow does not support"
        )
    return found
