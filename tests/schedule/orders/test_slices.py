"""Sliced micro-batches: Seq1F1B to the letter and its figures, and every synchronous scheme."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from counterflow import ByteCosts, ConfigError, Costs, Schedule, check, schemes, simulate
from counterflow.program import rules
from counterflow.program.rules import CheckSubject
from counterflow.schedule import formats, registry, torch_csv
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.orders.slices import sliced
from counterflow.simulation import lower

from ...tables import examples, table


def one_forward_one_backward(stages: int, micro_batches: int, slices: int) -> Schedule:
    options = {"stages": stages, "micro_batches": micro_batches}
    return sliced(registry.scheme("1f1b").build, options, slices)


def seq1f1b(worker: int, workers: int, micro_batches: int, n: int) -> list[str]:
    """Worker s of P: min(P - s - 2 + n, N·n) forwards, then one forward and one backward in turns."""
    forwards = [f"F{k // n}.{worker}:{k % n}/{n}" for k in range(micro_batches * n)]
    backwards = [f"B{k // n}.{worker}:{n - 1 - k % n}/{n}" for k in range(micro_batches * n)]
    warm_up = min(workers - worker - 2 + n, micro_batches * n)
    turns = [op for pair in zip(forwards[warm_up:], backwards, strict=False) for op in pair]
    return forwards[:warm_up] + turns + backwards[len(forwards) - warm_up :]


def test_sliced_1f1b_is_seq1f1b() -> None:
    for workers, micro_batches, n in product((1, 2, 3, 4, 7), (1, 2, 5), (2, 3, 4, 7)):
        found = one_forward_one_backward(workers, micro_batches, n).orders
        expected = [seq1f1b(worker, workers, micro_batches, n) for worker in range(workers)]
        assert [list(map(str, order)) for order in found] == expected, (workers, micro_batches, n)


def test_makespans_and_slices_held() -> None:
    """3N + 3(P - 1)/n, and P - s + n - 1 slices on worker s, if F = 1 and B = 2 a micro-batch."""
    table = {
        (4, 8): ((33, 4), (28.5, 5), (26.25, 7), (25.125, 11)),
        (8, 8): ((45, 8), (34.5, 9), (29.25, 11), (26.625, 15)),
        (8, 16): ((69, 8), (58.5, 9), (53.25, 11), (50.625, 15)),
    }
    for (workers, micro_batches), row in table.items():
        for n, (makespan, held) in zip((1, 2, 4, 8), row, strict=True):
            found = simulate(one_forward_one_backward(workers, micro_batches, n))
            assert found.makespan == pytest.approx(makespan) == 3 * micro_batches + 3 * (workers - 1) / n
            assert max(found.peak_activations) * n == pytest.approx(held)
            assert [round(peak * n) for peak in found.peak_activations] == [
                workers - worker + n - 1 for worker in range(workers)
            ]


def test_many_slices_take_a_sixth_of_the_activations_and_a_32nd_of_the_bubble() -> None:
    whole, fine = (simulate(one_forward_one_backward(8, 8, n)) for n in (1, 32))
    assert max(fine.peak_activations) / max(whole.peak_activations) <= 0.16
    assert sum(fine.idle) / sum(whole.idle) <= 1 / 16


def test_every_synchronous_scheme_is_right_with_slices() -> None:
    """Few micro-batches and one alone included; read back from a file, and lowered."""
    checked = 0
    for scheme in registry.SCHEMES.values():
        if not scheme.synchronous:
            continue
        splits = ({}, {"split": True}) if scheme.option("split") else ({},)
        sizes = list(product(((2, 1), (4, 2), (4, 8)), splits))
        for ((depth, micro_batches), split), n in table(sizes, (2, 3)):
            options = {scheme.depth: depth, "micro_batches": micro_batches, **split}
            try:
                whole = scheme.build(**options)
            except ConfigError:
                continue
            found = sliced(scheme.build, options, n)
            check(found)
            assert formats.loads(formats.dumps(found), "a file") == found
            costs = Costs(p2p=0.125)
            played, lowered = simulate(found, costs), simulate(lower(found, costs), costs)
            assert np.array_equal(played.start, lowered.start)
            assert max(played.peak_activations) <= max(simulate(whole).peak_activations), str(found)
            checked += 1
    assert checked > examples(100)


def test_slices_are_asked_for_by_name_with_any_scheme() -> None:
    expected = one_forward_one_backward(4, 8, 2)
    assert schemes.dapple(stages=4, micro_batches=8, slices=2) == expected
    assert schemes.dapple(workers=4, micro_batches=8, slices=2) == expected
    assert registry.schedule_of("1f1b(stages=4, micro_batches=8, slices=2)", {}) == expected
    assert str(expected) == "dapple(stages=4, micro_batches=8, slices=2)"
    assert schemes.zb_v(workers=2, micro_batches=4, slices=1) == schemes.zb_v(workers=2, micro_batches=4)
    with pytest.raises(ConfigError, match="slices=0: must be a whole number, 1 or more"):
        schemes.dapple(stages=4, micro_batches=8, slices=0)
    with pytest.raises(ConfigError, match="at most 1,000,000 are built"):
        schemes.dapple(stages=8, micro_batches=8, slices=10_000_000)


def test_what_cannot_be_sliced_is_refused() -> None:
    chimera = registry.scheme("chimera").build
    doubled: dict[str, OptionValue] = {"stages": 4, "micro_batches": 8, "concat": "forward-doubling"}
    with pytest.raises(
        ConfigError, match="run together, or are halved, cannot be sliced; choose concat=direct"
    ):
        sliced(chimera, doubled, 2)
    with pytest.raises(ConfigError, match="asynchronous schemes have no slices"):
        sliced(registry.scheme("pipedream").build, {"stages": 2}, 2)


def test_slices_come_in_the_order_of_their_states() -> None:
    schedule = one_forward_one_backward(1, 1, 2)
    assert list(map(str, schedule.orders[0])) == ["F0.0:0/2", "F0.0:1/2", "B0.0:1/2", "B0.0:0/2"]
    first, second, last, rest = schedule.orders[0]
    for order, line in (
        ((second, first, last, rest), "worker 0, op 0: F0.0:1/2 comes before slice 0, which it needs"),
        ((first, second, rest, last), "worker 0, op 2: B0.0:0/2 comes before slice 1, which it needs"),
    ):
        wrong = Schedule("mine", (), schedule.workload, (order,))
        broken = [
            rule for rule in rules.RULES if not rule.lowered and rules.details(rule, CheckSubject(wrong))
        ]
        assert broken == [rules.SLICES]
        assert rules.details(rules.SLICES, CheckSubject(wrong)) == line


def test_what_a_slice_needs() -> None:
    workload = one_forward_one_backward(2, 1, 3).workload
    needs = {str(op): {*map(str, workload.needs(op))} for op in workload.ops()}
    assert needs["F0.0:0/3"] == set()
    assert needs["F0.1:1/3"] == {"F0.0:1/3", "F0.1:0/3"}
    assert needs["B0.0:1/3"] == {"F0.0:1/3", "B0.1:1/3", "B0.0:2/3"}
    assert needs["B0.1:2/3"] == {"F0.1:2/3"}


def test_lengths_of_slices() -> None:
    """A text or numbers; equal ones are a number, and the order is that of equal slices."""
    lengths = schemes.dapple(stages=3, micro_batches=2, slices=(4, 2, 2))
    assert str(lengths) == "dapple(stages=3, micro_batches=2, slices=4+2+2)"
    assert registry.schedule_of(str(lengths), {}) == lengths
    assert formats.loads(formats.dumps(lengths), "a file") == lengths
    equal = schemes.dapple(stages=3, micro_batches=2, slices="5+5+5")
    assert equal == schemes.dapple(stages=3, micro_batches=2, slices=3)
    assert lengths.orders == equal.orders
    check(lengths)
    assert simulate(lengths).peak_activations == (1.75, 1.5, 1.25)  # of 5, 4 and 3 slices
    assert simulate(lengths).busy == (6.0,) * 3
    with pytest.raises(ConfigError, match="torch"):
        torch_csv.dumps(lengths)
    wrongs: list[Any] = ["4+", "4+0", (1, -1), (), "two", 1.5, True]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="must be a whole number, 1 or more, or lengths such as 512"):
            schemes.dapple(stages=3, micro_batches=2, slices=wrong)
    text = formats.dumps(lengths).replace("[4, 2, 2]", "[4, 2]")
    with pytest.raises(ConfigError, match="lengths: 2 numbers, but the ops are of 3 slices"):
        formats.loads(text, "a file")


def test_slices_of_growing_cost() -> None:
    """Attention to all before it: the slice from b to e of the sequence has e² - b² of it."""
    schedule = schemes.dapple(stages=1, micro_batches=1, slices=(3, 1))
    costs = Costs(forward=8.0, backward=16.0, attention=0.5, overhead=0.25)
    found = simulate(schedule, costs)
    # linear 4 · 3/4 and 4 · 1/4; attention 4 · 9/16 and 4 · 7/16
    assert found.start.tolist() == [0.0, 5.5, 8.5, 14.25]
    assert found.makespan == 14.25 + 2 * 5.25 + 0.25 == 24.0 + 4 * 0.25
    split = simulate(schemes.zb_h1(stages=1, micro_batches=1, slices=(3, 1)), replace(costs, overhead=0.0))
    assert split.makespan == 24.0  # weights have no attention: 4 of the halves' 16 are linear in each
    weights = [
        end - start
        for op, start, end in zip(split.schedule.orders[0], split.start, split.end, strict=True)
        if op.kind.value == "W"
    ]
    assert sorted(weights) == [1.0, 3.0]
    with pytest.raises(ConfigError, match=r"attention=1\.5: is a share of a forward; must be 1 or less"):
        Costs(attention=1.5)


def test_what_slices_leave_is_in_memory_once_and_its_gradient_until_it_is_used() -> None:
    schedule = schemes.dapple(stages=1, micro_batches=1, slices=(2, 1, 1))
    memory = ByteCosts(activations=80.0, inputs=8.0, state=16.0)

    def amounts(recompute: str) -> list[float]:
        used = simulate(schedule, Costs(memory=memory, recompute=recompute)).memory
        assert used is not None
        return list(used[0].amounts)

    # 40, 60, 80 saved; the last backward makes gradients of 12 for what the first two slices left
    assert amounts("none") == [40.0, 60.0, 80.0, 92.0, 72.0, 48.0, 0.0]
    # with recomputation inputs are saved, 4, 6, 8, and what the first two leave, 8 and 4, until the next
    # slice's backward has ended; the rest, 18, 18 and 36, from its recomputation to the end of its backward
    assert amounts("stage") == [12.0, 18.0, 20.0, 38.0, 50.0, 44.0, 48.0, 0.0]
