"""Dtypes and limits of dtypes that follow the weights, apart from those that the user's code names.

A run whose weights have another dtype (a mark) shows which dtypes follow the weights. A run in the weights'
own dtype shows the dtypes that the user's code names itself, which may be the mark's: these stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

import torch

from .call_arguments import PLAIN
from .placeholders import OfDtype, PlaceholderSlice, Size, Template
from .record import Record, RecordedCall
from .sizes import Varies, equal_values

MARKS = (torch.float64, torch.bfloat16, None)
"""Dtypes of fake weights; everything of this dtype then depends on the weights' dtype.

Modules may not accept the first; None: weights have their own dtype, and dtypes are those of the example.
"""

_LIMITS = ("min", "max", "eps", "tiny")
"""Numbers of a dtype that ``torch.finfo`` provides."""


def following(mark: torch.dtype | None) -> dict[Any, OfDtype]:
    """Dtype and limits that appear in a marked run, and what each stands for."""
    if mark is None:
        return {}
    return {mark: OfDtype(), **{getattr(torch.finfo(mark), name): OfDtype(name) for name in _LIMITS}}


def with_named_dtypes(
    marked: Record, unmarked: Record, dtype: torch.dtype, sizes: Mapping[int, int]
) -> Record:
    """A marked record, with the dtypes that the user's code names.

    Args:
        marked: record of a run with marked weights.
        unmarked: record of a run whose weights have their own dtype.
        dtype: this dtype.
        sizes: free sizes of the unmarked run.

    Raises:
        VariesByDtype: the runs take different steps, or a number is another one that is no limit of a dtype;
            so these depend on the weights' dtype.
    """
    if len(marked.steps) != len(unmarked.steps):
        raise VariesByDtype("it takes other steps")
    names = _Names(dtype, sizes)
    steps = list(starmap(names.step, zip(marked.steps, unmarked.steps, strict=True)))
    return replace(marked, steps=steps, output=names.template(marked.output, unmarked.output))


class VariesByDtype(Varies):
    """A model whose forward depends on the weights' dtype otherwise than by a dtype or its limit."""


class _Names:
    def __init__(self, dtype: torch.dtype, sizes: Mapping[int, int]) -> None:
        self._dtype, self._sizes = dtype, sizes

    def step(self, marked: RecordedCall, unmarked: RecordedCall) -> RecordedCall:
        kinds = {(s.module, s.function, s.inside, s.leaves, s.gives, s.within) for s in (marked, unmarked)}
        if len(kinds) > 1:
            raise VariesByDtype("it takes other steps", marked.inside)
        return replace(marked, takes=self.template(marked.takes, unmarked.takes))

    def template(self, marked: Template, unmarked: Template) -> Template:
        if marked.spec != unmarked.spec:
            raise VariesByDtype("it returns another structure")
        leaves = list(starmap(self._leaf, zip(marked.parts, unmarked.parts, strict=True)))
        return Template(leaves, marked.spec)

    def _leaf(self, marked: Any, unmarked: Any) -> Any:
        if isinstance(marked, PlaceholderSlice) and isinstance(unmarked, PlaceholderSlice):
            return PlaceholderSlice(
                self._leaf(marked.start, unmarked.start),
                self._leaf(marked.stop, unmarked.stop),
                self._leaf(marked.step, unmarked.step),
            )
        if isinstance(marked, OfDtype):
            limits = torch.finfo(self._dtype)
            expected = getattr(limits, marked.limit) if marked.limit else self._dtype
            return marked if unmarked == expected else unmarked
        if isinstance(unmarked, torch.dtype):
            return unmarked
        number = marked.of(self._sizes) if isinstance(marked, Size) else marked
        plain = isinstance(number, PLAIN) and isinstance(unmarked, PLAIN)
        if plain and not equal_values(number, unmarked):
            raise VariesByDtype(f"{number!r} is {unmarked!r} for weights of another dtype")
        return marked
