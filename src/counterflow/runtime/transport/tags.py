"""Tags of messages over Gloo, which matches by them.

A message's tag is multiplied by the lanes: its parts never match another part's receive. The tensors of one
message share a tag; Gloo matches equal tags in the order in which they were posted.
"""

from __future__ import annotations

from .base import MOST_TAGS

_LANES = 4
assert MOST_TAGS * _LANES < 2**31 - 2
PAYLOAD, HEADER, DESCRIBED, MORE_HEADER = range(_LANES)

BREAK_TAG = 2**31 - 1
"""A tag nothing is ever sent under."""

GATHER_TAG = BREAK_TAG - 1


def lane_tag(tag: int, lane: int) -> int:
    """The tag of a message's part."""
    assert 0 <= tag < MOST_TAGS, tag
    return tag * _LANES + lane
