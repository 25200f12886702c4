"""Diagnoses without an engine: they drive a loss through callables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from counterflow.api.contexts import Share, share_sequence
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.comparison import (
    compare_with_parts,
    difference,
    distance,
    equal_within_units,
    norm_distance,
)
from counterflow.verification.diagnosis.graded_losses import LossProbe, WeightedLoss
from counterflow.verification.diagnosis.graph_leaves import StageGraph, diagnose_graph
from counterflow.verification.diagnosis.reruns import RerunDiagnosis
from counterflow.verification.diagnosis.sample_means import SampleMeanDiagnosis
from counterflow.verification.diagnosis.shared_layers import SharedLayer, Sharing, diagnose_shared_layer
from counterflow.verification.diagnosis.sliced_layers import SlicedLayer, SlicedLayerDiagnosis
from counterflow.verification.diagnosis.tolerances import (
    ACTIVATIONS,
    GRADIENTS,
    LOSSES,
    LOSSES_OF_SLICES,
    MODELS,
    TRAININGS,
    square_root_tolerance,
)

DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16


def test_one_table_has_the_tolerances_of_all_purposes() -> None:
    table = [
        (ACTIVATIONS, (1e-6, 1e-3, 6e-2, 6e-2)),
        (LOSSES, (1e-6, 1e-3, 8e-3, 6e-2)),
        (LOSSES_OF_SLICES, (1e-6, 1e-2, 1e-2, 1e-2)),
        (GRADIENTS, (1e-5, 1e-2, math.inf, 6e-2)),
        (MODELS, (1e-6, 1e-4, 0.05, 0.05)),
        (TRAININGS, (1e-10, 1e-5, 1e-2, 1e-2)),
    ]
    for tolerance, limits in table:
        assert tuple(tolerance.of(dtype) for dtype in DTYPES) == limits
    assert ACTIVATIONS.of(torch.float64, torch.bfloat16) == 6e-2


def test_a_distance_is_relative_to_the_largest_expected_value() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert distance(expected, torch.tensor([1.0, -3.0])) == 0.25
    assert distance(torch.zeros(2), torch.zeros(2)) == 0.0
    assert distance(torch.zeros(2), torch.ones(2)) == math.inf
    assert distance(expected, expected.double()) == distance(expected, expected[:1]) == math.inf
    assert distance(torch.tensor([1, 2]), torch.tensor([1, 3])) == math.inf
    odd, even = torch.tensor([math.nan, 2.0]), torch.tensor([1.0, 2.0])
    assert distance(odd, even) == 0.0  # the step reports what is not finite
    assert distance(odd, even, skip_non_finite=False) == math.inf
    assert distance(odd, odd, skip_non_finite=False) == 0.0
    infinite = torch.tensor([-math.inf, 2.0])
    assert distance(infinite, infinite, skip_non_finite=False) == 0.0
    assert difference((expected, 1), (expected, 2)) == math.inf


def test_distances_of_reruns_and_updates() -> None:
    expected, infinite = torch.tensor([3.0, 4.0]), torch.tensor([math.inf, 4.0])
    assert norm_distance(expected, torch.tensor([3.0, 3.375])) == 0.125
    assert norm_distance(torch.zeros(2), torch.ones(2)) == math.inf
    assert math.isnan(norm_distance(torch.zeros(2), torch.zeros(2)))  # both are zero
    assert math.isnan(norm_distance(infinite, infinite))
    eps = torch.finfo(torch.float32).eps
    assert equal_within_units(expected, expected + 8 * eps, 2.0)
    assert not equal_within_units(expected, expected + 16 * eps, 2.0)
    assert equal_within_units(infinite, infinite, 0.0)
    assert not equal_within_units(expected, expected.double(), 8.0)
    assert equal_within_units(torch.tensor([1]), torch.tensor([1]), 0.0)
    assert square_root_tolerance(torch.int64) == 0.0


def test_parts_are_joined_and_compared_with_the_whole() -> None:
    value = torch.arange(6.0)

    def squares(rows: slice) -> Tensor:
        return value[rows].square()

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts])

    parts = [partial(squares, rows) for rows in (slice(0, 2), slice(2, 6))]
    assert compare_with_parts(value.square, parts, join, distance) == 0.0
    assert compare_with_parts(value.square, parts[::-1], join, distance) > 0.0


@dataclass(frozen=True)
class Mean:
    """A loss that weighs as its samples do."""

    loss: Tensor
    by: float
    weight: float = 1.0

    def sums_with(self, parts: Sequence[WeightedLoss]) -> bool:
        return len(parts) > 0


class Rows:
    """Samples in the first dimension."""

    def count(self, output: Tensor) -> int:
        return len(output)

    def cut(self, output: Tensor, rows: slice) -> Tensor:
        return output[rows]

    def join(self, outputs: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
        assert [len(output) for output in outputs] == [*samples]
        return torch.cat([*outputs])

    count_target, cut_target, join_targets = count, cut, join


def diagnosed(loss: Callable[[Tensor, Tensor], Tensor]) -> list[Any]:
    def compute(output: Any, target: Any, samples: float, graph: bool) -> tuple[Tensor, Mean]:
        del graph
        value = loss(output, target)
        return value, Mean(value.detach(), samples)

    ended: list[Any] = []
    diagnosis = SampleMeanDiagnosis(Rows(), lambda **outcome: ended.append(outcome), graph=True)
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        output = torch.randn(4, 3, generator=draw, dtype=torch.float64).requires_grad_()
        target = torch.randn(4, 3, generator=draw, dtype=torch.float64)
        diagnosis.begin(LossProbe(compute, list, lambda gradient: gradient), output, target, 4)
        diagnosis.end()
    diagnosis.finish()
    return ended


def test_a_mean_over_samples_is_decided() -> None:
    assert diagnosed(torch.nn.functional.mse_loss) == [{"decided": True, "reason": None}]


def test_what_is_no_mean_is_refused_with_the_expected_and_the_got_value() -> None:
    with pytest.raises(ConfigError, match=r"of 4 samples it is \S+, and those of parts of them"):
        diagnosed(lambda output, target: (output - target).square().sum())
    with pytest.raises(ConfigError, match="its value is, but the gradient"):
        diagnosed(balanced)


def balanced(output: Tensor, target: Tensor) -> Tensor:
    first, second = (output - target).square().mean(), output.square().mean()
    return first + second * (first.detach() / second.detach())


def test_a_loss_that_fails_on_parts_is_decided_by_units_alone() -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        if len(output) < 4:
            raise ValueError("few samples")
        return torch.nn.functional.mse_loss(output, target)

    assert diagnosed(fails) == [{"decided": True, "reason": None}]


class SequenceRows(NamedTuple):
    """A slice of three positions, of nine."""

    slice: int
    slices: int = 3
    micro_batch: int = 0
    samples: int = 2
    positions: int = 3
    sequence_length: int = 9

    def uncut(self) -> SequenceRows:
        return self._replace(slice=0, slices=1)


@dataclass
class SlicedStage:
    """One layer: it returns its output and its states."""

    layer: Callable[[Tensor, Mapping[int, Tensor]], tuple[Tensor, Mapping[int, Tensor]] | None]
    number: int = 4
    lower_precision: bool = False
    shares_sequences: bool = False
    undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext

    def layers(self) -> list[SlicedLayer]:
        return [SlicedLayer("layer 0 (Sums)", lambda value, states, _: self.layer(value, states))]

    def diagnose(self) -> None:
        diagnosis = SlicedLayerDiagnosis()
        for number in range(3):
            value, rows = torch.randn(2, 3, 4), SequenceRows(number)
            assert diagnosis.expects(self.number, value, 0, rows)
            diagnosis.add(self, value, 0, rows)
        assert not diagnosis.expects(self.number, value, 0, SequenceRows(0, micro_batch=1))
        for length in (10, 8):  # longer and shorter than the one that was compared
            assert diagnosis.expects(self.number, value, 0, SequenceRows(0, sequence_length=length))
        for step, repeats in enumerate((False, True, False, True, False), start=0):
            assert diagnosis.expects(self.number, value, step, SequenceRows(0, micro_batch=1)) == repeats
            assert not diagnosis.expects(self.number, value, step, SequenceRows(0, micro_batch=2))


def test_layers_on_slices(caplog: pytest.LogCaptureFixture) -> None:
    """Running sums over positions need the sum of the slices before, with its gradient."""

    def sums(value: Tensor, states: Mapping[int, Tensor]) -> tuple[Tensor, Mapping[int, Tensor]]:
        output = value.cumsum(1) + states.get(0, torch.zeros(()))
        return output, {0: output[:, -1:]}

    def detached(value: Tensor, states: Mapping[int, Tensor]) -> tuple[Tensor, Mapping[int, Tensor]]:
        output, states = sums(value, states)
        return output, {0: states[0].detach()}

    SlicedStage(sums).diagnose()
    SlicedStage(lambda value, _: (value.tanh(), {})).diagnose()
    assert not caplog.records
    wrong: list[Any] = [
        detached,
        lambda value, _: (value.cumsum(1), {}),
        lambda value, _: (value.flip(1), {}),
    ]
    for layer in wrong:
        with pytest.raises(ConfigError, match=r"layer 0 \(Sums\) of stage 4 makes something else of a whole"):
            SlicedStage(layer).diagnose()
    SlicedStage(lambda *_: None).diagnose()
    assert "could not verify that layer 0 (Sums), and what comes after it" in caplog.text


def test_values_of_a_sequence_that_no_positions_divide_are_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beside others, whose gradients are: their graph is freed once."""
    flat: Any = lambda value, _: ((value.exp(), value.exp().flatten(0, 1)), {})  # noqa: E731
    SlicedStage(flat).diagnose()
    assert "could not verify that layer 0 (Sums) computes the same from slices" in caplog.text


