"""Losses as users write them: means, and what looks like one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from user_models import VOCABULARY, logits_of

import counterflow as cf


@dataclass(frozen=True)
class Loss:
    """A kind of loss.

    Attributes:
        make: the loss function of a model, of output and target.
        tokens: whether targets are token ids.
        weighted: whether targets are a dict with weights.
        counted: whether it is divided by the targets that count, in asynchronous schemes by micro-batch.
        habits: what a user does to the loss function between two steps.
        in_order: whether it depends on the order of its calls.
    """

    make: Callable[[nn.Module], Callable[[Any, Any], Any]]
    tokens: bool = False
    weighted: bool = False
    counted: bool = False
    in_order: bool = False


LOSSES: dict[str, Loss] = {}


def loss(name: str, **options: Any) -> Callable[[Callable[[Tensor, Any], Any]], Callable[[Tensor, Any], Any]]:
    """Register a function of logits and target."""

    def register(function: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], Any]:
        def make(_model: nn.Module) -> Callable[[Any, Any], Any]:
            return lambda output, target: function(logits_of(output), target)

        LOSSES[name] = Loss(make, **options)
        return function

    return register


mse, l1 = functional.mse_loss, functional.l1_loss


@loss("mean of squares")
def mean_of_squares(o: Tensor, y: Tensor) -> Any:
    return mse(o, y)


@loss("mean by hand")
def mean_by_hand(o: Tensor, y: Tensor) -> Any:
    return (o - y).square().mean(1).mean()


@loss("smooth and absolute")
def smooth_and_absolute(o: Tensor, y: Tensor) -> Any:
    return functional.smooth_l1_loss(o, y) + 0.3 * l1(o, y)


@loss("sum")
def summed(o: Tensor, y: Tensor) -> Any:
    return (o - y).square().sum()


@loss("sum by samples")
def sum_by_samples(o: Tensor, y: Tensor) -> Any:
    return (o - y).square().sum() / len(o)


@loss("root of a mean")
def root_of_a_mean(o: Tensor, y: Tensor) -> Any:
    return mse(o, y).sqrt()


@loss("logarithm of a mean")
def logarithm_of_a_mean(o: Tensor, y: Tensor) -> Any:
    return mse(o, y).log1p()


@loss("mean with metrics")
def mean_with_metrics(o: Tensor, y: Tensor) -> Any:
    return mse(o, y), {"l1": l1(o, y).detach()}


@loss("dict of losses")
def dict_of_losses(o: Tensor, y: Tensor) -> Any:
    return {"loss": mse(o, y) + 0.1 * o.abs().mean(), "l1": float(l1(o, y))}


@loss("weighted by samples", weighted=True)
def weighted_by_samples(o: Tensor, t: Any) -> Any:
    e = (o - t["y"]).square().mean(1)
    return (e * t["weight"]).sum() / t["weight"].sum()


@loss("weighted mean", weighted=True)
def weighted_mean(o: Tensor, t: Any) -> Any:
    return ((o - t["y"]).square().mean(1) * t["weight"]).mean()


@loss("weights by their mean", weighted=True)
def weights_by_their_mean(o: Tensor, t: Any) -> Any:
    weight = t["weight"] / t["weight"].mean()
    return ((o - t["y"]).square().mean(1) * weight).mean()


@loss("sum of weights", weighted=True)
def sum_of_weights(o: Tensor, t: Any) -> Any:
    return cf.LossSum(((o - t["y"]).square().mean(1) * t["weight"]).sum(), t["weight"].sum())


@loss("own mask", weighted=True)
def own_mask(o: Tensor, t: Any) -> Any:
    mask = t["weight"] > 0.5
    return (o - t["y"]).square().mean(1)[mask].sum() / mask.sum().clamp(min=1)


@loss("chosen elements", weighted=True)
def chosen_elements(o: Tensor, t: Any) -> Any:
    mask = t["weight"] > 0.5
    return mse(o[mask], t["y"][mask])


@loss("Barlow twins")
def barlow_twins(o: Tensor, y: Tensor) -> Any:
    a, b = (o - o.mean(0)) / o.std(0), (y - y.mean(0)) / y.std(0)
    return (a.T @ b / len(a) - torch.eye(a.shape[1], dtype=a.dtype)).square().sum()


@loss("variance")
def variance(o: Tensor, y: Tensor) -> Any:
    return mse(o, y) + 0.5 * functional.relu(1 - (o.var(0) + 1e-4).sqrt()).mean()


@loss("hard examples")
def hard_examples(o: Tensor, y: Tensor) -> Any:
    e = (o - y).square().mean(1)
    return e[e >= e.mean()].mean()


@loss("hardest half")
def hardest_half(o: Tensor, y: Tensor) -> Any:
    e = (o - y).square().mean(1)
    return e.topk(max(1, len(e) // 2)).values.mean()


@loss("median")
def median(o: Tensor, y: Tensor) -> Any:
    return (o - y).square().mean(1).median()


@loss("balanced by detached sizes")
def balanced(o: Tensor, y: Tensor) -> Any:
    a, b = mse(o, y), l1(o, y)
    return a + b * (a.detach() / b.detach())


@loss("normalised by itself")
def normalised(o: Tensor, y: Tensor) -> Any:
    a, b = mse(o, y), l1(o, y)
    return a / a.detach() + b / b.detach()


@loss("divided by a number")
def divided_by_a_number(o: Tensor, y: Tensor) -> Any:
    a, b = mse(o, y), l1(o, y)
    return a + b * (a.item() / b.item())


@loss("straight through")
def straight_through(o: Tensor, y: Tensor) -> Any:
    a, b = mse(o, y), l1(o, y)
    return a + (b * a.detach() - (b * a).detach())


@loss("clipped gradient of a mean")
def switched(o: Tensor, y: Tensor) -> Any:
    a, b = mse(o, y), l1(o, y)
    return torch.where(a.detach() > 2.0, a, a.detach() + b - b.detach())


@loss("detached by samples")
def detached_by_samples(o: Tensor, y: Tensor) -> Any:
    e = (o - y).square().mean(1)
    return (e * (-e).exp().detach()).mean()


@loss("batch maximum")
def batch_maximum(o: Tensor, y: Tensor) -> Any:
    return mse(o, y) + 0.1 * o.max()


@loss("clamped mean")
def clamped_mean(o: Tensor, y: Tensor) -> Any:
    return mse(o, y).clamp(max=1.5) + 0.1 * l1(o, y)


@loss("contrast of samples")
def contrast(o: Tensor, y: Tensor) -> Any:
    return functional.cross_entropy(o @ y.T, torch.arange(len(o)))


@loss("correlation")
def correlation(o: Tensor, y: Tensor) -> Any:
    return 1 - functional.cosine_similarity(o.flatten(), y.flatten(), 0) + 0.1 * mse(o, y)


@loss("product of means")
def product_of_means(o: Tensor, y: Tensor) -> Any:
    return mse(o, y) + 0.2 * o.mean() * y.mean()


@loss("softmax over samples")
def softmax_over_samples(o: Tensor, y: Tensor) -> Any:
    e = (o - y).square().mean(1)
    return (e * e.detach().softmax(0)).sum()


@loss("gradient of the output")
def gradient_of_the_output(o: Tensor, y: Tensor) -> Any:
    e = mse(o, y)
    if not o.requires_grad or not torch.is_grad_enabled():
        return e
    (gradient,) = torch.autograd.grad(mse(o, y, reduction="sum"), o, create_graph=True)
    return e + 0.01 * gradient.square().sum(1).mean()


@loss("terms added in the loss")
def added_in_the_loss(o: Tensor, y: Tensor) -> Any:
    cf.add_loss(0.1 * o.square().mean(), "size")
    return mse(o, y)


@loss("unbalanced term added in the loss")
def product_added_in_the_loss(o: Tensor, y: Tensor) -> Any:
    cf.add_loss(0.5 * o.mean(0).square().sum(), "square of a mean")
    return mse(o, y)


@loss("cosine")
def cosine(o: Tensor, y: Tensor) -> Any:
    return functional.cosine_embedding_loss(o, y, torch.ones(len(o), dtype=o.dtype))


class Weighted(nn.Module):
    """A loss with a weight that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, output: Any, y: Tensor) -> Tensor:
        o = logits_of(output)
        return (torch.stack([mse(o, y), l1(o, y)]) * (-self.size).exp() + self.size).sum()


