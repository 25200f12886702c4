"""The rows of ``benchmarks/trainers.py``: models, data and features, each a trainer made from a ``Case``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = SMALL | {"intermediate_size": 24, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64, "pad_token_id": 0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", LLAMA),
    "Qwen2": ("Qwen2", LLAMA),
    "Qwen3": ("Qwen3", LLAMA | {"head_dim": 8}),
    "Mistral": ("Mistral", LLAMA | {"sliding_window": 4}),
    "GPT-2": ("GPT2", GPT2),
    "GPT-NeoX": ("GPTNeoX", SMALL | {"intermediate_size": 24, **NO_DROPOUT}),
    "Phi": ("Phi", LLAMA | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Gemma": ("Gemma", LLAMA | {"head_dim": 8}),
    "OLMo": ("Olmo", LLAMA),
    "OPT": ("OPT", SMALL | {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64,
                            "dropout": 0.0, "attention_dropout": 0.0}),
    "Bloom": ("Bloom", {"vocab_size": 64, "hidden_size": 16, "n_layer": 4, "n_head": 2, "pad_token_id": 0,
                        **NO_DROPOUT}),
    "Falcon": ("Falcon", SMALL | {"num_kv_heads": 2, "new_decoder_architecture": True, **NO_DROPOUT}),
    "Granite": ("Granite", LLAMA),
    "Mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
LAYERS = {"GPT2": "n_layer", "Bloom": "n_layer"}
"""Names of the number of layers where it is not ``num_hidden_layers``."""

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
    "optim": "adamw_torch", "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "epoch", "max_grad_norm": 0.5,
    "weight_decay": 0.1,
}  # fmt: skip
SCHEDULES = {1: "1f1b", 2: "zb-v", 4: "1f1b"}
"""Scheme by number of workers, where a row names none."""


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        feature: name of the feature.
        architecture: name of the architecture.
        trainer: ``Trainer``, or a trainer of TRL.
        options: training arguments.
        model: name of what is done to the model: ``lora``, ``float32``, ``frozen``.
        layers: number of the model's layers.
        data: name of the data.
        more: further arguments of the trainer, and changes of it, by name.
        after: name of what is done after training.
        source: number of workers of the run whose first checkpoint is resumed; 0: the row's own number.
        replicas: number of replicas of the pipeline.
        weights: relative tolerance of the weights.
        logged: relative tolerance of what is logged.
        pps: numbers of workers in a pipeline.
        refused: whether it is refused: when the trainer is made, or with ``after="train"`` when it begins.
    """

    feature: str
    architecture: str = "Llama"
    trainer: str = "Trainer"
    options: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    layers: int = 2
    data: str = "padded"
    more: tuple[str, ...] = ()
    after: str = ""
    source: int = 0
    replicas: int = 1
    weights: float = 1e-12
    logged: float = 1e-6
    pps: tuple[int, ...] = (2,)
    refused: bool = False

    @property
    def name(self) -> str:
        """Trainer, architecture and feature."""
        return f"{self.trainer} {self.architecture} {self.feature}"

    @property
    def resumes(self) -> bool:
        """Whether a run begins from a checkpoint."""
        return self.after == "resume"

    def schedule(self, pp: int) -> str:
        """Scheme of a run."""
        found: str = self.options.get("schedule", SCHEDULES[pp])
        return found


