"""Occasions that become rarer: a check in steps 0, 1, 2, 4, 8 and so on costs a long run nothing."""

from __future__ import annotations


def is_doubling(number: int) -> bool:
    """Return whether a number of a step or a call is 0 or a power of two.

    >>> [number for number in range(20) if is_doubling(number)]
    [0, 1, 2, 4, 8, 16]
    """
    return not number & (number - 1)


def rechecks(step: int) -> bool:
    """Return whether a step, counted from 0, repeats checks that earlier steps passed.

    The first update changes weights and gates that were zero, behind which a check sees nothing.

    >>> [step for step in range(20) if rechecks(step)]
    [0, 1, 3, 7, 15]
    """
    return is_doubling(step + 1)
