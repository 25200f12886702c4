"""``schedule="auto"``: checks of the request, and the layers that are measured.

Invariant: nothing here predicts. The function that chooses is registered from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from counterflow.capture.model_layers import layers_of
from counterflow.errors import ConfigError
from counterflow.execution import Batching, Execution
from counterflow.schedule.ir import Schedule

from ..mini_batch.loss_output import LossFunction
from ..parameters.optimizers import MakeOptimizer
from ..transport.base import Transport
from .defaults import captured_layers
from .partition import Model

AUTO = "auto"
"""Value of ``schedule`` for which the schedule is planned."""

ListLayers = Callable[[nn.Module], Sequence[nn.Module]]


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """A request for a schedule, of all workers.

    Attributes:
        layers: the model's layers, which stay as they are.
        loss: loss function, as of ``Pipeline``.
        example: a mini-batch of the replica, inputs and targets.
        optimizer: function that makes an optimizer of parameters.
        execution: options of the run.
        batching: how mini-batches are cut.
        workers: number of workers of a pipeline; None: all are one pipeline.
        micro_batch: samples of a micro-batch; None: planned.
    """

    layers: Sequence[nn.Module]
    loss: LossFunction | None
    example: tuple[Any, Any]
    optimizer: MakeOptimizer
    execution: Execution
    batching: Batching
    workers: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """A planned schedule.

    Attributes:
        schedule: the schedule.
        cuts: the layers with which stages 1, 2, ... begin.
        execution: options of the run with the planned recomputation.
        step_seconds: planned seconds of a step.
        peak_bytes: planned bytes of the fullest worker.
        text: the choice in words.
    """

    schedule: Schedule
    cuts: tuple[int, ...]
    execution: Execution
    step_seconds: float
    peak_bytes: float
    text: str

    @override
    def __str__(self) -> str:
        return self.text


Chooser = Callable[[ScheduleRequest, Transport], ScheduleChoice]
"""Function that plans a schedule; all workers call it."""

CHOOSERS: dict[str, Chooser] = {}
"""The function for ``auto``, which ``counterflow.automatic`` registers."""


def request_of(
    model: Model,
    loss: LossFunction | None,
    example: Any,
    list_layers: ListLayers | None,
    *,
    optimizer: MakeOptimizer,
    execution: Execution,
    batching: Batching,
    fixed: Mapping[str, object],
) -> tuple[ScheduleRequest, ListLayers | None]:
    """The request of a pipeline's arguments, and a function that lists the same layers again.

    Raises:
        ConfigError: the example is no mini-batch, samples are in other dimensions, or an argument is given
            that the plan decides.
    """
    if decided := [name for name, value in fixed.items() if value is not None]:
        raise ConfigError(f'schedule="auto" decides {decided[0]}; leave it out, or name the schedule')
    if not isinstance(example, tuple) or len(example) != 2:
        raise ConfigError(
            f'schedule="auto" needs example=(inputs, targets), a mini-batch as step takes it, to measure the '
            f"model with; example is {'missing' if example is None else f'a {type(example).__name__}'}"
        )
    if (batching.input_dims, batching.target_dims) != (0, 0):
        raise ConfigError('schedule="auto" needs the samples in dimension 0; name the schedule')
    listed = list_layers is not None or not isinstance(model, nn.Module) or _lists_itself(model)
    if not listed:
        list_layers, _ = captured_layers(model, example[0], None, None, batching, stages=1)
    layers = layers_of(model, list_layers)
    return ScheduleRequest(layers, loss, example, optimizer, execution, batching), list_layers


def _lists_itself(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential | nn.ModuleList)
