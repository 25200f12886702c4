"""``layers``: a model's records, cut, as modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from counterflow.common.tensors.torch_private import buffers_of
from counterflow.errors import ConfigError

from .cutting import CutPoint, cuts_of
from .guards import Environment
from .layer import CapturedLayer
from .layer_contents import LayerSteps, held_names
from .layer_steps import parts_of
from .opening import records_of
from .recording import Recording, capturing
from .tracing_internals import transient_buffers_of


def layers(
    model: nn.Module,
    example: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    input_dims: int | None = 0,
) -> list[CapturedLayer]:
    """Automatic layers of any model, for ``Pipeline(list_layers=...)``.

    The model's forward runs several times, in training and in evaluation mode, on tensors without values,
    which takes no memory. The layers run the model's own modules; the first one accepts the model's inputs,
    the last one returns its output. Models of transformers are called with ``use_cache=False`` by default.

    Args:
        model: any module, on a device or the meta device.
        example: a mini-batch of any number of samples, as in ``Pipeline.step``: a tensor, a tuple of
            the model's arguments, or a dict of its keyword arguments.
        kwargs: keyword arguments of the model, as in ``Pipeline.step``.
        input_dims: dimension of the samples in the tensors; None: none.

    Returns:
        The layers, each with some cost; at least one.

    Raises:
        ConfigError: the model's forward decides by values of tensors, or cannot be traced; the error names
            the line.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> [layer.title for layer in layers(model, torch.ones(4, 2))]
    ['0', '1', '2']
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} is not a module, so no layers can be found; give a list of layers "
            "to the Pipeline directly"
        )
    environment = Environment.current("cpu")
    with capturing():
        records = records_of(model, example, dict(kwargs or {}), input_dims)
    cuts = cuts_of(records)
    total = records.training.costs.get("", 0.0)
    edges = [
        CutPoint(0, 0, 0, 0.0),
        *cuts,
        CutPoint(len(records.training.steps), len(records.evaluation.steps), 0, total),
    ]
    training = parts_of(records.training, records.example, [edge.training for edge in edges], model)
    evaluation = parts_of(records.evaluation, records.example, [edge.evaluation for edge in edges], model)
    recording = Recording(model, records, (training, evaluation), environment)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    transient = _names_of_transient_buffers(model)
    tensors |= records.evaluation.constants | records.training.constants
    captured = []
    for number, parts in enumerate(zip(training, evaluation, strict=True)):
        members = {name: tensors[name] for part in parts for name in held_names(part)}
        cost = edges[number + 1].cost - edges[number].cost
        captured.append(
            CapturedLayer(
                recording, number, _title(parts[0]), parts, tensors=members, transient=transient, cost=cost
            )
        )
    _hold_unused(model, captured, transient)
    return captured


def _title(part: LayerSteps) -> str:
    called = [step.module for step in part.steps if step.module is not None]
    if not called:
        return "no module"
    return called[0] if called[0] == called[-1] else f"{called[0]} to {called[-1]}"


def _names_of_transient_buffers(model: nn.Module) -> set[str]:
    names: dict[int, str] = {}
    persistent: set[int] = set()
    for path, module in model.named_modules():
        buffers, transient = buffers_of(module), transient_buffers_of(module)
        for name, buffer in buffers.items():
            if buffer is not None:
                names.setdefault(id(buffer), f"{path}.{name}" if path else name)
                persistent |= set() if name in transient else {id(buffer)}
    return {name for number, name in names.items() if number not in persistent}


def _hold_unused(model: nn.Module, captured: Sequence[CapturedLayer], transient: Collection[str]) -> None:
    listed = {id(t) for layer in captured for t in (*layer.parameters(), *layer.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in listed:
            # it belongs to the model and its state
            captured[-1].hold_unused(name, tensor, persistent=name not in transient)
