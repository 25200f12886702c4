"""WPipe (Yang et al., ICLR 2022): Figures 4 and 5, equation 1, Table 1, section 3.4.

N = workers, M = micro-batches of one period; 2N partitions (stages), the first N are group G0.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import chain, product

import pytest

from counterflow import ByteCosts, ConfigError, Costs, OpKind, Schedule
from counterflow.papers import closed_forms
from counterflow.program.checker import check
from counterflow.schedule.graph import OpGraph
from counterflow.schedule.placement import looped
from counterflow.schedule.residency import peak_activations
from counterflow.schedule.schemes import gpipe, pipedream, pipedream_2bw, wpipe
from counterflow.simulation import simulate

from .reading import EQUAL_SLOTS

WORKERS = (1, 2, 3, 4, 6)
EXTRA = (0, 1, 2, 5, 9)
"""M − N."""
TIMES = [Costs(), EQUAL_SLOTS]


def groups(workers: int) -> tuple[range, range]:
    return range(workers), range(workers, 2 * workers)


# --- Section 3.2, Figures 4 and 5: the order -----------------------------------------------------------


def test_section_3_2_grouped_placement() -> None:
    """Partition p on worker p mod N; the first N are G0."""
    assert looped(3, chunks=2).pipes_stages == ((0, 1, 2, 0, 1, 2),)
    assert wpipe(3, 3).placement == looped(3, chunks=2)


def test_figure_5_orders_of_two_workers() -> None:
    schedule = wpipe(workers=2, micro_batches=2, periods=3)
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "F0.0 F1.0 F0.2 F1.2 B0.2 F2.0 B1.2 F3.0 B0.0 F2.2v1 B1.0 F3.2v1 B2.2v1 F4.0v1 "
        "B3.2v1 F5.0v1 B2.0 F4.2v2 B3.0 F5.2v2 B4.2v2 B5.2v2 B4.0v1 B5.0v1",
        "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3v1 B2.3v1 F3.3v1 B3.3v1 "
        "F4.1v1 B2.1 F5.1v1 B3.1 F4.3v2 B4.3v2 F5.3v2 B5.3v2 B4.1v1 B5.1v1",
    ]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_figure_5_order_is_the_stream_of_vs(workers: int, extra: int) -> None:
    """V number v: forward on worker w in slot 2v+w, backward in slot 2v+2N−1−w."""
    m, periods = workers + extra, 4
    slots: dict[tuple[OpKind, int, int], int] = {}
    stream = [(group, t, j) for t in range(periods + 1) for group in range(2) for j in range(m)]
    for v, (group, t, j) in enumerate(stream):
        for w in range(workers):
            stage = group * workers + w
            slots[OpKind.FORWARD, t * m + j, stage] = 2 * v + w
            back = t - 1 if group == 0 else t
            slots[OpKind.BACKWARD, back * m + j, stage] = 2 * v + 2 * workers - 1 - w
    for order in wpipe(workers, m, periods).orders:
        taken = [slots[op.kind, op.micro_batches[0], op.stage] for op in order]
        assert taken == sorted(set(taken))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("costs", TIMES)
def test_section_3_2_no_worker_idles_in_the_steady_state(workers: int, extra: int, costs: Costs) -> None:
    for periods in (3, 4, 8):
        result = simulate(wpipe(workers, workers + extra, periods), costs)
        assert result.steady_bubble_ratio == 0


# --- Equation 1: versions ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_equation_1_versions(workers: int, extra: int) -> None:
    """G0 uses version max(0, t−1), G1 version t: w(t+1) = w(t) − ν∇f(w(t−1+i)) for group i."""
    m = workers + extra
    for op in wpipe(workers, m, periods=5).ops():
        period = op.micro_batches[0] // m
        assert op.version == (max(0, period - 1) if op.stage < workers else period)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_equation_1_updates_are_made_in_time(workers: int, extra: int) -> None:
    """F of G1 in period t+1 follows G1's update t, F of G0 in period t+2 follows G0's update t.

    An update follows the last backward of its period; G0 then still needs the version before.
    """
    schedule = wpipe(workers, workers + extra, periods=5)
    for worker, order in enumerate(schedule.orders):
        backwards = {worker: 0, worker + workers: 0}
        for op in order:
            newest = backwards[op.stage] // schedule.micro_batches
            assert op.version <= newest
            if op.stage >= workers:
                assert op.version == newest
            else:
                assert newest <= op.version + 1
            backwards[op.stage] += op.kind is OpKind.BACKWARD


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_section_3_3_versions_held(workers: int, extra: int) -> None:
    """G0 two, G1 one: three stages of half a worker's share, 1.5 models' worth."""
    schedule = wpipe(workers, workers + extra, periods=5)
    assert simulate(schedule).weight_copies == (3,) * workers
    for worker in range(workers):
        assert most_versions(schedule, worker, stage=worker) == 2
        assert most_versions(schedule, worker, stage=worker + workers) == 1


def most_versions(schedule: Schedule, worker: int, stage: int) -> int:
    """Most versions of a stage kept at once: the newest, and those that later ops use."""
    ops = [op for op in schedule.orders[worker] if op.stage == stage]
    most = backwards = 0
    for index, op in enumerate(ops):
        newest = backwards // schedule.micro_batches
        most = max(most, len({newest, *(later.version for later in ops[index:])} & set(range(newest + 1))))
        backwards += op.kind is OpKind.BACKWARD
    return most


# --- Section 3.3, Table 1: memory ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_section_3_3_stashed_forwards_by_group(workers: int, extra: int) -> None:
    m = workers + extra
    schedule = wpipe(workers, m, periods=4)
    g0, g1 = groups(workers)
    assert peak_activations(schedule, g0) == tuple(m + workers - w for w in range(workers))
    assert peak_activations(schedule, g1) == tuple(workers - w for w in range(workers))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_table_1_activations_of_wpipe(workers: int, extra: int) -> None:
    """The paper counts M (G0) and M − w (G1) on worker w, together (4M−N+1)/4 models' activations.

    Counted: G0's stash is at M + N − w when N − w forwards of the next period have joined a whole
    period's M, and G1's is at N − w at another time, not M − w, because its backwards follow at once
    (1F1B). Both together never exceed M + N − w, which is (2M+N+1)/4: the paper's total at M = N, and
    (M−N)/2 less above.
    """
    m = workers + extra
    peaks = simulate(wpipe(workers, m, periods=4)).peak_activations
    assert peaks == tuple(m + workers - w for w in range(workers))
    models = Fraction(int(sum(peaks)), 2 * workers)
    published = Fraction(4 * m - workers + 1, 4)
    assert models == Fraction(2 * m + workers + 1, 4)
    assert published - models == Fraction(m - workers, 2)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_table_1_activations_of_the_others(workers: int, extra: int) -> None:
    """GPipe M; PipeDream and 2BW (2M−N+1)/2, which counts M − w where 1F1B stashes N − w."""
    m = workers + extra

    def models(schedule: Schedule) -> Fraction:
        return Fraction(int(sum(simulate(schedule).peak_activations)), workers)

    assert models(gpipe(workers, m)) == m
    published = Fraction(2 * m - workers + 1, 2)
    counted = Fraction(workers + 1, 2)
    assert models(pipedream_2bw(workers, m, periods=4)) == counted
    assert models(pipedream(workers, periods=3 * workers + 2)) == counted
    assert published - counted == m - workers


@pytest.mark.parametrize("workers", WORKERS)
def test_table_1_size_of_all_buffers(workers: int) -> None:
    """In models' weights. The paper counts no buffer where one version is enough (GPipe, G1)."""

    def models(schedule: Schedule, partitions: int) -> Fraction:
        return Fraction(sum(simulate(schedule).weight_copies), partitions)

    assert models(gpipe(workers, workers), workers) == 0 + 1
    assert models(pipedream(workers, 3 * workers + 2), workers) == Fraction(workers + 1, 2)
    assert models(pipedream_2bw(workers, workers, 4), workers) == 2
    assert models(wpipe(workers, workers, 4), 2 * workers) == 1 + Fraction(1, 2)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("micro_batches", [1, 4, 8, 16])
