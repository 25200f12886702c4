"""The built-in models, GPT and BERT by their shape or by a name, trained on the bytes of a text."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from counterflow.data.text import BYTE_VALUES, read_text, shipped_text, unigram_entropy
from counterflow.errors import ConfigError
from counterflow.models.shapes import SHAPES, Family

from ..source import ModelAndData, ModelSource

if TYPE_CHECKING:
    from counterflow.models import BERTConfig, GPTConfig
    from counterflow.schedule.ir import Schedule

    from ..config import RunConfig
    from ..sections.model_section import ModelSection

_RATE_TIMES_WIDTH = 0.64  # narrow and wide models both train well with it: 0.01 at 64, 0.0005 at 1280

_DEVIATION_AT_WIDTH_1 = 0.8
"""Standard deviation of fresh weights times √hidden: 0.02 at GPT-2 XL's width of 1600, more in narrower
models.
"""


def family_of(kind: str) -> Family:
    """GPT or BERT: the family of a kind, or of the model of a name."""
    preset = SHAPES.get(kind)
    return preset.family if preset else Family(kind)


def usual_rate_of(hidden: int) -> float:
    """The learning rate with which a model of a width is trained from fresh weights."""
    return _RATE_TIMES_WIDTH / hidden


class BuiltIn(ModelSource):
    """GPT and BERT."""

    kinds = tuple(family.value for family in Family)
    named = tuple(SHAPES)
    own_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"model": ("experts", "experts_per_token")}
    usual_rate = f"{_RATE_TIMES_WIDTH:g} divided by the model's width by default"

    def filled(self, keys: dict[str, Any]) -> dict[str, Any]:
        """A model with a name has that model's shape; any other has the vocabulary of the data."""
        kind = keys.get("kind", Family.GPT)
        preset = SHAPES.get(kind)
        if preset is None:
            return {"vocabulary": _least_vocabulary(kind), **keys}
        shape = dataclasses.asdict(preset)
        names = "layers", "hidden", "heads", "positions", "vocabulary", "dropout"
        return {name: shape[name] for name in names} | keys

    def check(self, model: ModelSection) -> None:
        """Check that heads divide the width and the vocabulary covers the data."""
        if model.hidden % model.heads:
            below = max(model.heads, model.hidden - model.hidden % model.heads)
            raise ConfigError(
                f"model.hidden = {model.hidden}: must be a multiple of model.heads = {model.heads}; "
                f"nearest: {below} or {below + model.heads}"
            )
        if model.experts_per_token is not None and model.experts_per_token > (model.experts or 0):
            raise ConfigError(
                f"model.experts_per_token = {model.experts_per_token}: must be model.experts = "
                f"{model.experts or 0} or less"
            )
        if model.experts is not None and family_of(model.kind) is not Family.GPT:
            raise ConfigError(f'model.experts = {model.experts}: is for a GPT, and "{model.kind}" is none')
        least = _least_vocabulary(model.kind)
        if model.vocabulary < least:
            parts = "256 bytes" if least == BYTE_VALUES else "256 bytes and the mask token"
            raise ConfigError(
                f"model.vocabulary = {model.vocabulary}: must be {least} or more: the data has {parts}"
            )

    def refusal(self, config: RunConfig, schedule: Schedule) -> str | None:
        """Refuse shared sequences of a model that attends in both directions."""
        del schedule
        if config.mesh.cp > 1 and family_of(config.model.kind) is Family.BERT:
            return (
                f"mesh.cp = {config.mesh.cp}: {config.model.kind} attends in both directions, and contexts "
                "share causal attention alone; leave it out"
            )
        return None

    def learning_rate(self, config: RunConfig) -> float:
        """Narrow models have larger learning rates."""
        return usual_rate_of(config.model.hidden)

    def make(self, config: RunConfig) -> ModelAndData:
        """Make a list of layers, and windows of bytes."""
        import torch

        from counterflow.data.text_batches import MaskedByte, NextByte
        from counterflow.models.loss import masked_token_loss, next_token_loss

        path, seed = config.data.path, config.train.seed
        text = shipped_text() if path is None else read_text(path)
        name = "the help text that ships with Python" if path is None else str(path)
        with torch.device("meta"):
            layers = _shape(config.model).build()
        masked = family_of(config.model.kind) is Family.BERT
        return ModelAndData(
            layers,
            None,
            masked_token_loss if masked else next_token_loss,
            (MaskedByte if masked else NextByte)(text, config.model.positions, seed=seed, name=name),
            text=name,
            text_bytes=len(text),
            entropy=unigram_entropy(text),
            digest=hashlib.blake2b(text, digest_size=16).hexdigest(),
        )


def _least_vocabulary(kind: str) -> int:
    return BYTE_VALUES + (family_of(kind) is Family.BERT)


def _shape(section: ModelSection) -> GPTConfig | BERTConfig:
    from counterflow.models.bert import BERTConfig
    from counterflow.models.gpt import GPTConfig
    from counterflow.models.presets import PRESETS

    names = ("layers", "hidden", "heads", "vocabulary", "positions", "dropout", "tied")
    shape = {name: getattr(section, name) for name in names}
    if section.experts is not None:
        shape["experts"] = section.experts
        shape["experts_per_token"] = section.experts_per_token or min(2, section.experts)
    named = PRESETS.get(section.kind)
    if named is not None:
        return dataclasses.replace(named.config, **shape)  # type: ignore[return-value]
    if family_of(section.kind) is Family.BERT:
        return BERTConfig(**shape, next_sentence=False)  # a text has no second sentences to distinguish
    return GPTConfig(**shape, deviation=_DEVIATION_AT_WIDTH_1 / math.sqrt(section.hidden))


SOURCE = BuiltIn()