def diagnosed_shares(
    run: Callable[[Any], tuple[Any, dict[str, Tensor]]], value: Any, dim: int = 1, samples: int = 2
) -> list[str | None]:
    """Outcomes at two positions, of which each has the others' tensors of one whole value."""
    outcomes: list[str | None] = []
    tensors = [leaf for leaf in pytree.tree_leaves(value) if leaf.shape[dim] > 1]

    def part_of(number: int, wholes: dict[int, Tensor]) -> Any:
        def part(leaf: Tensor) -> Tensor:
            if leaf.shape[dim] == 1:
                return leaf
            shared = share_sequence(leaf, Share(number, 2), dim)
            wholes[id(shared)] = leaf
            return shared

        return pytree.tree_map(part, value)

    for number in range(2):
        wholes: dict[int, Tensor] = {}
        mine, others = part_of(number, wholes), part_of(1 - number, {})

        def mean(term: Tensor, others: Any = others) -> Tensor:
            return (term + next(iter(run(others)[1].values())).double()) / 2

        def gather(tensor: Tensor, _: int, wholes: dict[int, Tensor] = wholes) -> Tensor:
            return wholes[id(tensor)]

        layer = SharedLayer("layer 1 (Mix)", 3, run, run, lower_precision=False)
        outcomes.append(diagnose_shared_layer(layer, Sharing(Share(number, 2), gather, mean), mine, samples))
        assert len(wholes) == len(tensors)
    return outcomes