def test_table_1_bubble_ratio_of_gpipe(workers: int, micro_batches: int) -> None:
    expected = (workers - 1) / (micro_batches + workers - 1)
    ratio = simulate(gpipe(workers, micro_batches)).bubble_ratio
    assert ratio == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_table_1_activations_with_recomputation(workers: int, extra: int) -> None:
    """One stage at a time is whole again: S_a for GPipe and 2BW, 0.5 S_a for WPipe (inputs ignored)."""
    m = workers + extra
    costs = Costs(recompute="stage", memory=ByteCosts(activations=1.0, inputs=0.0))

    def models(schedule: Schedule, partitions: int) -> Fraction:
        memory = simulate(schedule, costs).memory
        assert memory is not None
        return Fraction(int(sum(use.peak for use in memory)), partitions)

    assert models(gpipe(workers, m), workers) == 1
    assert models(pipedream_2bw(workers, m, 4), workers) == 1
    assert models(wpipe(workers, m, 4), 2 * workers) == Fraction(1, 2)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("extra", EXTRA)
def test_section_3_3_recomputation_stashes_only_stage_inputs(workers: int, extra: int) -> None:
    schedule = wpipe(workers, workers + extra, periods=4)
    costs = Costs(recompute="stage", memory=ByteCosts(activations=0.0, inputs=1.0))
    memory = simulate(schedule, costs).memory
    assert memory is not None
    assert tuple(use.peak for use in memory) == peak_activations(schedule)


