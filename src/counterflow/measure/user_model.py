"""A user's model as the subject of a measurement: its layers, and mini-batches made of an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

from .layer_times import Subject


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


def subject_of_model(
    model: Model,
    loss: Callable[[Any, Any], Any],
    example: tuple[Any, Any],
    *,
    optimizer: MakeOptimizer | None = None,
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    execution: Execution | None = None,
    seed: int = 0,
) -> Subject:
    """The subject of a measurement of a user's model.

    Args:
        model: any module, an ``nn.Sequential``, or a list of layers; it is copied.
        loss: loss function, as of ``Pipeline``.
        example: a mini-batch, inputs and targets as in ``Pipeline.step``, with the samples in dimension 0.
        optimizer: function that makes an optimizer of parameters; None: AdamW.
        list_layers: function that lists the layers of a module; None: they are found.
        execution: options of the run, of which precision and compilation are measured.
        seed: seed of random draws.

    Raises:
        ConfigError: the example is no pair, has no samples, or layers cannot be found.
    """
    if not isinstance(example, tuple) or len(example) != 2:
        raise ConfigError(
            "example: give a mini-batch, inputs and targets: (tokens, labels), or ((x, y), labels) for a model "
            "of two inputs"
        )
    samples = samples_in(example[0], 0)
    if isinstance(model, nn.Module) and list_layers is None and not isinstance(model, nn.Sequential | nn.ModuleList):
        layers: list[nn.Module] = [*captured_layers(model, example[0])]
    else:
        layers = layers_of(model, list_layers)
    return Subject(
        layers=layers,
        loss=loss,
        optimizer=optimizer or partial(torch.optim.AdamW, lr=0.001),
        batch=RepeatedSamples(example, samples),
        seed=seed,
        execution=(execution or Execution()).but(digest_every=0),
    )
