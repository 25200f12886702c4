"""A pipeline's state as flat tables, by keys that do not know the layout: what is written, and where it goes.

``model/NAME`` is a weight or a buffer, ``ema/NAME`` the average of a weight, ``optimizer/NAME/SLOT`` a
tensor that the optimiser keeps for it; what is no tensor is under ``options/NAME`` (the optimiser's options
and numbers, and the updates in an average), ``extra/NAME`` (a module's extra state) and ``scheduler/STAGE``.
NAME is the first by which the model knows it.

Invariant: nothing here copies a tensor; whoever writes copies only what it writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from counterflow.errors import ConfigError
from counterflow.runtime.dtensors import is_dtensor
from counterflow.runtime.pipeline import Pipeline

from .files import DTYPES, dtype_name
from .index import Index, Stored

_LOG = logging.getLogger(__name__)

MODEL, OPTIMIZER, OPTIONS, EXTRA, SCHEDULER = "model", "optimizer", "options", "extra", "scheduler"
AVERAGE = "ema"


def first_names(pipeline: Pipeline) -> dict[str, str]:
    """Every further name of a weight of the model, with its first one; the same on all workers."""
    weights = pipeline.weights
    found = {full: first for names in weights.names for full, first in names if full != first}
    for first, every in weights.aliases.items():
        found |= {name: found.get(first, first) for name in every if name != first}
    return found


def at_hand(pipeline: Pipeline) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What this worker holds: tensors as they are, DTensors among them, and what is no tensor."""
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    for name, value in _entries(pipeline):
        if isinstance(value, Tensor):
            tensors[f"{MODEL}/{name}"] = value.detach()
        else:
            objects[f"{EXTRA}/{name}"] = value
    weights = pipeline.weights
    for stage, optimizer in weights.optimizers.items():
        names = weights.updated_names(stage)
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if not key.startswith("param")}
            for parameter in group["params"]:
                name, kept = names[id(parameter)], optimizer.state.get(parameter, {})
                slots = {slot: value for slot, value in kept.items() if isinstance(value, Tensor)}
                tensors |= {f"{OPTIMIZER}/{name}/{slot}": value.detach() for slot, value in slots.items()}
                objects[f"{OPTIONS}/{name}"] = {
                    "optimizer": type(optimizer).__name__,
                    "options": options,
                    "slots": sorted(slots),
                    "numbers": {slot: value for slot, value in kept.items() if slot not in slots},
                }
                if weights.average is not None and name in weights.average.of(stage):
                    tensors[f"{AVERAGE}/{name}"] = weights.average.of(stage)[name].laid_out
                    objects[f"{OPTIONS}/{name}"]["averaged"] = weights.average.updates(stage)
    for stage, scheduler in weights.schedulers.items():
        objects[f"{SCHEDULER}/{stage}"] = scheduler.state_dict()
    for key, tensor in tensors.items():
        dtype_name(tensor, key)
    return tensors, objects


def changing_in_forward(pipeline: Pipeline, tensors: Iterable[str]) -> set[str]:
    """Of the keys of tensors at hand those that a forward may change: buffers, and weights seen to change."""
    weights = pipeline.weights
    steady = {first for names in weights.names for _, first in names} - weights.changes.in_forward
    kinds = ((key, *key.partition("/")[::2]) for key in tensors)
    return {key for key, kind, name in kinds if kind == MODEL and name not in steady}


def file_and_name(key: str) -> tuple[str, str]:
    """The kind of file that has a tensor, and its name in it: the model's own, or that with the slot.

    >>> file_and_name("optimizer/0.weight/exp_avg")
    ('optimizer', '0.weight.exp_avg')
    """
    kind, _, name = key.partition("/")
    return kind, ".".join(name.rsplit("/", 1)) if kind == OPTIMIZER else name


def _entries(pipeline: Pipeline) -> Iterator[tuple[str, Any]]:
    """What ``state_dict`` of each layer at hand has, and what is in no layer, by first names."""
    first = first_names(pipeline)
    for copy in pipeline.weights.stages.values():
        for layer in copy.with_weights:
            for name, value in layer.state().items():
                full = layer.names[name]
                yield first.get(full, full), value
    for names, value in pipeline.weights.unlisted.entries():
        yield first.get(names[0], names[0]), value


_WHAT = {OPTIONS: "options of the optimiser for ", AVERAGE: "average of "}