# --- Section 3.4: messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
@pytest.mark.parametrize("extra", EXTRA)
def test_section_3_4_messages_of_one_micro_batch(workers: int, extra: int) -> None:
    """C_WPipe = 2(2N−1)·C_a against C_2BW = C_GPipe = 2(N−1)·C_a."""
    m = workers + extra

    def messages(schedule: Schedule) -> Fraction:
        return Fraction(len(OpGraph(schedule).messages), schedule.total_micro_batches)

    assert messages(wpipe(workers, m, periods=3)) == 2 * (2 * workers - 1)
    assert messages(pipedream_2bw(workers, m, periods=3)) == 2 * (workers - 1)
    assert messages(gpipe(workers, m)) == 2 * (workers - 1)


# --- More than two groups (Counterflow) -----------------------------------------------------------------

SHAPES = [
    # N, M, G: M a multiple of N, (G−1)·N or more
    *((n, (g - 1) * n, g) for n in (1, 2, 3, 5) for g in (2, 3, 4)),
    *((n, (g + 2) * n, g) for n, g in ((1, 3), (2, 5), (4, 3))),
]


def test_orders_of_one_worker_with_three_groups() -> None:
    """Forwards of G0, then those of G1 and G2 in turn; the backward of G1 one V after that of G2."""
    schedule = wpipe(workers=1, micro_batches=2, periods=2, groups=3)
    assert " ".join(map(str, schedule.orders[0])) == (
        "F0.0 F1.0 F0.1 F0.2 B0.2 F1.1 B0.1 F1.2 B1.2 F2.0 B1.1 F3.0 B0.0 F2.1v1 B1.0 F2.2v1 B2.2v1 F3.1v1 "
        "B2.1v1 F3.2v1 B3.2v1 B3.1v1 B2.0 B3.0"
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_only_the_first_is_late_and_no_worker_idles(shape: tuple[int, int, int]) -> None:
    """G0 uses the version before the newest, every other group the newest one; workers hold (G+1)/G."""
    n, m, g = shape
    schedule = wpipe(n, m, periods=5, groups=g)
    check(schedule)
    assert schedule.placement == looped(n, chunks=g)
    for worker, order in enumerate(schedule.orders):
        backwards = dict.fromkeys(range(worker, g * n, n), 0)
        for op in order:
            newest = backwards[op.stage] // m
            period = op.micro_batches[0] // m
            if op.stage >= n:
                assert op.version == newest == period
            else:
                assert op.version == max(0, period - 1) <= newest <= op.version + 1
            backwards[op.stage] += op.kind is OpKind.BACKWARD
        for stage in backwards:
            assert most_versions(schedule, worker, stage) == (2 if stage < n else 1)
    for backward in (0.5, 1.0, 2.0, 3.0):
        result = simulate(schedule, Costs(backward=backward))
        assert result.steady_bubble_ratio == pytest.approx(0, abs=1e-12)
    assert result.weight_copies == (g + 1,) * n
    assert Fraction(sum(result.weight_copies), g * n) == closed_forms.wpipe_weights(g)
    assert result.peak_activations == tuple(m + (g - 1) * n - w for w in range(n))
    assert Fraction(int(sum(result.peak_activations)), g * n) == closed_forms.wpipe_activations(n, m, g)
    messages = Fraction(len(OpGraph(schedule).messages), schedule.total_micro_batches)
    assert messages == (closed_forms.messages(n, g) if n > 1 else 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"workers": 4, "micro_batches": 4, "groups": 3},
            r"=4: .*its 4 workers, 8 or more,.*; use 8, or gro",
        ),
        ({"workers": 4, "micro_batches": 9, "groups": 3}, r"micro_batches=9: .* use 12, or groups=2$"),
        (
            {"workers": 2, "micro_batches": 5, "groups": 4},
            r"micro_batches=5: .* 6 or more.* use 6, or groups=2$",
        ),
        ({"workers": 2, "micro_batches": 5, "groups": 1}, r"groups=1: must be 2 or more"),
    ],
)
def test_groups_that_have_no_order_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wpipe(**options)


