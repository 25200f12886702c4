"""Attention masks between stages: one value per position instead of one per pair of positions.

The form of a model's mask is found by trying: keys that count, texts that do not see each other, causal or
not, a window. A mask of another form is passed unchanged.

Invariant: a narrow mask expands, value by value, to the mask that the model made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class NarrowMask(NamedTuple):
    """A mask of (samples, 1, positions, positions).

    Attributes:
        keys: (samples, positions): which positions are seen.
        texts: (samples, positions): numbers of texts that do not see each other; None: one text per sample.
        form: ``"all"``; ``"near 64"``: positions at most this far apart; ``"causal"``, also with the width of
            a window: ``"causal 4096"``.
        added: the dtype of a mask that is added to scores; ``""``: a mask of flags.
    """

    keys: Tensor
    texts: Tensor | None
    form: str
    added: str


def texts_of(positions: Tensor) -> Tensor:
    """Numbers of the texts to which positions belong.

    >>> texts_of(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
    [[0, 0, 0, 1, 1]]
    """
    follows = positions[:, 1:] == positions[:, :-1] + 1
    return torch.nn.functional.pad((~follows).cumsum(1), (1, 0))


def narrowed(
    mask: Tensor, form: str, positions: Tensor | None, *, keys: Tensor | None = None, trusted: bool = False
) -> NarrowMask | None:
    """A mask in a form; None if it does not have the form, which is not checked on a GPU if ``trusted``.

    Args:
        mask: (samples, 1, positions, positions).
        form: as of ``NarrowMask``.
        positions: of the texts, which do not see each other; None: one text per sample.
        keys: (samples, positions): which positions are seen; None: those that any other sees.
        trusted: whether the form is known.
    """
    flags = mask if mask.dtype is torch.bool else mask == 0
    added = "" if mask.dtype is torch.bool else str(mask.dtype).removeprefix("torch.")
    texts = None if positions is None else texts_of(positions.expand(len(mask), -1))
    narrow = NarrowMask(flags.any(2)[:, 0] if keys is None else keys, texts, form, added)
    if trusted and mask.is_cuda:  # the host would wait for the answer
        return narrow
    return narrow if torch.equal(_expanded(narrow), mask) else None


def forms_of(windows: Iterable[int | None], *, packed: bool) -> Iterator[tuple[str, bool]]:
    """The forms to try, and whether texts do not see each other; forms that other samples may need come
    first.
    """
    wide = [window for window in windows if window]
    for kind in ("all", *(f"near {w}" for w in wide), "causal", *(f"causal {w}" for w in wide)):
        likely = packed and kind.startswith("causal")
        yield from ((kind, separate) for separate in (likely, not likely))


def is_mask(leaf: Any, samples: int, length: int) -> bool:
    """Check whether a value exists for each pair of positions."""
    return (
        isinstance(leaf, Tensor)
        and leaf.shape == (samples, 1, length, length)
        and not leaf.requires_grad
        and not leaf.is_meta
        and (leaf.dtype is torch.bool or leaf.is_floating_point())
    )


def widened(tree: Any) -> Any:
    """A tree with expanded masks in place of narrow ones; each is made once for all layers that use it."""

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, NarrowMask):
            return leaf
        keys: Any = leaf.keys
        cache = getattr(keys, "masks", None)
        if cache is None:
            cache = keys.masks = {}
        kind = leaf.form, leaf.added, leaf.texts is None
        if kind not in cache:
            cache[kind] = _expanded(leaf)
        return cache[kind]

    return pytree.tree_map(widen, tree, is_leaf=lambda leaf: isinstance(leaf, NarrowMask))


def _expanded(narrow: NarrowMask) -> Tensor:
    keys, texts = narrow.keys, narrow.texts
    length = keys.shape[1]
    flags = keys[:, None, None, :].expand(-1, 1, length, -1)
    kind, _, window = narrow.form.partition(" ")
    at = torch.arange(length, device=keys.device)
    if kind == "near":
        flags = flags & ((at - at[:, None]).abs() <= int(window))
    elif kind == "causal":
        seen = at <= at[:, None]
        if window:
            seen = seen & (at > at[:, None] - int(window))
        flags = flags & seen
    if texts is not None:
        flags = flags & (texts[:, None, :, None] == texts[:, None, None, :])
    if not narrow.added:
        return flags.contiguous()
    dtype: torch.dtype = getattr(torch, narrow.added)
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=keys.device)
    return torch.where(flags, torch.zeros((), dtype=dtype, device=keys.device), low)


_MASKS = "counterflow_"
"""Prefix of an attention's name: the same attention with masks that are always made."""


@contextmanager
def masks_made(shell: nn.Module, *, required: bool) -> Iterator[None]:
    """Let a model make its masks within this context even if these samples need none.

    Stages pass on values of one structure for all samples of a shape, but transformers omits a mask if no
    sample has padding.
    """
    if not required:
        yield
        return
    configs = [vars(module)["config"] for module in shell.modules() if "config" in vars(module)]
    before = [config._attn_implementation for config in configs]
    for config, name in zip(configs, before, strict=True):
        config._attn_implementation = _registered(name)
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _registered(name: str | None) -> str | None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: PLC0415

    if name is None or name not in ALL_MASK_ATTENTION_FUNCTIONS or name.startswith(_MASKS):
        return name
    if _MASKS + name not in ALL_MASK_ATTENTION_FUNCTIONS:
        make = (
            _given_mask
            if name.startswith("flash")
            else partial(_always_made, ALL_MASK_ATTENTION_FUNCTIONS[name])
        )
        ALL_MASK_ATTENTION_FUNCTIONS.register(_MASKS + name, make)
    return _MASKS + name


def _always_made(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return make(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def _given_mask(*_: object, attention_mask: Tensor | None = None, **__: object) -> Tensor | None:
    return attention_mask
