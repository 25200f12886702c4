"""Defaults of a pipeline's arguments: the transport of the launch, layers by recording.

Invariant: nothing here sends or runs anything but the capture of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from counterflow import capture
from counterflow.errors import ConfigError
from counterflow.execution import Batching
from counterflow.schedule.ir import Schedule

from ..transport.base import Transport


def transport_of(
    transport: Transport | str | None,
    device: torch.device | str | None,
    timeout_seconds: float | None,
    schedule: Schedule,
) -> Transport:
    """The transport that is given, or that of the launch."""
    if isinstance(transport, Transport):
        return transport
    from ..workers.world import current_transport  # noqa: PLC0415

    alone = schedule.placement.workers == 1
    return current_transport(transport, device=device, timeout_seconds=timeout_seconds, alone=alone)


def captured_layers(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None,
    costs: Sequence[float] | None,
    batching: Batching,
    *,
    stages: int,
) -> tuple[Callable[[nn.Module], Sequence[nn.Module]], Sequence[float]]:
    """Return a function that lists captured layers, and their costs.

    Raises:
        ConfigError: they cannot be found, or somebody lists them.
    """
    if list_layers is not None:
        raise ConfigError(
            "list_layers says what the layers are, and example asks for them to be found; give one of them"
        )
    dims = batching.input_dims
    if dims is not None and not isinstance(dims, int):
        raise ConfigError(
            f"example: layers are found where the samples are in one dimension of all inputs, and input_dims "
            f"is {dims!r}; call cf.layers with what fits, and give its layers by list_layers"
        )
    layers = capture.layers(cast("nn.Module", model), example, input_dims=dims)
    if len(layers) < stages and any(layer.differentiates for layer in layers):
        raise ConfigError(
            f"the {type(model).__name__} is {len(layers)} layer{'s' * (len(layers) != 1)} for {stages} "
            "stages, as its forward calls torch.autograd.grad, and a gradient through two stages would be "
            "that of the second; choose fewer stages"
        )
    return lambda _: layers, [layer.cost for layer in layers] if costs is None else costs
