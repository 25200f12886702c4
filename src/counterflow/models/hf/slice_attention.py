"""Attention of transformers' decoders in slices of a sequence: what their layers call, with a carried state.

A layer that runs on a slice calls transformers' ``sdpa`` as ever; here it gets attention to all earlier
slices as well. Its own masks would be of the slice alone and are left out: causal ones, with a window where
the layer says one, with padding and packed documents, are what slices can have. A model that is trained in
slices has it so in whole runs.

Invariant: a layer whose attention is not of that kind is refused.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from counterflow.api.attention import attend
from counterflow.api.carry import Carry
from counterflow.errors import ConfigError

from .recurrence import LINEAR

CAUSAL = "causal"
"""The key of what goes from layer to layer that says so."""

EVERY_LAYER = "every_layer"
"""The kind of the layers of models whose layers are all of one kind."""

FULL = "full_attention"

KINDS = EVERY_LAYER, FULL, "sliding_attention", LINEAR
"""The kinds of layers that can run in slices, if their masks are causal, or causal within a window."""

_SDPA = "sdpa"

_IGNORED = {"sliding_window", "position_ids", "use_cache", "position_embeddings", "cache_position"}
"""Arguments that change nothing beside what is done with them here."""


class Seen(NamedTuple):
    """Limits of what positions see of each other, besides causality; each [samples, positions] or None.

    Attributes:
        documents: as of ``attend``.
        seen: as of ``attend``.
    """

    documents: Tensor | None = None
    seen: Tensor | None = None


class _Now(threading.local):
    carry: Carry | None = None
    window: int | None = None
    seen = Seen()
    calls = 0


_now = _Now()


@contextmanager
def attending(carry: Carry, block: nn.Module, window: int | None, seen: Seen) -> Iterator[dict[str, Any]]:
    """Wrap a layer that runs on a slice; yield what the layer is called with.

    Args:
        carry: the layer's own.
        block: the layer of transformers.
        window: of its attention, by its model's config.
        seen: documents and padding of the slice.

    Raises:
        ConfigError: it does not call transformers' ``sdpa`` once.
    """
    _intercept()
    _now.carry, _now.window, _now.seen, _now.calls = carry, window, seen, 0
    try:
        yield {}
        calls = _now.calls
    finally:
        _now.carry, _now.seen = None, Seen()
    if calls != 1:
        raise ConfigError(
            f"a {type(block).__name__} in a slice calls transformers' attention {_SDPA!r} {calls} times, and "
            'slices need one call; load the model with attn_implementation="sdpa", or train without slices'
        )


@functools.cache
def _intercept() -> None:
    # All other layers get transformers' own function from ours.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    original = ALL_ATTENTION_FUNCTIONS[_SDPA]
    replacement = functools.partial(_attention, original)
    ALL_ATTENTION_FUNCTIONS.register(_SDPA, torch.compiler.disable(replacement))


def _attention(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _now.carry is None:
        return original(module, *args, **kwargs)
    return _of_slice(_now.carry, module, *args, **kwargs)


def _of_slice(  # noqa: PLR0917 - transformers' own
    carry: Carry,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    del attention_mask
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unsupported = sorted(
        name
        for name, option in kwargs.items()
        if option is not None and option is not False and name not in _IGNORED
    )
    if not causal or unsupported or sliding_window != _now.window:
        what = f"has {', '.join(unsupported)}" if unsupported else "looks at both sides of a position"
        if causal and not unsupported:
            what = f"has a window of {sliding_window}, where its config says {_now.window}"
        raise ConfigError(
            f"the attention of a {type(module).__name__} {what}, which slices do not have; train "
            "without slices"
        )
    _now.calls += 1
    output = attend(
        carry, query, key, value, dropout=dropout, scale=scaling, window=sliding_window, **_now.seen._asdict()
    )
    return output.transpose(1, 2).contiguous(), None
