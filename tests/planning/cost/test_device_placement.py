"""Device placement: MixPipe's Figure 5, WPipe's cases A and B, and that every device has one worker."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow import Costs
from counterflow.planning.cost.device_placement import Arrangement, devices, network
from counterflow.planning.inputs.cluster import AllReduce, Cluster, Link, all_reduce
from counterflow.schedule.placement import bidirectional, linear, looped, wave
from counterflow.schedule.schemes import dapple
from counterflow.simulation import simulate

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
    assert set(together.allreduce) == {all_reduce(servers(2, 4), [4])}
    # Figure 5 a: replica by replica, data parallelism or directions have to cross.
    for other in (Arrangement.PIPELINE_INSIDE, Arrangement.REPLICAS_INSIDE):
        found = network(servers(2, 4), bidirectional(4), 2, other)
        assert set(found.allreduce) == {all_reduce(servers(2, 4), [2, 2])}


def test_wpipe_a_and_b() -> None:
    """Eight machines of eight, depth 8 and width 8: A sums gradients between machines, B sends messages."""
    a = network(servers(8, 8), looped(8, 2), 8, Arrangement.PIPELINE_INSIDE)
    assert (a.seconds_per_byte[0][1], a.allreduce[0].seconds_per_byte) == (0.1, 2 * 7 / 8 * 2.0)
    b = network(servers(8, 8), looped(8, 2), 8, Arrangement.REPLICAS_INSIDE)
    assert (b.seconds_per_byte[0][1], b.allreduce[0]) == (2.0, all_reduce(servers(8, 8), [8]))
    # One direction has no copies but the replicas: MixPipe's arrangement is then B.
    assert network(servers(8, 8), looped(8, 2), 8, Arrangement.COPIES_INSIDE) == b


def test_a_way_out_that_is_shared() -> None:
    a = network(servers(8, 8, shared=True), linear(8), 8, Arrangement.PIPELINE_INSIDE)
    # The eight workers of a machine sum a stage each over the one way out; each of them is one ring.
    assert set(a.allreduce) == {all_reduce(servers(8, 8, shared=True), [1] * 8)}
    assert a.allreduce[3].crossing_seconds_per_byte == 2 * 7 / 8 * 2.0
    assert set(a.crossed) == {tuple(range(8))}
    b = network(servers(8, 8, shared=True), linear(8), 8, Arrangement.REPLICAS_INSIDE)
    assert b.seconds_per_byte[2][3] == 16.0  # eight replicas send at once
    assert b.allreduce[3] == all_reduce(servers(8, 8), [8])
    assert set(b.crossed) == {()}


GBYTE = 1e9
TWO_NODES = Cluster("two of 8", 2, 8, 1e12, Link(0, 1e-11), Link(0, 1 / 12.5e9), shared_adapter=True)
RINGS = replace(TWO_NODES, allreduce=AllReduce.RING)


def end_of_sums(cluster: Cluster, depth: int) -> float:
    """When a GB of each stage is summed, if all sums begin at once, each on a worker of its own."""
    found = network(cluster, linear(depth), 16 // depth, Arrangement.PIPELINE_INSIDE)
    sums = [one.seconds(GBYTE) for one in found.allreduce]
    shared = [
        (ways, one.crossing_seconds_per_byte * GBYTE)
        for ways, one in zip(found.crossed, found.allreduce, strict=True)
    ]
    costs = Costs(0, 0, sync=sums, sync_mode="end", sync_crossings=shared, replicas=16 // depth)
    return simulate(dapple(depth, 2), costs).makespan


def test_copies_in_one_ring_cross_a_way_out_once() -> None:
    """D=1, W=16 on two nodes of 8 at 12.5 GB/s: one ring crosses the card; with D=2, two share it."""
    assert end_of_sums(RINGS, 1) == pytest.approx(2 * 15 / 16 / 12.5)  # 0.15 s, as if in 16 rings 1.2 s
    assert end_of_sums(RINGS, 2) == pytest.approx(2 * 2 * 7 / 8 / 12.5)  # 0.28 s, as if in 8 rings 1.12 s


def test_sums_on_two_levels_leave_a_node_once() -> None:
    """Reduce-scatter and all-gather inside; each device sums its part between the nodes."""
    for depth in (1, 2, 4, 8):
        each = 8 // depth
        inside, between = 2 * (each - 1) / each * 0.01, 2 * 1 / 2 / 12.5
        assert end_of_sums(TWO_NODES, depth) == pytest.approx(inside + depth * between)
    own = replace(TWO_NODES, shared_adapter=False)  # each device has a card
    assert all_reduce(own, [8, 8]).seconds(GBYTE) == pytest.approx(2 * 7 / 8 * 0.01 + 0.08 / 8)
    latencies = replace(TWO_NODES, inside=Link(1.0, 0), between=Link(10.0, 0))
    assert all_reduce(latencies, [8, 8]).seconds(GBYTE) == 2 * 3 * 1.0 + 2 * 1 * 10.0
    assert all_reduce(replace(latencies, allreduce=AllReduce.RING), [8, 8]).seconds(GBYTE) == 30 * 10.0


def test_sums_that_do_not_meet_share_nothing() -> None:
    """The first stage's sum begins when the last one's is over."""
    costs = Costs(forward=1.0, backward=2.0, sync=1.0, sync_mode="eager", replicas=2)
    shared = replace(costs, sync_crossings=[((0, 1), 1.0)] * 4)
    assert simulate(dapple(4, 4), shared).syncs == simulate(dapple(4, 4), costs).syncs
    slow = replace(shared, sync=6.0, sync_crossings=[((0,), 6.0), ((0,), 6.0), ((1,), 6.0), ((1,), 6.0)])
    ends = [(s.stage, s.start, s.end) for s in simulate(dapple(4, 4), slow).syncs]
    # Two and two share a way: alone for the 2 seconds before the other begins and after it has ended.
    assert ends == [(3, 15.0, 25.0), (2, 17.0, 27.0), (1, 19.0, 29.0), (0, 21.0, 31.0)]


def test_what_a_worker_sends_to_other_nodes_leaves_it_one_after_another() -> None:
    alone = network(servers(3, 1), linear(3), 1, Arrangement.PIPELINE_INSIDE)
    assert alone.ways is not None
    assert alone.ways[1][0] == alone.ways[1][2]
    assert network(servers(1, 3), linear(3), 1, Arrangement.PIPELINE_INSIDE).ways is None
    # A forward and the gradient of another micro-batch leave worker 1 together.
    costs = Costs(1.0, 1.0, p2p=4.0)
    both = simulate(dapple(3, 4), replace(costs, ways=alone.ways))
    sent = sorted((m.start, m.end) for m in both.messages if m.sender == 1)
    assert all(end <= start for (_, end), (start, _) in pairwise(sent))
    apart = sorted((m.start, m.end) for m in simulate(dapple(3, 4), costs).messages if m.sender == 1)
    assert any(end > start for (_, end), (start, _) in pairwise(apart))
    assert both.steady_step is not None


def test_pipes_that_run_in_step_share_a_way_out() -> None:
    """Chimera's stage 0 to 1 leaves server 0 for both directions at one time."""
    found = network(servers(2, 4, shared=True), bidirectional(4), 2, Arrangement.COPIES_INSIDE)
    assert {found.seconds_per_byte[0][1], found.seconds_per_byte[3][2]} == {2 * 2 * 2.0}


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
