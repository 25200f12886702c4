"""Where messages stand in the lists."""

from __future__ import annotations

from itertools import pairwise

import pytest

from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.program.actions import Compute, Matching, Receive, Send
from counterflow.schedule.program.lowering import AHEAD, lower


@pytest.mark.parametrize(
    "schedule",
    [schemes.dapple(4, 8), schemes.chimera(4, 8), schemes.zb_v(4, 8), schemes.interleaved(4, 8, chunks=2)],
    ids=str,
)
def test_matched_by_tag_every_receive_is_posted_ops_ahead(schedule: Schedule) -> None:
    # Over Gloo a message leaves when its receiver has said that it has a place for it, a way before.
    rows = lower(schedule, matching=Matching.TAG).actions
    for row in rows:
        ran = 0
        posted: dict[object, int] = {}
        for action in row:
            if isinstance(action, Receive):
                posted[action.output] = ran
            elif isinstance(action, Compute):
                takes = [output for output in posted if output in schedule.workload.needs(action.op)]
                assert all(posted.pop(output) <= max(0, ran - AHEAD) for output in takes)
                ran += 1
        assert not posted


def test_a_send_follows_its_op_at_once() -> None:
    for matching in Matching:
        for row in lower(schemes.dapple(4, 4), matching=matching).actions:
            for one, other in pairwise([a for a in row if not isinstance(a, Receive)]):
                if isinstance(other, Send):
                    assert isinstance(one, Compute)
                    assert one.op == other.output
