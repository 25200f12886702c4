"""Cutting of mini-batches into micro-batches, and of these into parts, along the dimensions of their samples.

Invariant: what holds samples is cut, or refused; nothing that may hold them goes to all micro-batches as it
is, unless the user says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from counterflow.common.mappings import PLAIN, flat_with_paths, names_of
from counterflow.common.tensors.torch_private import spread
from counterflow.errors import ConfigError

from ..messages.values import Keyworded
from .entries import (
    ENTRIES,
    Entries,
    KnownLayouts,
    Lists,
    cut_by_entries,
    is_leaf,
    of_children,
)

Dims = Any
"""Dimension of the samples in a value's tensors: an int for all, None for none, ``ENTRIES`` for the
entries of a list, or a tree of them of the value's structure or of its first levels, as ``torch.vmap`` takes
``in_dims``."""

Tree = TypeVar("Tree")

KWARG_OPTIONS = {"input_dims": "kwarg_dims", "sequence_dims": "kwarg_sequence_dims"}
"""Options of keyword arguments to the first layer, by that of its inputs."""


def samples_in(
    tree: object,
    dims: Dims = 0,
    name: str = "inputs",
    *,
    option: str | None = None,
    uncut: bool = False,
    known_layouts: KnownLayouts | None = None,
) -> int:
    """The number of samples of a mini-batch.

    Args:
        tree: its tensors, in any structure.
        dims: where their samples are.
        name: what to call it: ``inputs`` or ``targets``.
        option: option that states the dimensions; None: that of the samples.
        uncut: whether the mini-batch is not cut, so lists need no check.
        known_layouts: lists whose samples are in their tensors, as other mini-batches showed.

    Raises:
        ConfigError: its tensors do not agree, there are none, or something in it can neither be cut nor
            go to all micro-batches.
    """
    if dims == 0 and isinstance(tree, Tensor) and tree.dim():
        return tree.shape[0]
    option = option or f"{name.removesuffix('s')}_dims"
    with_paths, spec = flat_with_paths(tree, leaves_of(tree, dims))
    by_leaf = _dims_by_leaf(tree, dims, name, option)
    sizes: dict[int, str] = {}
    lists: dict[int, str] = {}
    for (where, leaf), dim in zip(with_paths, by_leaf, strict=True):
        path = name + where
        is_keyword = isinstance(tree, Keyworded) and where.startswith(".kwargs")
        leaf_option = KWARG_OPTIONS[option] if is_keyword else option
        size = None if dim is None else _size(leaf, dim, path, leaf_option)
        if size is not None:
            counts = lists if isinstance(leaf, (list, tuple)) and isinstance(dims, int) else sizes
            counts.setdefault(size, path)
    if len(sizes) > 1:
        found_in = " and ".join(f"{size} in {path}" for size, path in sorted(sizes.items()))
        raise ConfigError(
            f"{name} must have one number of samples; found {found_in}; say with {options_of(tree, option)} "
            "which dimension "
            "of each tensor they are (None: it has none), or cf.ENTRIES for a list with an entry a sample"
        )
    if not sizes:
        raise ConfigError(f"{name} must have a tensor with samples; found {_shown(spec)}")
    (samples,) = sizes
    if uncut:
        return samples
    if samples in lists:
        raise ConfigError(
            f"{lists[samples]} has {samples} entries, as many as there are samples; make a tensor of it, or "
            f"say with {option} whether it has one a sample (cf.ENTRIES) or all micro-batches get it whole "
            "(None)"
        )
    if samples > 1:
        Lists(samples, option, [] if known_layouts is None else known_layouts).refuse_either(tree, dims, name)
    return samples


def options_of(tree: object, option: str) -> str:
    """Return the options that state the dimensions of a tree.

    Args:
        tree: inputs, with keyword arguments perhaps, or targets.
        option: option of what is no keyword argument.
    """
    return f"{option} and {KWARG_OPTIONS[option]}" if isinstance(tree, Keyworded) else option


def _dims_by_leaf(tree: object, dims: Dims, name: str, option: str) -> list[int | Entries | None]:
    if isinstance(tree, Keyworded) and isinstance(dims, Keyworded):
        of_kwargs = _dims_by_leaf(tree.kwargs, dims.kwargs, "keyword arguments", KWARG_OPTIONS[option])
        return [*_dims_by_leaf(tree.positional, dims.positional, name, option), *of_kwargs]
    _, spec = pytree.tree_flatten(tree, is_leaf=leaves_of(tree, dims))
    by_leaf = spread_dims(dims, spec)
    if by_leaf is None or not all(dim is None or isinstance(dim, (int, Entries)) for dim in by_leaf):
        raise ConfigError(
            f"{option}={dims!r} does not fit the {name}, which are {_shown(spec)}; give an int, None, "
            "cf.ENTRIES (for a list or tuple), or a tree of them like it"
        )
    return by_leaf


def refuse_whole_entries(error: Exception, target: object, dims: Dims, samples: int, total: int) -> None:
    """Say why a loss function may have failed: on a list of all samples' entries beside outputs of some.

    Args:
        error: its own.
        target: what it was given.
        dims: where the targets' samples are.
        samples: of the outputs that it was given.
        total: of the mini-batch.

    Raises:
        ConfigError: the targets are such a list.
    """
    if dims is None and isinstance(target, (list, tuple)) and len(target) == total != samples:
        raise ConfigError(
            f"the loss function fails ({type(error).__name__}: {error}) on outputs of {samples} samples and "
            f"targets of {total} entries, as many as the mini-batch has samples: target_dims=None gives "
            "each micro-batch the targets whole; if each entry is a sample's, say target_dims=cf.ENTRIES"
        ) from error


def cut(tree: Tree, rows: slice, dims: Dims = 0) -> Tree:
    """Some samples of a mini-batch, whatever its structure."""
    if dims == 0 and isinstance(tree, Tensor) and tree.dim():
        return tree[rows]  # type: ignore[return-value]
    leaves, spec = pytree.tree_flatten(tree, is_leaf=leaves_of(tree, dims))
    by_leaf = spread_dims(dims, spec)
    assert by_leaf is not None, "samples_in has refused it"
    list_types = (list, tuple) if isinstance(dims, int) else ()
    parts = [
        leaf if dim is None or isinstance(leaf, list_types) else _cut(leaf, dim, rows)
        for leaf, dim in zip(leaves, by_leaf, strict=True)
    ]
    result: Tree = pytree.tree_unflatten(parts, spec)
    return result


def cut_leaves(tree: Tree, rows: slice, dims: Dims, leaf_dims: Mapping[int, int | None]) -> Tree:
    """Some samples of a mini-batch, of which some leaves are cut in other dimensions.

    Args:
        tree: its tensors.
        rows: the samples.
        dims: where they are.
        leaf_dims: dimensions of some leaves, by number; None: these are whole.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=leaves_of(tree, dims))
    by_leaf = spread_dims(dims, spec)
    assert by_leaf is not None, "samples_in has refused it"
    list_types = (list, tuple) if isinstance(dims, int) else ()
    parts = []
    for number, (leaf, dim) in enumerate(zip(leaves, by_leaf, strict=True)):
        leaf_dim = leaf_dims.get(number, dim)
        parts.append(leaf if leaf_dim is None or isinstance(leaf, list_types) else _cut(leaf, leaf_dim, rows))
    result: Tree = pytree.tree_unflatten(parts, spec)
    return result


