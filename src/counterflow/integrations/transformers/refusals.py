"""What a trainer may be asked for that a pipeline cannot do, each with what to do instead.

Invariant: it is refused before anything is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from counterflow.errors import ConfigError

from .arguments import PipelineFields

Rule = tuple[str, Callable[[Any], object], str]
"""The name of an argument, whether it asks for it, and the reason with the way out."""

_OWN_OPTIMIZERS = ("lomo", "adalomo", "galore", "apollo", "layerwise", "muon", "bnb", "8bit", "paged")

_OF_ARGUMENTS: tuple[Rule, ...] = (
    ("deepspeed", bool, "it wraps the model itself; take pp, with zero_stage of cf.Execution for its shards"),
    ("fsdp", bool, "it wraps the model itself; cut the model over more workers by pp"),
    ("fp16", bool, "it wants losses scaled; take bf16=True"),
    ("fp16_full_eval", bool, "it casts the whole model; take bf16=True"),
    ("bf16_full_eval", bool, "it casts the whole model; take bf16=True"),
    ("torch_compile", bool, "it compiles the whole model, of which a worker has a part; leave it out"),
    ("auto_find_batch_size", bool, "workers would find other sizes; say per_device_train_batch_size"),
    ("use_liger_kernel", bool, "it computes the loss without logits; leave it out"),
    ("neftune_noise_alpha", lambda alpha: alpha is not None, "its noise is of the whole model; leave it out"),
    ("parallelism_config", bool, "it cuts the model in other ways; leave it out"),
    (
        "optim",
        lambda name: any(part in str(getattr(name, "value", name)).lower() for part in _OWN_OPTIMIZERS),
        "it looks at the whole model; take adamw_torch, adafactor or sgd",
    ),
)

_OF_TRAINER: tuple[Rule, ...] = (
    ("model_init", bool, "the model would be made anew for each run; give the model"),
    (
        "optimizers",
        lambda pair: pair[0] is not None or pair[1] is not None,
        "these are of the whole model; give optim and lr_scheduler_type, or a class",
    ),
    (
        "ref_model",
        lambda model: model is not None,
        "a second model would run in one stage; precompute what it gives",
    ),
)


def refuse(named: Mapping[str, Any]) -> None:
    """Refuse what cannot be done.

    Args:
        named: a trainer's arguments, by name.

    Raises:
        ConfigError: something is asked for that cannot be done.
    """
    arguments, model = named.get("args"), named.get("model")
    if not isinstance(arguments, PipelineFields):
        raise ConfigError(
            f"args is a {type(arguments).__name__}, which says nothing of a pipeline; give PipelineArguments "
            "or arguments made with PipelineFields: class Mine(PipelineFields, SFTConfig)"
        )
    if arguments.pipeline_workers != arguments.pp:
        raise ConfigError(
            f"pp={arguments.pp}, and {arguments.pipeline_workers} processes run; start as many as pp says "
            "(replicas beside the pipeline are not known to this trainer), or change pp"
        )
    for owner, rules in ((arguments, _OF_ARGUMENTS), (named, _OF_TRAINER)):
        for name, asks, reason in rules:
            value = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
            if value is not None and asks(value):
                raise ConfigError(
                    f"{name}={getattr(value, 'value', value)!r} does not go with a pipeline: {reason}"
                )
    if not isinstance(model, nn.Module) or not callable(getattr(model, "save_pretrained", None)):
        raise ConfigError(
            f"model is a {type(model).__name__}, and a pipeline writes checkpoints as models of transformers "
            "and peft do; give such a model"
        )
    arguments.made_schedule()
