"""Buffers that layers of several stages share: constant ones only, since each stage would change its own.

A buffer is shared if layers have the same tensor, or tensors with common memory, or the same module.

Invariant: what is shared is read off the user's model before any of it is copied, so it is the same on every
worker. A table that no forward changes (rotary embeddings, masks) is shared by as many stages as there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn

from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.errors import ConfigError

from ..stages.named_layer import NamedLayer, place_of
from ..stages.stage import LocalStage

_FIRST_STEPS = 4
"""Steps of each worker in which contents are compared, then in steps 4, 8, 16, ..."""


@dataclass(frozen=True, slots=True)
class Place:
    """A layer's buffer or parameter.

    Attributes:
        stage: the layer's stage.
        layer: the layer.
        name: the tensor's name in the layer.
    """

    stage: int
    layer: NamedLayer
    name: str

    def __str__(self) -> str:
        """Name and layer, for messages."""
        return f"{self.name!r} of {place_of(self.layer)}"


SharedBuffer = tuple[Place, ...]
"""The places of one buffer that several stages share; of each layer one, in their order."""


def shared_buffers(layers: Sequence[Sequence[NamedLayer]], loss: NamedLayer | None) -> list[SharedBuffer]:
    """The buffers that layers of several stages share.

    Args:
        layers: layers by stage.
        loss: the loss function, if it has weights or buffers.

    Raises:
        ConfigError: a buffer has the memory of a trained parameter of another stage.
    """
    places: dict[int, list[Place]] = {}
    tensors: dict[int, Tensor] = {}
    buffers: set[int] = set()
    for stage, members in enumerate(layers):
        last = stage == len(layers) - 1
        for layer in (*members, loss) if last and loss is not None else members:
            module = layer.module
            named = dict(module.named_buffers(remove_duplicate=False))
            buffers.update(map(id, named.values()))
            named.update(module.named_parameters(remove_duplicate=False))
            for name, tensor in named.items():
                tensors[id(tensor)] = tensor
                places.setdefault(id(tensor), []).append(Place(stage, layer, name))
    groups = []
    order = {key: number for number, key in enumerate(places)}
    for group in sorted(_overlapping(tensors), key=lambda group: min(map(order.__getitem__, group))):
        if buffers.isdisjoint(group):
            continue
        of_group = sorted((p for key in group for p in places[key]), key=lambda p: (p.stage, p.layer.index))
        if len({place.stage for place in of_group}) == 1:
            continue
        trained = [p for key in group if tensors[key].requires_grad for p in places[key]]
        for parameter in trained:
            buffer = next(p for key in group if key in buffers for p in places[key])
            if buffer.stage != parameter.stage:
                raise ConfigError(
                    f"the buffer {buffer} has the memory of the weight {parameter}, and stage "
                    f"{buffer.stage} would not see the updates of stage {parameter.stage}; register the "
                    "weight itself in both layers, or cut the model so that both are in one stage"
                )
        groups.append(tuple(of_group))
    return groups


def _overlapping(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    spans = sorted((*_span(key, tensor), key) for key, tensor in tensors.items())
    groups: list[list[int]] = []
    reach = ("", 0)
    for kind, begin, end, key in spans:
        if groups and kind == reach[0] and begin < reach[1]:
            groups[-1].append(key)
            reach = kind, max(reach[1], end)
        else:
            groups.append([key])
            reach = kind, end
    return groups


def _span(key: int, tensor: Tensor) -> tuple[str, int, int]:
    if tensor.is_meta or is_dtensor(tensor) or not tensor.numel():
        return "none", key, key + 1  # a place of its own
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + elements * tensor.element_size()


class SharedBuffers:
    """A worker's watch over its copies of buffers that stages share.

    Args:
        shared: the shared buffers of the model.
        stages: the worker's stages.
        exact: whether stages of one worker may share what they change: it runs them in the order of the
            layers.
    """

    def __init__(
        self, shared: Iterable[SharedBuffer], stages: Mapping[int, LocalStage], *, exact: bool
    ) -> None:
        layers = {layer.index: layer for local_stage in stages.values() for layer in local_stage.with_weights}
        self._watched: list[_Watched] = []
        for places in shared:
            here = [place for place in places if place.stage in stages]
            if exact and len(here) == len(places):
                continue
            for stage, of_stage in groupby(here, key=lambda place: place.stage):
                place = next(of_stage)
                owner, _, name = place.name.rpartition(".")
                module = layers[place.layer.index].module.get_submodule(owner)
                if name not in dict(module.named_parameters(recurse=False)):
                    self._watched.append(_Watched(module, name, stage, places))
        self._steps = 0

    def note(self, *, step: bool = False) -> None:
        """Note what they hold, before forwards; ``step`` counts them as those of a training step."""
        if not self._watched:
            return
        contents = self._compares_contents
        for watched in self._watched:
            watched.note(contents=contents)
        self._steps += step

    @property
    def _compares_contents(self) -> bool:
        return self._steps < _FIRST_STEPS or not self._steps & (self._steps - 1)

    def check(self) -> None:
        """Refuse a forward that changed one since ``note``.

        Raises:
            ConfigError: one did.
        """
        for watched in self._watched:
            if watched.changed():
                raise ConfigError(_refusal(watched))


class _Watched:
    def __init__(self, module: nn.Module, name: str, stage: int, places: SharedBuffer) -> None:
        self.module, self.name, self.stage, self.places = module, name, stage, places
        self._shared_module = len({id(_owner(place)) for place in places}) < len(places)
        self._buffer: Tensor | None = None
        self._version = 0
        self._contents: Tensor | None = None
        self._compares = False

    def note(self, *, contents: bool) -> None:
        """Note what it holds; ``contents``: also changes that torch does not count are seen."""
        self._compares = contents
        buffer = self._now()
        version = 0 if buffer is None else buffer._version  # noqa: SLF001 - documented as it
        if buffer is self._buffer and version == self._version and not (contents and self._differs()):
            return
        self._buffer, self._version = buffer, version
        self._contents = None if buffer is None else buffer.detach().clone()

    def changed(self) -> bool:
        """True if the buffer differs from its noted contents."""
        buffer = self._now()
        if buffer is not self._buffer:
            # Another tensor under this name is seen by nobody who has the old one, but by the same module.
            return self._shared_module and self._differs()
        counted = buffer is not None and buffer._version != self._version  # noqa: SLF001 - documented as it
        return (counted or self._compares) and self._differs()

    def _now(self) -> Tensor | None:
        return dict(self.module.named_buffers(recurse=False)).get(self.name)

    def _differs(self) -> bool:
        buffer, then = self._now(), self._contents
        if buffer is None or then is None or buffer.shape != then.shape or buffer.dtype != then.dtype:
            return False  # a cache that each stage fills by itself
        return not _equal(buffer.detach(), then)


def _equal(tensor: Tensor, reference: Tensor) -> bool:
    return tensor.equal(reference) or bool(
        ((tensor == reference) | (tensor.isnan() & reference.isnan())).all()
    )


def _owner(place: Place) -> nn.Module:
    return place.layer.module.get_submodule(place.name.rpartition(".")[0])


def _refusal(watched: _Watched) -> str:
    writer = next(place for place in watched.places if place.stage == watched.stage)
    place = next(place for place in watched.places if place.stage != watched.stage)
    return (
        f"{place_of(writer.layer)} changes its buffer {writer.name!r} in a forward, and "
        f"{place_of(place.layer)} has the same buffer in another stage, so stages {writer.stage} and "
        f"{place.stage} would each change their own; give cuts that put both layers in one stage, or give "
        "each layer a buffer of its own"
    )
