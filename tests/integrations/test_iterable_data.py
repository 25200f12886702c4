"""Data without a length, whose epochs end within a step: losses, norms and weights are the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

import counterflow as cf
from counterflow.integrations.transformers import PipelineArguments, PipelineTrainer

from .test_transformers import LOGGED, collate, data, tiny_model, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 4, "optim": "sgd",
    "learning_rate": 0.1, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True,
    "save_strategy": "epoch", "max_grad_norm": 0.5,
}  # fmt: skip


class Rows(IterableDataset):  # type: ignore[type-arg]
    """Rows of tokens without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(data(self.count))


class Unscaled(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model whose loss is the mean of a batch, which the trainer divides by the number of batches."""

    accepts_loss_kwargs = False


class StopsEpoch(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the second epoch within a step."""

    stopped = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after the first batch."""
        control.should_epoch_stop = state.global_step == 1 and state.epoch > 1 and not self.stopped
        self.stopped = self.stopped or control.should_epoch_stop


def _train(folder: str, pp: int | None, case: str, more: dict[str, Any]) -> list[dict[str, float]]:
    kind, arguments = transformers.Trainer, transformers.TrainingArguments
    if pp is not None:
        kind, arguments = PipelineTrainer, PipelineArguments
        more = {"pp": pp, **more}
    model = tiny_model()
    if case == "unscaled":
        model = Unscaled(model.config).double()
        torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(1))
        model.load_state_dict(tiny_model().state_dict())
    trainer = kind(
        model=model,
        args=arguments(output_dir=folder, **{**OPTIONS, **more}),
        train_dataset=Rows(12),
        data_collator=collate,
        callbacks=[StopsEpoch()] if case == "stopped" else [],
    )
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return [
        {name: row[name] for name in (*LOGGED, "train_loss") if name in row}
        for row in trainer.state.log_history
    ]


def _cases(folder: str) -> list[list[dict[str, float]]]:
    return [_train(f"{folder}/{case}", 1, case, {}) for case in CASES]


CASES = "scaled", "unscaled", "stopped"


def test_batches_that_an_epoch_leaves_over_are_in_the_next_update(tmp_path: Path) -> None:
    """Twelve rows are six batches, and a step takes four; checkpoints are saved between."""
    folder = tmp_path / "stages"
    histories = cf.launch(_cases, str(folder), workers=1, transport="local", threads=1)[0]
    for case, history in zip(CASES, histories, strict=True):
        expected = _train(str(tmp_path / case), None, case, {})
        assert len(expected) == len(history) == 5
        for row, wanted in zip(history, expected, strict=True):
            assert row == pytest.approx(wanted, rel=1e-6)  # the trainer adds losses up in float32
        trained, wanted_weights = weights(folder / case), weights(tmp_path / case)
        for name, tensor in wanted_weights.items():
            # A loss in float32 is rounded when it is multiplied by the number of batches, here 6.
            torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"logging_strategy": "epoch"}, r"ended with 2 batches of a step's 4, and .* logging_strategy=steps"),
        ({"gradient_accumulation_steps": 8}, "ended with 6 batches of a step's 8, and no epoch has as many"),
    ],
)
def test_data_that_has_no_step_is_refused(tmp_path: Path, more: dict[str, Any], sentence: str) -> None:
    def train() -> None:
        _train(str(tmp_path), 1, "scaled", more)

    with pytest.raises(cf.ConfigError, match=sentence):
        cf.launch(train, workers=1, transport="local", threads=1)
