"""Reliability of a profile: whether its times can be those of a quiet machine, by its own numbers.

Invariant: a sentence names the numbers that it follows from. A profile of any origin is judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from counterflow.schedule.op import OpKind

from .profile import LayerProfile, Profile

FALL = 0.8
"""Multiple of a time below which the time of more samples is too short: more work takes no less time."""

SPREAD = 1.75
"""Multiple of the low quantile of repeats from which the high one is too far away.

Cores of virtual machines run at 0.6 of their speed for seconds, which the range of a plan shows.
"""

WAITING = 0.3
"""Share of ops waiting for a processor from which the rest is uncertain, too: programs that had the
processor change caches, the speed of cores and the time of messages.
"""

_MATTERS = 0.05
"""Minimum share of the seconds of the most expensive kind, of a kind that is judged."""


def unreliable(profile: Profile) -> str | None:
    """A sentence that says why times of a profile are not reliable; None: nothing says so.

    >>> def profile(forward, **more):
    ...     layer = LayerProfile((1.0, 2.0), forward, (0.0, 0.0), (0.0, 0.0), 0.0, 0.0, **more)
    ...     return Profile("", "", "", {"block": layer})
    >>> unreliable(profile((2.0, 1.0)))
    'not reliable, as block takes 2 times as long for 1 sample as for 2: measure again on a quiet machine'
    >>> unreliable(profile((1.0, 2.0), low_factors=(0.5, 1.0), high_factors=(1.0, 1.1)))
    'not reliable, as repeats of block differ by 2 times at 1 sample: measure again on a quiet machine'
    >>> unreliable(profile((1.0, 2.0)))
    """
    reason = next(_reasons(profile), None)
    return None if reason is None else f"not reliable, as {reason}: measure again on a quiet machine"


def _reasons(profile: Profile) -> Iterator[str]:
    if profile.waiting_share > WAITING:
        yield f"its workers waited for a processor in {profile.waiting_share:.0%} of the measured ops"
    for kind, layer in profile.layers.items():
        judged = [size for size in layer.samples if _matters(profile, layer, size)]
        for few, many in pairwise(judged):
            ratio = _seconds(layer, few) / _seconds(layer, many)
            if ratio * FALL > 1:
                yield f"{kind} takes {ratio:.2g} times as long for {_samples(few)} as for {many:g}"
        for size in judged:
            place = layer.samples.index(size)
            low = layer.low_factors[place] if layer.low_factors else 1.0
            high = layer.high_factors[place] if layer.high_factors else 1.0
            if high > SPREAD * low:
                factor = f"by {high / low:.2g} times" if low else "without bound"
                yield f"repeats of {kind} differ {factor} at {_samples(size)}"


def _seconds(layer: LayerProfile, samples: float) -> float:
    return layer.seconds(OpKind.FORWARD, samples) + layer.seconds(OpKind.BACKWARD, samples)


def _matters(profile: Profile, layer: LayerProfile, samples: float) -> bool:
    most = max(_seconds(known, samples) for known in profile.layers.values())
    return 0.0 < _MATTERS * most <= _seconds(layer, samples)


def _samples(count: float) -> str:
    return f"{count:g} sample{'' if count == 1 else 's'}"
