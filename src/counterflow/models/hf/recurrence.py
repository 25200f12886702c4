"""Mamba's layers in slices of a sequence: their convolution's edge and recurrent state as a carried state.

A layer that runs on a slice is given a cache of transformers' interface, by which it asks for what it saw
before. Transformers' own caches change their tensors in place; this one is made anew for each slice, and what
it returns and leaves has gradients. The scan begins with the state that the slice before left.

Source: Gu and Dao, Mamba (arXiv 2312.00752) section 3.2; Dao and Gu, Mamba-2 (arXiv 2405.21060) section 6.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.api.carry import Carry
from counterflow.errors import ConfigError

LINEAR = "linear_attention"
"""The kind of layers that transformers gives a convolution's edge and a recurrent state."""


class _Before(threading.local):
    cache: _Cache | None = None


_now = _Before()


class _Cache:
    """State of one layer after earlier slices, by the interface of transformers' caches.

    It says that it has nothing, so the layer takes the path for sequences; what it has enters there.
    """

    def __init__(self, edge: Tensor | None, state: Tensor | None) -> None:
        self.edge, self.state = edge, state

    def get_conv_state(self, *_: object, **__: object) -> None:
        """Nothing: the path for one token would write into it."""

    def get_recurrent_state(self, *_: object, **__: object) -> None:
        """Nothing: see ``get_conv_state``."""

    def update_conv_state(self, inputs: Tensor, *_: object, conv_kernel_size: int, **__: object) -> Tensor:
        """The inputs, [samples, channels, positions], behind those that the convolution still sees."""
        size = conv_kernel_size - 1
        edge = inputs.new_zeros(*inputs.shape[:2], size) if self.edge is None else self.edge
        joined = torch.cat([edge, inputs], -1)
        self.edge = joined[..., joined.shape[-1] - size :].clone()
        return joined

    def update_recurrent_state(self, state: Tensor, *_: object, **__: object) -> Tensor:
        """Note the state after the slice."""
        self.state = state
        return state


@contextmanager
def recurring(carry: Carry, block: nn.Module) -> Iterator[dict[str, Any]]:
    """Wrap a layer that runs on a slice; yield what the layer is called with.

    Args:
        carry: the layer's own.
        block: the layer of transformers.

    Raises:
        ConfigError: it is not one of Mamba's.
    """
    if not _intercept(type(getattr(block, "mixer", block)).__module__):
        raise ConfigError(
            f"a {type(block).__name__} does not scan as Mamba's layers do, so what it leaves to the next "
            "slice is not known; train without slices"
        )
    _now.cache = cache = _Cache(*carry.take((None, None)))
    try:
        yield {_name_of_cache(block): cache}
    finally:
        _now.cache = None
    carry.leave((cache.edge, cache.state))


def _name_of_cache(block: nn.Module) -> str:
    # transformers names it ``cache`` from 5.24 on.
    return "cache" if "cache" in inspect.signature(block.forward).parameters else "cache_params"


@functools.cache
def _intercept(module: str) -> bool:
    """Put ours in the place of a module's scans, which do not begin with a state (or have no gradient).

    Returns:
        Whether the module has any.
    """
    names = _SCANS.keys() & vars(sys.modules[module]).keys()
    for name in names:
        original = getattr(sys.modules[module], name)
        replacement = functools.partial(_scan, _SCANS[name], original)
        setattr(sys.modules[module], name, torch.compiler.disable(replacement))
    return bool(names)


def _scan(replacement: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cache = _now.cache
    if cache is None:
        return original(*args, **kwargs)
    return replacement(original, cache.state, *args, **kwargs)


def _by_chunks(original: Callable[..., Any], state: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "initial_states": state})


def _selective(  # noqa: PLR0917 - transformers' own
    original: Callable[..., Any],
    state: Tensor | None,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The scan of a slice alone, and what decayed of the state before it, as the scan is linear in that.

    Kernels return a last state that has no gradient, so it is summed up here.
    """
    kwargs["return_last_state"] = False
    outputs = original(
        hidden_states, dt, A, B, C, delta_bias=delta_bias, delta_softplus=delta_softplus, **kwargs
    )
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    until = dt.cumsum(-1)[:, :, None]  # [samples, channels, 1, positions], as all products but the state's
    entered = dt[:, :, None] * B.float()[:, None] * hidden_states.float()[:, :, None]
    last = (torch.exp(A[..., None] * (until[..., -1:] - until)) * entered).sum(-1)
    if state is not None:
        decayed = torch.exp(A[..., None] * until) * state[..., None]
        outputs = outputs + (decayed * C[:, None]).sum(2).to(outputs.dtype)
        last = last + decayed[..., -1]
    return outputs if z is None else outputs * functional.silu(z), last


_SCANS = {"mamba_selective_scan": _selective, "mamba2_chunk_scan": _by_chunks}
"""Transformers' scans, and what is in their place."""
