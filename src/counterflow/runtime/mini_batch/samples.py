"""How a mini-batch is cut into micro-batches and these into parts: which dimension of what are the samples.

Invariant: what holds samples is cut, or refused; nothing that may hold them goes to all micro-batches as it
is, unless the user says so.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError

from ..torch_private import spread

Dims = Any
"""Which dimension of a value's tensors the samples are: an int for all, None for none, or a tree of them of
the value's structure or of its first levels, as ``torch.vmap`` takes ``in_dims``."""

Tree = TypeVar("Tree")

PLAIN: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""What has no samples in it."""


def samples_in(tree: object, dims: Dims = 0, name: str = "inputs") -> int:
    """The number of samples of a mini-batch.

    Args:
        tree: its tensors, in any structure.
        dims: where their samples are.
        name: what to call it: ``inputs`` or ``targets``.

    Raises:
        ConfigError: its tensors do not agree, there are none, or something in it can neither be cut nor
            go to all micro-batches.
    """
    if dims == 0 and isinstance(tree, Tensor) and tree.dim():
        return tree.shape[0]
    option = f"{name.removesuffix('s')}_dims"
    with_paths, spec = pytree.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    by_leaf = _spread(dims, spec)
    if by_leaf is None or not all(dim is None or isinstance(dim, int) for dim in by_leaf):
        raise ConfigError(
            f"{option}={dims!r} does not fit the {name}, which are {_shown(spec)}; give an int, None, or a "
            "tree of them like it"
        )
    sizes: dict[int, str] = {}
    lists: dict[int, str] = {}
    for (keys, leaf), dim in zip(with_paths, by_leaf, strict=True):
        path = name + pytree.keystr(keys)
        size = None if dim is None else _size(leaf, dim, path, option)
        if size is not None:
            found = lists if isinstance(leaf, (list, tuple)) and isinstance(dims, int) else sizes
            found.setdefault(size, path)
    if len(sizes) > 1:
        found_in = " and ".join(f"{size} in {path}" for size, path in sorted(sizes.items()))
        raise ConfigError(
            f"{name} must have one number of samples; found {found_in}; say with {option} which dimension of "
            "each tensor they are (None: it has none)"
        )
    if not sizes:
        raise ConfigError(f"{name} must have a tensor with samples; found {_shown(spec)}")
    (samples,) = sizes
    if samples in lists:
        raise ConfigError(
            f"{lists[samples]} has {samples} entries, as many as there are samples; make a tensor of it, or "
            f"say with {option} whether it has one a sample (0) or all micro-batches get it whole (None)"
        )
    return samples


def cut(tree: Tree, rows: slice, dims: Dims = 0) -> Tree:
    """Some samples of a mini-batch, whatever its structure."""
    if dims == 0 and isinstance(tree, Tensor) and tree.dim():
        return tree[rows]  # type: ignore[return-value]
    leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_leaf)
    by_leaf = _spread(dims, spec)
    assert by_leaf is not None, "samples_in has refused it"
    whole = (list, tuple) if isinstance(dims, int) else ()
    parts = [
        leaf if dim is None or isinstance(leaf, whole) else _cut(leaf, dim, rows)
        for leaf, dim in zip(leaves, by_leaf, strict=True)
    ]
    found: Tree = pytree.tree_unflatten(parts, spec)
    return found


def joined(parts: Sequence[Tree], dims: Dims, name: str) -> Tree:
    """One tree of the samples of several, in their order.

    Args:
        parts: trees of one structure.
        dims: where their samples are; what has none is the first one's.
        name: what to call it: ``outputs``.

    Raises:
        ConfigError: they cannot be put together.
    """
    option = f"{name.removesuffix('s')}_dims"
    flat = [pytree.tree_flatten(part, is_leaf=_is_leaf) for part in parts]
    spec = flat[0][1]
    by_leaf = _spread(dims, spec)
    if by_leaf is None or any(other != spec for _, other in flat):
        raise ConfigError(
            f"{option}={dims!r} does not fit the {name}, which are {_shown(spec)}, or they differ"
        )
    found: Tree = pytree.tree_unflatten(
        [
            same[0] if dim is None else _joined(same, dim, name, option)
            for dim, same in zip(by_leaf, zip(*(leaves for leaves, _ in flat), strict=True), strict=True)
        ],
        spec,
    )
    return found


def _joined(same: Sequence[Any], dim: int, name: str, option: str) -> Any:
    if all(isinstance(leaf, Tensor) and leaf.dim() for leaf in same):
        return torch.cat(list(same), dim)
    if all(isinstance(leaf, PLAIN) and leaf == same[0] for leaf in same):
        return same[0]
    if all(type(leaf) is list for leaf in same):
        return [entry for leaf in same for entry in leaf]
    raise ConfigError(
        f"{name} have a {type(same[0]).__name__} that cannot be put together from micro-batches; say with "
        f"{option} that it has no samples (None: the first one counts)"
    )


def split_points(samples: int, micro_batches: int) -> list[int]:
    """Where micro-batches begin, and ``samples`` at the end: the first ones get one sample more.

    >>> split_points(10, 4)
    [0, 3, 6, 8, 10]
    """
    size, more = divmod(samples, micro_batches)
    return [m * size + min(m, more) for m in range(micro_batches + 1)]


def moved(tree: Tree, device: torch.device, *, copied: bool = False) -> Tree:
    """The same on a device; ``copied``: in memory of its own."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):  # one of inference mode cannot be saved for a backward
            return leaf.to(device, non_blocking=True, copy=copied or leaf.is_inference())
        return leaf.to(device) if isinstance(leaf, BlockMask) else leaf

    found: Tree = pytree.tree_map(move, tree, is_leaf=_is_leaf)
    return found


