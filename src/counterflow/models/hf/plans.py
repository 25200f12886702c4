"""Cuts of models of transformers, and refusals of those that a pipeline runs differently.

transformers defines which of a model's modules repeat, and which come after them (``base_model_pp_plan``,
``_pp_plan``); a small table does so for models without such a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from counterflow.errors import ConfigError

from .routers import router_loss
from .shells import has, has_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelCut:
    """Cut of a model.

    Attributes:
        repeated: the path in the base model of the list of its repeated layers.
        after: the paths in the base model of modules after them.
        unnamed: paths of modules with weights that a plan of transformers does not name, which have to come
            before.
    """

    repeated: str
    after: tuple[str, ...]
    unnamed: tuple[str, ...] = ()


_STREAMS = ModelCut("layers", ("hc_head", "norm"))

_BERT = ModelCut("encoder.layer", ("pooler",))

_MAMBA = ModelCut("layers", ("norm_f",))

_PLANS = {
    "bert": _BERT,
    "camembert": _BERT,
    "deepseek_v4": _STREAMS,
    "distilbert": ModelCut("transformer.layer", ()),
    "electra": _BERT,
    "falcon_mamba": _MAMBA,
    "hy_v4": _STREAMS,
    "gpt2": ModelCut("h", ("ln_f",)),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "modernbert": ModelCut("layers", ("final_norm",)),
    "olmoe": ModelCut("layers", ("norm",)),
    "opt": ModelCut("decoder.layers", ("decoder.final_layer_norm", "decoder.project_out")),
    "roberta": _BERT,
    "xlm-roberta": _BERT,
}
"""Plans by model type, for models without a plan of their own or with an incomplete one."""


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model of transformers, without peft's wrappers.

    Raises:
        ConfigError: the module contains none.
    """
    inner: Any = model
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        for adapter, config in inner.peft_config.items():
            if getattr(config, "is_prompt_learning", False):
                raise ConfigError(
                    f"adapter {adapter!r} of the {type(model).__name__} is of type {config.peft_type}, which "
                    "changes the input of every layer; use an adapter inside the layers, such as LoRA"
                )
        inner = inner.get_base_model()
    if not callable(getattr(inner, "_init_weights", None)) or not hasattr(inner, "base_model"):
        raise ConfigError(
            f"a {type(model).__name__} is not a model of transformers; give list_layers a function of your "
            "own "
            "that lists its layers"
        )
    base: PreTrainedModel = inner
    return base


def plan_of(model: PreTrainedModel, base: PreTrainedModel) -> ModelCut:
    """Find the cut of a model: by the plan of transformers for its base model, or by the table.

    Raises:
        ConfigError: neither has a plan for it.
    """
    pipeline_plan: Mapping[str, Any] | None = getattr(base.config, "base_model_pp_plan", None)
    config = base.config
    composite = getattr(config, "sub_configs", None)
    if pipeline_plan and not composite and config.model_type not in _PLANS:
        names = list(pipeline_plan)
        lists = [
            name for name in names if has(base, name) and isinstance(base.get_submodule(name), nn.ModuleList)
        ]
        if len(lists) == 1:
            unnamed = (
                name for name, child in base.named_children() if name not in names and has_weights(child)
            )
            return ModelCut(lists[0], tuple(names[names.index(lists[0]) + 1 :]), tuple(unnamed))
    known = _PLANS.get(config.model_type)
    if known is None or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"a {type(model).__name__} cannot be cut: transformers has no pipeline plan for it, "
            f"and it is not one of {', '.join(_PLANS)}; give list_layers a function of your own that lists "
            "its "
            "layers"
        )
    return known


def refuse(model: PreTrainedModel) -> None:
    """Refuse models that a pipeline would run differently from the model alone.

    Raises:
        ConfigError: the model is one of them.
    """
    config, name = model.config, type(model).__name__
    if not model.training:
        raise ConfigError(
            f"the {name} is in evaluation mode, as from_pretrained returns it, and would train without "
            "dropout; call model.train() before"
        )
    if getattr(config, "_attn_implementation", None) == "flex_attention":
        raise ConfigError(
            f"the masks of the {name}'s flex_attention cannot be passed between stages; load it with "
            'attn_implementation="sdpa"'
        )
    if getattr(config, "output_router_logits", False) and router_loss(model) is None:
        raise ConfigError(
            f"the {name} adds a loss of its routers in a form of its own; set output_router_logits=False in "
            "its config, and add the loss by cf.add_loss in its layers"
        )
    if "_loss_function" in vars(model):
        raise ConfigError(
            f"the {name} has its own loss_function, which the pipeline does not call; give it to the "
            "Pipeline as a function of the model's output and the labels, and delete it from the model"
        )
