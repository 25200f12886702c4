"""Cases of a long table that a run takes."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from . import tables
from .tables import left_out, spread


class Case(pytest.Function):
    """A case with the numbers of its parameters."""

    def __init__(self, test: str, *numbers: int) -> None:
        self.test, self.numbers = test, numbers
        self.callspec: Any = SimpleNamespace(indices=dict(enumerate(numbers)))

    @classmethod
    def from_parent(cls, parent: Any, **options: Any) -> Any:
        """Make a case without a tree of tests."""
        case = cls.__new__(cls)
        case.__init__(parent, *options["numbers"])  # type: ignore[misc]
        return case

    @property
    def nodeid(self) -> str:
        """Name of the test with its parameters."""
        return f"{self.test}[{'-'.join(map(str, self.numbers))}]"

    def get_closest_marker(self, name: str, default: Any = None) -> Any:
        """No marker."""
        del name
        return default


TESTS = ("long", 3, 3), ("short", 2), ("single", 1), ("none", 2)


def cases(test: str, *counts: int) -> list[Case]:
    rows = product(*(range(count) for count in counts))
    return [Case.from_parent(test, numbers=numbers) for numbers in rows]


def test_each_value_is_taken_before_a_second_pair() -> None:
    rows = cases("a", 4, 4, 2)
    taken = [case.numbers for case in spread(rows, 4)]
    assert [{row[place] for row in taken} for place in range(3)] == [{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1}]
    pairs = {(row[0], row[1]) for row in (case.numbers for case in spread(rows, 16))}
    assert len(pairs) == 16
    assert spread(rows, 99) == rows
    assert [case.numbers for case in spread(rows, 1)] == [(0, 0, 0)]


def test_limits_are_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short, single, none = (cases(name, *counts) for name, *counts in TESTS)
    monkeypatch.setattr(tables, "WHOLE", False)
    omitted = left_out([*long, *short, *single, *none], {"long": 3, "single": 1, "none": 0})
    assert [case for case in omitted if case in none] == none
    assert len([case for case in omitted if case in long]) == 6
    assert len(omitted) == 8
    without_first = {"long": 3, "long[0-0]": 0, "short[1]": 0}
    taken = [case for case in [*long, *short] if case not in left_out([*long, *short], without_first)]
    assert [{case.numbers[place] for case in taken[:3]} for place in range(2)] == [{0, 1, 2}] * 2
    assert [case.nodeid for case in taken if case in [long[0], *short]] == ["short[0]"]
    monkeypatch.setattr(tables, "WHOLE", True)
    assert left_out(long, {"long": 3}) == []
