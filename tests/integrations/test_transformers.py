"""The Trainer of transformers in stages: its own losses, norms and weights, in float64."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import counterflow as cf
from counterflow.integrations.transformers import (
    PipelineArguments,
    PipelineTrainer,
    PipelineTrainerMixin,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
    "optim": "adamw_torch", "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "save_strategy": "epoch", "eval_strategy": "epoch", "max_grad_norm": 0.5,
    "warmup_steps": 2, "weight_decay": 0.1,
}  # fmt: skip


def data(samples: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(samples)
    rows = []
    for _ in range(samples):
        length = int(torch.randint(5, 10, (1,), generator=draw))
        ids = torch.randint(3, 60, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded at the end, by lengths that differ from batch to batch."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    labels = {"labels": padded("labels", -100)} if "labels" in rows[0] else {}
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), **labels}


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def run(kind: Any, arguments: Any, resume: str | None = None) -> list[dict[str, float]]:
    trainer = kind(
        model=tiny_model(),
        args=arguments,
        train_dataset=data(10),
        eval_dataset=data(3),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{arguments.output_dir}/final")
    return [{name: row[name] for name in LOGGED if name in row} for row in trainer.state.log_history]


def alone(folder: Path, **more: Any) -> list[dict[str, float]]:
    return run(
        transformers.Trainer, transformers.TrainingArguments(output_dir=str(folder), **(OPTIONS | more))
    )


def in_stages(
    folder: str, pp: int, schedule: str, more: dict[str, Any], resume: str | None = None
) -> list[dict[str, float]]:
    arguments = PipelineArguments(output_dir=folder, pp=pp, schedule=schedule, **(OPTIONS | more))
    return run(PipelineTrainer, arguments, resume)


def threaded(folder: str, more: dict[str, Any], resume: str | None = None) -> list[dict[str, float]]:
    histories = cf.launch(in_stages, folder, 1, "1f1b", more, resume, workers=1, transport="local", threads=1)
    return histories[0]


def weights(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in (folder / "final").glob("*.safetensors") for n, t in load_file(file).items()}


def loaded(folder: Path) -> dict[str, Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float64)
    state: dict[str, Tensor] = model.state_dict()
    return state


def agree(folder: Path, other_folder: Path, history: Any, expected: Any) -> None:
    assert len(history) == len(expected)
    for row, wanted in zip(history, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)  # the trainer adds losses up in float32
    actual_weights, expected_weights = weights(folder), weights(other_folder)
    if "model.layers.0.mlp.gate.weight" in actual_weights:  # the trainer writes experts one by one
        actual_weights, expected_weights = loaded(folder), loaded(other_folder)
    assert actual_weights.keys() == expected_weights.keys() != set()
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(actual_weights[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """Folder and history of the trainer itself, without further options."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, alone(folder)


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """The same of the trainer in one stage."""
    folder = tmp_path_factory.mktemp("one")
    return folder, threaded(str(folder), {})


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    """The trainer collects garbage, also among all that is imported."""
    gc.freeze()


def test_one_worker_trains_as_the_trainer_and_goes_on_from_a_checkpoint(
    tmp_path: Path, plain: tuple[Path, Any], one_worker: tuple[Path, Any]
) -> None:
    """Ten samples are five batches: the last step of an epoch has one batch in place of two."""
    folder, expected = plain
    stages, history = one_worker
    agree(stages, folder, history, expected)
    history = threaded(str(tmp_path / "again"), {}, str(stages / "checkpoint-3"))
    agree(tmp_path / "again", folder, history, expected)


def test_options_are_those_of_the_trainer(tmp_path: Path) -> None:
    more = {
        "label_smoothing_factor": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "optim": "sgd",
    }  # fmt: skip
    expected = alone(tmp_path / "alone", **more)
    history = threaded(str(tmp_path / "stages"), more)
    agree(tmp_path / "stages", tmp_path / "alone", history, expected)


