"""What a model source is: where a run's model comes from, what a config says of it, and what is made of that.

Invariant: what depends on where a model comes from is a method here, and nothing else asks for it. A source
is one file in ``sources``, or of a user's, which registers it. Reading a config does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import nn

    from counterflow.data.batches import Batches
    from counterflow.runtime.pipeline import Pipeline
    from counterflow.runtime.stages.layers import Model
    from counterflow.schedule.ir import Schedule

    from .config import RunConfig
    from .sections.model import ModelSection

AVERAGED = "-ema"
"""Behind the name of an exported folder: of averaged weights."""


class Write(Protocol):
    """Writes what a pipeline has trained into a folder; all workers call it."""

    def __call__(self, pipeline: Pipeline, folder: Path, *, ema: bool) -> None:
        """Write it; with ``ema`` the averages of the trained weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """What a run trains, and on what.

    Attributes:
        model: on the meta device.
        list_layers: its layers; None: it is a list of them.
        loss: its output and targets to its loss.
        batches: mini-batches.
        text: what to call their text.
        text_bytes: length of that.
        entropy: in nats a target: the loss of a model that knows only how frequent each is.
        digest: of the text.
        target: what the model is to tell.
        unit: of the text, in a word.
        export: the folder that is written at the end beside the checkpoints, one of the source's ``exports``,
            and what writes it; None: there is none.
    """

    model: Model
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None
    loss: Callable[[Any, Any], Any]
    batches: Batches
    text: str
    text_bytes: int
    entropy: float
    digest: str
    target: str = "byte"
    unit: str = "byte"
    export: tuple[str, Write] | None = None


class ModelSource:
    """Where models come from.

    Attributes:
        kinds: the values of ``model.kind`` that are its.
        named: more of them: the names of models whose shape it knows.
        own_keys: by table, the keys that only its models have; a config with another model is refused them.
        usual_rate: the learning rate where none is given, in words.
        exports: what a run may write at its end beside the checkpoints: names of folders, and what they are.
    """

    kinds: ClassVar[tuple[str, ...]]
    named: ClassVar[tuple[str, ...]] = ()
    own_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    usual_rate: ClassVar[str]
    exports: ClassVar[Mapping[str, str]] = {}

    def filled(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of ``[model]`` with what follows from them.

        Raises:
            ConfigError: they do not make a model.
        """
        return keys

    def check(self, model: ModelSection) -> None:
        """Refuse keys whose values do not fit each other.

        Raises:
            ConfigError: the message names them.
        """

    def written(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Those of the keys of ``[model]`` from which ``filled`` makes the others again."""
        return keys

    def refusal(self, config: RunConfig, schedule: Schedule) -> str | None:
        """What is wrong with a config whose tables are each right; None: nothing."""
        del config, schedule
        return None

    def learning_rate(self, config: RunConfig) -> float:
        """The largest learning rate where none is given."""
        raise NotImplementedError

    def name(self, config: RunConfig) -> str:
        """What to call the model."""
        return config.model.kind

    def make(self, config: RunConfig) -> Made:
        """The model, on the meta device, and what it is trained on; the same in every process.

        Raises:
            ConfigError: it cannot be read or made, or does not fit the data.
        """
        raise NotImplementedError
