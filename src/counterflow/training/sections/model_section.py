"""The tables ``[model]``, ``[data]`` and ``[lora]``: what is trained, and on what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Strict, model_validator

from counterflow.common.options import option
from counterflow.data.text import BYTE_VALUES
from counterflow.errors import ConfigError
from counterflow.models.shapes import EXAMPLE

from .. import source_registry
from ..source import ModelSource
from .keys import PATH, SHARE, PathKey, Section, count


class ModelSection(Section):
    """The model that is trained. The shape of a model with a name may be changed key by key."""

    kind: str = option(
        "gpt", f"{', '.join(source_registry.kinds())}, or one of {', '.join(source_registry.named())}"
    )
    """Architecture, or the name of a model."""

    path: str | None = option(None, "a text, in quotes")
    """huggingface: a folder with a model and its tokenizer, or its name on the hub"""

    fresh: bool | None = option(None, "true or false")
    """huggingface: whether to make fresh weights; default: read them from the folder"""

    dtype: Literal["float32", "bfloat16"] | None = option(None, "float32 or bfloat16, in quotes")
    """huggingface: type in which weights are trained, however they are stored; default: float32"""

    layers: int = count(EXAMPLE.layers, 10_000)
    """Transformer blocks, without embedding and head."""

    hidden: int = count(EXAMPLE.hidden, 1_000_000)
    """Width of the hidden states."""

    heads: int = count(EXAMPLE.heads, 1_000_000)
    """Attention heads; a divisor of hidden."""

    positions: int = count(EXAMPLE.positions, 10_000_000)
    """Tokens of a sample."""

    vocabulary: int = count(BYTE_VALUES, 100_000_000)
    """Number of different tokens; default: as many as the data has."""

    dropout: float = option(EXAMPLE.dropout, SHARE, ge=0, lt=1)
    """Share of activations set to zero in training."""

    tied: bool = option(False, "true or false")
    """Whether the head uses the embedding's weights."""

    experts: int | None = count(None, 100_000)
    """gpt: feed-forward networks of each block, of which each token passes some; default: one for all"""

    experts_per_token: int | None = count(None, 100_000)
    """gpt: those that a token passes; default: 2"""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        kind = data.get("kind", "gpt") if isinstance(data, dict) else None
        if not isinstance(kind, str):
            return data
        present = (name for name, value in data.items() if value is not None)
        source_registry.refuse_keys_of_others(kind, "model", present)
        return source_registry.source_of(kind).filled(data)

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        self.source.check(self)
        return self

    def values(self) -> dict[str, Any]:
        """The keys that have a value, except those that follow from the model's source."""
        return self.source.written(super().values())

    @property
    def source(self) -> ModelSource:
        """The source of the model."""
        return source_registry.source_of(self.kind)

    @property
    def all_layers(self) -> int:
        """Number of layers between which the model can be cut into stages: embedding, blocks, head."""
        return self.layers + 2


class DataSection(Section):
    """The data that the model is trained on."""

    path: PathKey | None = option(None, PATH)
    """A text file, or a folder of them; default: the text that ships with Python."""

    field: str | None = option(None, "a text, in quotes")
    """huggingface: key of a JSONL line that contains the text; default: text"""

    label: str | None = option(None, "a text, in quotes")
    """huggingface: key of a row that contains the class of its text; default: label"""

    samples: Literal["packed", "padded"] | None = option(None, "packed or padded, in quotes")
    """huggingface: whether a sample is packed with several texts or is one text with padding; default:
    packed, for classifiers padded
    """


class LoraSection(Section):
    """Adapters of peft in place of the model's own weights; only with a rank."""

    rank: int | None = count(None, 1_000_000)
    """Rank of the adapters; default: none, the model itself is trained."""

    alpha: float | None = option(None, "a number, more than 0", gt=0)
    """Adapters are scaled by alpha over rank; default: twice the rank."""

    dropout: float | None = option(None, SHARE, ge=0, lt=1)
    """Share of an adapter's input that is dropped."""

    targets: Annotated[tuple[str, ...], Strict(False)] | None = option(None, "a list of names")
    """Modules that get an adapter; default: those that peft knows for the model."""

    @model_validator(mode="after")
    def _check(self) -> LoraSection:
        if self.rank is None and self.values():
            raise ConfigError(
                f"lora.{next(iter(self.values()))}: lora.rank is not given, so there are no adapters; give it"
            )
        return self
