"""Models of transformers, from a folder or by a name on the hub; trained whole, or by adapters of peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from counterflow import toml
from counterflow.errors import ConfigError

from ..source import Made, ModelSource
from .built_in import usual_rate_of

if TYPE_CHECKING:
    from counterflow.schedule.ir import Schedule

    from ..config import RunConfig

_KIND = "huggingface"
_FINE_TUNING_RATE, _ADAPTERS_RATE = 2e-5, 2e-4
_MOST_POSITIONS = 1024

_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
"""By key of ``[model]``, what the model's own config calls it."""

_READ = *_SIZES, "dropout", "tied"
"""The keys that it says in place of ours."""


class HuggingFace(ModelSource):
    """Models of transformers."""

    kinds = (_KIND,)
    own_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "model": ("path", "fresh", "dtype"),
        "data": ("field", "label", "samples"),
        "lora": ("rank", "alpha", "dropout", "targets"),
    }
    usual_rate = f"of a model of transformers {_FINE_TUNING_RATE:g}, with adapters {_ADAPTERS_RATE:g}"
    exports: ClassVar[Mapping[str, str]] = {
        "model": "the model, as from_pretrained of transformers reads it",
        "adapter": "the adapters, as from_pretrained of peft reads them",
        "model-ema": "the model of averaged weights",
        "adapter-ema": "the adapters of averaged weights",
    }

    def filled(self, keys: dict[str, Any]) -> dict[str, Any]:
        """What the model's own config says."""
        for name, value in keys.items():
            if name in _READ and value is not None:
                raise ConfigError(
                    f"model.{name}: the config of the model in model.path says it; leave it out"
                )
        if not isinstance(keys.get("path"), str) or not keys["path"]:
            raise ConfigError(f'model.kind = "{_KIND}": needs model.path, a folder or a name on the hub')
        from counterflow.models.hf.weights import most_positions, read_config

        found = read_config(keys["path"])
        most = most_positions(found)
        positions = keys.get("positions")
        if type(most) is int and type(positions) is int and positions > most:
            raise ConfigError(
                f"model.positions = {positions}: the model in {keys['path']} takes {most} or fewer"
            )
        if missing := [name for name in _SIZES.values() if not hasattr(found, name)]:
            raise ConfigError(
                f"model.path = {keys['path']!r}: its {type(found).__name__} tells no {missing[0]}; models of "
                "attention layers are cut, as docs/hugging-face.md lists them; train another from Python, "
                "with list_layers"
            )
        told = {key: getattr(found, name) for key, name in _SIZES.items()}
        told["tied"] = bool(getattr(found, "tie_word_embeddings", False))
        if positions is None:
            told["positions"] = min(most or _MOST_POSITIONS, _MOST_POSITIONS)
        return {
            name: value for name, value in keys.items() if value is not None or name == "positions"
        } | told

    def written(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Without those that the model's config says."""
        return {name: value for name, value in keys.items() if name not in _READ}

    def refusal(self, config: RunConfig, schedule: Schedule) -> str | None:
        """There is no text that ships with it, and its loss is divided by all labels."""
        if config.data.path is None:
            return f'model.kind = "{_KIND}": needs data.path, a text or JSONL file, or a folder of them'
        if not schedule.synchronous:
            return (
                f"schedule.scheme = {toml.shown(schedule.scheme)}: updates weights before all labels of a "
                "mini-batch are counted, by which the loss of a model of transformers is divided; take a "
                "synchronous scheme"
            )
        return None

    def learning_rate(self, config: RunConfig) -> float:
        """That of fine-tuning, but for fresh weights."""
        if config.model.fresh:
            return usual_rate_of(config.model.hidden)
        return _FINE_TUNING_RATE if config.lora.rank is None else _ADAPTERS_RATE

    def name(self, config: RunConfig) -> str:
        """The folder, and what is trained of it."""
        rank, fresh = config.lora.rank, "fresh " if config.model.fresh else ""
        return f"{fresh}{config.model.path}{f' with adapters of rank {rank}' if rank is not None else ''}"

    def make(self, config: RunConfig) -> Made:
        """The model cut into layers, and samples of tokens."""
        from ..hugging_face import from_transformers

        return from_transformers(config)


SOURCE = HuggingFace()
