"""Arguments and functions of recorded calls: which are constants, which draw, which no step can repeat."""

from __future__ import annotations

import enum
from collections import Counter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.common.containers import ContainerEntries, containers_in
from counterflow.common.trees import tensors_in, version_of

ABSENT = object()
"""Value of an attribute that does not exist."""

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.layout, torch.memory_format, torch.dtype, torch.device),
)


def same(value: object, old: object) -> bool:
    """Tell whether an attribute is the same object as before, or an equal plain value."""
    return value is old or (isinstance(value, PLAIN) and value == old)


DRAWING = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_"),
    *(
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "poisson",
        "binomial",
        "dropout",
        "alpha_dropout",
        "uniform_",
    ),
    *("exponential_", "random_", "cauchy_", "geometric_", "log_normal_", "rrelu", "gumbel_softmax"),
}
"""Functions of torch that draw random numbers."""

UNSEEN = {
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "backward",
    "numpy",
    "data_ptr",
}
"""Methods of tensors whose effect no step contains."""


def is_constant(leaf: Any) -> bool:
    """Check that a value is the same in every run: numbers, texts, types, functions of modules."""
    if isinstance(leaf, (FunctionType, BuiltinFunctionType)):
        return not getattr(leaf, "__closure__", None)
    return isinstance(leaf, (*PLAIN, type)) or leaf is Ellipsis


def versions(tree: Any) -> list[tuple[Tensor, int]]:
    """Tensors of a tree, each with torch's count of its changes."""
    return [(tensor, version_of(tensor)) for tensor in tensors_in(tree)]


def shared_containers(arguments: Any) -> ContainerEntries:
    """Lists and dicts that arguments contain twice, which a recorded call would make two."""
    containers = list(containers_in(arguments))
    counts = Counter(map(id, containers))
    return ContainerEntries([container for container in containers if counts[id(container)] > 1])


def sizes_as_tuples(tree: Any) -> Any:
    """A tree with tuples in place of ``torch.Size``."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(map(sizes_as_tuples, tree))
    if kind is dict:
        return {name: sizes_as_tuples(part) for name, part in tree.items()}
    if isinstance(tree, (Tensor, *PLAIN)):
        return tree
    return pytree.tree_map_only(torch.Size, tuple, tree, is_leaf=lambda x: isinstance(x, torch.Size))