def classifier(folder: str, kind: Any, arguments: Any, more: dict[str, Any]) -> tuple[list[float], str]:
    """Losses of an evaluation and a training after it, and the problem type that the model has then."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).double()
    rows = [{"input_ids": row["input_ids"], "labels": number % 3} for number, row in enumerate(data(10))]
    trainer = kind(
        model=model,
        args=arguments(output_dir=folder, **(OPTIONS | {"num_train_epochs": 1} | more)),
        train_dataset=rows,
        eval_dataset=rows[:3],
        data_collator=collate_classes,
    )
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return [first, *losses], model.config.problem_type


def collate_classes(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    labels = torch.tensor([row["labels"] for row in rows])
    return collate([{"input_ids": row["input_ids"]} for row in rows]) | {"labels": labels}


def test_a_classifier_learns_its_kind_and_an_evaluation_before_moves_no_order(tmp_path: Path) -> None:
    """transformers sets ``problem_type`` in the first forward."""
    expected = classifier(str(tmp_path / "plain"), transformers.Trainer, transformers.TrainingArguments, {})
    more = {"pp": 1, "schedule": "1f1b"}
    stages = str(tmp_path / "stages")
    (results,) = cf.launch(
        classifier, stages, PipelineTrainer, PipelineArguments, more, workers=1, transport="local", threads=1
    )
    assert results[0] == pytest.approx(expected[0], rel=1e-6)
    assert results[1] == expected[1] == "single_label_classification"


def family(name: str) -> Any:
    torch.manual_seed(0)
    if name == "GPT2LMHead":
        config: Any = transformers.GPT2Config(
            vocab_size=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        return transformers.GPT2LMHeadModel(config).double()
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, pad_token_id=0, output_router_logits=True,
        router_aux_loss_coef=0.5,
    )  # fmt: skip
    config._experts_implementation = "batched_mm"  # the others do not compute in float64, or decide by values
    return transformers.MixtralForCausalLM(config).double()


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = (
        torch.as_tensor(prediction.predictions)[:, :-1],
        torch.as_tensor(prediction.label_ids)[:, 1:],
    )
    counted = labels != -100
    return {"right": float((logits.argmax(-1) == labels)[counted].sum()), "sum": float(logits[counted].sum())}


def adapted(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


FLAT = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
JOBS: dict[str, dict[str, Any]] = {
    "gpt2, metrics, auto": {"model": "GPT2LMHead", "metrics": True, "schedule": "auto"},
    "experts": {"model": "Mixtral"},
    "adapters": {
        "lora": True,
        "more": {"load_best_model_at_end": True, "metric_for_best_model": "loss", "num_train_epochs": 2},
    },
    "packed, checkpointing": {"packed": True, "more": {"gradient_checkpointing": True}},
}


def job(folder: Path, name: str, pp: int | None, replicas: int = 1) -> list[dict[str, float]]:
    """Train, evaluate and predict: in one process, if pp is None."""
    options_of_job = JOBS[name]
    options = (
        OPTIONS | {"num_train_epochs": 1, "output_dir": str(folder / name)} | options_of_job.get("more", {})
    )
    options["gradient_accumulation_steps"] *= replicas if pp is None else 1
    if pp is None:
        kind: Any = transformers.Trainer
        arguments: Any = transformers.TrainingArguments(**options)
    else:
        kind = PipelineTrainer
        arguments = PipelineArguments(pp=pp, schedule=options_of_job.get("schedule", "1f1b"), **options)
    trainer = kind(
        model=adapted(tiny_model())
        if options_of_job.get("lora")
        else family(options_of_job["model"])
        if "model" in options_of_job
        else tiny_model(),
        args=arguments,
        train_dataset=data(12),
        eval_dataset=data(3),
        data_collator=FLAT if options_of_job.get("packed") else collate,
        compute_metrics=accuracy if options_of_job.get("metrics") else None,
    )
    trainer.train()
    trainer.save_model(f"{folder / name}/final")
    history = [
        {n: v for n, v in row.items() if n in LOGGED or n in ("eval_right", "eval_sum")}
        for row in trainer.state.log_history
    ]
    if options_of_job.get("metrics"):
        labelled = trainer.predict(data(3))
        without = trainer.predict([{"input_ids": row["input_ids"]} for row in data(3)])
        assert without.label_ids is None
        assert "test_loss" not in without.metrics
        history += [
            {"labelled": float(abs(labelled.predictions).sum()), "loss": labelled.metrics["test_loss"]}
        ]
        history += [{"without": float(abs(without.predictions).sum())}]
    return history


HALF: dict[str, Any] = {
    **OPTIONS, "fp16": True, "eval_strategy": "no", "num_train_epochs": 3, "per_device_train_batch_size": 1,
    "optim": "sgd",
}  # fmt: skip


def half(folder: str, pp: int | None, resume: str | None = None) -> list[tuple[float, ...]]:
    """Losses, norms and rates of a model whose gradients overflow in float16 at first.

    On a CPU the trainer without a pipeline scales nothing and computes in float32, so it gets what it has on
    a GPU.
    """
    torch.set_num_threads(1)
    model = tiny_model().float()
    with torch.no_grad():
        model.lm_head.weight.mul_(200)
    kind: Any = transformers.Trainer if pp is None else PipelineTrainer
    arguments: Any = transformers.TrainingArguments(output_dir=folder, **HALF)
    if pp is not None:
        arguments = PipelineArguments(output_dir=folder, pp=pp, schedule="zb-v" if pp > 1 else "1f1b", **HALF)
    trainer = kind(model=model, args=arguments, train_dataset=data(10), data_collator=collate)
    if pp is None:
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    log = trainer.state.log_history
    return [tuple(row[name] for name in LOGGED[:3]) for row in log if "loss" in row]


def test_float16_is_the_trainers_and_its_scale_is_in_checkpoints(tmp_path: Path) -> None:
    wanted = half(str(tmp_path / "alone"), None)
    skipped = [row[1] != row[1] for row in wanted]  # NaN
    assert any(skipped[:9])
    assert not all(skipped)

    def staged(name: str, resume: str | None = None) -> list[tuple[float, ...]]:
        job = (half, str(tmp_path / name), 1, resume)
        histories: list[list[tuple[float, ...]]] = cf.launch(*job, workers=1, transport="local", threads=1)
        return histories[0]

    runs = {"stages": staged("stages")}
    for name, source in (("on", "stages"), ("over", "alone")):
        runs[name] = staged(name, str(tmp_path / source / "checkpoint-5"))
    runs["back"] = half(str(tmp_path / "back"), None, str(tmp_path / "stages" / "checkpoint-5"))
    for name, history in runs.items():
        halves(tmp_path / name, tmp_path / "alone", history, wanted)
        scales = [torch.load(tmp_path / run / "checkpoint-15" / "scaler.pt") for run in (name, "alone")]
        assert scales[0] == scales[1]


def adapters(folder: str, resume: str | None = None) -> list[dict[str, float]]:
    """Train adapters in stages, whose frozen weights have no state of the optimizer."""
    arguments = PipelineArguments(pp=1, schedule="1f1b", **OPTIONS | {"output_dir": folder})
    trainer = PipelineTrainer(
        model=adapted(tiny_model()),
        args=arguments,
        train_dataset=data(12),
        eval_dataset=data(3),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    return [{n: v for n, v in row.items() if n in LOGGED} for row in trainer.state.log_history]


def test_adapters_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    complete, on = str(tmp_path / "whole"), str(tmp_path / "on")
    (wanted,) = cf.launch(adapters, complete, workers=1, transport="local", threads=1)
    first = min(Path(complete).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    (history,) = cf.launch(adapters, on, str(first), workers=1, transport="local", threads=1)
    assert history == wanted
    for name, tensor in weights(Path(complete)).items():
        torch.testing.assert_close(weights(Path(on))[name], tensor, rtol=0.0, atol=0.0, msg=name)


def halves(folder: Path, other_folder: Path, history: Any, expected: Any) -> None:
    torch.testing.assert_close(history, expected, rtol=5e-3, atol=0.0, equal_nan=True)
    for name, tensor in weights(other_folder).items():
        torch.testing.assert_close(weights(folder)[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def jobs(folder: str, checkpoint: str) -> list[list[dict[str, float]]]:
    gc.freeze()
    histories = [job(Path(folder), name, 2) for name in JOBS]
    resumed = in_stages(f"{folder}/resumed", 2, "zb-v", {}, checkpoint)
    halved: Any = half(f"{folder}/half", 2)
    return [*histories, halved, job(Path(folder) / "replicas", "experts", 1), resumed]


def test_checkpoints_are_those_of_the_trainer_without_a_pipeline(
    tmp_path: Path, plain: tuple[Path, Any], one_worker: tuple[Path, Any]
) -> None:
    """Each goes on from the other's; in two stages a run does from either, as both have the same files."""
    checkpoints = [folder / "checkpoint-3" for folder in (plain[0], one_worker[0])]
    trainer_files, pipeline_files = ({file.name for file in folder.iterdir()} for folder in checkpoints)
    assert trainer_files == pipeline_files
    agree(tmp_path / "ours", plain[0], threaded(str(tmp_path / "ours"), {}, str(checkpoints[0])), plain[1])
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), **OPTIONS)
    agree(
        tmp_path / "theirs",
        plain[0],
        run(transformers.Trainer, arguments, str(checkpoints[1])),
        plain[1],
    )


