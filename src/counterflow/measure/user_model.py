"""A user's model as the subject of a measurement: its layers, and mini-batches made of an example.

Invariant: a model or its file can be pickled; layers are found on each worker, as steps of a forward cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.capture.layer_listing import layers as captured_layers
from counterflow.capture.model_layers import Model, layers_of
from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.runtime.mini_batch.samples import samples_in
from counterflow.runtime.parameters.optimizers import MakeOptimizer

from .optimizer_trial import optimizer_name
from .subject_pipeline import Subject

DEFAULT_OPTIMIZER: MakeOptimizer = partial(torch.optim.AdamW, lr=0.001)
"""Optimizer of a model that comes without."""


@dataclass(frozen=True, slots=True)
class RepeatedSamples:
    """Mini-batches of any size, of the samples of an example in turn.

    Attributes:
        example: inputs and targets, as in ``Pipeline.step``.
        samples: number of samples of the example.
    """

    example: tuple[Any, Any]
    samples: int

    def __call__(self, count: int) -> tuple[Any, Any]:
        """Inputs and targets of a number of samples."""
        rows = torch.arange(count) % self.samples

        def repeated(leaf: Any) -> Any:
            has_samples = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self.samples
            return leaf[rows.to(leaf.device)] if has_samples else leaf

        batch: tuple[Any, Any] = pytree.tree_map(repeated, self.example)
        return batch


@dataclass(frozen=True, slots=True)
class UserModel:
    """A user's model, and what it is trained with.

    Attributes:
        model: any module, an ``nn.Sequential``, or a list of layers; on the meta device it is measured with
            any weights.
        loss: loss function, as of ``Pipeline``.
        example: a mini-batch, inputs and targets as in ``Pipeline.step``, with the samples in dimension 0.
        optimizer: function that makes an optimizer of parameters.
        list_layers: function that lists the layers of a module; None: they are found.
        execution: options of the run, of which precision and compilation are measured.
        seed: seed of random draws.

    Raises:
        ConfigError: the example is no pair, or has no samples.
    """

    model: Model
    loss: Callable[[Any, Any], Any]
    example: tuple[Any, Any]
    optimizer: MakeOptimizer = DEFAULT_OPTIMIZER
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    execution: Execution = field(default_factory=Execution)
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.example, tuple) or len(self.example) != 2:
            raise ConfigError(
                f"example is a {type(self.example).__name__}: give a mini-batch, inputs and targets: "
                "(tokens, labels), or ((x, y), labels) for a model of two inputs"
            )
        _ = self.samples

    @property
    def samples(self) -> int:
        """Number of samples of the example."""
        return samples_in(self.example[0], 0)

    @property
    def optimizer_name(self) -> str:
        """Class of the optimizer."""
        return optimizer_name(self.optimizer)

    def __call__(self) -> Subject:
        """The subject of a measurement.

        Raises:
            ConfigError: layers cannot be found.
        """
        return Subject(
            layers=self._layers(),
            loss=self.loss,
            optimizer=self.optimizer,
            batch=RepeatedSamples(self.example, self.samples),
            seed=self.seed,
            execution=self.execution.of_measurement(),
            fills_meta=True,
        )

    def _layers(self) -> list[nn.Module]:
        listed = self.list_layers is not None or isinstance(self.model, nn.Sequential | nn.ModuleList)
        if listed or not isinstance(self.model, nn.Module):
            return layers_of(self.model, self.list_layers)
        return [*captured_layers(self.model, self.example[0])]
