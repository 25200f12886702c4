"""How much of a table of several dimensions a run of the tests takes.

In ``make test`` the values of the shortest dimension take turns, and tests/slow.txt limits the cases of tests
that take long; a run of some folders or files knows no limits. ``make test-whole`` takes all, and
benchmarks/results/tests_whole.txt keeps its result.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar
from zlib import crc32

import pytest

_Case = TypeVar("_Case", bound=pytest.Function)

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


def left_out(items: Iterable[pytest.Item], limits: Mapping[str, int]) -> list[pytest.Item]:
    """Return the cases that are not taken; one that is asked for by its name is.

    Args:
        items: the cases.
        limits: largest number of cases by test; 0 by case that is not taken.
    """
    if WHOLE:
        return []
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            cases[item.nodeid.partition("[")[0]].append(item)
    taken: set[pytest.Function] = set()
    for test, all_cases in cases.items():
        rows = _turns_of(test, all_cases) if all_cases[0].get_closest_marker("table") else all_cases
        rows = [case for case in rows if limits.get(case.nodeid, 1) or len(all_cases) == 1]
        count = limits.get(test, len(rows))
        taken.update(rows if count >= len(rows) else spread(rows, count))
    return [case for rows in cases.values() for case in rows if case not in taken]


def _turns_of(test: str, cases: list[pytest.Function]) -> list[pytest.Function]:
    # The numbers that a decorator gives to its values are one dimension, also where it has several names.
    columns = {tuple(case.callspec.indices[name] for case in cases) for name in cases[0].callspec.indices}
    rows = dict(zip(zip(*sorted(columns), strict=True), cases, strict=True))
    dimensions = [sorted(set(column)) for column in sorted(columns)]
    if len(rows) < len(list(product(*dimensions))):
        return cases
    return [rows[row] for row in table(*dimensions, of=test)]


def spread(cases: Sequence[_Case], count: int) -> list[_Case]:
    """Choose cases whose parameters have as many different values as possible, then as many pairs of them."""
    left, taken, seen = list(cases), list[_Case](), set[Any]()
    while left and len(taken) < count:
        best = max(left, key=lambda case: [len(each - seen) for each in _values(case)])  # the first of equals
        left.remove(best)
        taken.append(best)
        seen.update(*_values(best))
    return [case for case in cases if case in taken]


def _values(case: pytest.Function) -> tuple[set[Any], set[Any]]:
    values = sorted(case.callspec.indices.items()) if hasattr(case, "callspec") else []
    return set(values), set(combinations(values, 2))
