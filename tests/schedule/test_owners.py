"""Who updates which parameter, where optimiser state is sharded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterflow.schedule.owners import owners


def test_the_largest_go_first_each_to_who_has_least() -> None:
    assert owners([(10, (0, 1)), (7, (0, 1)), (6, (0, 1)), (3, (0, 1))]) == [0, 1, 1, 0]
    assert owners([(4, (2, 5))] * 4) == [2, 5, 2, 5]
    assert owners([(4, (3,)), (4, (1, 3)), (1, (1, 3))]) == [3, 1, 1]
    assert owners([]) == []


@given(st.lists(st.tuples(st.integers(0, 99), st.sets(st.integers(0, 5), min_size=1).map(sorted))))
def test_every_parameter_has_one_of_its_holders(sizes: list[tuple[int, list[int]]]) -> None:
    found = owners(sizes)
    assert all(owner in holders for owner, (_, holders) in zip(found, sizes, strict=True))
    assert owners(sizes) == found


@given(st.lists(st.integers(1, 99), min_size=1), st.integers(1, 6))
def test_no_two_holders_of_the_same_differ_by_more_than_one_parameter(sizes: list[int], count: int) -> None:
    found = owners([(size, range(count)) for size in sizes])
    loads = [
        sum(size for size, owner in zip(sizes, found, strict=True) if owner == one) for one in range(count)
    ]
    assert max(loads) - min(loads) <= max(sizes)
