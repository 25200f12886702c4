"""Model sources: where a run's model comes from, what a config says about it, and how it is made.

Invariant: everything that depends on the origin of a model is a method of its source. A source is one file in
``sources``, or a user's own, which is registered. Reading a config does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import nn

    from counterflow.capture.model_layers import Model
    from counterflow.data.text_batches import TextBatches
    from counterflow.runtime.pipeline import Pipeline
    from counterflow.schedule.ir import Schedule

RunConfig = Any
"""A ``config.RunConfig``, as sources annotate their methods. A config asks its source for defaults, so this
module cannot import the class.
"""

ModelSection = Any
"""A ``sections.model.ModelSection``, for the same reason."""

AVERAGED = "-ema"
"""Suffix of an exported folder's name: it contains averaged weights."""


class Write(Protocol):
    """Writes a trained model into a folder; all workers call it."""

    def __call__(self, pipeline: Pipeline, folder: Path, *, ema: bool) -> None:
        """Write the model; with ``ema`` the averages of the trained weights."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelAndData:
    """The model of a run, its loss and its samples.

    Attributes:
        model: the model, on the meta device.
        list_layers: function that lists its layers; None: the model is a list of layers.
        loss: function of its output and targets that returns the loss.
        batches: mini-batches.
        text: name of the text.
        text_bytes: length of the text.
        entropy: loss in nats per target of a model that knows only how frequent each target is.
        digest: digest of the text.
        target: what the model predicts.
        unit: unit of the text, in a word.
        export: the folder that is written at the end next to the checkpoints, one of the source's
            ``exports``, and its writer; None: none.
    """

    model: Model
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None
    loss: Callable[[Any, Any], Any]
    batches: TextBatches
    text: str
    text_bytes: int
    entropy: float
    digest: str
    target: str = "byte"
    unit: str = "byte"
    export: tuple[str, Write] | None = None


class ModelSource:
    """A source of models.

    Attributes:
        kinds: values of ``model.kind`` that belong to the source.
        named: further values: names of models whose shape it knows.
        own_keys: by table, the keys that only its models have; configs of other models may not contain them.
        usual_rate: default learning rate, in words.
        exports: folders that a run may write at its end next to the checkpoints, and what they contain.
    """

    kinds: ClassVar[tuple[str, ...]]
    named: ClassVar[tuple[str, ...]] = ()
    own_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    usual_rate: ClassVar[str]
    exports: ClassVar[Mapping[str, str]] = {}

    def filled(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of ``[model]``, completed by those that follow from them.

        Raises:
            ConfigError: the keys do not make a model.
        """
        return keys

    def check(self, model: ModelSection) -> None:
        """Refuse keys whose values do not fit each other.

        Raises:
            ConfigError: the values contradict each other.
        """

    def written(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of ``[model]`` from which ``filled`` makes the others again."""
        return keys

    def refusal(self, config: RunConfig, schedule: Schedule) -> str | None:
        """Reason to refuse a config whose tables are each right; None: it is accepted."""
        del config, schedule
        return None

    def learning_rate(self, config: RunConfig) -> float:
        """The default maximum learning rate."""
        raise NotImplementedError

    def name(self, config: RunConfig) -> str:
        """Name of the model."""
        return str(config.model.kind)

    def make(self, config: RunConfig) -> ModelAndData:
        """The model, on the meta device, and its samples; the same in every process.

        Raises:
            ConfigError: the model cannot be read or made, or does not fit the data.
        """
        raise NotImplementedError
