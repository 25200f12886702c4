"""Filled templates are the trees that torch builds, and survive copies and pickling."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from counterflow.capture.placeholders import (
    Around,
    Member,
    OfDevice,
    OfDtype,
    PlaceholderSlice,
    Ref,
    Size,
    Template,
)

X, W = torch.ones(2), torch.zeros(3)
AROUND = Around({Ref(0, 0): X}, {"w": W}, {0: 6, 1: 5}, torch.bfloat16, torch.device("cpu"))


class Pair(NamedTuple):
    first: Any
    second: Any


HALF = Size((0,), Fraction(1, 2))
LEAVES = [
    (Ref(0, 0), X),
    (Member("w"), W),
    (Size((0,), Fraction(1)), 6),
    (Size((0, 1), Fraction(2), Fraction(-1)), 59),
    (HALF, 3),
    (Size((1,), Fraction(1, 2), kind=float), 2.5),
    (Size((), Fraction(1), Fraction(3)), 4),
    (OfDtype(), torch.bfloat16),
    (OfDtype("min"), torch.finfo(torch.bfloat16).min),
    (OfDevice(), torch.device("cpu")),
    (PlaceholderSlice(None, HALF, 2), slice(None, 3, 2)),
    ("text", "text"),
    (None, None),
    (7, 7),
]


@pytest.mark.parametrize(("leaf", "value"), LEAVES, ids=repr)
def test_a_leaf_is_filled_with_its_value(leaf: object, value: object) -> None:
    template = Template([leaf], pytree.tree_structure(((0,), {})))
    (filled,), named = template.filled(AROUND)
    assert (filled is value) if isinstance(value, torch.Tensor) else (filled == value)
    assert type(filled) is type(value)
    assert named == {}


TREES = [
    ((), {}),
    ((0, [1, (2, 3)], {"b": 4, "a": [5]}), {"z": 6, "y": (7, {})}),
    ((Pair(0, [1]), slice(1, 2)), {"ordered": OrderedDict(b=2, a=3)}),
    (({"pair": Pair({"x": 1}, ())},), {"many": [[], [4]]}),
]


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch's own, when it restores a spec
@pytest.mark.parametrize("tree", TREES, ids=repr)
@pytest.mark.parametrize("change", [lambda t: t, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_tree_is_built_as_torch_builds_it(tree: Any, change: Any) -> None:
    leaves, spec = pytree.tree_flatten(tree)
    marked = [HALF if index % 2 else leaf for index, leaf in enumerate(leaves)]
    values = [3 if index % 2 else leaf for index, leaf in enumerate(leaves)]
    template = change(Template(marked, spec))
    for _ in range(2):
        filled = template.filled(AROUND)
        expected = pytree.tree_unflatten(values, spec)
        assert filled == expected
        assert pytree.tree_structure(filled) == spec
        assert str(filled) == str(expected)  # the order of keys, too


class Checked(Pair):
    """A tuple that looks at what it contains."""

    def __new__(cls, first: Any, second: Any) -> Checked:
        assert isinstance(first, torch.Tensor)
        return super().__new__(cls, first, min(second, 1))


def test_a_user_s_tuple_is_made_of_values_alone() -> None:
    spec = pytree.tree_structure(((Checked(X, 0),), {}))
    template = Template([Ref(0, 0), HALF], spec)
    (filled,), _ = template.filled(AROUND)
    assert type(filled) is Checked
    assert filled.first is X
    assert filled.second == 1


def test_each_call_gets_lists_and_dicts_of_its_own() -> None:
    template = Template(*pytree.tree_flatten((([1, 2], {"a": 3}), {})))
    (first, _), _ = template.filled(AROUND)
    first.append(9)
    assert template.filled(AROUND) == (([1, 2], {"a": 3}), {})