@pytest.mark.timeout(900)  # seven runs: three minutes of a quiet machine, and over five of a busy one
def test_features_in_two_stages_are_those_of_the_trainer(
    tmp_path: Path, plain: tuple[Path, Any], one_worker: tuple[Path, Any]
) -> None:
    """Also a run goes on in two stages, with another scheme, from a checkpoint of one."""
    folder = tmp_path / "stages"
    checkpoint = str(one_worker[0] / "checkpoint-3")
    histories = cf.launch(jobs, str(folder), checkpoint, workers=2, transport="gloo", threads=1)[0]
    for name, history in zip(JOBS, histories, strict=False):
        wanted = job(tmp_path / "alone", name, None)
        agree(folder / name, tmp_path / "alone" / name, history, wanted)
    wanted = job(tmp_path / "both", "experts", None, replicas=2)
    agree(folder / "replicas" / "experts", tmp_path / "both" / "experts", histories[-2], wanted)
    agree(folder / "resumed", plain[0], histories[-1], plain[1])
    halves(folder / "half", tmp_path / "half", histories[-3], half(str(tmp_path / "half"), None))
    assert loaded(folder / "resumed").keys() == tiny_model().state_dict().keys()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"fp16_full_eval": True}, "fp16_full_eval=True cannot be combined with a pipeline"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True cannot be combined"),
        ({"optim": "lomo"}, "optim='lomo' cannot be combined"),
        ({"optim": "schedule_free_adamw"}, "optim='schedule_free_adamw' cannot be combined"),
        ({"schedule": "pipedream"}, "is asynchronous"),
        ({"pp": 2}, "pp=2, but 1 process runs"),
        ({"schedule": "auto", "cuts": [1]}, "cuts cannot be combined with schedule='auto'"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True cannot be combined"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(tmp_path: Path, more: dict[str, Any], sentence: str) -> None:
    arguments = PipelineArguments(**{"output_dir": str(tmp_path), "pp": 1, **OPTIONS, **more})
    with pytest.raises(cf.ConfigError, match=sentence):
        PipelineTrainer(model=tiny_model(), args=arguments)


def test_a_backend_of_the_trainers_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigError, match=r"ddp_backend='gloo' cannot be combined .*; leave it out"):
        PipelineArguments(output_dir=str(tmp_path), ddp_backend="gloo", **OPTIONS)


