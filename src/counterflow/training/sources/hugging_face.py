"""Models of transformers, from a folder or by a name on the hub; trained whole, or by adapters of peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from counterflow.common import toml
from counterflow.errors import ConfigError

from ..source import ModelAndData, ModelSource
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
"""Names in the model's own config of keys of ``[model]``."""

_READ = *_SIZES, "dropout", "tied"
"""Keys that the model's own config defines."""


class HuggingFace(ModelSource):
    """Models of transformers."""

    kinds = (_KIND,)
    own_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "model": ("path", "fresh", "dtype"),
        "data": ("field", "label", "samples"),
        "lora": ("rank", "alpha", "dropout", "targets"),
    }
    usual_rate = f"{_FINE_TUNING_RATE:g} for a model of transformers, {_ADAPTERS_RATE:g} with adapters"
    exports: ClassVar[Mapping[str, str]] = {
        "model": "the model, as from_pretrained of transformers reads it",
        "adapter": "the adapters, as from_pretrained of peft reads them",
        "model-ema": "the model of averaged weights",
        "adapter-ema": "the adapters of averaged weights",
    }

    def filled(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The values in the model's own config."""
        for name, value in keys.items():
            if name in _READ and value is not None:
                raise ConfigError(f"model.{name}: the model in model.path defines it; leave it out")
        if not isinstance(keys.get("path"), str) or not keys["path"]:
            raise ConfigError(f'model.kind = "{_KIND}": needs model.path, a folder or a name on the hub')
        from counterflow.models.hf.weight_files import most_positions, read_config

        hf_config = read_config(keys["path"])
        most = most_positions(hf_config)
        positions = keys.get("positions")
        if type(most) is int and type(positions) is int and positions > most:
            raise ConfigError(
                f"model.positions = {positions}: the model in {keys['path']} accepts {most} or fewer"
            )
        if missing := [name for name in _SIZES.values() if not hasattr(hf_config, name)]:
            raise ConfigError(
                f"model.path = {keys['path']!r}: its {type(hf_config).__name__} has no {missing[0]}; only "
                "models of attention layers are cut, see docs/hugging-face.md; train others from Python, "
                "with list_layers"
            )
        sizes = {key: getattr(hf_config, name) for key, name in _SIZES.items()}
        sizes["tied"] = bool(getattr(hf_config, "tie_word_embeddings", False))
        if positions is None:
            sizes["positions"] = min(most or _MOST_POSITIONS, _MOST_POSITIONS)
        return {
            name: value for name, value in keys.items() if value is not None or name == "positions"
        } | sizes

    def written(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys without those that the model's own config defines."""
        return {name: value for name, value in keys.items() if name not in _READ}

    def refusal(self, config: RunConfig, schedule: Schedule) -> str | None:
        """Refuse a run without a text, and schemes that update before all labels are counted."""
        if config.data.path is None:
            return f'model.kind = "{_KIND}": needs data.path, a text or JSONL file, or a folder of them'
        if not schedule.synchronous:
            return (
                f"schedule.scheme = {toml.shown(schedule.scheme)}: updates weights before all labels of a "
                "mini-batch are counted, but the loss of a model of transformers is divided by their number; "
                "choose a synchronous scheme"
            )
        return None

    def learning_rate(self, config: RunConfig) -> float:
        """The learning rate of fine-tuning, or of fresh weights."""
        if config.model.fresh:
            return usual_rate_of(config.model.hidden)
        return _FINE_TUNING_RATE if config.lora.rank is None else _ADAPTERS_RATE

    def name(self, config: RunConfig) -> str:
        """The folder, and which part of the model is trained."""
        rank, fresh = config.lora.rank, "fresh " if config.model.fresh else ""
        return f"{fresh}{config.model.path}{f' with adapters of rank {rank}' if rank is not None else ''}"

    def make(self, config: RunConfig) -> ModelAndData:
        """The model cut into layers, and samples of tokens."""
        from ..transformers_runs import from_transformers

        return from_transformers(config)


SOURCE = HuggingFace()