def joined(
    parts: Sequence[Tree], dims: Dims, name: str, samples: Sequence[int], *, equal: bool = False
) -> Tree:
    """One tree of the samples of several, in their order.

    Args:
        parts: trees of one structure.
        dims: where their samples are; what has none is the first one's.
        name: what to call it: ``outputs``.
        samples: of each part.
        equal: whether values without samples must be equal in all parts, and need no gradient.

    Raises:
        ConfigError: they cannot be put together.
    """
    option = f"{name.removesuffix('s')}_dims"
    if len({*samples}) == 1 and samples[0] > 1:
        Lists(samples[0], option, [], (list,)).refuse_either(parts[0], dims, name)
    flat = [pytree.tree_flatten(part, is_leaf=leaves_of(part, dims)) for part in parts]
    spec = flat[0][1]
    by_leaf = spread_dims(dims, spec)
    if by_leaf is None or any(other_spec != spec for _, other_spec in flat):
        raise ConfigError(
            f"{option}={dims!r} does not fit the {name}, which are {_shown(spec)}, or they differ"
        )
    result: Tree = pytree.tree_unflatten(
        [
            _of_all(same, name, equal=equal) if dim is None else _joined(same, dim, name, option)
            for dim, same in zip(by_leaf, zip(*(leaves for leaves, _ in flat), strict=True), strict=True)
        ],
        spec,
    )
    return result


class LossDims:
    """Dimensions of the samples, or of the positions, in the outputs and the targets of a loss.

    Args:
        outputs: dimensions in the outputs.
        targets: dimensions in the targets.
        uncut: whether outputs are not cut by the pipeline.
    """

    def __init__(self, outputs: Dims, targets: Dims, *, uncut: bool = False) -> None:
        self._outputs, self._targets, self._uncut = outputs, targets, uncut

    def count(self, output: Any) -> int:
        """Number of samples in an output."""
        return samples_in(output, self._outputs, "outputs", uncut=self._uncut)

    def count_target(self, target: Any) -> int:
        """Number of samples in a target."""
        return samples_in(target, self._targets, "targets", uncut=self._uncut)

    def cut(self, output: Any, rows: slice) -> Any:
        """Some samples of an output."""
        return cut(output, rows, self._outputs)

    def cut_target(self, target: Any, rows: slice) -> Any:
        """Some samples of a target."""
        return cut(target, rows, self._targets)

    def join(self, outputs: Sequence[Any], samples: Sequence[int]) -> Any:
        """One output of the samples of several."""
        return joined(outputs, self._outputs, "outputs", samples, equal=True)

    def join_targets(self, targets: Sequence[Any], samples: Sequence[int]) -> Any:
        """One target of the samples of several."""
        return joined(targets, self._targets, "targets", samples, equal=True)