def _is_leaf(node: object) -> bool:
    """What is cut as one thing: a list of numbers or texts, a mask by blocks."""
    if type(node) in (list, tuple):
        return bool(node) and all(isinstance(entry, PLAIN) for entry in node)  # type: ignore[attr-defined]
    return isinstance(node, BlockMask)


def _spread(dims: Dims, spec: pytree.TreeSpec) -> list[int | None] | None:
    """By leaf what a tree of dimensions says; None if it does not fit."""
    if dims is None or isinstance(dims, int):
        return [dims] * spec.num_leaves
    children = spec.children()
    if spec.type is dict and isinstance(dims, dict) and dims.keys() == {*spec.context}:
        of = [dims[key] for key in spec.context]  # torch takes them in the order that dims has
    elif isinstance(dims, (list, tuple)) and type(dims) in (spec.type, spec.context):
        of = list(dims)
    else:
        return spread(dims, spec)
    if len(of) != len(children):
        return None
    found = [_spread(one, child) for one, child in zip(of, children, strict=True)]
    return None if None in found else [dim for its in found if its is not None for dim in its]


def _size(leaf: Any, dim: int, path: str, option: str) -> int | None:
    """The samples of a leaf; None if it has none.

    Raises:
        ConfigError: it has no such dimension, or it is not known how to cut it.
    """
    if isinstance(leaf, Tensor):
        if leaf.dim() and not -leaf.dim() <= dim < leaf.dim():
            raise ConfigError(
                f"{path} of shape {tuple(leaf.shape)} has no dimension {dim}; say with {option} which one "
                "its samples are (None: it has none)"
            )
        return leaf.shape[dim] if leaf.dim() else None
    if isinstance(leaf, BlockMask):
        masks: int = leaf.kv_num_blocks.shape[0]
        return masks if masks > 1 else None  # one is for all samples
    if isinstance(leaf, (list, tuple)):
        return len(leaf)
    if isinstance(leaf, PLAIN):
        return None
    kind = type(leaf)
    raise ConfigError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, and it is not known whether it has samples; "
        f"make tensors of it, or say with {option} that all micro-batches get it whole (None)"
    )


def _cut(leaf: Any, dim: int, rows: slice) -> Any:
    if isinstance(leaf, Tensor):
        if not leaf.dim():
            return leaf
        return leaf[rows] if dim == 0 else leaf.narrow(dim, rows.start, rows.stop - rows.start)
    if isinstance(leaf, BlockMask):
        return leaf if leaf.kv_num_blocks.shape[0] == 1 else _cut_mask(leaf, rows)
    return leaf[rows] if isinstance(leaf, (list, tuple)) else leaf


def _cut_mask(mask: BlockMask, rows: slice) -> BlockMask:
    """A mask by blocks of some samples; its function goes on counting them among all."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask.mask_mod(b + rows.start, h, q, kv)

    full, which = mask.full_kv_num_blocks, mask.full_kv_indices
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks[rows],
        mask.kv_indices[rows],
        None if full is None else full[rows],
        None if which is None else which[rows],
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def _shown(spec: pytree.TreeSpec) -> str:
    """``a dict of 'x', 'mask'``."""
    if spec.is_leaf():
        return "no tuple, list or dict"
    of = ", ".join(map(repr, spec.context)) if spec.type is dict else len(spec.children())
    return f"a {spec.type.__name__} of {of}"
