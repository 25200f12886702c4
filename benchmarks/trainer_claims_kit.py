"""A small model, its data and its trainers, plain or in stages, for ``trainer_claims_rows``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from counterflow.integrations.transformers import PipelineArguments, PipelineTrainer


class LineConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    """Sizes of a ``Line``."""

    model_type = "line"

    def __init__(self, outputs: int = 1, **more: Any) -> None:
        super().__init__(**more)
        self.outputs = outputs


class Line(transformers.PreTrainedModel):  # type: ignore[misc]
    """A regression on one number through three linear layers; it may give its output twice."""

    config_class = LineConfig
    supports_activation_checkpointing = supports_gradient_checkpointing = True

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.one, self.two, self.three = nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.post_init()

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """The loss, if there are labels, and the output."""
        y = self.three(torch.tanh(self.two(torch.tanh(self.one(x[:, None])))))[:, 0]
        outputs = (y,) * self.config.outputs
        return outputs if labels is None else (nn.functional.mse_loss(y, labels), *outputs)


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    """Numbers, and numbers that depend on them."""

    def __init__(self, length: int = 32, labels: tuple[str, ...] = ("labels",)) -> None:
        draw = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, generator=draw, dtype=torch.float64)
        self.y = 2 * self.x + 3 + 0.1 * torch.randn(length, generator=draw, dtype=torch.float64)
        self.labels = labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index]} | dict.fromkeys(self.labels, self.y[index])


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Points without a length."""

    def __init__(self, length: int = 32) -> None:
        self.points = Points(length)

    def __iter__(self) -> Any:
        """Go through the points."""
        for index in range(len(self.points)):
            yield self.points[index] | {"extra": 0.0}


def line(**sizes: Any) -> Line:
    """The model, the same each time."""
    torch.manual_seed(0)
    return Line(LineConfig(**sizes)).double()


def llama(**more: Any) -> Any:
    """A small language model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def texts(samples: int = 16) -> list[dict[str, Any]]:
    """Tokens of different lengths."""
    draw = torch.Generator().manual_seed(samples)
    found = []
    for _ in range(samples):
        length = int(torch.randint(4, 9, (1,), generator=draw))
        ids = torch.randint(3, 32, (length,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": ids})
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded at the end."""
    longest = max(len(row["input_ids"]) for row in rows)

    def of(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids = of("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": of("labels", -100)}


def close(found: Any) -> dict[str, float]:
    """Share of predictions near their labels."""
    predictions, labels = (np.asarray(part) for part in (found.predictions, found.label_ids))
    return {"accuracy": float((np.abs(predictions - labels) < 0.5).mean())}


class CloseInParts:
    """``close``, in batches."""

    def __init__(self) -> None:
        self.near: list[bool] = []

    def __call__(self, found: Any, compute_result: bool) -> dict[str, float]:
        """Share of predictions so far."""
        predictions, labels = (
            part[0] if isinstance(part, tuple) else part for part in (found.predictions, found.label_ids)
        )
        self.near += ((predictions - labels).abs() < 0.5).tolist()
        told = {"accuracy": sum(self.near) / len(self.near)}
        if compute_result:
            self.near = []
        return told


class Kit:
    """Makes trainers of one kind: the plain one, or one in stages.

    Args:
        folder: folder of the claim, which all workers see.
        workers: number of workers over which models are cut; 0: the plain trainer.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.workers, self.root, self.made = workers, folder, 0

    @property
    def staged(self) -> bool:
        """Whether the trainers are in stages."""
        return self.workers > 0

    @property
    def kind(self) -> Any:
        """Class of the trainers."""
        return PipelineTrainer if self.staged else transformers.Trainer

    def folder(self) -> Path:
        """A new folder."""
        self.made += 1
        return self.root / str(self.made)

    def arguments(self, folder: Path | None = None, **options: Any) -> Any:
        """Training arguments."""
        given = {
            "output_dir": str(folder or self.folder()), "use_cpu": True, "report_to": [],
            "disable_tqdm": True,
            "per_device_train_batch_size": 4, "num_train_epochs": 2, "save_strategy": "no",
            "logging_steps": 1,
            "learning_rate": 0.05, **options,
        }  # fmt: skip
        if self.staged:
            return PipelineArguments(pp=self.workers, **given)
        return transformers.TrainingArguments(**given)

    def trainer(
        self, model: Any = None, named: dict[str, Any] | None = None, kind: Any = None, **options: Any
    ) -> Any:
        """A trainer of points, unless ``named`` says otherwise."""
        model = line() if model is None else model
        data: dict[str, Any] = {"train_dataset": Points(), "eval_dataset": Points(18)}
        if isinstance(model, transformers.LlamaForCausalLM) or hasattr(model, "peft_config"):
            data = {"train_dataset": texts(), "eval_dataset": texts(5), "data_collator": padded}
        return (kind or self.kind)(model=model, args=self.arguments(**options), **data | (named or {}))

    def weights(self, trainer: Any) -> dict[str, Tensor]:
        """All weights of a trainer."""
        folder = self.folder()
        trainer.save_model(str(folder))
        written(trainer)
        return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@contextmanager
def raises(kind: type[Exception], word: str) -> Iterator[None]:
    """Something that has to raise an error which contains a word."""
    try:
        yield
    except kind as error:
        if word not in str(error):
            raise AssertionError(f"{error} does not say {word}") from error
    else:
        raise AssertionError(f"no {kind.__name__}")


def same(one: dict[str, Tensor], other: dict[str, Tensor], within: float = 1e-12) -> bool:
    """Whether two models have the same weights."""
    return one.keys() == other.keys() and all(
        float((one[n].double() - other[n].double()).abs().max()) <= within for n in one
    )


def history(trainer: Any) -> list[dict[str, Any]]:
    """What a trainer logged, without times."""
    parts = ("runtime", "per_second", "train_loss", "total_flos", "preparation_time")
    return [
        {n: v for n, v in row.items() if not any(p in n for p in parts)} for row in trainer.state.log_history
    ]


def losses(trainer: Any) -> list[float]:
    """The logged losses."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def written(trainer: Any) -> None:
    """Wait until all workers have written."""
    if getattr(trainer, "pipeline", None) is not None:
        trainer.pipeline.transport.gather_objects(None)


def checkpoints(trainer: Any) -> list[int]:
    """Numbers of the checkpoints."""
    written(trainer)
    return sorted(int(p.name.split("-")[1]) for p in Path(trainer.args.output_dir).glob("checkpoint-*"))


def expected(model: Line, points: Points) -> tuple[Tensor, float]:
    """Output and loss of a model on some points."""
    with torch.no_grad():
        loss, output = model(points.x, points.y)[:2]
    return output, float(loss)


def words() -> Any:
    """A tokenizer of a few words."""
    import tokenizers

    known = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 32)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
