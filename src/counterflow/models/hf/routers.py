"""The loss of the routers of a transformers model: its balance over all layers, added in the last one.

transformers computes it from the router logits of all layers and tokens of a forward, and adds it to the
loss with ``router_aux_loss_coef``. Here each repeated layer passes its logits on, and the last one calls the
model's own function, so a micro-batch's loss is the one that the model itself returns for it.

Invariant: the function and its arguments are the model's own. It is a product of means over all tokens, so no
mean over samples: a pipeline trains it with ``per_micro_batch_loss=True``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from counterflow.api.aux_loss import add_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS = "router_logits"
"""Key of the logits among the values that layers pass on, and transformers' name of them."""

COUNTED = "counted_tokens"
"""Key of the mask of tokens that count, for the last layer."""


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The loss of a model's routers.

    Attributes:
        function: the model's function of router logits, numbers of experts and choices, and a mask of tokens.
        experts: number of experts of a layer.
        choices: number of experts for a token.
        factor: factor of the loss.
        router: class of the modules that compute logits.
        index: place of the logits in their output; None: they are the output.
    """

    function: Callable[[tuple[Tensor, ...], int, int, Tensor | None], Tensor]
    experts: int
    choices: int
    factor: float
    router: type[nn.Module]
    index: int | None

    def add(self, logits: tuple[Tensor, ...], mask: Tensor | None) -> None:
        """Add the loss of a micro-batch to what is trained; logits are of (sample, position, expert)."""
        by_token = tuple(tensor.flatten(0, 1) for tensor in logits)
        add_loss(self.factor * self.function(by_token, self.experts, self.choices, mask), "aux_loss")

    @contextmanager
    def recorded(self, block: nn.Module) -> Iterator[list[Tensor]]:
        """Record the router logits of a repeated layer's forward."""
        logits: list[Tensor] = []

        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            logits.append(output if self.index is None else output[self.index])

        routers = [module for module in block.modules() if isinstance(module, self.router)]
        handles = [router.register_forward_hook(note) for router in routers]
        try:
            yield logits
        finally:
            for handle in handles:
                handle.remove()


def router_loss(model: PreTrainedModel) -> RouterLoss | None:
    """The loss that a model adds with ``output_router_logits``; None: it adds none, or in another form."""
    if not getattr(model.config, "output_router_logits", False):
        return None
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    recorder: Any = (getattr(model, "_can_record_outputs", None) or {}).get(LOGITS)
    router = getattr(recorder, "target_class", None)
    names = "num_experts", "num_experts_per_tok", "router_aux_loss_coef"
    values: list[Any] = [getattr(model, name, None) for name in names]
    if function is None or not isinstance(router, type) or None in values:
        return None
    experts, choices, factor = values
    return RouterLoss(function, experts, choices, factor, router, recorder.index)