def test_layers_on_shares() -> None:
    """A layer that treats each position for itself computes the shares of what it makes of the whole."""

    def diagnose(run: Callable[[Any], Any], value: Any, dim: int = 1) -> list[str | None]:
        return diagnosed_shares(lambda part: (run(part), {}), value, dim)

    table = torch.randn(1, 1, 4)
    right = [
        diagnose(torch.tanh, torch.randn(2, 8, 4)),
        diagnose(torch.tanh, torch.randn(8, 2, 4), dim=0),  # positions before samples
        diagnose(lambda value: value.flatten(0, 1), torch.randn(2, 8, 4)),
        diagnose(lambda value: (value.mT, table), torch.randn(2, 8, 4)),
        diagnose(
            lambda value: {**value, "x": value["x"] * value["table"]},
            {"x": torch.randn(2, 8, 4), "table": table},
        ),
    ]
    assert right == [[None, None]] * 5
    wrong: list[Callable[[Tensor], Any]] = [
        lambda value: value.roll(1, 1),
        lambda value: (value, value.mean(1)),
        lambda value: value + value.shape[1],
        lambda value: (value, torch.tensor([value.shape[1]])),
        lambda value: value + torch.arange(value.shape[1])[:, None],
        lambda value: value + functional.pad(value, (0, 0, 1, 0))[:, :-1],
    ]
    for layer in wrong:
        with pytest.raises(
            ConfigError, match=r"layer 1 \(Mix\) of stage 3 computes something else of a share"
        ):
            diagnose(layer, torch.randn(2, 8, 4))
    row = torch.randn(1, 4, 4)
    assert all("The size of tensor" in str(why) for why in diagnose(lambda x: x * row, torch.randn(2, 8, 4)))
    assert all("makes a tensor of" in str(why) for why in diagnose(lambda x: x @ x.mT, torch.randn(2, 8, 4)))