LOSSES["trained weights"] = Loss(lambda _model: Weighted())


class Annealed:
    """A loss with a number that users change."""

    def __init__(self) -> None:
        self.weight = 0.0

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        return mse(logits_of(output), y) + self.weight * logits_of(output).square().mean()


LOSSES["annealed"] = Loss(lambda _model: Annealed())


class Running(nn.Module):
    """A loss divided by a running mean of itself, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones((), dtype=torch.float64))

    def forward(self, output: Any, y: Tensor) -> Tensor:
        value = mse(logits_of(output), y)
        if self.training:
            self.size.mul_(0.9).add_(0.1 * value.detach())
        return value / self.size


LOSSES["divided by a running mean"] = Loss(lambda _model: Running(), in_order=True)


def _decay(model: nn.Module) -> Callable[[Any, Any], Any]:
    def decayed(output: Any, y: Tensor) -> Tensor:
        return mse(logits_of(output), y) + 0.01 * sum(p.square().sum() for p in model.parameters())

    return decayed


LOSSES["norm of the model's weights"] = Loss(_decay)


def _cross_entropy(**options: Any) -> Callable[[nn.Module], Callable[[Any, Any], Any]]:
    return lambda _model: (
        lambda output, y: functional.cross_entropy(logits_of(output).flatten(0, 1), y.flatten(), **options)
    )


LOSSES["cross entropy"] = Loss(_cross_entropy(), tokens=True)
LOSSES["smoothed cross entropy"] = Loss(_cross_entropy(label_smoothing=0.1), tokens=True)
LOSSES["cross entropy, targets ignored"] = Loss(_cross_entropy(ignore_index=2), tokens=True, counted=True)
LOSSES["cross entropy, class weights"] = Loss(
    _cross_entropy(weight=torch.arange(1.0, VOCABULARY + 1, dtype=torch.float64)), tokens=True, counted=True
)


@loss("transposed cross entropy", tokens=True)
def transposed(o: Tensor, y: Tensor) -> Any:
    return functional.cross_entropy(o.transpose(1, 2), y)


@loss("own mask of tokens", tokens=True)
def own_mask_of_tokens(o: Tensor, y: Tensor) -> Any:
    each = functional.cross_entropy(o.transpose(1, 2), y, reduction="none")
    mask = (y > 2).to(each.dtype)
    return (each * mask).sum() / mask.sum().clamp(min=1)


@loss("sum of tokens that count", tokens=True)
def sum_of_tokens(o: Tensor, y: Tensor) -> Any:
    each = functional.cross_entropy(o.transpose(1, 2), y, reduction="none")
    mask = (y > 2).to(each.dtype)
    return cf.LossSum((each * mask).sum(), mask.sum())


@loss("mean of sequences", tokens=True)
def mean_of_sequences(o: Tensor, y: Tensor) -> Any:
    each = functional.cross_entropy(o.transpose(1, 2), y, reduction="none")
    mask = (y > 2).to(each.dtype)
    return ((each * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


@loss("cross entropy and a z-loss", tokens=True)
def with_z_loss(o: Tensor, y: Tensor) -> Any:
    return functional.cross_entropy(o.flatten(0, 1), y.flatten()) + 0.01 * o.logsumexp(-1).square().mean()


@loss("focal", tokens=True)
def focal(o: Tensor, y: Tensor) -> Any:
    each = functional.cross_entropy(o.transpose(1, 2), y, reduction="none")
    return ((1 - (-each).exp()).square() * each).mean()


@loss("targets ignored beside another term", tokens=True)
def ignored_beside(o: Tensor, y: Tensor) -> Any:
    ce = functional.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=2)
    return ce + 0.1 * o.square().mean()


@loss("entropy of the mean", tokens=True)
def entropy_of_the_mean(o: Tensor, y: Tensor) -> Any:
    mean = o.softmax(-1).mean((0, 1))
    return functional.cross_entropy(o.flatten(0, 1), y.flatten()) + 0.5 * (mean * mean.log()).sum()


@loss("perplexity", tokens=True)
def perplexity(o: Tensor, y: Tensor) -> Any:
    return functional.cross_entropy(o.flatten(0, 1), y.flatten()).exp()
