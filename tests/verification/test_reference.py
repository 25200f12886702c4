"""One process, against numbers by hand and against torch without any of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ScheduleError
from counterflow.schedule import registry, schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.reference import Reference, Staleness
from counterflow.verification.reference_parts import parts_of
from counterflow.verification.training_agreement import one_process, verify

D = torch.float64


class Scale(nn.Module):
    """Its input times one weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=D))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=D).reshape(-1, 1)


def reference(*weights: float, micro_batches: int = 2, loss: Any = mean, **options: Any) -> Reference:
    return Reference([Scale(w) for w in weights], loss, (1,) * micro_batches, optimizer=sgd, **options)


def weights_of(training: Reference) -> list[float]:
    return [float(value) for value in training.state_dict().values()]


def gradients_of(training: Reference) -> list[float]:
    return [float(value) for value in training.gradients.values()]


def test_a_step_by_hand() -> None:
    """Loss: mean(x a b - y); gradients: mean(x) b and mean(x) a."""
    training = reference(3.0, 4.0)
    batch = column(1, 2, 3), column(0, 0, 6)
    found = training.step([batch])
    assert (found.number, found.samples) == (0, 3)
    assert found.loss == pytest.approx(2 * 12 - 2)
    assert found.grad_norm == pytest.approx(math.hypot(8, 6))
    assert gradients_of(training) == pytest.approx([8.0, 6.0])
    assert weights_of(training) == pytest.approx([-5.0, -2.0])
    assert list(training.state_dict()) == list(training.gradients) == ["0.weight", "1.weight"]
    second = training.step([batch])
    assert (second.number, training.steps) == (1, 2)
    assert second.loss == pytest.approx(2 * 10 - 2)
    assert weights_of(training) == pytest.approx([-5 + 4, -2 + 10])
    assert training.evaluate([batch]) == pytest.approx(2 * -8 - 2)
    assert weights_of(training) == pytest.approx([-1.0, 8.0])


def test_replicas_count_by_their_samples() -> None:
    training = reference(1.0)
    batches = [(column(1, 2, 3), column(0, 0, 0)), (column(5), column(1))]
    found = training.step(batches)
    assert found.samples == 4
    assert found.loss == pytest.approx((6 + 4) / 4)
    assert gradients_of(training) == pytest.approx([11 / 4])
    assert training.evaluate(batches) == pytest.approx(11 / 4 * (1 - 11 / 4) - 1 / 4)


def test_a_loss_sum_is_divided_by_all_that_counts() -> None:
    def masked(output: Tensor, target: Tensor) -> cf.LossSum:
        return cf.LossSum((output * target).sum(), target.sum())

    training = reference(2.0, loss=masked)
    batch = column(1, 2, 3, 4), column(1, 1, 1, 0)
    found = training.step([batch])
    assert found.loss == pytest.approx(2 * 6 / 3)
    assert gradients_of(training) == pytest.approx([2.0])
    assert found.grad_norm == pytest.approx(2.0)
    assert weights_of(training) == pytest.approx([0.0])
    training = reference(2.0, loss=masked)
    assert training.evaluate([batch]) == pytest.approx(4.0)