def test_a_choice_that_rounding_changes_is_no_error() -> None:
    """One token of many, in the share of one position."""

    def chooses(value: Tensor) -> Tensor:
        chosen = value.clone()
        chosen[0, 0] *= 1.0 if value.shape[1] == 64 else -1.0
        return chosen

    outcomes = diagnosed_shares(lambda part: (chooses(part), {}), torch.randn(2, 64, 4))
    assert outcomes[1] is not None
    assert "rounding changes a choice among experts" in outcomes[1]


def test_long_shares_are_compared_in_part() -> None:
    """The beginnings of both halves are shares of a shorter sequence."""
    lengths, value = [], torch.randn(1, 6000, 2)

    def run(part: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        lengths.append(part.shape[1])
        return part * 2, {}

    def gather(part: Tensor, dim: int) -> Tensor:
        assert torch.equal(part, torch.cat([value[:, :16], value[:, 3000:3016]], 1))
        return torch.cat([part[:, :16], part, part[:, 16:]], dim)

    layer = SharedLayer("layer 1 (Mix)", 3, run, run, lower_precision=False)
    assert diagnose_shared_layer(layer, Sharing(Share(0, 2), gather, torch.clone), value, 1) is None
    assert lengths == [32, 64]


def test_losses_that_layers_add_on_shares() -> None:
    """A mean of what each token makes is that of its shares; a product of means over a sequence is not."""

    def diagnose(term: Callable[[Tensor], dict[str, Tensor]]) -> list[str | None]:
        return diagnosed_shares(lambda part: (part * 2, term(part)), torch.randn(2, 8, 4))

    assert diagnose(lambda value: {"z": value.logsumexp(-1).square().mean()}) == [None, None]
    with pytest.raises(
        ConfigError, match=r"layer 1 \(Mix\) of stage 3 adds 'balance' .* no mean over positions"
    ):
        diagnose(lambda value: {"balance": value.softmax(-1).mean(1).square().sum(-1).mean()})
    outcomes = diagnose(lambda value: {"once": value.sum()} if value.shape[1] == 8 else {})
    assert outcomes == ["it does not add 'once' both for a share and for the whole sequence"] * 2


def graph(outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> StageGraph:
    return StageGraph(5, outputs, inputs, weights, leaves=[], ends=[], casts=False, recomputes=False)


def test_leaves_of_a_first_graph() -> None:
    """A tensor that existed before a run is a weight that nobody trains; one that a run creates is none."""
    x, layer = torch.randn(2, 4, requires_grad=True), nn.Linear(4, 4)
    hidden = torch.randn(4, requires_grad=True)

    def scaled(factor: Callable[[], Tensor]) -> list[Tensor]:
        return [layer(x) * factor()]

    def diagnose(factor: Callable[[], Tensor]) -> None:
        diagnose_graph(graph(scaled(factor), [x], [*layer.parameters()]), lambda: scaled(factor))

    diagnose(lambda: torch.ones(4))
    diagnose(lambda: torch.ones(4, requires_grad=True))
    with pytest.raises(ConfigError, match=r"stage 5 computes with a tensor of shape \(4,\) that requires"):
        diagnose(lambda: hidden)

    def changing() -> Tensor:
        with torch.no_grad():
            layer.weight.mul_(0.5)
        return torch.ones(4, requires_grad=True)

    with pytest.raises(ConfigError, match="it changes weights as it runs"):
        diagnose(changing)


def test_reruns() -> None:
    """One run a step is compared, with its values the first time, and then by norms."""
    diagnosis = RerunDiagnosis(torch.device("cpu"))
    output = torch.tensor([3.0, 4.0])
    first = diagnosis.first_output([output, torch.tensor([1])], 0)
    assert first is not None
    assert diagnosis.first_output([output], 0) is None
    first.compare([output + 1e-6, torch.tensor([2])], "stage 1")  # whole numbers are not compared
    for rerun in ([output.flip(0), torch.tensor([1])], [output]):
        with pytest.raises(ConfigError, match="stage 1 gives other values when it is computed again"):
            first.compare(rerun, "stage 1")
    second = diagnosis.first_output([output], 1)
    assert second is not None
    second.compare([output.flip(0)], "stage 1")
    with pytest.raises(ConfigError, match="stage 1 gives other values"):
        second.compare([2 * output], "stage 1")
