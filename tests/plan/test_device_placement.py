"""Device placement: MixPipe's Figure 5, WPipe's cases A and B, and that every device has one worker."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.plan.cluster import Cluster, Link
from counterflow.plan.device_placement import Arrangement, devices, network
from counterflow.schedule.placement import bidirectional, linear, looped, wave

INSIDE, BETWEEN = Link(1.0, 0.1), Link(5.0, 2.0)


def servers(nodes: int, each: int, shared: bool = False) -> Cluster:
    return Cluster("c", nodes, each, 1e9, INSIDE, BETWEEN, shared_adapter=shared)


def test_mixpipe_figure_5() -> None:
    """D=4, W=2, two servers of 4: server 0 has P0 and P3 of both replicas, server 1 P1 and P2."""
    placed = devices(bidirectional(4), 2, Arrangement.COPIES_INSIDE)
    server = {(r, w): placed[r][w] // 4 for r in range(2) for w in range(4)}
    assert {key for key, at in server.items() if at == 0} == {(0, 0), (0, 3), (1, 0), (1, 3)}
    assert {key for key, at in server.items() if at == 1} == {(0, 1), (0, 2), (1, 1), (1, 2)}
    together = network(servers(2, 4), bidirectional(4), 2, Arrangement.COPIES_INSIDE)
    assert together.copies == 4
    assert set(together.allreduce) == {INSIDE}
    # Figure 5 a: replica by replica, data parallelism or directions have to cross.
    for other in (Arrangement.PIPELINE_INSIDE, Arrangement.REPLICAS_INSIDE):
        assert set(network(servers(2, 4), bidirectional(4), 2, other).allreduce) == {BETWEEN}


def test_wpipe_a_and_b() -> None:
    """Eight machines of eight, depth 8 and width 8: A sums gradients between machines, B sends messages."""
    a = network(servers(8, 8), looped(8, 2), 8, Arrangement.PIPELINE_INSIDE)
    assert (a.seconds_per_byte[0][1], a.allreduce[0]) == (0.1, BETWEEN)
    b = network(servers(8, 8), looped(8, 2), 8, Arrangement.REPLICAS_INSIDE)
    assert (b.seconds_per_byte[0][1], b.allreduce[0]) == (2.0, INSIDE)
    # One direction has no copies but the replicas: MixPipe's arrangement is then B.
    assert network(servers(8, 8), looped(8, 2), 8, Arrangement.COPIES_INSIDE) == b


def test_a_way_out_that_is_shared() -> None:
    a = network(servers(8, 8, shared=True), linear(8), 8, Arrangement.PIPELINE_INSIDE)
    assert a.allreduce[3] == Link(5.0, 16.0)  # all eight devices of a machine sum over the one way out
    b = network(servers(8, 8, shared=True), linear(8), 8, Arrangement.REPLICAS_INSIDE)
    assert b.seconds_per_byte[2][3] == 16.0  # eight replicas send at once
    assert b.allreduce[3] == INSIDE


def test_a_pipeline_over_two_nodes_crosses_once() -> None:
    found = network(servers(2, 2), linear(4), 1, Arrangement.PIPELINE_INSIDE)
    assert [found.latency_seconds[w][w + 1] for w in range(3)] == [1.0, 5.0, 1.0]
    assert [found.latency_seconds[w + 1][w] for w in range(3)] == [1.0, 5.0, 1.0]
    assert found.latency_seconds[0][2] == 0  # no such message


def test_copies_of_two_pairs_of_pipes_stand_together() -> None:
    placed = devices(bidirectional(8, pairs=2), 1, Arrangement.COPIES_INSIDE)
    by_device = sorted(range(8), key=lambda w: placed[0][w])
    assert by_device == [0, 3, 4, 7, 1, 2, 5, 6]


@pytest.mark.parametrize("arrangement", list(Arrangement))
@settings(derandomize=True, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from(["linear", "both", "wave", "looped"]))
def test_every_device_drives_one_worker(
    arrangement: Arrangement, half: int, replicas: int, kind: str
) -> None:
    placement = {
        "linear": linear(half),
        "both": bidirectional(2 * half),
        "wave": wave(half, 2),
        "looped": looped(half, 3),
    }[kind]
    placed = devices(placement, replicas, arrangement)
    flat = sorted(device for row in placed for device in row)
    assert flat == list(range(placement.workers * replicas))