def test_clipping_and_a_scheduler() -> None:
    def slower(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    training = reference(3.0, 4.0, clip_norm=5.0, scheduler=slower)
    batch = column(1, 2, 3), column(0, 0, 0)
    found = training.step([batch])
    assert found.grad_norm == pytest.approx(10.0)  # before it is clipped
    assert gradients_of(training) == pytest.approx([4.0, 3.0])
    assert weights_of(training) == pytest.approx([-1.0, 1.0])
    training.step([batch])  # gradients 2 and -2, at half the rate
    assert gradients_of(training) == pytest.approx([2.0, -2.0])
    assert weights_of(training) == pytest.approx([-2.0, 2.0])


def test_old_weights_and_a_norm_by_stage() -> None:
    """Of two stages the first computes one update behind; each is clipped to 5 / sqrt(2)."""
    late = Staleness((1,), lambda _, stage, period: max(0, period - (stage == 0)))
    training = reference(3.0, 4.0, staleness=late)
    batch = column(1, 2, 3), column(0, 0, 0)
    training.step([batch])
    assert weights_of(training) == pytest.approx([-5.0, -2.0])
    training.step([batch])  # with 3 and -2: gradients -4 and 6, on weights -5 and -2
    assert gradients_of(training) == pytest.approx([-4.0, 6.0])
    assert weights_of(training) == pytest.approx([-1.0, -8.0])
    training.flush()
    training.step([batch])  # with -1 and -8
    assert gradients_of(training) == pytest.approx([-16.0, -2.0])
    clipped = reference(3.0, 4.0, staleness=late, clip_norm=5.0)
    clipped.step([batch])
    limit = 5 / math.sqrt(2)
    assert gradients_of(clipped) == pytest.approx([limit, limit])


def test_a_loss_sum_of_old_weights_is_each_micro_batchs_own() -> None:
    def halves(output: Tensor, target: Tensor) -> cf.LossSum:
        return cf.LossSum((output * target).sum(), target.sum())

    training = reference(1.0, loss=halves, staleness=Staleness((), lambda *_: 0))
    found = training.step([(column(1, 3, 5, 7), column(1, 1, 1, 0))])
    assert found.loss == pytest.approx((2 + 5) / 2)
    assert gradients_of(training) == pytest.approx([3.5])


def test_versions_are_those_of_the_ops() -> None:
    assert Staleness.of(schemes.dapple(2, 4), (1,)) is None
    stale = Staleness.of(schemes.pipedream(3), [1, 2])
    assert stale is not None
    assert stale.cuts == (1, 2)
    assert [stale.version(3, stage, 5) for stage in range(3)] == [3, 4, 5]
    assert [stale.version(3, stage, 50) for stage in range(3)] == [48, 49, 50]
    unknown = schemes.pipedream(3)
    object.__setattr__(unknown, "scheme", "unheard")
    assert Staleness.of(unknown, (1, 2)) == stale


@pytest.mark.parametrize(
    "schedule",
    [
        *map(schemes.pipedream, (1, 2, 5, 10)),
        schemes.pipedream(3, periods=2),
        schemes.pipedream_2bw(2, 2, periods=1),
        schemes.wpipe(2, 2, periods=1),
        *(schemes.pipedream_2bw(d, n) for d, n in ((1, 1), (2, 4), (4, 5))),
        *(schemes.wpipe(d, n) for d, n in ((2, 4), (3, 4), (4, 8))),
    ],
    ids=str,
)
def test_versions_of_the_ops_are_those_that_a_scheme_states(schedule: Schedule) -> None:
    rule = registry.scheme(schedule.scheme).version_rule(dict(schedule.options))
    stale = Staleness.of(schedule, ())
    assert rule is not None
    assert stale is not None
    for stage, period in itertools.product(range(schedule.stages), range(3 * schedule.periods)):
        assert stale.version(schedule.stages, stage, period) == rule(schedule.stages, stage, period)


@pytest.mark.parametrize("schedule", [schemes.pipedream(2), schemes.dapple(2, 4)], ids=str)
def test_schedules_that_no_training_can_run_are_refused_before_it_begins(schedule: Schedule) -> None:
    wrong = replace(schedule, orders=(schedule.orders[0][:-1], *schedule.orders[1:]))
    with pytest.raises(ScheduleError):
        verify(wrong, [nn.Linear(2, 2), nn.Linear(2, 2)], nn.MSELoss(), [[]], optimizer=sgd)


def test_the_users_layers_and_hooks_stay() -> None:
    first_scale, last_scale = Scale(1.0), Scale(2.0)
    layers = [first_scale, nn.Dropout(0.5), last_scale]
    first_scale.weight.register_hook(lambda gradient: 10 * gradient)
    training = Reference(layers, mean, (1,) * 2, optimizer=sgd, seed=3)
    batch = torch.ones(64, 1, dtype=D), torch.zeros(64, 1, dtype=D)
    first = training.step([batch])
    again = Reference(layers, mean, (1,) * 2, optimizer=sgd, seed=3)
    assert again.step([batch]).loss == first.loss
    assert Reference(layers, mean, (1,) * 2, optimizer=sgd, seed=4).step([batch]).loss != first.loss
    assert (first_scale.weight.item(), last_scale.weight.item()) == (1.0, 2.0)
    assert first_scale.weight.grad is None
    assert training.evaluate([batch]) == training.evaluate([batch])  # nothing is dropped


def test_frozen_unused_and_sparse_weights() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(5, 2, sparse=True, dtype=D), nn.Linear(2, 1, dtype=D)
    head.bias.requires_grad_(False)
    training = Reference([table, head], mean, (1,) * 2, optimizer=sgd)
    training.step([(torch.tensor([0, 1, 1, 3]), torch.zeros(4, 1, dtype=D))])
    assert list(training.gradients) == ["0.weight", "1.weight"]
    expected = torch.zeros(5, 1, dtype=D)
    expected[[0, 1, 3]] = torch.tensor([[0.25], [0.5], [0.25]], dtype=D)
    torch.testing.assert_close(training.gradients["0.weight"], expected * head.weight)


@pytest.mark.parametrize("option", ["autocast", "compute_dtype"])
def test_lower_precision_is_bfloat16s(option: str) -> None:
    layers = [nn.Linear(3, 4), nn.Linear(4, 1)]
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 3), torch.zeros(8, 1)
    full = Reference(layers, nn.MSELoss(), (1,) * 1, optimizer=sgd).step([(inputs, targets)]).loss
    half: dict[str, Any] = {option: torch.float16}
    other = Reference(layers, nn.MSELoss(), (1,), optimizer=sgd, **half).step([(inputs, targets)]).loss
    training = Reference(layers, nn.MSELoss(), (1,) * 1, optimizer=sgd, **{option: torch.bfloat16})  # type: ignore[arg-type]
    found = training.step([(inputs, targets)]).loss
    assert len({found, full, other}) == 3
    assert found == pytest.approx(full, rel=0.05)
    assert all(value.dtype == torch.float32 for value in training.state_dict().values())


