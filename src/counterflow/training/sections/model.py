"""The tables ``[model]``, ``[data]`` and ``[lora]``: what is trained, and on what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Strict, model_validator

from counterflow import toml
from counterflow.data.text import BYTE_VALUES
from counterflow.errors import ConfigError
from counterflow.models.shapes import EXAMPLE

from .. import registry
from ..source import ModelSource
from .keys import PATH, SHARE, PathKey, Section, count, key


class ModelSection(Section):
    """What is trained. A model with a name has a shape, which may be changed key by key."""

    kind: str = key(
        "gpt",
        "architecture, or the name of a model",
        f"{', '.join(registry.kinds())}, or one of {', '.join(registry.named())}",
    )
    path: str | None = key(
        None,
        "huggingface: a folder with a model and its tokenizer, or its name on the hub",
        "a text, in quotes",
    )
    fresh: bool | None = key(
        None,
        "huggingface: whether weights are made anew by the model's rules; read from the folder if not",
        "true or false",
    )
    dtype: Literal["float32", "bfloat16"] | None = key(
        None,
        "huggingface: what weights are trained in, however they are stored; float32 where not given",
        "float32 or bfloat16, in quotes",
    )
    layers: int = count(EXAMPLE.layers, "transformer blocks, without embedding and head", 10_000)
    hidden: int = count(EXAMPLE.hidden, "width of the hidden states", 1_000_000)
    heads: int = count(EXAMPLE.heads, "attention heads; a divisor of hidden", 1_000_000)
    positions: int = count(EXAMPLE.positions, "tokens of a sample", 10_000_000)
    vocabulary: int = count(
        BYTE_VALUES, "number of different tokens; as many as the data has where not given", 100_000_000
    )
    dropout: float = key(EXAMPLE.dropout, "share of activations set to zero in training", SHARE, ge=0, lt=1)
    tied: bool = key(False, "whether the head uses the embedding's weights", "true or false")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Take what is not given from where the model comes from."""
        kind = data.get("kind", "gpt") if isinstance(data, dict) else None
        if not isinstance(kind, str):
            return data
        source = registry.source_of(kind)
        for name, other in registry.keys_of_others(source, "model").items():
            if data.get(name) is not None:
                raise ConfigError(
                    f'model.{name}: is for model.kind = "{other}", and it is {toml.shown(kind)}; '
                    f'leave it out, or set model.kind = "{other}"'
                )
        return source.filled(data)

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

    path: PathKey | None = key(
        None, "a text file, or a folder of them; the text that ships with Python where not given", PATH
    )
    field: str | None = key(
        None,
        'huggingface: of a line of a JSONL file, which has its text; "text" where not given',
        "a text, in quotes",
    )
    label: str | None = key(
        None,
        'huggingface: of a row, which has the class of its text; "label" where not given',
        "a text, in quotes",
    )
    samples: Literal["packed", "padded"] | None = key(
        None,
        "huggingface: whether a sample is full, of texts one after another, or one text and padding; "
        "packed where not given, but padded for classifiers",
        "packed or padded, in quotes",
    )


class LoraSection(Section):
    """Adapters of peft in place of the model's own weights; only with a rank."""

    rank: int | None = count(None, "of the adapters; the model itself is trained where not given", 1_000_000)
    alpha: float | None = key(
        None, "adapters count alpha over rank; twice the rank where not given", "a number, more than 0", gt=0
    )
    dropout: float | None = key(None, "share of what goes into adapters that is dropped", SHARE, ge=0, lt=1)
    targets: Annotated[tuple[str, ...], Strict(False)] | None = key(
        None,
        "the modules that get one; those that peft knows for the model where not given",
        "a list of names",
    )

    @model_validator(mode="after")
    def _check(self) -> LoraSection:
        if self.rank is None and self.given():
            raise ConfigError(
                f"lora.{next(iter(self.given()))}: there are no adapters without lora.rank; give it"
            )
        return self
