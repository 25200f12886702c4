"""Numbers of a record that depend on the free sizes of the example, by runs with other sizes.

A number that is the same in all runs is a constant; any other has to be a multiple of a product of sizes,
plus a constant, in all runs. Nothing is assumed about how a module uses its sizes.

Invariant: if runs differ in anything else, the sizes are not free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from .example_call import Example
from .placeholders import OfDtype, PlaceholderSlice, Size, Template
from .record import Record, RecordedCall


class Varies(Exception):  # noqa: N818 - nothing is wrong with the model
    """A model that takes another path for other sizes.

    Args:
        why: what it does.
        paths: paths of the opened modules that do it; empty: the model itself.
    """

    def __init__(self, why: str, *paths: str) -> None:
        super().__init__(why)
        self.paths = frozenset(paths) if all(paths) else frozenset()


def sizes_of(example: Example) -> dict[int, int]:
    """The size of each group of free dimensions in the example."""
    return {
        group: leaf.shape[dim]
        for leaf, free in zip(example.leaves, example.free, strict=True)
        if isinstance(leaf, Tensor)
        for dim, group in free
    }


def other_sizes(example: Example) -> list[dict[int, int]]:
    """Other sizes to try, with which any two groups change differently.

    Numbers of samples are multiples of the example's, because a model may merge frames of samples; lengths
    are shorter, because it may have no positions for longer ones.
    """
    sizes = sizes_of(example)
    samples = {g for free in example.free for n, (dim, g) in enumerate(free) if not n}
    if not sizes:
        return []
    candidates = []
    for run in (1, 2, 3):
        tried = {}
        for number, (group, size) in enumerate(sorted(sizes.items())):
            if group in samples:
                tried[group] = size * (run + 1)
            else:
                shorter = (run + number) % 4
                tried[group] = size - shorter if size > 4 else size + shorter
        candidates.append(tried)
    return candidates


def merged(records: Sequence[Record], sizes: Sequence[Mapping[int, int]]) -> Record:
    """The first record, with numbers that differ between records as ``Size``.

    Raises:
        Varies: a number changes that depends on no size.
    """
    first = records[0]
    if varying := _varying(records):
        raise Varies("it takes other steps", *varying)
    for record in records[1:]:
        for step, second in zip(first.steps, record.steps, strict=False):
            if (step.module, step.function, step.inside) != (second.module, second.function, second.inside):
                deepest = max(step.inside, second.inside, key=len)
                raise Varies("it takes other steps", deepest)
    if len({len(record.steps) for record in records}) > 1:
        raise Varies("it takes other steps")
    if any(record.inputs != first.inputs for record in records):
        raise Varies("it takes other inputs")
    fit = _Fit(sizes)
    steps = fit.steps([record.steps for record in records])
    output = fit.template([record.output for record in records])
    shapes = {
        ref: (fit.shape([r.shapes[ref][0] for r in records]), first.shapes[ref][1]) for ref in first.shapes
    }
    return replace(first, steps=steps, output=output, shapes=shapes)


def refuse_differences(record: Record, run: Record, sizes: Mapping[int, int]) -> None:
    """Compare a record with a run of the model with some sizes.

    Args:
        record: the record.
        run: steps of the run.
        sizes: size of each group of free dimensions in the run.

    Raises:
        Varies: the run is not what the record says for these sizes.
    """
    if len(record.steps) != len(run.steps):
        raise Varies("it takes other steps")
    for step, run_step in zip(record.steps, run.steps, strict=True):
        if replace(step, takes=run_step.takes) != run_step:
            raise Varies("it takes other steps", step.inside)
        _refuse_other_leaves(step.takes, run_step.takes, sizes)
    _refuse_other_leaves(record.output, run.output, sizes)
    for name, tensor in record.constants.items():
        run_tensor = run.constants.get(name)
        if run_tensor is None or not _equal_tensors(tensor, run_tensor):
            raise Varies("it uses another tensor")


def _refuse_other_leaves(template: Template, run_template: Template, sizes: Mapping[int, int]) -> None:
    if template.spec != run_template.spec:
        raise Varies("it passes another structure")
    for leaf, run_leaf in zip(template.leaves(), run_template.leaves(), strict=True):
        expected = leaf.of(sizes) if type(leaf) is Size else leaf
        of_dtype = isinstance(leaf, (OfDtype, torch.dtype)) or isinstance(run_leaf, OfDtype)
        known = of_dtype or (type(expected) is PlaceholderSlice and type(run_leaf) is PlaceholderSlice)
        if not known and (type(expected) is not type(run_leaf) or not equal_values(expected, run_leaf)):
            raise Varies(f"{expected!r} is {run_leaf!r}")


def _equal_tensors(tensor: Tensor, second: Tensor) -> bool:
    return tensor is second or (
        tensor.shape == second.shape and tensor.dtype == second.dtype and tensor.equal(second)
    )


def _varying(records: Sequence[Record]) -> set[str]:
    by_record = []
    for record in records:
        calls: dict[str, list[object]] = {}
        for step in record.steps:
            calls.setdefault(step.inside, []).append((step.module, step.function))
        by_record.append(calls)
    paths = set().union(*by_record)
    return {path for path in paths if any(calls.get(path) != by_record[0].get(path) for calls in by_record)}


class _Fit:
    def __init__(self, sizes: Sequence[Mapping[int, int]]) -> None:
        self._sizes = sizes
        groups = sorted(sizes[0])
        self._products = [part for n in range(1, len(groups) + 1) for part in combinations(groups, n)]

    def steps(self, of_records: Sequence[Sequence[RecordedCall]]) -> list[RecordedCall]:
        steps: list[RecordedCall] = []
        errors: dict[str, str] = {}
        for same in zip(*of_records, strict=True):
            try:
                steps.append(self._step(same))
            except Varies as error:
                errors.setdefault(same[0].inside, str(error))
        if errors:
            raise Varies(next(iter(errors.values())), *errors)
        return steps

    def _step(self, steps: Sequence[RecordedCall]) -> RecordedCall:
        first = steps[0]
        kinds = {(s.leaves, s.gives, s.within, s.attentions) for s in steps}
        if len(kinds) > 1:
            raise Varies("it takes other steps")
        return replace(first, takes=self.template([step.takes for step in steps]))

    def template(self, templates: Sequence[Template]) -> Template:
        first = templates[0]
        if any(t.spec != first.spec for t in templates):
            raise Varies("it returns another structure")
        leaves = [self.leaf(leaves_at) for leaves_at in zip(*(t.parts for t in templates), strict=True)]
        return Template(leaves, first.spec)

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        if len({len(shape) for shape in shapes}) > 1:
            raise Varies("a tensor has other dimensions")
        fitted = []
        for sizes in zip(*shapes, strict=True):
            try:
                fitted.append(self.leaf(sizes))
            except Varies:
                fitted.append(None)  # unused, or a step's number would vary as well
        return tuple(fitted)

    def leaf(self, leaves: Sequence[Any]) -> Any:
        first = leaves[0]
        if all(type(leaf) is type(first) and equal_values(leaf, first) for leaf in leaves):
            return first
        if all(type(leaf) is PlaceholderSlice for leaf in leaves):
            ends = ([getattr(leaf, name) for leaf in leaves] for name in ("start", "stop", "step"))
            return PlaceholderSlice(*map(self.leaf, ends))
        kind = type(first)
        if kind in (int, float) and all(type(leaf) is kind and isfinite(leaf) for leaf in leaves):
            for groups in self._products:
                size = self._fitted(groups, leaves)
                if size is not None:
                    return size
        raise Varies(f"{first!r} is {leaves[1]!r} for other sizes")

    def _fitted(self, groups: tuple[int, ...], leaves: Sequence[int] | Sequence[float]) -> Size | None:
        numbers = [Fraction(number) for number in leaves]
        products = [prod(sizes[group] for group in groups) for sizes in self._sizes]
        differing = next((n for n, product in enumerate(products) if product != products[0]), None)
        if differing is None:
            return None
        factor = (numbers[differing] - numbers[0]) / (products[differing] - products[0])
        more = numbers[0] - factor * products[0]
        kind = type(leaves[0])
        if kind is int and more.denominator != 1:
            return None
        exact = all(
            factor * product + more == number for product, number in zip(products, numbers, strict=True)
        )
        return Size(groups, factor, more, kind) if exact and factor else None


def equal_values(first: Any, second: Any) -> bool:
    """Tell whether two runs have the same value; NaN is NaN."""
    try:
        return first is second or bool(first == second) or bool(first != first and second != second)  # noqa: PLR0124
    except Exception:  # of a user's class
        return False