def _of_all(same: Sequence[Any], name: str, *, equal: bool) -> Any:
    first = same[0]
    if not equal or all(leaf is first for leaf in same):
        return first
    if isinstance(first, Tensor):
        fits = not first.requires_grad and all(torch.equal(leaf, first) for leaf in same)
    else:
        fits = all(leaf == first for leaf in same)
    if not fits:
        raise ConfigError(f"{name} have a value without samples that differs between micro-batches")
    return first


def _joined(same: Sequence[Any], dim: int | Entries, name: str, option: str) -> Any:
    if isinstance(dim, Entries):
        if not all(isinstance(leaf, (list, tuple)) for leaf in same):
            raise ConfigError(_no_entries(name, same[0], option))
        return type(same[0])(entry for leaf in same for entry in leaf)
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
    """First sample of each micro-batch, and ``samples`` at the end; the first ones have one sample more.

    >>> split_points(10, 4)
    [0, 3, 6, 8, 10]
    """
    size, more = divmod(samples, micro_batches)
    return [m * size + min(m, more) for m in range(micro_batches + 1)]


def moved(tree: Tree, device: torch.device, *, copied: bool = False) -> Tree:
    """A tree with its tensors on a device; ``copied``: in their own memory."""
    lone_tensor: Any = tree if type(tree) is Tensor else None
    if (
        lone_tensor is not None
        and lone_tensor.device == device
        and not copied
        and not lone_tensor.is_inference()
    ):
        return tree  # as the walk below would find, in a tenth of its time

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):  # one of inference mode cannot be saved for a backward
            # To the host it waits: a copy that is still on its way would be read before it is made.
            towards_device = device.type != "cpu"
            return leaf.to(device, non_blocking=towards_device, copy=copied or leaf.is_inference())
        if isinstance(leaf, PLAIN):
            return leaf
        to = getattr(leaf, "to", None)  # a mask by blocks, a batch of graphs
        return to(device) if callable(to) else leaf

    result: Tree = pytree.tree_map(move, tree, is_leaf=is_leaf)
    return result


def leaves_of(tree: object, dims: Dims) -> Callable[[object], bool]:
    """Predicate of the nodes of a tree that are cut as a unit."""
    lists = cut_by_entries(tree, dims)
    return (lambda node: id(node) in lists or is_leaf(node)) if lists else is_leaf


def _no_entries(path: str, leaf: object, option: str) -> str:
    return (
        f"{path} is a {type(leaf).__name__}, and {option}=cf.ENTRIES is for a list or tuple; give an int or "
        "None"
    )


def spread_dims(dims: Dims, spec: pytree.TreeSpec) -> list[int | Entries | None] | None:
    """Dimensions of each leaf from a tree of dimensions; None if the trees do not match."""
    if dims is None or isinstance(dims, int):
        return [dims] * spec.num_leaves
    if dims is ENTRIES:
        return [ENTRIES] if spec.is_leaf() else None
    of = of_children(dims, spec)
    if of is None:
        return None if names_of(spec) is not None else spread(dims, spec)
    spreads = [spread_dims(child_dims, child) for child_dims, child in zip(of, spec.children(), strict=True)]
    return None if None in spreads else [dim for leaf_dims in spreads for dim in leaf_dims or ()]


def _size(leaf: Any, dim: int | Entries, path: str, option: str) -> int | None:
    if isinstance(dim, Entries):
        if not isinstance(leaf, (list, tuple)):
            raise ConfigError(_no_entries(path, leaf, option))
        return len(leaf)
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
        "make tensors of it, or register its class with torch.utils._pytree.register_pytree_node; of "
        f"micro-batches that are ready, samples= tells the numbers, or {option}=None"
    )


def _cut(leaf: Any, dim: int | Entries, rows: slice) -> Any:
    if isinstance(dim, Entries):
        return leaf[rows]
    if isinstance(leaf, Tensor):
        if not leaf.dim():
            return leaf
        return leaf[rows] if dim == 0 else leaf.narrow(dim, rows.start, rows.stop - rows.start)
    if isinstance(leaf, BlockMask):
        return leaf if leaf.kv_num_blocks.shape[0] == 1 else _cut_mask(leaf, rows)
    return leaf[rows] if isinstance(leaf, (list, tuple)) else leaf


def _cut_mask(mask: BlockMask, rows: slice) -> BlockMask:
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
    if spec.is_leaf():
        return "no tuple, list or dict"
    names = names_of(spec)
    of = ", ".join(map(repr, names)) if names is not None else len(spec.children())
    return f"a {spec.type.__name__} of {of}"
