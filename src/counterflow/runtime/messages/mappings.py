"""Mappings of any class (a tokenizer's ``BatchEncoding``, a ``UserDict``) as trees of their items.

Torch's pytrees look into dicts of some classes only. A class of mappings that one meets is registered with
them here, once in a process, if the class makes an equal mapping of a dict.

Invariant: what is put together again has the items and the plain attributes of what was taken apart.
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

from counterflow.errors import ConfigError

PLAIN: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""What has no samples in it."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Keys(NamedTuple):
    """What a mapping is beside its values.

    Attributes:
        names: its keys.
        attributes: its plain attributes, by name.
    """

    names: tuple[Any, ...]
    attributes: tuple[tuple[str, Any], ...]


_lock = threading.Lock()
_known: set[type] = set()


def know(tree: object) -> bool:
    """Let torch's pytrees look into all mappings of a tree.

    Returns:
        Whether there is one into which they did not look before.

    Raises:
        ConfigError: one has an attribute that is neither plain nor an item.
    """
    if isinstance(tree, Tensor):
        return False
    found = [
        leaf
        for leaf in pytree.tree_leaves(tree)
        if not isinstance(leaf, Tensor) and isinstance(leaf, Mapping) and _registered(leaf)
    ]
    for mapping in found:
        know(mapping)
    return bool(found)


def flat_with_paths(
    tree: object, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """A tree's leaves, each with its path, and the tree's structure.

    If a class is registered without a function for its leaves' names, the leaves are numbered.
    """
    try:
        found, spec = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError:  # no flatten_with_keys_fn
        leaves, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
        return [(f" (its tensor or value {number})", leaf) for number, leaf in enumerate(leaves)], spec
    return [(pytree.keystr(path), leaf) for path, leaf in found], spec


def names_of(spec: pytree.TreeSpec) -> list[Any] | None:
    """The keys of a tree's root, if that is a mapping."""
    if isinstance(spec.context, Keys):
        return list(spec.context.names)
    return list(spec.context) if spec.type in (dict, OrderedDict) else None


def _registered(mapping: Mapping[Any, Any]) -> bool:
    """Whether torch's pytrees look into this class, which they did not."""
    kind = type(mapping)
    with _lock:
        if kind in _known:
            return True
        try:
            made: Any = kind(dict(mapping))  # type: ignore[call-arg]
            same = type(made) is kind and list(made) == list(mapping)
            same = same and all(made[key] is mapping[key] for key in mapping)
        except Exception:  # a class of the user's: whatever it raises, it cannot be made
            return False
        if same:
            pytree.register_pytree_node(kind, _flat, _of(kind), flatten_with_keys_fn=_flat_with_keys)
            _known.add(kind)
        return same


def _flat(mapping: Any) -> tuple[list[Any], Keys]:
    keys = tuple(mapping)
    return [mapping[key] for key in keys], Keys(keys, tuple(_attributes(mapping)))


def _flat_with_keys(mapping: Any) -> tuple[list[tuple[Any, Any]], Keys]:
    values, keys = _flat(mapping)
    return [(pytree.MappingKey(key), value) for key, value in zip(keys.names, values, strict=True)], keys


def _of(kind: Any) -> Any:
    def made(values: Iterable[Any], keys: Keys) -> Any:
        found = kind(dict(zip(keys.names, values, strict=True)))
        if keys.attributes:
            vars(found).update(keys.attributes)
        return found

    return made


def _attributes(mapping: Any) -> Iterable[tuple[str, Any]]:
    """The plain attributes; of the others, those that hold the items, or are private, its class makes."""
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
    """Whether it is where a mapping has its items."""
    if not isinstance(value, Mapping) or list(value) != list(mapping):
        return False
    return all(value[key] is mapping[key] for key in mapping)


def _is_item(name: str, value: object, mapping: Any) -> bool:
    return name in mapping and mapping[name] is value