def test_a_training_is_its_steps_its_flushes_and_an_evaluation() -> None:
    batches = [[(column(1, 2, 3), column(0, 0, 0))], [(column(2, 2), column(1, 1))]]
    found = one_process([Scale(3.0)], mean, (1,) * 2, batches, optimizer=sgd)
    assert [step.loss for step in found.steps] == pytest.approx([6.0, 2 * 1 - 1])
    assert float(found.gradients["0.weight"]) == pytest.approx(2.0)
    assert float(found.state["0.weight"]) == pytest.approx(-1.0)
    assert found.evaluation == pytest.approx(-2.0)
    late = Staleness((), lambda _, __, period: max(0, period - 1))
    flushed = one_process(
        [Scale(3.0)], mean, (1,) * 2, batches, optimizer=sgd, staleness=late, flush_after=(0,)
    )
    assert flushed.steps[1].loss == pytest.approx(1.0)
    running = one_process(
        [Scale(3.0)], mean, (1,) * 2, batches, optimizer=sgd, staleness=late, flush_after=(1,)
    )
    assert running.steps[1].loss == pytest.approx(2 * 3 - 1)


def test_parts_are_those_of_the_backwards() -> None:
    assert parts_of(schemes.dapple(2, 3)) == (1, 1, 1)
    assert parts_of(schemes.chimera(2, 4, concat="forward-doubling")) == (1, 1, 1, 1)
    assert parts_of(schemes.chimera(2, 4, concat="backward-halving")) == (2, 2, 2, 2)
    assert parts_of(schemes.pipedream_2bw(2, 2, periods=3)) == (1, 1)