class Counting(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Looks where packed samples begin, as flash attention does."""

    def forward(self, *args: Any, cu_seq_lens_q: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + cu_seq_lens_q.double().mean()
        return output


def test_a_model_that_looks_where_packed_samples_begin_is_refused(tmp_path: Path) -> None:
    options = OPTIONS | {"eval_strategy": "no", "remove_unused_columns": False}
    arguments = PipelineArguments(output_dir=str(tmp_path), **options)
    model = Counting(tiny_model().config).double()
    trainer = PipelineTrainer(model=model, args=arguments, train_dataset=data(4), data_collator=FLAT)
    with pytest.raises(
        cf.ConfigError, match=r"the model depends on cu_seq_lens_q, .*; use attn_implementation"
    ):
        cf.launch(trainer.train, workers=1, transport="local", threads=1)


class Own(transformers.Trainer):  # type: ignore[misc]
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)  # type: ignore[no-any-return]


class Staged(PipelineTrainerMixin, Own):
    """A user's trainer in stages, whose own step would not run."""


class Optimizing(PipelineTrainer):
    def create_optimizer(self, model: Any = None) -> Any:
        return super().create_optimizer(model)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Staged, r"Own\.training_step would not run in a pipeline: the pipeline runs the step"),
        (
            Optimizing,
            r"Optimizing\.create_optimizer would not run in a pipeline: each stage has an optimiser",
        ),
    ],
)
def test_methods_that_would_not_run_are_refused(tmp_path: Path, kind: Any, sentence: str) -> None:
    arguments = PipelineArguments(output_dir=str(tmp_path), **(OPTIONS | {"eval_strategy": "no"}))
    with pytest.raises(cf.ConfigError, match=sentence):
        kind(model=tiny_model(), args=arguments)


def test_an_optimizer_of_other_weights_is_refused(tmp_path: Path, plain: tuple[Path, Any]) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(plain[0] / "checkpoint-3", checkpoint)
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    state["param_groups"][0]["params"].pop()
    torch.save(state, checkpoint / "optimizer.pt")
    with pytest.raises(cf.ConfigError, match=r"optimizer\.pt is of other groups of weights"):
        threaded(str(tmp_path / "stages"), {}, str(checkpoint))


class Switching(PipelineTrainer):
    """Computes its loss with a module switched."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        attention = model.model.layers[0].self_attn
        attention.scaling, before = 1.0, attention.scaling
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            attention.scaling = before


def test_a_loss_that_switches_a_module_is_refused(tmp_path: Path) -> None:
    """The stages would call the module as it is."""
    arguments = PipelineArguments(output_dir=str(tmp_path), **(OPTIONS | {"eval_strategy": "no"}))
    trainer = Switching(model=tiny_model(), args=arguments, train_dataset=data(4), data_collator=collate)
    with pytest.raises(
        cf.ConfigError,
        match=r"Switching\.compute_loss cannot run in stages, .* changes the attribute 'scaling'",
    ):
        cf.launch(trainer.train, workers=1, transport="local", threads=1)


def test_arguments_without_a_pipeline_are_refused(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **OPTIONS)
    with pytest.raises(cf.ConfigError, match="has no fields for a pipeline"):
        PipelineTrainer(model=tiny_model(), args=arguments)