def late_periods(n: int, m: int, g: int, places: Callable[[int, int], tuple[int, int]]) -> list[int]:
    """By group, the periods by which its weights are old: V's from its first forward to the last update."""
    found = []
    for group in range(g):
        window = places(group, m - 1)[1] - places(group, 0)[0]
        found.append(-(-(window + n) // (g * m)) - 1)
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("g", [2, 3, 4, 5, 6])
def test_groups_in_whole_periods_would_make_half_of_them_late(n: int, g: int) -> None:
    """The paper's stream, continued: M V's of each group in turn, down through the groups and up again."""

    def places(group: int, j: int) -> tuple[int, int]:
        return group * m + j, (2 * (g - 1) - group) * m + j

    m = (g - 1) * n
    assert late_periods(n, m, g, places) == [1] * -(-g // 2) + [0] * (g // 2)


@pytest.mark.parametrize(("n", "g"), [(2, 3), (3, 3), (2, 4)])
def test_groups_no_stream_of_vs_does_better(n: int, g: int) -> None:
    """With all but G0 current M is N − 1 + (G−2)·⌈N/2⌉ or more, also in equal slots; never is G0 current.

    A solver is asked for the V's of all forwards and backwards of a period, in the order of a group's
    micro-batches.
    """
    least = n - 1 + (g - 2) * -(-n // 2)
    assert _stream_exists(n, least, g, late=1)
    assert not _stream_exists(n, least - 1, g, late=1)
    assert not _stream_exists(n, least, g, late=0)
    assert not _stream_exists(n, 2 * n * g, g, late=0)


def _stream_exists(n: int, m: int, g: int, late: int) -> bool:
    """Whether a stream of V's exists in which only the first ``late`` groups use old weights."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model, each = cp_model.CpModel(), g * m
    down, up = ([[model.new_int_var(0, 4 * each, "") for _ in range(m)] for _ in range(g)] for _ in range(2))
    for places in (down, up):
        rests = []
        for place in chain(*places):
            rest, periods = model.new_int_var(0, each - 1, ""), model.new_int_var(0, 4, "")
            model.add(place == rest + each * periods)
            rests.append(rest)
        model.add_all_different(rests)
    half = -(-n // 2)  # V's from a group's first stage to the next group's
    for group, j in product(range(g), range(m)):
        if j > 0:
            model.add(down[group][j] > down[group][j - 1])
            model.add(up[group][j] > up[group][j - 1])
        if group > 0:
            model.add(down[group][j] >= down[group - 1][j] + half)
            model.add(up[group - 1][j] >= up[group][j] + half)
        else:
            model.add(up[-1][j] >= down[-1][j])
    for group in range(g):
        model.add(up[group][-1] - down[group][0] + n <= (2 if group < late else 1) * each)
    model.add(down[0][0] == 0)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    return bool(solver.solve(model) == cp_model.OPTIMAL)