def test_parts_count_by_their_samples() -> None:
    def squared(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean() ** 2

    training = Reference([Scale(1.0)], squared, (2, 1), optimizer=sgd)
    batch = column(1, 2, 3, 4, 6, 8), column(0, 0, 0, 0, 0, 0)
    found = training.step([batch])  # of 1 and 2 (2 samples), of 3 (1), of 4, 6 and 8 (3)
    assert found.loss == pytest.approx((2 * 1.5**2 + 3**2 + 3 * 6**2) / 6)
    assert gradients_of(training) == pytest.approx([2 * (2 * 1.5**2 + 3**2 + 3 * 6**2) / 6])
    training = Reference([Scale(1.0)], squared, (3,), optimizer=sgd)
    assert training.step([(column(2), column(0))]).loss == pytest.approx(4.0)  # two parts have no sample
    training = Reference([Scale(1.0)], squared, (2, 1), optimizer=sgd)
    # Without gradients micro-batches are whole.
    assert training.evaluate([batch]) == pytest.approx((3 * 2**2 + 3 * 6**2) / 6)


class Scaled(nn.Module):
    """The mean, times a weight of the loss's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=D))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mean(output, target) * self.scale


def test_a_loss_with_a_weight_is_trained_with_the_layers() -> None:
    """Loss: s mean(x a b); gradients: 2 b s, 2 a s and 2 a b."""
    loss = Scaled()
    training = reference(3.0, 4.0, loss=loss)
    batch = column(1, 2, 3), column(0, 0, 0)
    assert training.step([batch]).loss == pytest.approx(48.0)
    assert list(training.state_dict()) == ["0.weight", "1.weight", "loss_function.scale"]
    assert gradients_of(training) == pytest.approx([16.0, 12.0, 24.0])
    assert weights_of(training) == pytest.approx([-13.0, -8.0, -22.0])
    assert loss.scale.item() == 2.0
    assert training.evaluate([batch]) == pytest.approx(2 * 13 * 8 * -22)


def test_weights_on_the_meta_device_are_drawn_by_the_seed() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)]

    def made(**options: Any) -> dict[str, Any]:
        return Reference(layers, nn.MSELoss(), (1,), optimizer=sgd, **options).state_dict()

    first, same, default, zero = made(seed=3), made(seed=3), made(), made(seed=0)
    assert all(value.device.type == "cpu" for value in first.values())
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert all(torch.equal(zero[name], default[name]) for name in zero)
    assert not any(torch.equal(first[name], zero[name]) for name in first)


def test_a_loss_sum_scales_what_has_a_gradient() -> None:
    def half(output: Tensor, target: Tensor) -> cf.LossSum:
        return cf.LossSum((output * target).sum(), target.sum())

    class Unused(Scale):
        def __init__(self) -> None:
            super().__init__(2.0)
            self.unused = nn.Parameter(torch.ones((), dtype=D))

    training = Reference([Unused()], half, (1, 1), optimizer=sgd)
    assert training.gradients == {}
    found = training.step([(column(1, 2, 3, 4), column(1, 0, 0, 1))])  # the half of 4 counts
    assert found.grad_norm == pytest.approx(2.5)
    assert {name: float(value) for name, value in training.gradients.items()} == {
        "0.weight": pytest.approx(2.5),
        "0.unused": 0.0,
    }


class Counts(Scale):
    """Has an extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2.0)
        self.seen = 0

    def forward(self, value: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(value)

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_a_state_is_as_it_was_then() -> None:
    training = Reference([Counts()], mean, (1, 1), optimizer=sgd)
    before = training.state_dict()
    training.step([(column(1, 3), column(0, 0))])
    assert before["0.weight"].item() == 2.0
    assert training.state_dict()["0.weight"].item() == 0.0
    assert (before["0._extra_state"], training.state_dict()["0._extra_state"]) == (0, 2)


def test_indices_are_not_lowered() -> None:
    """257 is no number of bfloat16."""
    table, head = nn.Embedding(300, 1), nn.Linear(1, 1)
    training = Reference([table, head], nn.MSELoss(), (1,), optimizer=sgd, compute_dtype=torch.bfloat16)
    training.step([(torch.tensor([257]), torch.ones(1, 1))])
    assert training.gradients["0.weight"].nonzero()[:, 0].tolist() == [257]


def test_hooks_see_the_gradient_of_the_mini_batch_and_the_latest_weight() -> None:
    """One period behind, with weight 3: the gradient is 2, the weight that it will change 3 and then -17."""
    seen: list[tuple[float, float]] = []
    layer, other = Scale(3.0), Scale(1.0)

    def look(gradient: Tensor) -> Tensor:
        seen.append((round(float(gradient), 9), round(float(training.parameters[0]), 9)))
        return 10 * gradient

    layer.weight.register_hook(look)
    asked: list[tuple[int, int, int]] = []

    def version(stages: int, stage: int, period: int) -> int:
        asked.append((stages, stage, period))
        return 0

    training = Reference(
        [layer, other], mean, (1, 1), optimizer=sgd, staleness=Staleness((1,), version), clip_norm=None
    )
    batch = column(1, 2, 3), column(0, 0, 0)
    training.step([batch])
    assert gradients_of(training) == pytest.approx([20.0, 6.0])
    training.step([batch])
    assert seen == [(2.0, 3.0), (2.0, -17.0)]
    assert asked == [(2, 0, 0), (2, 1, 0), (2, 0, 1), (2, 1, 1)]
