"""Trainers of transformers and TRL in pipeline stages, against the same trainers in one process.

    python benchmarks/trainers.py [--keep] [--pp 1 2 4] [--only WORD]

Claims: for each row of the table (trainer, architecture, feature) and each number of workers, the logged
losses, gradient norms, learning rates and metrics, and the final weights, are those of the trainer itself in
one process. In float64: what is logged within 1e-6 of its value (trainers add losses up in float32), and
weights within 1e-12. In bf16 both are within 2e-2. SFTTrainer and DPOTrainer compute losses in float32: pp=1
is within 1e-4 of what they log and 1e-5 of weights, and pp=2 and 4 are as exact against pp=1 as the others.

Models have a few thousand parameters and train for 4 to 6 steps. Rows of TRL are left out without TRL.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import torch
from machine import machine, shown

import counterflow as cf

RESULTS = Path(__file__).parent / "results" / "trainers.txt"
SCHEDULES = {1: "1f1b", 2: "zb-v", 4: "1f1b"}
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
TOLD_EXACTLY_NOT = ("runtime", "per_second", "total_flos", "preparation_time")
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
    "optim": "adamw_torch", "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "epoch", "max_grad_norm": 0.5,
    "weight_decay": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        feature: name of the feature.
        architecture: name of the architecture.
        trainer: ``Trainer``, or a trainer of TRL.
        options: training arguments.
        model: name of what is done to the model: ``lora``, ``float32``.
        data: name of the data.
        more: further arguments of the trainer by name.
        after: name of what is done after training.
        replicas: number of replicas of the pipeline.
        weights: tolerance of the weights.
        logged: relative tolerance of what is logged.
        pps: numbers of workers in a pipeline.
    """

    feature: str
    architecture: str = "Llama"
    trainer: str = "Trainer"
    options: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    data: str = "padded"
    more: tuple[str, ...] = ()
    after: str = ""
    replicas: int = 1
    weights: float = 1e-12
    logged: float = 1e-6
    pps: tuple[int, ...] = (1, 2, 4)

    @property
    def name(self) -> str:
        return f"{self.trainer} {self.architecture} {self.feature}"


