"""The Trainer of transformers in stages: its own losses, norms and weights, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import counterflow as cf
from counterflow.integrations.transformers import PipelineArguments, PipelineTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate

TOLD = ("loss", "grad_norm", "learning_rate", "eval_loss")
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
    "optim": "adamw_torch", "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "save_strategy": "epoch", "eval_strategy": "epoch", "max_grad_norm": 0.5,
    "warmup_steps": 2, "weight_decay": 0.1,
}  # fmt: skip


def data(samples: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(samples)
    found = []
    for _ in range(samples):
        length = int(torch.randint(5, 10, (1,), generator=draw))
        ids = torch.randint(3, 60, (length,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": ids})
    return found


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded at the end, by lengths that differ from batch to batch."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": padded("labels", -100)}


def made() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def run(kind: Any, arguments: Any, resume: str | None = None) -> list[dict[str, float]]:
    trainer = kind(
        model=made(), args=arguments, train_dataset=data(10), eval_dataset=data(3), data_collator=collate
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{arguments.output_dir}/final")
    return [{name: row[name] for name in TOLD if name in row} for row in trainer.state.log_history]


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
    found = cf.launch(in_stages, folder, 1, "1f1b", more, resume, workers=1, transport="local")
    return found[0]


def weights(folder: Path) -> dict[str, Tensor]:
    return {
        n: t for file in (folder / "final").glob("model*.safetensors") for n, t in load_file(file).items()
    }


def agree(folder: Path, other: Path, told: Any, expected: Any) -> None:
    assert len(told) == len(expected)
    for row, wanted in zip(told, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)  # the trainer adds losses up in float32
    found = weights(folder)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
        {"lr_scheduler_type": "cosine", "optim": "sgd"},
    ],
    ids=["plain", "smoothed", "cosine"],
)
def test_one_worker_trains_as_the_trainer(tmp_path: Path, more: dict[str, Any]) -> None:
    """Ten samples are five batches: the last step of an epoch has one batch in place of two."""
    expected = alone(tmp_path / "alone", **more)
    told = threaded(str(tmp_path / "stages"), more)
    agree(tmp_path / "stages", tmp_path / "alone", told, expected)


@pytest.mark.parametrize(("pp", "schedule"), [(2, "zb-v")])
def test_processes_train_as_the_trainer(tmp_path: Path, pp: int, schedule: str) -> None:
    expected = alone(tmp_path / "alone")
    folder = tmp_path / "stages"
    told = cf.launch(in_stages, str(folder), pp, schedule, {}, workers=pp, transport="gloo")
    agree(folder, tmp_path / "alone", told[0], expected)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float64)
    assert loaded.state_dict().keys() == made().state_dict().keys()


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone")
    threaded(str(tmp_path / "stages"), {})
    half = next(p for p in sorted((tmp_path / "stages").glob("checkpoint-*")) if p.name == "checkpoint-3")
    told = threaded(str(tmp_path / "again"), {}, str(half))
    agree(tmp_path / "again", tmp_path / "alone", told, expected)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"fp16_full_eval": True}, "fp16_full_eval=True cannot be combined with a pipeline"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True cannot be combined"),
        ({"optim": "lomo"}, "optim='lomo' cannot be combined"),
        ({"schedule": "pipedream"}, "is asynchronous"),
        ({"pp": 2}, "pp=2, but 1 processes run"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(tmp_path: Path, more: dict[str, Any], sentence: str) -> None:
    arguments = PipelineArguments(**{"output_dir": str(tmp_path), "pp": 1, **OPTIONS, **more})
    with pytest.raises(cf.ConfigError, match=sentence):
        PipelineTrainer(model=made(), args=arguments)


def test_arguments_without_a_pipeline_are_refused(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **OPTIONS)
    with pytest.raises(cf.ConfigError, match="has no fields for a pipeline"):
        PipelineTrainer(model=made(), args=arguments)
