"""Arguments of a trainer that a pipeline does not support, each with the alternative.

Invariant: they are refused before anything is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError

from .trainer_arguments import AUTO, PipelineFields

Rule = tuple[str, Callable[[Any], object], str]
"""Name of an argument, whether its value is refused, and the reason with the way out."""

_OWN_OPTIMIZERS = (
    *("lomo", "adalomo", "galore", "apollo", "layerwise", "muon", "schedule_free"),
    *("bnb", "8bit", "4bit", "paged"),
)
"""Parts of names of optimisers that look at the whole model, or at whether it is trained or evaluated."""

_OF_ARGUMENTS: tuple[Rule, ...] = (
    ("deepspeed", bool, "it wraps the model itself; use pp, with zero_stage of cf.Execution for its shards"),
    ("fsdp", bool, "it wraps the model itself; cut the model over more workers by pp"),
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
    ("activation_offloading", bool, "it wraps the whole step; use recompute='layer'"),
    ("enable_jit_checkpoint", bool, "a signal to one worker would stop it alone; use save_strategy"),
    (
        "precompute_ref_log_probs",
        lambda precomputes: not precomputes,
        "the reference would be a second model, or one with its adapters switched off; set "
        "precompute_ref_log_probs=True",
    ),
    ("predict_with_generate", bool, "generation runs the whole model; generate with the saved model"),
    ("sync_ref_model", bool, "a second model would run in one stage; precompute its outputs"),
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
        "optimizer_cls_and_kwargs",
        lambda pair: not isinstance(pair[0], type) or not issubclass(pair[0], Optimizer),
        "it makes an optimiser of the whole model; give a class of optimisers",
    ),
    (
        "ref_model",
        lambda model: model is not None,
        "a second model would run in one stage; precompute its outputs",
    ),
)


def _refuse_of_replicas(arguments: PipelineFields, named: Mapping[str, Any]) -> None:
    options: Any = arguments
    if isinstance(named.get("train_dataset"), IterableDataset):
        raise ConfigError(
            f"train_dataset has no length, so it cannot be shared out over {arguments.replicas} replicas of "
            "the pipeline; give a dataset with a length, or start pp processes"
        )
    for name, refused in (
        ("train_sampling_strategy", options.train_sampling_strategy == "batch_rebalance"),
        ("include_num_input_tokens_seen", options.include_num_input_tokens_seen not in (False, "no")),
        ("accelerator_config", options.accelerator_config.split_batches),
        ("accelerator_config", not options.accelerator_config.even_batches),
    ):
        if refused:
            raise ConfigError(
                f"{name}={getattr(options, name)!r} cannot be combined with replicas of the pipeline: it "
                "looks at one replica's samples; leave it out, or start pp processes"
            )


_NEVER_CALLED = {
    "create_optimizer": "each stage has an optimiser of its own; give optimizer_cls_and_kwargs",
    "create_optimizer_and_scheduler": "each stage has an optimiser of its own; give optimizer_cls_and_kwargs",
}
_REPLACED = {
    "training_step": "the pipeline runs the step; override compute_loss, or this in a class before the mixin",
    "prediction_step": "the pipeline evaluates; override compute_loss, or this in a class before the mixin",
    "save_model": "each worker writes its stages; override this in a class before the mixin",
}
_KNOWN = ("transformers", "trl", "counterflow")


def _refuse_overridden(kinds: Sequence[type], mixin: type) -> None:
    # Python looks methods up in the order of kinds; the mixin replaces those after it.
    after = [kind for kind in kinds[kinds.index(mixin) :] if not issubclass(mixin, kind)]
    for classes, reasons in ((kinds, _NEVER_CALLED), (after, _REPLACED)):
        for name, reason in reasons.items():
            owner = next((kind for kind in classes if name in vars(kind)), mixin)
            if owner.__module__.partition(".")[0] not in _KNOWN:
                raise ConfigError(f"{owner.__name__}.{name} would not run in a pipeline: {reason}")


def refuse_made(trainer: Any, mixin: type) -> None:
    """Refuse what a trainer has made for itself.

    Args:
        trainer: the trainer.
        mixin: the class that replaces methods of the trainer.

    Raises:
        ConfigError: it has a second model, metrics of outputs that it does not compute, or methods that would
            not run.
    """
    _refuse_overridden(type(trainer).__mro__, mixin)
    if hasattr(trainer, "ref_model") and not getattr(trainer.args, "precompute_ref_log_probs", False):
        raise ConfigError(
            f"the reference model of {type(trainer).__name__} cannot be combined with a pipeline: it would "
            "run in one stage, or with the model's adapters switched off; precompute its outputs"
        )
    if trainer.has_fused_head and trainer.compute_metrics is not None:
        raise ConfigError(
            f"compute_metrics cannot be combined with a pipeline in {type(trainer).__name__}: its head "
            "returns no logits; leave it out, or use Trainer"
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
    if arguments.pp < 1 or arguments.pipeline_workers % arguments.pp:
        raise ConfigError(
            f"pp={arguments.pp}, but {plural(arguments.pipeline_workers, 'process')} "
            f"{'runs' if arguments.pipeline_workers == 1 else 'run'}; start pp processes, or a "
            "multiple of pp for replicas of the pipeline, or change pp"
        )
    if arguments.replicas > 1:
        _refuse_of_replicas(arguments, named)
    if arguments.schedule == AUTO and arguments.cuts is not None:
        raise ConfigError(
            "cuts cannot be combined with schedule='auto', whose schedules have different numbers of stages; "
            "leave cuts out, or name a scheme"
        )
    for owner, rules in ((arguments, _OF_ARGUMENTS), (named, _OF_TRAINER)):
        for name, asks, reason in rules:
            value = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
            if value is not None and asks(value):
                shown = getattr(value, "value", value)
                said = f"{name}={shown!r}" if isinstance(shown, str | float | int | dict) else name
                raise ConfigError(f"{said} cannot be combined with a pipeline: {reason}")
    if not isinstance(model, nn.Module) or not callable(getattr(model, "save_pretrained", None)):
        raise ConfigError(
            f"model is a {type(model).__name__}, but a pipeline writes checkpoints in the way of models of "
            "transformers and peft; give such a model"
        )
    arguments.made_schedule()
