"""Occasions that become rarer: a check in steps 0, 1, 2, 4, 8 and so on costs a long run nothing."""

from __future__ import annotations


def is_doubling(number: int) -> bool:
    """Return whether a number of a step or a call is 0 or a power of two.

    >>> [number for number in range(20) if is_doubling(number)]
    [0, 1, 2, 4, 8, 16]
    """
    return not number & (number - 1)
