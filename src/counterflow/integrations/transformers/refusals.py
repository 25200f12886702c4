"""Arguments of a trainer that a pipeline does not support, each with the alternative.

Invariant: they are refused before anything is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from counterflow.errors import ConfigError

from .arguments import PipelineFields

Rule = tuple[str, Callable[[Any], object], str]
"""Name of an argument, whether its value is refused, and the reason with the way out."""

_OWN_OPTIMIZERS = ("lomo", "adalomo", "galore", "apollo", "layerwise", "muon", "bnb", "8bit", "paged")

_OF_ARGUMENTS: tuple[Rule, ...] = (
    ("deepspeed", bool, "it wraps the model itself; use pp, with zero_stage of cf.Execution for its shards"),
    ("fsdp", bool, "it wraps the model itself; cut the model over more workers by pp"),
    ("fp16", bool, "it needs scaled losses; use bf16=True"),
    ("fp16_full_eval", bool, "it casts the whole model; use bf16=True"),
    ("bf16_full_eval", bool, "it casts the whole model; use bf16=True"),
    ("torch_compile", bool, "it compiles the whole model, but a worker has only a part; leave it out"),
    ("auto_find_batch_size", bool, "workers would find different sizes; set per_device_train_batch_size"),
    ("use_liger_kernel", bool, "it computes the loss without logits; leave it out"),
    (
        "neftune_noise_alpha",
        lambda alpha: alpha is not None,
        "its noise depends on the whole model; leave it out",
    ),
    ("parallelism_config", bool, "it cuts the model in other ways; leave it out"),
    (
        "optim",
        lambda name: any(part in str(getattr(name, "value", name)).lower() for part in _OWN_OPTIMIZERS),
        "it needs the whole model; use adamw_torch, adafactor or sgd",
    ),
)

_OF_TRAINER: tuple[Rule, ...] = (
    ("model_init", bool, "the model would be made anew for each run; pass the model"),
    (
        "optimizers",
        lambda pair: pair[0] is not None or pair[1] is not None,
        "these belong to the whole model; give optim and lr_scheduler_type, or a class",
    ),
    (
        "ref_model",
        lambda model: model is not None,
        "a second model would run in one stage; precompute its outputs",
    ),
)


def refuse(named: Mapping[str, Any]) -> None:
    """Refuse arguments that a pipeline does not support.

    Args:
        named: arguments of a trainer, by name.

    Raises:
        ConfigError: an argument is not supported.
    """
    arguments, model = named.get("args"), named.get("model")
    if not isinstance(arguments, PipelineFields):
        raise ConfigError(
            f"args is a {type(arguments).__name__}, which has no fields for a pipeline; give "
            "PipelineArguments "
            "or arguments made with PipelineFields: class Mine(PipelineFields, SFTConfig)"
        )
    if arguments.pipeline_workers != arguments.pp:
        raise ConfigError(
            f"pp={arguments.pp}, but {arguments.pipeline_workers} processes run; start pp processes "
            "(this trainer does not support replicas of the pipeline), or change pp"
        )
    for owner, rules in ((arguments, _OF_ARGUMENTS), (named, _OF_TRAINER)):
        for name, asks, reason in rules:
            value = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
            if value is not None and asks(value):
                raise ConfigError(
                    f"{name}={getattr(value, 'value', value)!r} cannot be combined with a pipeline: {reason}"
                )
    if not isinstance(model, nn.Module) or not callable(getattr(model, "save_pretrained", None)):
        raise ConfigError(
            f"model is a {type(model).__name__}, but a pipeline writes checkpoints in the way of models of "
            "transformers and peft; give such a model"
        )
    arguments.made_schedule()
