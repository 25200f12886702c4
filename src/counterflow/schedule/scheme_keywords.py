"""Keywords for the options of schemes, by which type checkers report a misspelt one.

Invariant: the keys are the options of all schemes (``registry.options``). Options of a user's own scheme are
passed to its function, or to ``registry.build``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class Sizes(TypedDict, total=False):
    """Options of the schemes by name."""

    stages: int
    workers: int
    micro_batches: int
    slices: int | str | Sequence[int]
    split: bool
    groups: int
    chunks: int
    periods: int
    pairs: int
    concat: Literal["direct", "forward-doubling", "backward-halving"]
    waves: int
    injected: int | Literal["max"]
    early_forwards: int
    asymmetric: bool
