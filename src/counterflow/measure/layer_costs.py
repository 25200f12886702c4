"""Costs of layers as the planner's profile: by kinds of layers, at each size of micro-batches.

Layers of one class whose weights have the same shapes are of one kind; its numbers are the medians over them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from counterflow.common.tensors.dtypes import sum_dtype
from counterflow.planning.inputs.layer_parts import Contexts
from counterflow.planning.inputs.model import LayerSkip, LayerTie
from counterflow.planning.inputs.profile import CURVES, FACTORS, LayerProfile, Profile

from .equal_layers import kinds_of
from .layer_times import AtLengths, AtSize
from .routed_experts import experts_of
from .sequences import Growth


def assembled(
    layers: Sequence[nn.Module],
    by_size: Sequence[AtSize],
    at_lengths: AtLengths | None = None,
    kinds: Sequence[str] | None = None,
) -> Profile:
    """A profile of measured layers and updates, and nothing else; ``kinds`` by default as ``kinds_of``."""
    kinds = kinds or kinds_of(layers)
    update = by_size[-1].update
    return Profile(
        name="",
        machine="",
        date="",
        layers={
            kind: layer_profile(
                [i for i, layer_kind in enumerate(kinds) if layer_kind == kind], by_size, layers, at_lengths
            )
            for kind in dict.fromkeys(kinds)
        },
        positions=0 if at_lengths is None else at_lengths.positions,
        update_together=update.together,
        norm_bytes_per_byte=update.norm_bytes_per_byte,
        norm_peak_bytes=float(update.norm_peak_bytes),
    )


def layer_profile(
    members: Sequence[int],
    by_size: Sequence[AtSize],
    layers: Sequence[nn.Module],
    at_lengths: AtLengths | None = None,
) -> LayerProfile:
    """A kind's curves, from the layers of that kind."""

    def curve(name: str) -> tuple[float, ...]:
        """Medians of a curve's amounts, by size."""
        return tuple(
            statistics.median(getattr(times.costs[i].profile, name)[0] for i in members) for times in by_size
        )

    largest = by_size[-1]
    first, parameters = largest.costs[members[0]].profile, [*layers[members[0]].parameters()]
    trained = [p for p in parameters if p.requires_grad]
    growth, state_bytes, slice_state_bytes = Growth(), 0.0, 0.0
    if at_lengths is not None:
        growth = at_lengths.growth(members, by_size[0].overhead_seconds)
        state_bytes, slice_state_bytes = max(at_lengths.state_bytes[i] for i in members)
    curves: dict[str, Any] = {name: curve(name) for name in (*CURVES, *FACTORS)}
    output_bytes = max(largest.costs[i].profile.output_bytes for i in members) / largest.size
    attends = state_bytes > 0 and not slice_state_bytes  # keys and values are left to later slices
    if all(set(curves[name]) == {1.0} for name in FACTORS):  # without repeats
        curves |= dict.fromkeys(FACTORS, ())
    return LayerProfile(
        samples=tuple(float(times.size) for times in by_size),
        **curves,
        weights_bytes=float(first.weights_bytes),
        output_bytes=output_bytes,
        buffer_bytes=float(first.buffer_bytes),
        noted_buffer_bytes=float(first.noted_buffer_bytes),
        one_copy=any(times.costs[i].profile.one_copy for i in members for times in by_size),
        graph_nodes=max(largest.costs[i].profile.graph_nodes for i in members),
        cast_bytes=float(first.cast_bytes),
        frozen_bytes=float(sum(p.nbytes for p in parameters if not p.requires_grad)),
        update_peak_bytes=float(max(largest.update.layers[i] for i in members)),
        parameter_bytes=tuple(float(p.nbytes) for p in trained),
        low_precision_bytes=float(sum(p.nbytes for p in trained if _is_low(p))),
        attention_share=growth.attention,
        fixed_share=growth.fixed,
        state_bytes=state_bytes,
        slice_state_bytes=slice_state_bytes,
        experts=experts_of(layers[members[0]], output_bytes),
        contexts=Contexts(state_bytes) if attends else None,
        input_tensors=first.input_tensors,
    )


def _is_low(parameter: nn.Parameter) -> bool:
    # Its gradient takes twice its bytes.
    return sum_dtype(parameter.dtype) is not parameter.dtype


def skips_of(measured: AtSize) -> tuple[LayerSkip, ...]:
    """Skip connections of layers, measured with each layer as a stage."""
    return tuple(
        replace(skip, size_bytes=skip.size_bytes / (1 if skip.once else measured.size))
        for cost in measured.costs
        for skip in cost.skips
    )


def layers_with_loss(layers: Sequence[nn.Module], loss: object) -> list[nn.Module]:
    """Layers of which the last one has the weights of a loss function too, as a last stage has.

    >>> [len([*layer.parameters()]) for layer in layers_with_loss([nn.ReLU(), nn.ReLU()], nn.Linear(2, 2))]
    [0, 2]
    """
    if not layers or not isinstance(loss, nn.Module) or next(loss.parameters(), None) is None:
        return [*layers]
    return [*layers[:-1], nn.ModuleList([layers[-1], loss])]


def ties_of(layers: Sequence[nn.Module]) -> tuple[LayerTie, ...]:
    """The weights that layers share.

    >>> tied = [nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)]
    >>> tied[2].weight = tied[0].weight
    >>> ties_of(tied)
    (LayerTie(layers=(0, 2), size_bytes=16.0, trained=True, low_precision=False),)
    """
    having: dict[int, tuple[nn.Parameter, list[int]]] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            having.setdefault(id(parameter), (parameter, []))[1].append(number)
    return tuple(
        LayerTie(tuple(numbers), float(shared.nbytes), shared.requires_grad, _is_low(shared))
        for shared, numbers in having.values()
        if len(numbers) > 1
    )
