"""Trainers in pipeline stages that go on from a checkpoint: weights, groups and orders of samples."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file

import counterflow as cf
from counterflow.integrations.transformers import PipelineArguments, PipelineTrainer

from .test_transformers import OPTIONS, collate, data, family, tiny_model

MODELS = {"experts": lambda: family("Mixtral"), "frozen": lambda: without_norms(tiny_model())}


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    """The trainer collects garbage, also among all that is imported."""
    gc.freeze()


def without_norms(model: Any) -> Any:
    """The norms are all that does not decay."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    return model


def losses(trainer: Any, resume: str | None = None) -> list[float]:
    trainer.train(resume_from_checkpoint=resume)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def in_stages(model: str, folder: str, resume: str | None, more: dict[str, Any]) -> list[float]:
    arguments = PipelineArguments(output_dir=folder, pp=1, schedule="1f1b", **(OPTIONS | more))
    trainer = PipelineTrainer(
        model=MODELS[model](),
        args=arguments,
        train_dataset=data(10),
        eval_dataset=data(3),
        data_collator=collate,
    )
    return losses(trainer, resume)


def threaded(*job: Any) -> list[float]:
    return cf.launch(in_stages, *job, workers=1, transport="local", threads=1)[0]


def test_experts_go_on_from_their_own_weights(tmp_path: Path) -> None:
    """Files have a tensor for each expert, the model one for all; and the best model is loaded at the end."""
    more = {"load_best_model_at_end": True}
    expected = threaded("experts", str(tmp_path / "complete"), None, more)
    checkpoint = str(tmp_path / "complete" / "checkpoint-3")
    assert threaded("experts", str(tmp_path / "on"), checkpoint, more) == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    threaded("frozen", str(tmp_path), None, {"max_steps": 1, "save_steps": 1})
    file = tmp_path / "checkpoint-1" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(cf.ConfigError, match=r"has no weights of model\.layers\.1\.mlp\.up_proj\.weight"):
        threaded("frozen", str(tmp_path / "on"), str(tmp_path / "checkpoint-1"), {})


def test_the_trainer_goes_on_if_no_weight_is_without_decay(tmp_path: Path) -> None:
    expected = threaded("frozen", str(tmp_path / "complete"), None, {})
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "plain"), **OPTIONS)
    trainer = transformers.Trainer(
        model=MODELS["frozen"](),
        args=arguments,
        train_dataset=data(10),
        eval_dataset=data(3),
        data_collator=collate,
    )
    checkpoint = str(tmp_path / "complete" / "checkpoint-3")
    assert losses(trainer, checkpoint) == pytest.approx(expected, rel=1e-6)


SEEN: list[list[int]] = []
ROWS = data(16)


def noted(rows: list[dict[str, Any]]) -> Any:
    SEEN.append([ROWS.index(row) for row in rows])
    return collate(rows)


def by_length(folder: str) -> tuple[list[list[int]], list[list[int]]]:
    """Rows in the last epoch of a complete run, and of one that goes on after the first epoch."""
    orders = []
    for name, resume in (("complete", None), ("on", f"{folder}/complete/checkpoint-2")):
        SEEN.clear()
        options = OPTIONS | {"num_train_epochs": 2, "eval_strategy": "no", "save_strategy": "epoch"}
        options |= {"per_device_train_batch_size": 2, "train_sampling_strategy": "group_by_length"}
        arguments = PipelineArguments(output_dir=f"{folder}/{name}", pp=1, schedule="1f1b", **options)
        trainer = PipelineTrainer(model=tiny_model(), args=arguments, train_dataset=ROWS, data_collator=noted)
        trainer.train(resume_from_checkpoint=resume)
        orders.append(SEEN[-4:])
    return orders[0], orders[1]


def test_replicas_go_on_in_one_order_of_samples(tmp_path: Path) -> None:
    """Samples are ordered by draws of torch's own generator; each is trained on once in an epoch."""
    rows = cf.launch(by_length, str(tmp_path), workers=2, transport="gloo", threads=1)
    for complete, on in rows:
        assert on == complete
    assert sorted(row for _, on in rows for batch in on for row in batch) == [*range(16)]
