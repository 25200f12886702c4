"""The tables ``[model]``, ``[data]`` and ``[lora]``: what is trained, and on what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Strict, model_validator

from counterflow.data.text import BYTE_VALUES
from counterflow.errors import ConfigError
from counterflow.execution import option
from counterflow.models.shapes import EXAMPLE

from .. import registry
from ..source import ModelSource
from .keys import PATH, SHARE, PathKey, Section, count


class ModelSection(Section):
    """What is trained. A model with a name has a shape, which may be changed key by key."""

    kind: str = option("gpt", f"{', '.join(registry.kinds())}, or one of {', '.join(registry.named())}")
    """Architecture, or the name of a model."""

    path: str | None = option(None, "a text, in quotes")
    """huggingface: a folder with a model and its tokenizer, or its name on the hub"""

    fresh: bool | None = option(None, "true or false")
    """huggingface: whether weights are made anew by the model's rules; read from the folder if not"""

    dtype: Literal["float32", "bfloat16"] | None = option(None, "float32 or bfloat16, in quotes")
    """huggingface: what weights are trained in, however they are stored; float32 where not given"""

    layers: int = count(EXAMPLE.layers, 10_000)
    """Transformer blocks, without embedding and head."""

    hidden: int = count(EXAMPLE.hidden, 1_000_000)
    """Width of the hidden states."""

    heads: int = count(EXAMPLE.heads, 1_000_000)
    """Attention heads; a divisor of hidden."""

    positions: int = count(EXAMPLE.positions, 10_000_000)
    """Tokens of a sample."""

    vocabulary: int = count(BYTE_VALUES, 100_000_000)
    """Number of different tokens; as many as the data has where not given."""

    dropout: float = option(EXAMPLE.dropout, SHARE, ge=0, lt=1)
    """Share of activations set to zero in training."""

    tied: bool = option(False, "true or false")
    """Whether the head uses the embedding's weights."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Take what is not given from where the model comes from."""
        kind = data.get("kind", "gpt") if isinstance(data, dict) else None
        if not isinstance(kind, str):
            return data
        given = (name for name, value in data.items() if value is not None)
        registry.refuse_keys_of_others(kind, "model", given)
        return registry.source_of(kind).filled(data)

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        self.source.check(self)
        return self

    def given(self) -> dict[str, Any]:
        """The keys that have a value, but for those that follow from where the model comes from."""
        return self.source.written(super().given())

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        return registry.source_of(self.kind)

    @property
    def all_layers(self) -> int:
        """Layers between which it can be cut into stages: embedding, blocks, head."""
        return self.layers + 2


class DataSection(Section):
    """What it is trained on."""

    path: PathKey | None = option(None, PATH)
    """A text file, or a folder of them; the text that ships with Python where not given."""

    field: str | None = option(None, "a text, in quotes")
    """huggingface: of a line of a JSONL file, which has its text; "text" where not given"""

    label: str | None = option(None, "a text, in quotes")
    """huggingface: of a row, which has the class of its text; "label" where not given"""

    samples: Literal["packed", "padded"] | None = option(None, "packed or padded, in quotes")
    """huggingface: whether a sample is full, of texts one after another, or one text and padding; packed
    where not given, but padded for classifiers
    """


class LoraSection(Section):
    """Adapters of peft in place of the model's own weights; only with a rank."""

    rank: int | None = count(None, 1_000_000)
    """Of the adapters; the model itself is trained where not given."""

    alpha: float | None = option(None, "a number, more than 0", gt=0)
    """Adapters count alpha over rank; twice the rank where not given."""

    dropout: float | None = option(None, SHARE, ge=0, lt=1)
    """Share of what goes into adapters that is dropped."""

    targets: Annotated[tuple[str, ...], Strict(False)] | None = option(None, "a list of names")
    """The modules that get one; those that peft knows for the model where not given."""

    @model_validator(mode="after")
    def _check(self) -> LoraSection:
        if self.rank is None and self.given():
            raise ConfigError(
                f"lora.{next(iter(self.given()))}: there are no adapters without lora.rank; give it"
            )
        return self
