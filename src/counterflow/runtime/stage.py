"""One worker's copy of a stage: its layers, how they are made and how they run.

Invariant: whether a layer's weights were given or are made here, they do not depend on the cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from counterflow.errors import ConfigError
from counterflow.schedule.modes import Recompute

from .randomness import RandomStreams, Rows, keeps_statistics
from .values import Value, tensors_of, value_of
from .versions import Versions


@dataclass(frozen=True, slots=True)
class NamedLayer:
    """A layer of the model.

    Attributes:
        index: its number among all layers of the model.
        names: its own names of parameters and buffers to those in the model's state_dict.
        module: the layer.
    """

    index: int
    names: Mapping[str, str]
    module: nn.Module


class StageCopy:
    """The layers of one stage on one worker.

    Args:
        stage: its number.
        layers: its layers, on the worker's device.
        streams: where random draws come from.
        recompute: what is computed again in the backward.
    """

    def __init__(
        self, stage: int, layers: Sequence[NamedLayer], streams: RandomStreams, recompute: Recompute
    ) -> None:
        self.stage = stage
        self.layers = tuple(layers)
        self.streams = streams
        self.recompute = recompute
        self.before_again: Callable[[], None] = _nothing
        """Called before a layer is recomputed, when the layer recomputed before it is done with."""
        self.versions: Versions | None = None
        """Of its weights, in schemes without a flush."""
        self.trains = any(p.requires_grad for layer in layers for p in layer.module.parameters())
        self._statistics = [
            buffer
            for layer in layers
            for module in layer.module.modules()
            if keeps_statistics(module)
            for buffer in module.buffers(recurse=False)
        ]

    @property
    def statistics(self) -> list[Tensor]:
        """Buffers that a training forward changes: running statistics of batch norms."""
        return self._statistics

    def train(self, training: bool) -> None:
        """Put the layers into training or evaluation mode."""
        for layer in self.layers:
            if layer.module.training is not training:
                layer.module.train(training)

    def forward(self, value: Value, step: int, rows: Sequence[Rows]) -> Value:
        """The stage's output on some rows, in the mode that autograd is in."""
        by_layer = self.recompute is Recompute.LAYER and torch.is_grad_enabled()
        for layer in self.layers:
            if by_layer:
                value = self._recomputed(layer, value, step, rows)
            else:
                value = self._run(layer, value, step, rows)
        return value

    def forward_again(self, value: Value, step: int, rows: Sequence[Rows]) -> Value:
        """The same output once more, to recompute: running statistics do not change a second time."""
        kept = [buffer.clone() for buffer in self._statistics]
        result = self.forward(value, step, rows)
        with torch.no_grad():
            for buffer, before in zip(self._statistics, kept, strict=True):
                buffer.copy_(before)
        return result

    def _run(self, layer: NamedLayer, value: Value, step: int, rows: Sequence[Rows]) -> Value:
        if not layer.module.training:
            return layer.module(value)  # type: ignore[no-any-return]
        return self.streams.run(layer.module, value, index=layer.index, step=step, rows=rows)

    def _recomputed(self, layer: NamedLayer, value: Value, step: int, rows: Sequence[Rows]) -> Value:
        """A layer of which only the input is kept.

        The reentrant kind of checkpoint, because it saves its inputs and what it recomputes through
        autograd's own saving, where they are counted. It needs an input that requires a gradient.
        """
        place = f"layer {layer.index} ({type(layer.module).__name__})"
        again = False

        def run(_: Tensor, *tensors: Tensor) -> Any:
            nonlocal again
            if again:
                self.before_again()
            kept = [buffer.clone() for buffer in self._statistics] if again else []
            result = tensors_of(self._run(layer, value_of(tensors), step, rows), place)
            if again:
                with torch.no_grad():
                    for buffer, before in zip(self._statistics, kept, strict=True):
                        buffer.copy_(before)
            again = True
            return tuple(result)

        anchor = torch.empty(0, requires_grad=True)
        given = [value] if isinstance(value, Tensor) else list(value)
        result = checkpoint(run, anchor, *given, use_reentrant=True, preserve_rng_state=False)
        return value_of(result)


def _nothing() -> None:
    return


def materialised(
    layers: Sequence[NamedLayer], device: torch.device, streams: RandomStreams, *, copied: bool
) -> list[NamedLayer]:
    """The layers on the worker's device; those on the meta device are made there and initialised.

    Each is initialised from a stream keyed by its number, by ``reset_parameters`` of its modules, so that
    its weights depend neither on the cut nor on the worker. Parameters that layers share stay shared.

    Args:
        layers: the worker's layers.
        device: where they shall be.
        streams: the run's random streams.
        copied: whether other workers hold the same objects (threads), so that these must be copied.

    Raises:
        ConfigError: a module on the meta device has parameters or buffers but no ``reset_parameters``.
    """
    memo: dict[int, Any] = {}
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    result = []
    for layer in layers:
        module = copy.deepcopy(layer.module, memo) if copied else layer.module
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            _made(module, layer, device, streams, made)
        else:
            module.to(device)
        result.append(NamedLayer(layer.index, layer.names, module))
    return result


def _made(
    module: nn.Module,
    layer: NamedLayer,
    device: torch.device,
    streams: RandomStreams,
    made: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    place = f"layer {layer.index} ({type(module).__name__})"
    for name, child in module.named_modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if own and not callable(getattr(child, "reset_parameters", None)):
            raise ConfigError(
                f"{place} is on the meta device, and its module {name or 'itself'!r} "
                f"({type(child).__name__}) has no reset_parameters() to make its weights with; give it one, "
                "or build the layers on a real device"
            )
    before = dict(module.named_parameters(remove_duplicate=False))
    module.to_empty(device=device)
    with streams.initial(layer.index):
        for child in module.modules():
            reset = getattr(child, "reset_parameters", None)
            if callable(reset):
                reset()
    for name, old in before.items():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        if id(old) in made:
            setattr(holder, leaf, made[id(old)][1])
        else:
            made[id(old)] = old, getattr(holder, leaf)  # the old one too, so that its id stays its own