_OF_SCHEDULERS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 2},
    "greedy": {"patience": 0, "factor": 0.5},
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5},
}
SCHEDULERS = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
    "warmup_stable_decay", "greedy",
)  # fmt: skip
SAVED = {"save_strategy": "epoch"}
BEST = {"metric_for_best_model": "loss", "load_best_model_at_end": True, "learning_rate": 0.5}
BOTH = (2, 4)
FEATURES = (
    Case("no accumulation", options={"gradient_accumulation_steps": 1}),
    Case("accumulation, short last step", data="odd", pps=BOTH),
    Case("more batches than workers", options={"gradient_accumulation_steps": 8}),
    Case("no num_items_in_batch", more=("no_items",), pps=BOTH),
    Case("label smoothing", options={"label_smoothing_factor": 0.1}, pps=BOTH),
    Case("compute_loss_func", more=("loss_func",)),
    Case("compute_loss of a subclass", more=("own_loss",)),
    Case("max_grad_norm=0.01", options={"max_grad_norm": 0.01}, pps=BOTH),
    Case("max_grad_norm=0", options={"max_grad_norm": 0.0}),
    *(
        Case(f"lr {name}", options={
            "lr_scheduler_type": name, "warmup_steps": 0 if name in ("greedy", "reduce_lr_on_plateau") else 1,
            "lr_scheduler_kwargs": _OF_SCHEDULERS.get(name), "num_train_epochs": 3})
        for name in SCHEDULERS
    ),
    Case("sgd", options={"optim": "sgd"}),
    Case("adafactor", options={"optim": "adafactor"}),
    Case("rmsprop", options={"optim": "rmsprop"}),
    Case("bf16", options={"bf16": True}, model="float32", weights=2e-2, logged=2e-2, pps=BOTH),
    Case("LoRA", model="lora", pps=BOTH),
    Case("LoRA, saved and resumed", model="lora", after="resume", options=SAVED),
    Case("LoRA, best", model="lora", options=SAVED | BEST),
    Case("gradient checkpointing", options={"gradient_checkpointing": True}, pps=BOTH),
    Case("packing", data="packed", pps=BOTH),
    Case("compute_metrics", more=("metrics",), pps=BOTH),
    Case("batch_eval_metrics", more=("metrics",), options={"batch_eval_metrics": True}),
    Case("preprocess_logits_for_metrics", more=("metrics", "preprocess")),
    Case("several evaluation sets", more=("sets",)),
    Case("prediction_loss_only", options={"prediction_loss_only": True}),
    Case("predict", after="predict", pps=BOTH),
    Case("predict without labels", after="predict_unlabelled"),
    Case("callbacks", more=("callback",), pps=BOTH),
    Case("events of a reporter", more=("reporter",), options=SAVED, pps=BOTH),
    Case("report_to tensorboard", options={"report_to": ["tensorboard"]}),
    Case("group_by_length", options={"train_sampling_strategy": "group_by_length"}),
    Case("iterable data", data="iterable", options={"max_steps": 4}),
    Case("drop_last", data="odd", options={"dataloader_drop_last": True}),
    Case("save_strategy=steps, limit", options={
        "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}),
    Case("save_strategy=best", options=BEST | {"save_strategy": "best"}),
    Case("save_pretrained, from_pretrained", after="loaded", pps=BOTH),
    Case("resume", after="resume", options=SAVED, pps=BOTH),
    Case("resume pp=1 by pp=2", after="resume", options=SAVED, source=1),
    Case("resume pp=2 by pp=4", after="resume", options=SAVED, source=2, pps=(4,)),
    Case("resume pp=4 by pp=2", after="resume", options=SAVED, source=4),
    Case("resume pp=4 by pp=1", after="resume", options=SAVED, source=4, pps=(1,)),
    Case("resume in mid-epoch", after="resume", data="odd", options={
        "save_strategy": "steps", "save_steps": 1, "num_train_epochs": 3}),
    Case("early stopping", more=("stopping",), options=SAVED | BEST | {"num_train_epochs": 5}, pps=BOTH),
    Case("max_steps", options={"max_steps": 3}),
    Case("frozen weights", model="frozen", pps=BOTH),
    Case("replicas", replicas=2, pps=(1, 2)),
    Case("replicas, mean of each", replicas=2, options={"average_tokens_across_devices": False}),
    Case('schedule="auto"', options={"schedule": "auto", "num_train_epochs": 6}, pps=BOTH),
    *(Case(f"schedule={name}", options={"schedule": name}, layers=8) for name in (
        "gpipe", "interleaved", "chimera", "zb-h1", "hanayo", "dualpipe")),
    Case("schedule=zb-v", options={"schedule": "zb-v"}, layers=8, pps=(4,)),
)  # fmt: skip
EXACT = {"precompute_ref_log_probs": True}
ALL = (1, 2, 4)
TRL = (
    *(Case("plain", name, "SFTTrainer", data="trl", pps=ALL) for name in ("Llama", "Qwen2", "Mistral")),
    Case("packing", trainer="SFTTrainer", data="trl", pps=ALL, options={
        "packing": True, "max_length": 16, "packing_strategy": "wrapped"}),
    Case("packing without padding", trainer="SFTTrainer", data="trl", pps=ALL, options={
        "packing": True, "max_length": 16, "padding_free": True}),
    Case("LoRA", trainer="SFTTrainer", data="trl", model="peft_config", pps=ALL),
    Case("label smoothing", trainer="SFTTrainer", data="trl", pps=ALL, options={
        "label_smoothing_factor": 0.1}),
    *(Case("precomputed reference", name, "DPOTrainer", data="trl", options=EXACT, pps=ALL)
      for name in ("Llama", "Qwen2")),
    Case("LoRA, precomputed reference", trainer="DPOTrainer", data="trl", model="peft_config", options=EXACT,
         pps=ALL),
    *(Case("plain", name, "RewardTrainer", data="trl", pps=BOTH) for name in ("Llama", "Qwen2", "Mistral")),
)  # fmt: skip
_REFUSED: dict[str, dict[str, Any]] = {
    "fp16": {"fp16_full_eval": True},
    "bf16_full_eval": {"bf16_full_eval": True},
    "fsdp": {"fsdp": True},
    "torch_compile": {"torch_compile": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "use_liger_kernel": {"use_liger_kernel": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 0.1},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
    "optim=lomo": {"optim": "lomo"},
    "optim=galore_adamw": {"optim": "galore_adamw", "optim_target_modules": ["q_proj"]},
    "an asynchronous scheme": {"schedule": "pipedream"},
    "auto with cuts": {"schedule": "auto", "cuts": [2]},
    "pp that does not divide": {"pp": 3},
}
REFUSED = (
    *(Case(name, options=options, refused=True, pps=(1,)) for name, options in _REFUSED.items()),
    Case("model_init", more=("model_init",), refused=True, pps=(1,)),
    Case("optimizers", more=("optimizers",), refused=True, pps=(1,)),
    Case("compute_loss that switches a module", more=("switching",), after="train", refused=True, pps=(1,)),
    Case("reference in the step", trainer="DPOTrainer", data="trl", refused=True, pps=(1,)),
    Case("compute_metrics", trainer="SFTTrainer", data="trl", more=("metrics",), refused=True, pps=(1,)),
)
CASES = (
    *(Case("plain", name, options=SAVED, layers=4, pps=BOTH) for name in ARCHITECTURES),
    *FEATURES,
    *TRL,
    *REFUSED,
)


def fused(case: Case) -> bool:
    """Whether TRL computes the loss by its fused head, in float32."""
    return case.trainer in ("SFTTrainer", "DPOTrainer")


# -- data


def rows(samples: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of different lengths."""
    draw = torch.Generator().manual_seed(seed + samples)
    found = []
    for _ in range(samples):
        length = int(torch.randint(5, 10, (1,), generator=draw))
        ids = torch.randint(3, 60, (length,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": ids})
    return found


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Samples without a length."""

    def __iter__(self) -> Any:
        """Go through the samples."""
        yield from rows(64)


def collate(given: list[dict[str, Any]]) -> dict[str, Any]:
    """Padded at the end, by lengths that differ from batch to batch."""
    longest = max(len(row["input_ids"]) for row in given)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in given])

    ids = padded("input_ids", 0)
    found = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    return found | ({"labels": padded("labels", -100)} if "labels" in given[0] else {})


def loss_func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """The loss of a language model, without the model's own."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    lost = torch.nn.functional.cross_entropy(
        logits, labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )
    return (
        lost / num_items_in_batch if num_items_in_batch is not None else lost / (labels[:, 1:] != -100).sum()
    )


def doubled(logits: Any, labels: Any) -> Any:
    """Logits as ``preprocess_logits_for_metrics`` gives them."""
    del labels
    return 2 * logits


class Accuracy:
    """Accuracy of the next token, over all batches or in parts."""

    def __init__(self) -> None:
        self.right, self.total = 0, 0

    def __call__(self, found: Any, compute_result: bool = True) -> dict[str, float]:
        """The accuracy, and the sum of the logits."""
        logits, labels = torch.as_tensor(found.predictions)[:, :-1], torch.as_tensor(found.label_ids)[:, 1:]
        counted = labels != -100
        self.right += int((logits.argmax(-1) == labels)[counted].sum())
        self.total += int(counted.sum())
        told = {"accuracy": self.right / self.total, "logits": float(logits[counted].double().sum())}
        if compute_result:
            self.right, self.total = 0, 0
        return told


def words(samples: int) -> list[str]:
    """Texts of one word a token."""
    return [" ".join(f"w{token}" for token in row["input_ids"]) for row in rows(samples)]


def tokenizer() -> Any:
    """A tokenizer of those words."""
    import tokenizers
    import transformers

    known = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 64)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


# -- models and trainers


def model_of(case: Case) -> Any:
    """The model of a row."""
    import transformers

    torch.manual_seed(0)
    name, sizes = ARCHITECTURES[case.architecture]
    sizes = sizes | {LAYERS.get(name, "num_hidden_layers"): case.layers}
    config = getattr(transformers, f"{name}Config")(**sizes)
    kind = "ForCausalLM"
    if name == "Mixtral":
        config._experts_implementation = "batched_mm"  # others do not compute in float64, or decide by values
    if case.trainer == "RewardTrainer":
        config.num_labels, kind = 1, "ForSequenceClassification"
    made = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}{kind}")(config)
    made = made if case.model == "float32" else made.double()
    if case.model == "frozen":
        for parameter in [*made.model.embed_tokens.parameters(), *made.model.layers[0].parameters()]:
            parameter.requires_grad_(False)
    if case.model == "lora":
        import peft

        made = peft.get_peft_model(made, lora()).double()
    return made


def lora() -> Any:
    """Adapters that change the output from the first step on."""
    import peft

    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def with_loss(kind: Any, *, switches: bool) -> Any:
    """A trainer whose ``compute_loss`` adds a penalty; it may switch a module for a second forward."""

    class Own(kind):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
            if switches:
                layer = model.model.layers[0].self_attn
                layer.scaling, before = 1.0, layer.scaling
                try:
                    outputs = model(**inputs)
                finally:
                    layer.scaling = before
            loss = loss + 1e-3 * outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    return Own


def of_replicas(kind: Any, replicas: int) -> Any:
    """A trainer in one process that divides the loss of each batch by the tokens of its replica."""

    class OfReplicas(kind):  # type: ignore[misc]
        def get_batch_samples(self, *given: Any) -> Any:
            batches, items = super().get_batch_samples(*given)
            counts = [
                self._get_num_items_in_batch(batches[replica::replicas], given[-1])
                for replica in range(replicas)
            ]
            self.divisors = [replicas * counts[number % replicas] for number in range(len(batches))]
            return batches, items

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            if model.training:
                named["num_items_in_batch"] = self.divisors.pop(0)
            return super().compute_loss(model, inputs, *given, **named)

    return OfReplicas


def trainer_of(case: Case, folder: Path, pp: int | None) -> Any:
    """The trainer in one process (``pp=None``), or in stages."""
    import transformers

    options = OPTIONS | case.options | {"output_dir": str(folder)}
    if pp is None:
        options["gradient_accumulation_steps"] *= case.replicas
        for name in ("schedule", "cuts", "pp"):
            options.pop(name, None)
    else:
        options = {"pp": pp, "schedule": SCHEDULES[pp]} | options
    if case.data == "trl":
        return of_trl(case, options, pp)
    named: dict[str, Any] = {
        "train_dataset": Stream() if case.data == "iterable" else rows(14 if case.data == "odd" else 16),
        "eval_dataset": {"one": rows(3), "two": rows(4)} if "sets" in case.more else rows(3),
        "data_collator": transformers.DataCollatorWithFlattening() if case.data == "packed" else collate,
    }
    if "loss_func" in case.more:
        named["compute_loss_func"] = loss_func
    if "metrics" in case.more:
        named["compute_metrics"] = Accuracy()
    if "preprocess" in case.more:
        named["preprocess_logits_for_metrics"] = doubled
    if "stopping" in case.more:
        named["callbacks"] = [transformers.EarlyStoppingCallback(early_stopping_patience=1)]
    if "model_init" in case.more:
        named["model_init"] = lambda: model_of(case)
    model = None if "model_init" in case.more else model_of(case)
    if "optimizers" in case.more:
        named["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    if pp is None:
        kind, arguments = transformers.Trainer, transformers.TrainingArguments(**options)
    else:
        from counterflow.integrations.transformers import PipelineArguments, PipelineTrainer

        kind, arguments = PipelineTrainer, PipelineArguments(**options)
    if pp is None and not arguments.average_tokens_across_devices:
        kind = of_replicas(kind, case.replicas)
    if {"own_loss", "switching"} & set(case.more):
        kind = with_loss(kind, switches="switching" in case.more)
    made = kind(model=model, args=arguments, **named)
    if "no_items" in case.more:
        made.model_accepts_loss_kwargs = False
    if "callback" in case.more:
        made.add_callback(halving())
    if "reporter" in case.more:
        made.add_callback(reporter())
    return made


def halving() -> Any:
    """A callback that evaluates after each step and ends training early."""
    import transformers

    class Halving(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
            control.should_evaluate = True
            assert named["model"] is not None
            assert named["optimizer"].param_groups
            if state.global_step == 3:
                control.should_training_stop = True
            return control

    return Halving()


def reporter() -> Any:
    """A callback that notes all events, and what is logged."""
    import transformers

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.events: list[str] = []
            self.logs: list[dict[str, float]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            self.events.append("on_log")
            self.logs.append(dict(logs))

    def noting(event: str) -> Any:
        def note(self: Any, *given: Any, **named: Any) -> None:
            self.events.append(event)

        return note

    for event in (
        "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end",
        "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_evaluate", "on_save",
        "on_prediction_step",
    ):  # fmt: skip
        setattr(Reporter, event, noting(event))
    return Reporter()


def of_trl(case: Case, options: dict[str, Any], pp: int | None) -> Any:
    """A trainer of TRL."""
    import datasets
    import trl

    from counterflow.integrations.transformers import PipelineFields, PipelineTrainerMixin

    kind = getattr(trl, case.trainer)
    arguments = getattr(trl, case.trainer.replace("Trainer", "Config"))
    if pp is not None:
        kind = type(f"Pipeline{kind.__name__}", (PipelineTrainerMixin, kind), {})
        name = f"Pipeline{arguments.__name__}"
        arguments = make_dataclass(name, (), bases=(PipelineFields, arguments))
        arguments.__module__ = __name__
        setattr(sys.modules[__name__], name, arguments)  # checkpoints contain the arguments
    if case.trainer == "SFTTrainer":
        data = datasets.Dataset.from_dict({"text": words(16)})
    else:
        data = datasets.Dataset.from_dict(
            {
                "prompt": words(16),
                "chosen": [" " + text for text in reversed(words(16))],
                "rejected": [" " + text for text in words(17)[1:]],
            }
        )
    named: dict[str, Any] = {"peft_config": lora()} if case.model == "peft_config" else {}
    if "metrics" in case.more:
        named["compute_metrics"] = Accuracy()
    options = options | {"bf16": False, "gradient_checkpointing": False}
    if fused(case):
        options |= {"optim": "sgd", "learning_rate": 0.1}
    return kind(
        model=model_of(case), args=arguments(**options), train_dataset=data,
        eval_dataset=data.select(range(4)), processing_class=tokenizer(), **named,
    )  # fmt: skip
