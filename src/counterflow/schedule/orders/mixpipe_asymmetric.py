"""Two-way orders for N = D micro-batches that are shorter than every symmetric order with the same peak.

Each is proved to be the shortest of all orders that send half of the micro-batches down and half up and stash
at most ``peak`` activations on a worker, by ``benchmarks/mixpipe_asymmetric.py``, which writes the table by
depth and peak. F = 1, B = 2, messages 0. With all other peaks a symmetric order is as short, up to D = 12.

A word is the order of one worker, from the first to the last: ``F`` and ``B`` of the down pipe, ``f`` and
``b`` of the up pipe, each for the next micro-batch of its pipe.
"""

from __future__ import annotations

ASYMMETRIC: dict[tuple[int, int], tuple[str, ...]] = {
    (6, 3): (
        "FFfbfbFBfbBB",
        "FffbFbBFfbBB",
        "FffbBFbfFbBB",
        "fFfBbfFbFBBb",
        "ffFBfbFbFBBb",
        "ffFBfbFBFBbb",
    ),
    (8, 3): (
        "FFfbfbFBfbFBfbBB",
        "FffbFbFBfbFBfbBB",
        "FffbFbBFfbFBfBbB",
        "FffbBFbfFbBFfBbB",
        "fFfBbfFbFBbfFBBb",
        "ffFBfbFbFBfbBFBb",
        "ffFBfbFbBFfBbFBb",
        "ffFBfbFBbfFBbFBb",
    ),
    (10, 3): (
        "FFfbfbFBfbFBFBfbfbBB",
        "FffbFbFBfbFBBFfbfBbB",
        "FffbFbFBfbFBBfFbfBbB",
        "FffbFbBFfbFBBfFBfbbB",
        "FffbBFbfFbFBBfFBfbbB",
        "fFfBbFfbFBFBfbBFfbBb",
        "ffFBfbFbFBBFfbBfFbBb",
        "ffFBfbFbFBBfFBbfFBbb",
        "ffFBfbFbFBBfFBfbFBbb",
        "ffFBfbFBFBbfFBfbFBbb",
    ),
    (10, 5): (
        "FFFFfbfbfbFBfbfbBBBB",
        "FFFffbfbFbFBfbfbBBBB",
        "FFfffbFbFbBFfBfbbBBB",
        "FFfffbFbFBbfFBfbbBBB",
        "FfFffbBFbFbfBFfbBBbB",
        "fFffFBbBFbfFbfFBBbBb",
        "fffFFBfBbFbFfbFBBBbb",
        "fffFFBfBbfFbFbFBBBbb",
        "fffFFBfBfbFbFBFBbBbb",
        "ffffFBFBfbFBFBFBbbbb",
    ),
    (12, 3): (
        "FFfbFBfbfbBFFBfbFBfbfbBB",
        "FFfbFBfBfbbFFBfbFBfbfbBB",
        "FFfbFBfBfbbFFBfbFBfBfbbB",
        "FFfbFBfBfbbFFBfbFBfBfbbB",
        "FFfbFBfBfbbFFBfbBFfBfbbB",
        "FfFbBFfBfbbFBFfBbfFBfbbB",
        "fFFBfBbFfbBFbfFBfBbfFbBb",
        "fFFBfBfbFBfbFbFBfBfbFBbb",
        "fFFBfBfbFBfbFbFBfBfbFBbb",
        "fFFBfBfbFBfbFbFBfBfbFBbb",
        "fFFBfBfbFBfbFbBFfBfbFBbb",
        "ffFBFBfbFBfbFBbfFBfbFBbb",
    ),
    (12, 5): (
        "FFFFfbfbfbfbfbFBFBfbBBBB",
        "FFFffbfbbffbFbFBFBfbBBBB",
        "FFfffbFbbffbFBFbFBfbBBBB",
        "FFfffbFbbffBbFBFbFfbBBBB",
        "FFfffbbfbfFBBFbFbFfBbBBB",
        "FfFffbfbfBFBbFbFbfFBBbBB",
        "fFffFBfbfbBFbFbFfbFBBBBb",
        "fffFFBfBfbbFbFfbFBFbBBBb",
        "fffFFBfBfbbFbFfBFbFbBBBb",
        "fffFFBfBfbFbBfFbFBFBBbbb",
        "fffFFBfBfbFBfbFBFbFBBbbb",
        "ffffFBFBfbFBfbFBFBFBbbbb",
    ),
}
