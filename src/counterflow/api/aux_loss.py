"""Losses that layers add to the one that is trained: a router's balance, a z-loss, a head in the middle.

An added loss travels with its stage's output, from stage to stage, and joins the loss after the last one
(``runtime/stages/aux_loss.py``); so its gradient is scaled correctly by any normaliser of the loss.

Invariant: no added loss is dropped in silence; it is refused if nobody collects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..errors import ConfigError
from .torch_internals import in_backward, never_compiled


@dataclass(slots=True)
class Collected:
    """Losses that layers added in a run.

    Attributes:
        graph: True if an added loss must have a graph.
        by_stage: True if stages take the losses of their layers from it.
        terms: sums by name.
    """

    graph: bool
    by_stage: bool = False
    terms: dict[str, Tensor] = field(default_factory=dict)


COLLECTED: ContextVar[Collected | None] = ContextVar("counterflow_added_losses", default=None)
"""The current collection; None: no losses are collected."""


@never_compiled
def add_loss(loss: Tensor, name: str = "added_loss") -> None:
    """Add a layer's own loss to that of its micro-batch; call it within the layer's forward.

    A micro-batch is trained on its loss plus all losses that layers of any stage, and the loss function, add
    to it. An added loss must be a mean over samples (or tokens) in which each sample's value depends on this
    sample alone; the first mini-batch of each kind checks that. With ``per_micro_batch_loss=True`` it may be
    anything, and weighs as the micro-batch's loss does. A layer adds a loss in each forward, 0 if need be.
    ``Step.loss`` includes it, and ``Step.metrics`` has the sum of each name. In one process
    ``cf.added_losses`` collects it.

    Args:
        loss: one real number, with its factor (0.01 for a balance, say).
        name: name among the metrics; layers may share it.

    Raises:
        ConfigError: the loss is no such number; nobody collects it; or its graph would be lost, as within
            ``torch.no_grad`` or a reentrant checkpoint.

    >>> class Squares(torch.nn.Module):
    ...     def forward(self, x: Tensor) -> Tensor:
    ...         add_loss(0.5 * x.square().mean(), "squares")
    ...         return x
    >>> with added_losses() as added:
    ...     output = Squares()(torch.full((3, 2), 2.0))
    >>> added
    {'squares': tensor(2.)}
    """
    if has_torch_function_unary(loss):  # what follows the model's functions notes this one
        handle_torch_function(add_loss, (loss,), loss, name)
        return
    if in_backward():  # a checkpoint computes the layer again; what it added the first time has the graph
        return
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()):
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"add_loss({name!r}): {shown}; give one real number as a tensor")
    collected = COLLECTED.get()
    if collected is None:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"add_loss({name!r}) is called where nobody collects what is added, so that it would not be "
                "trained; run the model in a cf.Pipeline, or within cf.added_losses() and add the sum "
                "to the loss"
            )
        return
    if collected.graph and not torch.is_grad_enabled():
        raise ConfigError(
            f"add_loss({name!r}) is called without gradients (torch.no_grad, or a reentrant torch.utils."
            "checkpoint), so that it would not be trained; call it outside of that, or take "
            "use_reentrant=False"
        )
    term = loss.reshape(())
    if term.dtype.itemsize < torch.float32.itemsize:
        term = term.float()
    terms = collected.terms
    terms[name] = terms[name] + term if name in terms else term


@contextmanager
def added_losses() -> Iterator[dict[str, Tensor]]:
    """Collect the losses that layers add by ``cf.add_loss``, if they run in one process.

    Yields:
        The sums by name, which are to be added to the loss: ``loss + sum(added.values())``.
    """
    with collecting() as collected:
        yield collected.terms


@contextmanager
def collecting(*, graph: bool = False, by_stage: bool = False) -> Iterator[Collected]:
    """Context that collects the losses which layers add; arguments as of ``Collected``."""
    collected = Collected(graph, by_stage)
    token = COLLECTED.set(collected)
    try:
        yield collected
    finally:
        COLLECTED.reset(token)


def forgets_added() -> Callable[[], None]:
    """Return a function that drops all losses added from here on, for a run that does not count."""
    collected = COLLECTED.get()
    if collected is None:
        return lambda: None
    before = dict(collected.terms)

    def forget() -> None:
        collected.terms.clear()
        collected.terms.update(before)

    return forget


def was_added() -> bool:
    """True if any loss was added to the current collection."""
    collected = COLLECTED.get()
    return collected is not None and bool(collected.terms)
