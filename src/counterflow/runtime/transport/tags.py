"""Tags of messages over Gloo, which matches by them.

A message's tag is multiplied by the lanes: its parts never match another part's receive. The tensors of one
message share a tag; Gloo matches equal tags in the order in which they were posted.
"""

from __future__ import annotations

_LANES = 4
PAYLOAD, HEADER, DESCRIBED, MORE_HEADER = range(_LANES)

_MAX_TAG = 2**31 // _LANES - 2

BREAK_TAG = 2**31 - 1
"""A tag nothing is ever sent under."""

GATHER_TAG = BREAK_TAG - 1


def lane_tag(tag: int, lane: int) -> int:
    """The tag of a message's part."""
    assert 0 <= tag <= _MAX_TAG, tag
    return tag * _LANES + lane