class Wanted:
    """What of a checkpoint goes into a pipeline: empty tensors to be filled, and what is no tensor.

    Args:
        pipeline: where it goes.
        index: of the checkpoint.
        training: whether the optimiser's state is wanted too.
        place: what is read, for errors.

    Raises:
        ConfigError: the checkpoint lacks something, or a shape differs.
    """

    def __init__(self, pipeline: Pipeline, index: Index, *, training: bool, place: str) -> None:
        self.pipeline, self.index, self.place = pipeline, index, place
        self.first = {name: first for first, names in index.aliases.items() for name in names}
        self.tensors: dict[str, Tensor] = {}
        self.objects: set[str] = set()
        self.converted: dict[tuple[str, str], int] = {}
        """How many tensors have (the checkpoint's dtype, the pipeline's)."""
        self._names: dict[str, str] = {}
        for name, mine in _entries(pipeline):
            if isinstance(mine, Tensor):
                key = f"{MODEL}/{self._known(MODEL, name, index.tensors)}"
                self._want(key, mine, mine.dtype)
            else:
                key = f"{EXTRA}/{self._known(EXTRA, name, index.objects)}"
                self.objects.add(key)
        if training:
            self._want_optimizers()
        for (theirs, ours), count in self.converted.items():
            _LOG.warning(
                "%s: %d tensors are %s there and %s in this pipeline: converted", place, count, theirs, ours
            )

    def _known(self, kind: str, name: str, table: Mapping[str, object]) -> str:
        found = next((n for n in (name, self.first.get(name, name)) if f"{kind}/{n}" in table), None)
        if found is None:
            raise ConfigError(
                f"{self.place}: has no {_WHAT.get(kind, '')}{name!r}; read it into the model that it was "
                "made of, with the same optimiser"
            )
        self._names[name] = found
        return found

    def _want(self, key: str, like: Tensor, dtype: torch.dtype) -> None:
        """An empty tensor for a stored one, laid out as another if it has its shape."""
        stored = self.index.tensors[key]
        kind, name = file_and_name(key)
        if kind == MODEL and stored.shape != tuple(like.shape):
            raise ConfigError(
                f"{self.place}: {name} has shape {stored.shape}, {tuple(like.shape)} in the pipeline; read "
                "it into the model that it was made of"
            )
        theirs = dtype_of(stored, self.place)
        if theirs != dtype:
            pair = str(theirs).removeprefix("torch."), str(dtype).removeprefix("torch.")
            self.converted[pair] = self.converted.get(pair, 0) + 1
        if is_dtensor(like) and stored.shape == tuple(like.shape):
            self.tensors[key] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            self.tensors[key] = torch.empty(stored.shape, dtype=dtype)

    def _want_optimizers(self) -> None:
        average = self.pipeline.weights.average
        self.has_average = any(key.startswith(f"{AVERAGE}/") for key in self.index.tensors)
        for stage, name, parameter in _trained(self.pipeline):
            if average is not None and self.has_average and name in average.of(stage):
                kept = average.of(stage)[name].laid_out
                self._want(f"{AVERAGE}/{self._known(AVERAGE, name, self.index.tensors)}", kept, kept.dtype)
            self.objects.add(f"{OPTIONS}/{self._known(OPTIONS, name, self.index.objects)}")
            known = self._names[name]
            weight = self.index.tensors.get(f"{MODEL}/{known}")
            for key in (k for k in self.index.tensors if k.startswith(f"{OPTIMIZER}/{known}/")):
                stored = self.index.tensors[key]
                theirs = dtype_of(stored, self.place)
                follows = weight is not None and stored.dtype == weight.dtype and theirs.is_floating_point
                self._want(key, parameter, parameter.dtype if follows and stored.shape else theirs)
        if self.pipeline.weights.schedulers:
            self.objects |= {key for key in self.index.objects if key.startswith(f"{SCHEDULER}/")}

    # -- what was read

    def model(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Weights, buffers and extra state, for ``Weights.load_state_dict``."""
        first = first_names(self.pipeline)
        own: dict[str, Any] = {}
        for name, mine in _entries(self.pipeline):
            known = self._names[name]
            own[name] = (
                self.tensors[f"{MODEL}/{known}"] if isinstance(mine, Tensor) else objects[f"{EXTRA}/{known}"]
            )
        return own | {name: own[its] for name, its in first.items() if its in own}

    def training(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """What the optimisers and schedulers keep, for ``Weights.load_training_state``.

        Raises:
            ConfigError: the optimiser's state is not all there.
        """
        optimizer: dict[str, Any] = {}
        averages: dict[str, Tensor] = {}
        updates = 0
        for stage, name, _ in _trained(self.pipeline):
            known, mine = self._names[name], type(self.pipeline.weights.optimizers[stage]).__name__
            kept = objects[f"{OPTIONS}/{known}"]
            if kept["optimizer"] != mine:
                raise ConfigError(
                    f"{self.place}: holds the state of {kept['optimizer']}, not of {mine}; give the same "
                    "optimiser, or read the weights only"
                )
            state = deepcopy(kept["numbers"])
            for slot in kept["slots"]:
                tensor = self.tensors.get(f"{OPTIMIZER}/{known}/{slot}")
                if tensor is None:
                    raise ConfigError(
                        f"{self.place}: has no {slot} of {name!r}, which its optimiser keeps; go on from "
                        "another checkpoint"
                    )
                state[slot] = tensor
            optimizer[name] = {"state": state, "options": kept["options"]}
            average = self.tensors.get(f"{AVERAGE}/{known}")
            if average is not None:
                averages[name], updates = average, kept["averaged"]
        schedulers = {
            int(key.partition("/")[2]): value
            for key, value in objects.items()
            if key.startswith(f"{SCHEDULER}/")
        }
        found = {"optimizer": optimizer, "scheduler": schedulers}
        return found | {"ema": averages, "averaged": {0: updates}} if self.has_average else found


def _trained(pipeline: Pipeline) -> Iterator[tuple[int, str, Tensor]]:
    """Stage, name and parameter of all that the optimisers at hand have."""
    weights = pipeline.weights
    for stage, optimizer in weights.optimizers.items():
        names = weights.updated_names(stage)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield stage, names[id(parameter)], parameter


def dtype_of(stored: Stored, place: str) -> torch.dtype:
    """The dtype of a stored tensor.

    Raises:
        ConfigError: there is no such dtype.
    """
    found = DTYPES.get(stored.dtype)
    if found is None:
        raise ConfigError(f"{place}: has a tensor of dtype {stored.dtype[:20]!r}, which is unknown here")
    return found
