"""Mappings of any class (a tokenizer's ``BatchEncoding``, a ``UserDict``) as trees of their items.

Torch's pytrees traverse dicts of some classes only. Any other class of mappings in a tree is registered with
them here, once in a process, if the class makes an equal mapping of a dict.

Invariant: an unflattened mapping has the items and the plain attributes of the one that was flattened.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.tensors.torch_private import subspecs
from counterflow.errors import ConfigError

PLAIN: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of values without samples."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Keys(NamedTuple):
    """A mapping without its values.

    Attributes:
        names: its keys.
        attributes: its plain attributes, by name.
    """

    names: tuple[Any, ...]
    attributes: tuple[tuple[str, Any], ...]


_lock = threading.Lock()
_known: set[type] = set()


def register_mapping_classes(tree: object) -> bool:
    """Register the classes of all mappings of a tree, so that torch's pytrees traverse them.

    Returns:
        True if one was not traversed before.

    Raises:
        ConfigError: a mapping has an attribute that is neither plain nor an item.
    """
    if isinstance(tree, Tensor):
        return False
    mappings = [
        leaf
        for leaf in pytree.tree_leaves(tree)
        if not isinstance(leaf, Tensor) and isinstance(leaf, Mapping) and _register(leaf)
    ]
    for mapping in mappings:
        register_mapping_classes(mapping)
    return bool(mappings)


def flat_with_paths(
    tree: object, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """A tree's leaves, each with its path, and the tree's structure.

    If a class is registered without a function for its leaves' names, the leaves are numbered.
    """
    try:
        leaves_by_path, spec = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError:  # no flatten_with_keys_fn
        leaves, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
        return [(f" (its tensor or value {number})", leaf) for number, leaf in enumerate(leaves)], spec
    return [(pytree.keystr(path), leaf) for path, leaf in leaves_by_path], spec


class PackedSpec(NamedTuple):
    """Structure of a tree on its way to another process.

    Torch's own pickles of structures need registered classes, and a tree in their place would be made of
    stand-ins, at which classes may look.

    Attributes:
        kind: class of the root; None: a leaf.
        context: context of the root, as torch's pytrees have it.
        children: structures below.
    """

    kind: Any
    context: Any
    children: tuple[PackedSpec, ...]


def packed_spec(spec: pytree.TreeSpec) -> PackedSpec:
    """A structure without objects of torch."""
    if spec.is_leaf():
        return _LEAF
    return PackedSpec(spec.type, spec.context, tuple(map(packed_spec, subspecs(spec))))


def unpacked_spec(packed: PackedSpec) -> pytree.TreeSpec:
    """The structure of torch's pytrees; classes of mappings in it are registered."""
    if packed.kind is None:
        return pytree.tree_structure(0)
    if isinstance(packed.context, Keys):
        with _lock:
            _add(packed.kind)
    return pytree.TreeSpec(packed.kind, packed.context, [*map(unpacked_spec, packed.children)])


_LEAF = PackedSpec(None, None, ())


def names_of(spec: pytree.TreeSpec) -> list[Any] | None:
    """The keys of a tree's root, if that is a mapping."""
    if isinstance(spec.context, Keys):
        return list(spec.context.names)
    return list(spec.context) if spec.type in (dict, OrderedDict) else None


def _register(mapping: Mapping[Any, Any]) -> bool:
    kind = type(mapping)
    with _lock:
        if kind in _known:
            return True
        try:
            copy: Any = kind(dict(mapping))  # type: ignore[call-arg]
            same = type(copy) is kind and list(copy) == list(mapping)
            same = same and all(copy[key] is mapping[key] for key in mapping)
        except Exception:  # a class of the user's: whatever it raises, it cannot be made
            return False
        if same:
            _add(kind)
        return same


def _add(kind: Any) -> None:
    if kind not in _known:
        pytree.register_pytree_node(kind, _flat, _unflatten_of(kind), flatten_with_keys_fn=_flat_with_keys)
        _known.add(kind)


def _flat(mapping: Any) -> tuple[list[Any], Keys]:
    keys = tuple(mapping)
    return [mapping[key] for key in keys], Keys(keys, tuple(_attributes(mapping)))


def _flat_with_keys(mapping: Any) -> tuple[list[tuple[Any, Any]], Keys]:
    values, keys = _flat(mapping)
    return [(pytree.MappingKey(key), value) for key, value in zip(keys.names, values, strict=True)], keys


def _unflatten_of(kind: Any) -> Any:
    def unflatten(values: Iterable[Any], keys: Keys) -> Any:
        mapping = kind(dict(zip(keys.names, values, strict=True)))
        if keys.attributes:
            vars(mapping).update(keys.attributes)
        return mapping

    return unflatten


def _attributes(mapping: Any) -> Iterable[tuple[str, Any]]:
    for name, value in getattr(mapping, "__dict__", {}).items():
        if isinstance(value, _PLAIN):
            yield name, value
        elif not (name.startswith("_") or _has_items(value, mapping) or _is_item(name, value, mapping)):
            kind = f"{type(mapping).__module__}.{type(mapping).__qualname__}"
            raise ConfigError(
                f"a {kind} has an attribute {name!r} of type {type(value).__name__} that is none of its "
                "items, so that its copies would be without it; put it among the items, or register the "
                "class with torch.utils._pytree.register_pytree_node"
            )


def _has_items(value: object, mapping: Any) -> bool:
    if not isinstance(value, Mapping) or list(value) != list(mapping):
        return False
    return all(value[key] is mapping[key] for key in mapping)


def _is_item(name: str, value: object, mapping: Any) -> bool:
    return name in mapping and mapping[name] is value
