"""Adaptation of TRL's trainers: heads whose steps can be captured, and metrics noted per micro-batch.

TRL computes log-probabilities in a fused function without logits, which cannot be captured; the model's own
head and ordinary functions of torch replace it. Metrics that ``compute_loss`` notes become outputs of the
captured objective: a ``Noted`` stands for the number in the trainer's own code.

Invariant: TRL is not imported, so it need not be installed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

TOKENS = "num_tokens"
"""The metric that TRL adds up over the run."""


class Noted:
    """A number of a metric while an objective is captured: a tensor that behaves as a number.

    Args:
        tensor: a tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()

    def item(self) -> Self:
        """Itself."""
        return self

    def sum(self) -> Noted:
        """The sum."""
        return Noted(self.tensor.sum())

    def mean(self) -> Noted:
        """The mean."""
        return Noted(self.tensor.to(_real(self.tensor)).mean())

    def min(self) -> Noted:
        """The least."""
        return Noted(self.tensor.min())

    def max(self) -> Noted:
        """The greatest."""
        return Noted(self.tensor.max())

    def __truediv__(self, operand: Any) -> Noted:
        """The quotient; 0 where nothing is counted, as TRL's code decides."""
        divisor = operand.tensor if isinstance(operand, Noted) else torch.as_tensor(operand)
        return Noted(torch.where(divisor == 0, 0.0, self.tensor / torch.where(divisor == 0, 1, divisor)))

    def __floordiv__(self, operand: Any) -> Noted:
        """The quotient, rounded down."""
        return Noted(torch.div(self.tensor, operand, rounding_mode="floor"))

    def __add__(self, operand: Any) -> Noted:
        """The sum of two."""
        return Noted(self.tensor + (operand.tensor if isinstance(operand, Noted) else operand))

    __radd__ = __add__

    def __gt__(self, operand: Any) -> bool:
        """True: ``__truediv__`` decides."""
        del operand
        return True


def _real(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.float32


def noting(trainer: Any, run: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """A result, and the metrics that a trainer noted meanwhile, as tensors of one number.

    Args:
        trainer: a trainer, with ``_metrics`` if it is one of TRL.
        run: what computes the loss.
    """
    metrics = getattr(trainer, "_metrics", None)
    if not isinstance(metrics, Mapping):
        return run(), {}
    accelerator = trainer.accelerator
    noted_values: dict[str, list[Any]] = {}
    trainer_state = trainer._metrics, getattr(trainer, "_total_train_tokens", None)  # noqa: SLF001
    gathers = {
        name: accelerator.__dict__.get(name) for name in ("gather", "gather_for_metrics")
    }  # instances have none
    try:
        trainer._metrics = {mode: _Lists(noted_values) for mode in metrics}  # noqa: SLF001
        trainer._total_train_tokens = 0  # noqa: SLF001
        for name in gathers:
            setattr(accelerator, name, Noted)
        result = run()
    finally:
        trainer._metrics, trainer._total_train_tokens = trainer_state  # noqa: SLF001
        for name, before in gathers.items():
            accelerator.__dict__.pop(name, None)
            if before is not None:
                setattr(accelerator, name, before)
    return result, {
        name: values[0].tensor.reshape(()).to(_real(values[0].tensor))
        for name, values in noted_values.items()
        if values and isinstance(values[0], Noted)
    }


class _Lists(dict[str, list[Any]]):
    def __init__(self, lists: dict[str, list[Any]]) -> None:
        super().__init__()
        self._lists = lists

    def __getitem__(self, name: str) -> list[Any]:
        return self._lists.setdefault(name, [])

    def __setitem__(self, name: str, values: list[Any]) -> None:
        self._lists[name] = values


def add_metrics(trainer: Any, means: Mapping[str, float], micro_batches: int, *, training: bool) -> None:
    """Note the metrics of a step, or of a batch, in a trainer of TRL.

    Args:
        trainer: the trainer.
        means: means over the micro-batches.
        micro_batches: their number.
        training: whether the model was trained.
    """
    if not means and not hasattr(trainer, "_total_train_tokens"):
        return
    noted = trainer._metrics["train" if training else "eval"]  # noqa: SLF001
    for name, mean in means.items():
        if name == TOKENS:
            trainer._total_train_tokens += round(mean * micro_batches)  # noqa: SLF001
        else:
            noted[name] += [mean] * micro_batches
    if means or training:
        noted[TOKENS] = [trainer._total_train_tokens]  # noqa: SLF001


@dataclass
class HeadOutput(ModelOutput):  # type: ignore[misc]
    """Output of TRL's fused head, computed from logits.

    Attributes:
        log_probs: logarithm of each label's probability; 0 where it does not count.
        entropy: entropy of each prediction.
        log_sum_sq_probs: logarithm of the sum of the squares of each prediction.
        mean_logits: mean of the logits of each prediction.
        is_top1: whether the label is the most likely one.
        label_mask: whether the label counts.
        loss: mean over the labels that count.
        aux_loss: loss of the router of experts.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    loss: Tensor | None = None
    aux_loss: Tensor | None = None


def plain_head(model: nn.Module) -> bool:
    """Replace TRL's fused head of a model by functions that are captured; False: it has none.

    Args:
        model: a model of transformers, or of peft.
    """
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    patched = vars(base).get("forward")
    if patched is None or "fused_lm_head" not in inspect.signature(patched, follow_wrapped=False).parameters:
        return False
    base.forward = types.MethodType(_forward, base)
    return True


def _forward(
    self: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs: Any
) -> Any:
    model_forward = type(self).forward
    if not fused_lm_head or labels is None:
        return model_forward(self, *args, **(kwargs if labels is None else kwargs | {"labels": labels}))
    outputs = model_forward(self, *args, **kwargs | {"use_cache": False})
    logits = outputs.logits[:, :-1]
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    labels = labels[:, 1:]
    mask = labels != -100
    label = labels.clamp(min=0)
    log_softmax = logits.log_softmax(-1)
    nothing = torch.zeros((), dtype=logits.dtype, device=logits.device)

    def counted(values: Tensor) -> Tensor:
        return torch.where(mask, values, nothing)

    log_probs = counted(log_softmax.gather(-1, label.unsqueeze(-1)).squeeze(-1))
    with torch.no_grad():
        entropy = counted(-(log_softmax.exp() * log_softmax).sum(-1))
        squares = counted((2 * log_softmax).logsumexp(-1))
        means = counted(logits.mean(-1))
        top = (logits.argmax(-1) == label) & mask
    return HeadOutput(
        log_probs=log_probs,
        entropy=entropy,
        log_sum_sq_probs=squares,
        mean_logits=means,
        is_top1=top,
        label_mask=mask,
        loss=-log_probs.sum() / mask.sum().clamp(min=1),
        aux_loss=getattr(outputs, "aux_loss", None),
    )
