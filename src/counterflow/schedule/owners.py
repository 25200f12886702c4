"""Which holder of a parameter updates it where optimiser state is sharded: ZeRO stage 1.

Invariant: every parameter has one owner among those who hold it, and all who ask with the same parameters in
the same order get the same answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence


def owners(sizes: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """Share parameters out among their holders: the largest first, each to the one who has least by then.

    Whole parameters, so that an optimiser that looks at one at a time makes the same numbers wherever it
    runs; as torch's ``ZeroRedundancyOptimizer`` does. Where two have as little, the lower number gets it.

    >>> owners([(4, (0, 3)), (9, (0, 3)), (5, (0, 3)), (2, (1,))])
    [3, 0, 3, 1]

    Args:
        sizes: of each parameter its bytes and the numbers of its holders.

    Returns:
        Of each parameter its owner.

    Source: Rajbhandari et al. 2020, ZeRO, section 5.1.
    """
    every = list(sizes)
    owned: dict[int, int] = defaultdict(int)
    found = [0] * len(every)
    for index in sorted(range(len(every)), key=lambda i: (-every[i][0], i)):
        size, holders = every[index]
        found[index] = owner = min(holders, key=lambda one: (owned[one], one))
        owned[owner] += size
    return found
