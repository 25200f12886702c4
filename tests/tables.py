"""How much of a table of several dimensions a run of the tests takes.

In ``make test`` the values of the shortest dimension take turns; ``make test-whole`` takes all combinations,
and benchmarks/results/tests_whole.txt keeps what that said.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any
from zlib import crc32

import pytest

WHOLE = bool(os.environ.get("WHOLE"))
"""Whether all combinations are taken."""


def table(*dimensions: Iterable[Any], of: str = "") -> list[tuple[Any, ...]]:
    """Combinations of one value of each dimension: those of the shortest take turns.

    So all combinations of the others are there, each value of the shortest, and with three dimensions or more
    each pair of values.

    Args:
        dimensions: the values of each.
        of: what is tested. Where several tests take the same two dimensions, other values meet in each.
    """
    values = [list(dimension) for dimension in dimensions]
    rows = list(product(*(range(len(choices)) for choices in values)))
    if not WHOLE:
        place = min(range(len(values)), key=lambda number: len(values[number]))
        count, turn = len(values[place]), crc32(of.encode())
        rows = [row for row in rows if (turn + sum(row) - 2 * row[place]) % count == 0]
    return [tuple(choices[at] for choices, at in zip(values, row, strict=True)) for row in rows]


def turns(rows: Sequence[Sequence[Any]], share: int = 1) -> list[Any]:
    """All values of all rows; in ``make test`` one of each row, whose places take turns.

    Args:
        rows: values of each.
        share: ``make test`` takes one row of so many.
    """
    if WHOLE:
        return [value for row in rows for value in row]
    return [row[number % len(row)] for number, row in enumerate(rows[::share]) if row]


def examples(count: int) -> int:
    """How many examples of a property are drawn: all of ``count``, or half."""
    return count if WHOLE else (count + 1) // 2


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The cases of tests marked as tables that are not taken; one that is asked for by its name is."""
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("table"):
            cases[item.nodeid.partition("[")[0]].append(item)
    return [case for test, all_cases in cases.items() for case in _left_out(test, all_cases)]


def _left_out(test: str, cases: list[pytest.Function]) -> list[pytest.Function]:
    # The numbers that a decorator gives to its values are one dimension, also where it has several names.
    columns = {tuple(case.callspec.indices[name] for case in cases) for name in cases[0].callspec.indices}
    rows = dict(zip(zip(*sorted(columns), strict=True), cases, strict=True))
    dimensions = [sorted(set(column)) for column in sorted(columns)]
    if len(rows) < len(list(product(*dimensions))):
        return []
    taken = set(table(*dimensions, of=test))
    return [case for row, case in rows.items() if row not in taken]
