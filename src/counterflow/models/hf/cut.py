"""Models of transformers as lists of layers, without a change to them: their own code runs, piece by piece.

The first layer is the model itself, whose repeated layers are stand-ins that record their arguments and end
the forward; the last one is the model itself too, whose embeddings and repeated layers are stand-ins that
return the layer's input. So the model itself makes positions, masks, and scales of embeddings and logits,
whatever it does.

Invariant: the layers contain all of the model's own modules and no others. A model that calls its repeated
layers in an unsupported way is refused, by the first layer at the latest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from counterflow.api.carry import Carry
from counterflow.errors import ConfigError

from .attention_masks import widened
from .first_layer import FirstLayer
from .plans import plan_of, refuse, unwrapped
from .recurrence import LINEAR, recurring
from .routers import COUNTED, LOGITS, RouterLoss, router_loss
from .shells import disable_extras, has, has_weights, shell_of
from .slice_attention import CAUSAL, EVERY_LAYER, FULL, Seen, attending
from .stand_ins import HIDDEN, SavedInput, unfollowed
from .weight_files import Filling, Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model of transformers, also with peft's adapters: for ``Pipeline(list_layers=...)``.

    The first accepts token ids, or a dict of arguments of the model's ``forward`` (``input_ids``,
    ``attention_mask``, ``position_ids``, ``token_type_ids``), or these as keyword arguments; the last returns
    the model's output without labels, an object with ``logits``.

    With ``output_router_logits`` in its config, the loss of its routers is added (``cf.add_loss``), as metric
    ``aux_loss``. It is a product of means over all tokens of a micro-batch, for which the pipeline needs
    ``per_micro_batch_loss=True``.

    Args:
        model: a model in training mode (``model.train()``); ``from_pretrained`` returns it in evaluation
            mode.

    Raises:
        ConfigError: the model has no plan, or a pipeline does not support it.
    """
    unwrapped_model = unwrapped(model)
    base: PreTrainedModel = unwrapped_model.base_model
    plan = plan_of(unwrapped_model, base)
    refuse(unwrapped_model)
    prefix = next(
        f"{name}." if name else "" for name, module in unwrapped_model.named_modules() if module is base
    )
    path = prefix + plan.repeated
    repeated = list(unwrapped_model.get_submodule(path).children())
    kinds = _kinds(unwrapped_model, len(repeated))
    after = [prefix + name for name in plan.after if has(base, name)]
    heads = [name for name, child in unwrapped_model.named_children() if prefix and child is not base]
    filling = Filling(unwrapped_model, getattr(model, "peft_config", None) or {})
    first = FirstLayer(
        unwrapped_model, path, [*after, *heads], kinds, [prefix + name for name in plan.unnamed]
    )
    window = getattr(base.config, "sliding_window", None)
    routers = first.routers = router_loss(unwrapped_model)
    blocks = [
        RepeatedLayer(block, kind, window, routers) for block, kind in zip(repeated, kinds, strict=True)
    ]
    listed = [first, *blocks, Last(unwrapped_model, path, [*after, *heads], prefix, routers)]
    for layer in listed:
        layer.fill_with(filling)
    return [*listed]


def _kinds(model: PreTrainedModel, count: int) -> list[str]:
    types = getattr(model.config, "layer_types", None)
    return list(types) if types is not None and len(types) == count else [EVERY_LAYER] * count


class RepeatedLayer(Layer):
    """A repeated layer."""

    def __init__(self, block: nn.Module, kind: str, window: int | None, routers: RouterLoss | None) -> None:
        super().__init__()
        self.routers = routers
        self.block = block
        self.kind = kind
        self.carry = Carry()
        self.window = None if kind == FULL else window

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        """The hidden states through the layer, with its own arguments."""
        if self.routers is None:
            return self._forward(value)
        with self.routers.recorded(self.block) as logits:
            output = self._forward(value)
        shape = value[HIDDEN].shape[:2]
        by_sample = (tensor.reshape(*shape, -1) for tensor in logits)
        return {**output, LOGITS: (*value.get(LOGITS, ()), *by_sample)}

    def _forward(self, value: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = widened(value["taken"][self.kind])
        if CAUSAL in value:
            enter = partial(self._carried, value[CAUSAL])
            hidden = self.carry._within(enter, self.block, value[HIDDEN], *args, **kwargs)
        else:
            hidden = self.block(value[HIDDEN], *args, **kwargs)
        if not isinstance(hidden, Tensor):
            raise unfollowed("has repeated layers that give more than one tensor")
        return {**value, HIDDEN: hidden}

    def _carried(self, seen: Seen) -> AbstractContextManager[dict[str, Any]]:
        if self.kind != LINEAR:
            return attending(self.carry, self.block, self.window, seen)
        if self.carry.context is not None:
            raise ConfigError(
                f"a {type(self.block).__name__} carries a state along the sequence, which cf.ContextParallel "
                "shares; train it without"
            )
        return recurring(self.carry, self.block) if self.carry.sliced else nullcontext({})


class Last(Layer):
    """Everything after the repeated layers."""

    def __init__(
        self, model: PreTrainedModel, path: str, after: list[str], prefix: str, routers: RouterLoss | None
    ) -> None:
        super().__init__()
        self.routers = routers
        self.saved_input: list[Tensor] = []
        replaced: dict[str, nn.Module] = {
            path: nn.ModuleList(
                SavedInput(self.saved_input, block) for block in model.get_submodule(path).children()
            )
        }
        for parent in _leading_to(path, prefix):
            for name, child in model.get_submodule(parent.rstrip(".")).named_children():
                if any(_leads(parent + name, target) for target in (path, *after)) or _is_looked_into(child):
                    continue
                replaced[parent + name] = SavedInput(self.saved_input, child, embeds=True)
        self.model = shell_of(model, replaced)
        disable_extras(self.model)

    def forward(self, value: dict[str, Any]) -> Any:
        """The hidden states to the model's output; a loss of routers is added."""
        if self.routers is not None:
            self.routers.add(value[LOGITS], value.get(COUNTED))
        hidden = value[HIDDEN]
        ids = value.get("input_ids")
        if ids is None:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        # A finished mask is not made again.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden.device)
        self.saved_input[:] = [hidden]
        try:
            return self.model(input_ids=ids, attention_mask=mask)
        finally:
            del self.saved_input[:]


def _is_looked_into(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_weights(module)


def _leads(path: str, target: str) -> bool:
    """Check whether a path equals another one or leads to it.

    >>> _leads("encoder", "encoder.layer"), _leads("enc", "encoder.layer")
    (True, False)
    """
    return target == path or target.startswith(f"{path}.")


def _leading_to(path: str, prefix: str) -> Iterator[str]:
    """The modules on the way from the base model to one, each with a dot.

    >>> list(_leading_to("bert.encoder.layer", "bert."))
    ['bert.', 'bert.encoder.']
    """
    yield prefix
    parts = path.removeprefix(prefix).split(".")
    for end in range(1, len(parts)):
        yield prefix + ".".join(parts[:end]) + "."
