"""How often state is copied to memory: by what copies and steps take, alike on all workers."""

from __future__ import annotations

import pytest

from counterflow.training.supervision.restarts import SHARE, CopyTurns


def run(turns: CopyTurns, steps: int, *, step: float, held: float, late: float) -> list[int]:
    """After which of so many steps copies are made; a copy holds its worker and makes the next step late."""
    found = []
    for number in range(steps):
        turns.stepped(number, step + late * (number in found))
        if turns.due(number + 1):
            turns.copied(number + 1, held)
            found.append(number + 1)
        turns.agree([turns.row(), [0.0, 2 * step]])
    return found


@pytest.mark.parametrize(
    ("held", "late", "expected"),
    [
        (0.0, 0.0, [2, 4, 6, 8, 10, 12]),
        (0.05, 0.0, [2, 4, 6, 8, 10, 12]),
        (0.2, 0.0, [2, 6, 10]),
        (0.125, 0.125, [2, 7, 12]),
        (2.0, 0.0, [2]),
    ],
)
def test_copies_take_a_part_of_the_time(held: float, late: float, expected: list[int]) -> None:
    assert run(CopyTurns(None, 0), 12, step=1.0, held=held, late=late) == expected
    made = run(CopyTurns(None, 0), 1_000, step=1.0, held=held, late=late)
    assert (held + late) * len(made) <= SHARE * 1_000


def test_what_is_given_is_done() -> None:
    assert run(CopyTurns(3, 1), 10, step=1.0, held=9.0, late=9.0) == [3, 6, 9]


def test_the_slowest_copy_and_the_fastest_step_decide() -> None:
    turns = CopyTurns(None, 0)
    turns.agree([[0.2, 1.0], [0.4, 2.0]])
    assert turns.interval == 8
    turns.agree([[0.0, 1.0], [0.0, 2.0]])  # nothing is known
    assert turns.interval == 8