FEATURES = (
    Case("no accumulation", options={"gradient_accumulation_steps": 1}),
    Case("accumulation, short last step", data="odd"),
    Case("label smoothing", options={"label_smoothing_factor": 0.1}),
    Case("compute_loss_func", more=("loss_func",)),
    Case("no num_items_in_batch", more=("no_items",)),
    Case("max_grad_norm=0.01", options={"max_grad_norm": 0.01}),
    Case("max_grad_norm=0", options={"max_grad_norm": 0.0}),
    Case("linear warm-up", options={"warmup_steps": 2}),
    Case("cosine", options={"lr_scheduler_type": "cosine"}),
    Case("cosine with restarts", options={"lr_scheduler_type": "cosine_with_restarts"}),
    Case("polynomial", options={"lr_scheduler_type": "polynomial"}),
    Case("constant with warm-up", options={"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}),
    Case("inverse square root", options={"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2}),
    Case("reduce on plateau", options={"lr_scheduler_type": "reduce_lr_on_plateau"}),
    Case("sgd", options={"optim": "sgd"}),
    Case("adafactor", options={"optim": "adafactor"}),
    Case("bf16", options={"bf16": True}, model="float32", weights=2e-2, logged=2e-2),
    Case("LoRA", model="lora"),
    Case("LoRA, saved and resumed", model="lora", after="resume", options={"save_strategy": "epoch"}),
    Case("gradient checkpointing", options={"gradient_checkpointing": True}),
    Case("packing", data="packed"),
    Case("compute_metrics", more=("metrics",)),
    Case("batch_eval_metrics", more=("metrics",), options={"batch_eval_metrics": True}),
    Case("predict", after="predict"),
    Case("predict without labels", after="predict_unlabelled"),
    Case("callbacks", more=("callback",)),
    Case("report_to tensorboard", options={"report_to": ["tensorboard"]}),
    Case("group_by_length", options={"train_sampling_strategy": "group_by_length"}),
    Case("save_strategy=steps, limit", options={"save_strategy": "steps", "save_steps": 1,
                                                "save_total_limit": 2}),
    Case("save_strategy=best", options={"save_strategy": "best", "metric_for_best_model": "loss",
                                        "load_best_model_at_end": True, "learning_rate": 0.5}),
    Case("resume", options={"save_strategy": "epoch"}, after="resume"),
    Case("resume from another pp", options={"save_strategy": "epoch"}, after="resume_other"),
    Case("early stopping", more=("stopping",), options={
        "save_strategy": "epoch", "metric_for_best_model": "loss", "load_best_model_at_end": True,
        "num_train_epochs": 5, "learning_rate": 0.5,
    }),
    Case("max_steps", options={"max_steps": 3}),
    Case("two replicas", replicas=2, pps=(1, 2)),
    Case('schedule="auto"', options={"schedule": "auto", "num_train_epochs": 6}, pps=(2, 4)),
)  # fmt: skip
TRL = (
    *(Case("plain", name, "SFTTrainer", data="trl") for name in ("Llama", "Qwen2", "Qwen3", "Mistral")),
    Case("packing", trainer="SFTTrainer", data="trl", options={
        "packing": True, "max_length": 16, "packing_strategy": "wrapped"}),
    Case("LoRA", trainer="SFTTrainer", data="trl", model="peft_config"),
    Case("label smoothing", trainer="SFTTrainer", data="trl", options={"label_smoothing_factor": 0.1}),
    *(Case("precomputed reference", name, "DPOTrainer", data="trl",
           options={"precompute_ref_log_probs": True}) for name in ("Llama", "Qwen2")),
    Case("LoRA, precomputed reference", trainer="DPOTrainer", data="trl", model="peft_config",
         options={"precompute_ref_log_probs": True}),
    *(Case("plain", name, "RewardTrainer", data="trl") for name in ("Llama", "Qwen2", "Mistral")),
)  # fmt: skip
CASES = tuple(
    Case("plain", name, options={"save_strategy": "epoch"}) for name in ARCHITECTURES
) + FEATURES + TRL  # fmt: skip


def fused(case: Case) -> bool:
    """Whether TRL computes the loss by its fused head, in float32."""
    return case.trainer in ("SFTTrainer", "DPOTrainer")


# -- data


def rows(samples: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed + samples)
    found = []
    for _ in range(samples):
        length = int(torch.randint(5, 10, (1,), generator=draw))
        ids = torch.randint(3, 60, (length,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": ids})
    return found


def collate(given: list[dict[str, Any]]) -> dict[str, Any]:
    """Padded at the end, by lengths that differ from batch to batch."""
    longest = max(len(row["input_ids"]) for row in given)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in given])

    ids = padded("input_ids", 0)
    found = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    return found | ({"labels": padded("labels", -100)} if "labels" in given[0] else {})


def loss_func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    lost = torch.nn.functional.cross_entropy(
        logits, labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )
    return (
        lost / num_items_in_batch if num_items_in_batch is not None else lost / (labels[:, 1:] != -100).sum()
    )


class Accuracy:
    """Accuracy of the next token, over all batches or in parts."""

    def __init__(self) -> None:
        self.right, self.total = 0, 0

    def __call__(self, found: Any, compute_result: bool = True) -> dict[str, float]:
        logits, labels = torch.as_tensor(found.predictions)[:, :-1], torch.as_tensor(found.label_ids)[:, 1:]
        counted = labels != -100
        self.right += int((logits.argmax(-1) == labels)[counted].sum())
        self.total += int(counted.sum())
        told = {"accuracy": self.right / self.total, "logits": float(logits[counted].double().sum())}
        if compute_result:
            self.right, self.total = 0, 0
        return told


# -- a run


def model_of(case: Case) -> Any:
    import transformers

    torch.manual_seed(0)
    name, sizes = ARCHITECTURES[case.architecture]
    config = getattr(transformers, f"{name}Config")(**sizes)
    kind = "ForCausalLM"
    if name == "Mixtral":
        config._experts_implementation = "batched_mm"  # others do not compute in float64, or decide by values
    if case.trainer == "RewardTrainer":
        config.num_labels, kind = 1, "ForSequenceClassification"
    made = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}{kind}")(config)
    made = made if case.model == "float32" else made.double()
    if case.model == "lora":
        import peft

        made = peft.get_peft_model(made, lora(case)).double()
    return made


def lora(case: Case) -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def trainer_of(case: Case, folder: Path, pp: int | None) -> Any:
    """The trainer in one process (``pp=None``), or in stages."""
    import transformers

    options = OPTIONS | case.options | {"output_dir": str(folder)}
    if pp is None:
        options["gradient_accumulation_steps"] *= case.replicas
        options.pop("schedule", None)
    else:
        options = {"pp": pp, "schedule": SCHEDULES[pp]} | options
    named: dict[str, Any] = {}
    samples = 14 if case.data == "odd" else 16
    if case.data == "trl":
        return of_trl(case, options, pp)
    named |= {"train_dataset": rows(samples), "eval_dataset": rows(3), "data_collator": collate}
    if case.data == "packed":
        named["data_collator"] = transformers.DataCollatorWithFlattening()
    if "loss_func" in case.more:
        named["compute_loss_func"] = loss_func
    if "metrics" in case.more:
        named["compute_metrics"] = Accuracy()
    if "stopping" in case.more:
        named["callbacks"] = [transformers.EarlyStoppingCallback(early_stopping_patience=1)]
    if pp is None:
        kind, arguments = transformers.Trainer, transformers.TrainingArguments(**options)
    else:
        from counterflow.integrations.transformers import PipelineArguments, PipelineTrainer

        kind, arguments = PipelineTrainer, PipelineArguments(**options)
    made = kind(model=model_of(case), args=arguments, **named)
    if "no_items" in case.more:
        made.model_accepts_loss_kwargs = False
    if "callback" in case.more:
        made.add_callback(halving())
    return made


def halving() -> Any:
    """A callback that ends an epoch early, asks for evaluations and notes all events."""
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


def words(samples: int) -> list[str]:
    return [" ".join(f"w{token}" for token in row["input_ids"]) for row in rows(samples)]


def tokenizer() -> Any:
    import tokenizers
    import transformers

    known = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 64)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def of_trl(case: Case, options: dict[str, Any], pp: int | None) -> Any:
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
    named = {"peft_config": lora(case)} if case.model == "peft_config" else {}
    options = options | {"bf16": False, "gradient_checkpointing": False}
    if fused(case):
        options |= {"optim": "sgd", "learning_rate": 0.1}
    return kind(
        model=model_of(case), args=arguments(**options), train_dataset=data,
        eval_dataset=data.select(range(4)), processing_class=tokenizer(), **named,
    )  # fmt: skip


def run(case: Case, folder: Path, pp: int | None, before: Path | None = None) -> None:
    """Train, and write what was logged and the weights."""
    from transformers import PrinterCallback

    shutil.rmtree(folder, ignore_errors=True) if pp is None or _first() else None
    trainer = trainer_of(case, folder, pp)
    trainer.remove_callback(PrinterCallback)
    if case.after.startswith("resume") and pp is not None and before is not None:
        trainer.train(resume_from_checkpoint=str(first_checkpoint(before)))
    else:
        trainer.train()
    more: dict[str, Any] = {}
    if case.after.startswith("predict"):
        data = rows(5, 1)
        if case.after == "predict_unlabelled":
            data = [{"input_ids": row["input_ids"]} for row in data]
        found = trainer.predict(data)
        more = {"predicted": torch.as_tensor(found.predictions).double(), "metrics": told(found.metrics)}
    trainer.save_model(str(folder / "final"))
    history = [told(row) for row in trainer.state.log_history]
    if pp is None or trainer.is_world_process_zero():
        kept = sorted(path.name for path in folder.glob("checkpoint-*"))
        files = sorted(
            path.name for path in (folder / "final").glob("*") if not path.name.startswith("model")
        )
        torch.save({"history": history, "kept": kept, "files": files, **more}, folder / "told.pt")


def _first() -> bool:
    from counterflow.runtime.workers.world import current_transport

    transport = current_transport()
    transport.gather_objects(None)
    return transport.rank == 0


def told(row: dict[str, Any]) -> dict[str, float]:
    return {name: v for name, v in row.items() if not any(part in name for part in TOLD_EXACTLY_NOT)}


def first_checkpoint(folder: Path) -> Path:
    return min(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def weights(folder: Path, architecture: str) -> dict[str, torch.Tensor]:
    if architecture in ("Mixtral", "GPT-NeoX"):  # the trainer writes weights by older names
        import transformers

        kind = transformers.AutoModelForCausalLM
        state: dict[str, torch.Tensor] = kind.from_pretrained(
            folder / "final", dtype=torch.float64
        ).state_dict()
        return state
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in (folder / "final").glob("*.safetensors"):
        found |= load_file(file)
    return found


def serve(cases: tuple[Case, ...], folder: Path, pp: int) -> None:
    """Run cases in this worker, until one fails."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for case in cases:
        place = folder / case.name / str(pp)
        try:
            plain = Case(**{**vars(case), "after": ""})
            before = folder / case.name / ("1" if case.after == "resume_other" else f"before {pp}")
            if case.after == "resume":
                run(plain, before, pp)
            run(plain if case.after == "resume_other" and pp == 1 else case, place, pp, before)
        except Exception as error:
            place.mkdir(parents=True, exist_ok=True)
            with (place / "error").open("a") as file:
                file.write(f"{type(error).__name__}: {error}\n")
            raise


def compared(case: Case, folder: Path, pp: int) -> dict[str, Any]:
    """Largest differences of what was logged and of weights, and what is wrong."""
    place = folder / case.name / str(pp)
    if not (place / "told.pt").exists():
        error = (place / "error").read_text() if (place / "error").exists() else "did not end"
        return {"wrong": error.splitlines()[0][:200]}
    mine = torch.load(place / "told.pt", weights_only=False)
    reference = "1" if fused(case) and pp > 1 else "alone"
    rounded = fused(case) and pp == 1
    logged, tolerance = (1e-4, 1e-5) if rounded else (case.logged, case.weights)
    its = torch.load(folder / case.name / reference / "told.pt", weights_only=False)
    found: dict[str, Any] = {"logged": 0.0, "weights": 0.0, "wrong": ""}
    if len(mine["history"]) != len(its["history"]):
        return found | {"wrong": f"{len(mine['history'])} logs for {len(its['history'])}"}
    pairs = [
        *zip(mine["history"], its["history"], strict=True),
        (mine.get("metrics", {}), its.get("metrics", {})),
    ]
    for row, wanted in pairs:
        if case.after.startswith("resume"):  # of the steps since then
            row.pop("train_loss", None), wanted.pop("train_loss", None)
        if row.keys() != wanted.keys():
            found["wrong"] = f"logs differ: {sorted(row.keys() ^ wanted.keys())}"
            continue
        for name, value in wanted.items():
            if isinstance(value, float | int):
                if rounded and name.endswith("rewards/accuracies"):  # of margins that are 0 but for rounding
                    continue
                apart = abs(row[name] - value) / max(abs(value), 1.0 if rounded else 1e-3)
                found["logged"] = max(found["logged"], math.inf if math.isnan(apart) else apart)
                if not apart <= logged and not found["wrong"]:
                    found["wrong"] = f"{name} {row[name]} for {value}"
    ours, wanted_weights = (
        weights(place, case.architecture),
        weights(place.parent / reference, case.architecture),
    )
    if ours.keys() != wanted_weights.keys() or mine["kept"] != its["kept"] or mine["files"] != its["files"]:
        found["wrong"] = found["wrong"] or f"files or weights differ: {mine['kept']} {mine['files']}"
        return found
    for name, tensor in wanted_weights.items():
        apart = float((ours[name].double() - tensor.double()).abs().max())
        found["weights"] = max(found["weights"], apart if math.isfinite(apart) else math.inf)
    if "predicted" in its:
        same = mine["predicted"].shape == its["predicted"].shape
        apart = float((mine["predicted"] - its["predicted"]).abs().max()) if same else math.inf
        found["weights"] = max(found["weights"], apart)
    if not found["weights"] <= tolerance and not found["wrong"]:
        found["wrong"] = f"weights {found['weights']:.1e} apart"
    return found


def launched(cases: list[Case], folder: Path, pp: int, say: Callable[[str], None]) -> None:
    """Run cases in processes, which are started anew after a case that fails."""
    groups: dict[int, list[Case]] = {}
    for case in cases:
        if pp in case.pps:
            groups.setdefault(case.replicas, []).append(case)
    for replicas, asked in groups.items():
        left = asked
        while left:
            try:
                cf.launch(
                    serve,
                    tuple(left),
                    folder,
                    pp,
                    workers=pp * replicas,
                    transport="gloo",
                    timeout_seconds=60,
                )
            except Exception as error:
                done = [(folder / case.name / str(pp) / "told.pt").exists() for case in left]
                at = done.index(False) if False in done else len(left)
                say(f"{pp} workers: {left[at].name if at < len(left) else ''}: {str(error)[-300:]}")
                left = left[at + 1 :]
            else:
                left = []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--pp", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = [case for case in CASES if asked.only in case.name]
    try:
        import trl

        about = f"trl {trl.__version__}"
    except ImportError:
        cases, about = [case for case in cases if case.data != "trl"], "no trl"
    import transformers

    transformers.logging.set_verbosity_error()
    folder = Path(tempfile.mkdtemp())
    for case in list(cases):
        try:
            run(case, folder / case.name / "alone", None)
        except Exception as error:
            print(
                f"{case.name} fails in one process: {type(error).__name__}: {str(error)[:300]}",
                file=sys.stderr,
            )
            cases.remove(case)
    for pp in asked.pp:
        launched(cases, folder, pp, lambda text: print(text, file=sys.stderr))
    lines = [
        f"Against the trainer in one process; transformers {transformers.__version__}, {about}, float64.",
        f"{'trainer':14}{'architecture':14}{'feature':32}{'pp':>3}  {'schedule':9}{'logged':>9}"
        f"{'weights':>10}",
    ]
    right = 0
    total = 0
    for case in cases:
        for pp in [pp for pp in asked.pp if pp in case.pps]:
            found = compared(case, folder, pp)
            total += 1
            right += not found["wrong"]
            numbers = f"{found['logged']:9.0e}{found['weights']:10.0e}" if "logged" in found else " " * 19
            schedule = case.options.get("schedule", SCHEDULES[pp])
            lines.append(
                f"{case.trainer:14}{case.architecture:14}{case.feature:32}{pp:3}  {schedule:9}{numbers}  "
                f"{found['wrong'] or 'same'}"
            )
    lines += [f"{right} of {total} rows are the same.", shown(machine())]
    print("\n".join(lines))
    shutil.rmtree(folder)
    if asked.keep:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
