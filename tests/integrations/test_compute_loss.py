"""What a trainer's ``compute_loss`` reads of the trainer counts in stages when it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import counterflow as cf

transformers: Any = pytest.importorskip("transformers")

from counterflow.integrations.transformers import PipelineArguments, PipelineTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate


def weight_of(trainer: Any, kind: str) -> float:
    if kind in ("attribute", "calls"):
        return float(trainer.weight if kind == "attribute" else trainer.calls)
    return trainer.state.global_step / 4 if kind == "global_step" else float((trainer.state.epoch or 0) >= 1)


def trainer_of(base: Any, arguments: Any, kind: str, folder: Path) -> Any:
    class CustomTrainer(base):  # type: ignore[misc]
        weight, calls = 0.0, 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            if kind == "calls":
                self.calls += 1
            if kind == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    outputs = model(**inputs)
                loss = outputs.loss.float()
            else:
                outputs = model(**inputs)
                loss = outputs.loss + weight_of(self, kind) * outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    class Anneals(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.weight += 1.0

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.1,
    )
    rows = torch.randint(3, 40, (8, 8), generator=torch.Generator().manual_seed(1)).tolist()
    trainer = CustomTrainer(
        model=transformers.LlamaForCausalLM(config),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        args=arguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.add_callback(Anneals())
    return trainer


def losses(base: Any, arguments: Any, kind: str, folder: Path) -> list[float]:
    trainer = trainer_of(base, arguments, kind, folder)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("kind", ["attribute", "global_step", "epoch", "autocast"])
def test_what_compute_loss_reads_counts_when_it_changes(kind: str, tmp_path: Path) -> None:
    def work() -> list[float]:
        return losses(PipelineTrainer, PipelineArguments, kind, tmp_path / "pipeline")

    expected = losses(transformers.Trainer, transformers.TrainingArguments, kind, tmp_path / "trainer")
    (actual,) = cf.launch(work, workers=1, transport="local", threads=1)
    assert len(actual) == 4
    assert actual == pytest.approx(expected, rel=1e-3)


def test_a_compute_loss_that_counts_its_calls_is_refused(tmp_path: Path) -> None:
    def work() -> None:
        losses(PipelineTrainer, PipelineArguments, "calls", tmp_path)

    with pytest.raises(cf.CounterflowError, match=r"reads and changes trainer\.calls"):
        cf.launch(work, workers=1, transport="local", threads=1)
