"""Record of a traced run of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .contexts import Change
from .placeholders import Ref, Template

ATTENTION = "scaled_dot_product_attention"
"""Name of torch's function of attention."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of torch's ``scaled_dot_product_attention``.

    Attributes:
        causal: whether it says so itself.
        masked: whether it takes a mask.
    """

    causal: bool
    masked: bool

    @classmethod
    def of(  # noqa: PLR0917 - torch's own
        cls,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> AttentionCall:
        """The call with these arguments."""
        del query, key, value, dropout_p
        return cls(bool(is_causal), attn_mask is not None)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call.

    Attributes:
        module: path of the called module; None: a function of torch is called.
        function: the called function; None: a module is called.
        takes: positional and keyword arguments.
        leaves: number of leaves of its result.
        gives: which of these are tensors, and their references.
        within: contexts in which it ran, where they differ from those around the forward.
        inside: path of the opened module whose forward made the call.
        attentions: calls of attention that a called module makes.
    """

    module: str | None
    function: Callable[..., Any] | None
    takes: Template
    leaves: int
    gives: tuple[tuple[int, Ref], ...]
    within: Change | None
    inside: str
    attentions: tuple[AttentionCall, ...] = ()


@dataclass(slots=True)
class Record:
    """Result of a traced run.

    Attributes:
        steps: steps in order.
        output: output of the model.
        inputs: leaves of the example that are tensors, by their number, and their references.
        shapes: by tensor, its shape and its dtype.
        memory: by tensor, a number of its memory, which views share.
        bytes: by tensor, its size for the example.
        changes: by step, memory of the tensors that it changes in place.
        costs: by path of a module, cost of its calls.
        called: paths of the modules that ran.
        constants: tensors that are neither parameter nor buffer.
        mark: dtype of the weights.
        reads: attributes of modules that the forwards of opened modules read, by the module's path and the
            name: path of the first reader.
        observed: attributes of further objects that they read, each with the object's name.
        live: names of the values that called modules change.
        written: attributes of called modules that these change and opened modules read, and the first reader.
    """

    steps: list[RecordedCall] = field(default_factory=list)
    output: Template = field(default_factory=lambda: Template([], pytree.tree_structure(())))
    inputs: dict[int, Ref] = field(default_factory=dict)
    shapes: dict[Ref, tuple[tuple[Any, ...], torch.dtype]] = field(default_factory=dict)
    memory: dict[Ref, int] = field(default_factory=dict)
    bytes: dict[Ref, int] = field(default_factory=dict)
    changes: dict[int, set[int]] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    constants: dict[str, Tensor] = field(default_factory=dict)
    mark: torch.dtype | None = None
    reads: dict[tuple[str, str], str] = field(default_factory=dict)
    observed: set[tuple[str, str]] = field(default_factory=set)
    live: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)


def main_dtype(model: nn.Module) -> torch.dtype:
    """The floating-point dtype of most of a model's parameters."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=counts.__getitem__, default=torch.get_default_dtype())
