"""What a worker does with its weights, by hand: gradients, norms, updates, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ConfigError, WorkerError
from counterflow.program.actions import StartSync, Summed, WaitSync
from counterflow.runtime.mesh.parallel_dims import WeightDims
from counterflow.runtime.parameters.optimizers import Parameters
from counterflow.runtime.parameters.weights import Weights
from counterflow.runtime.stages.deferred import defer
from counterflow.runtime.stages.versions import Versions
from counterflow.runtime.transport.base import Transport
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport

from .by_hand import backward, sgd, weights_of


class Row(nn.Module):
    """A weight of some ones."""

    def __init__(self, size: int = 1, *, trains: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64), requires_grad=trains)


def rows(*sizes: int) -> list[list[nn.Module]]:
    """A stage for each size, with one row."""
    return [[Row(size)] for size in sizes]


def value(weights: Weights, stage: int) -> list[float]:
    found: list[float] = weights.stages[stage].parameters()[0].tolist()
    return found


def gradient(weights: Weights, stage: int) -> list[float] | None:
    found = weights.stages[stage].parameters()[0].grad
    return None if found is None else found.tolist()


def on_threads(count: int, work: Callable[[Transport], Any]) -> list[Any]:
    return launch(
        lambda: work(current_transport()), workers=count, transport="strict-local", timeout_seconds=30
    )


# -- gradients and updates


def test_a_stage_is_updated_and_its_gradients_are_cleared() -> None:
    weights = weights_of(rows(1, 2))
    backward(weights, 1.0, 0.5)
    weights.update(1, 0)
    assert (value(weights, 0), value(weights, 1)) == ([1.0], [0.25, 0.25])  # 1 - 0.5 * 1.5
    weights.update(0, 0)
    assert value(weights, 0) == [0.25]
    weights.detach()
    assert gradient(weights, 0) is None
    backward(weights, 1.0)
    weights.update(0, 1)
    assert value(weights, 0) == [-0.25], "nothing of the step before is in it"


def test_what_is_skipped_is_cleared_alone() -> None:
    weights = weights_of(rows(1, 1))
    backward(weights, 1.0)
    weights.skip(1)
    backward(weights, 1.0)
    for stage in range(2):
        weights.update(stage, 0)
    assert (value(weights, 0), value(weights, 1)) == ([0.0], [0.5])


def test_all_gradients_are_cleared() -> None:
    weights = weights_of(rows(1, 1))
    backward(weights, 1.0)
    weights.clear()
    assert weights.squared_norm() == 0.0


def test_norms_are_of_all_stages_and_factors_of_one_or_all() -> None:
    weights = weights_of(rows(1, 3))
    backward(weights, 2.0)
    assert weights.squared_norm() == pytest.approx(16.0)
    square, odd = weights.own_norm().read()
    assert square == pytest.approx(16.0)
    assert odd is None
    weights.scale(0.5, 1)
    assert weights.squared_norm() == pytest.approx(7.0)
    weights.scale(2.0)
    assert weights.squared_norm() == pytest.approx(28.0)


def test_the_first_that_is_not_finite_is_named() -> None:
    weights = weights_of(rows(1, 1, 1))
    backward(weights, 1.0)
    assert weights.not_finite() is None
    weights.scale(math.nan, 2)
    assert weights.not_finite() == (2, "2.weight")
    weights.scale(math.inf, 1)
    assert weights.not_finite() == (1, "1.weight")


def test_a_stage_is_clipped_where_it_is() -> None:
    weights = weights_of(rows(4, 1))
    backward(weights, 1.0)
    counted, alive = weights.clip(0, 1.0, None)
    assert (counted.item(), alive.item()) == (4.0, True)
    own = weights.stages[0].parameters()[0].grad
    assert own is not None
    assert own.tolist() == [pytest.approx(1 / (2 + 1e-6), rel=1e-12)] * 4, "as torch's clip_grad_norm_ does"
    assert weights.own_norm().read()[0] == pytest.approx(2.0, rel=1e-5)  # 1 of this one, 1 of the other
    counted, alive = weights.clip(1, None, alive)
    assert (counted.item(), alive.item()) == (1.0, True)
    counted, alive = weights.clip(1, 100.0, None)
    assert weights.squared_norm() == pytest.approx(2.0, rel=1e-5), "a limit above the norm changes nothing"


def test_what_is_not_finite_is_dropped_from_then_on() -> None:
    weights = weights_of(rows(2))
    backward(weights, math.inf)
    counted, alive = weights.clip(0, 1.0, torch.tensor(True))
    assert (counted.item(), alive.item()) == (math.inf, False)
    assert weights.squared_norm() == 0.0
    backward(weights, 1.0)
    counted, alive = weights.clip(0, None, alive)
    assert counted.item() == pytest.approx(2.0)
    assert not alive
    assert weights.squared_norm() == 0.0


def test_gradients_are_kept_where_asked() -> None:
    modules = [[Row(1), Row(2)], [Row(1)]]
    weights = weights_of(modules)
    backward(weights, 3.0)
    weights.update(0, 0)
    assert weights.kept_gradients == {}
    weights.keeps_gradients = True
    backward(weights, 3.0)
    weights.update(0, 1)
    assert {name: kept.tolist() for name, kept in weights.kept_gradients.items()} == {
        "0.weight": [3.0],
        "1.weight": [3.0, 3.0],
    }
    weights.update(1, 1)
    kept = weights.kept_gradients["2.weight"]
    assert kept.tolist() == [6.0]
    assert not kept.requires_grad
    backward(weights, 1.0)
    weights.update(1, 2)
    assert weights.kept_gradients["2.weight"].tolist() == [1.0]
    assert kept.tolist() == [6.0], "a snapshot"
    assert weights.kept_gradients["0.weight"].tolist() == [3.0]


def test_what_has_no_gradient_is_kept_no_longer() -> None:
    weights = weights_of([[Row(), Row()]])
    weights.keeps_gradients = True
    backward(weights, 1.0)
    weights.update(0, 0)
    weights.attach()
    (weights.stages[0].parameters()[1] * 2.0).sum().backward()
    weights.update(0, 1)
    assert [*weights.kept_gradients] == ["1.weight"]


def test_a_scheduler_makes_a_step_with_its_stage() -> None:
    weights = weights_of(rows(1, 1), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    backward(weights, 1.0)
    weights.update(1, 0)
    backward(weights, 1.0)
    weights.update(1, 1)
    assert value(weights, 1) == [0.25]  # 1 - 0.5 - 0.25
    assert [weights.schedulers[stage].last_epoch for stage in range(2)] == [0, 2]


def test_hooks_see_each_gradient_once() -> None:
    modules = rows(1, 1)
    seen: list[tuple[int, float]] = []
    for stage, (module,) in enumerate(modules):
        module.get_parameter("weight").register_hook(
            lambda gradient, stage=stage: seen.append((stage, gradient.item()))
        )
    weights = weights_of(modules)
    assert weights.hooked
    backward(weights, 1.0, 1.0)
    assert seen == []
    weights.call_hooks(0, 1)
    assert seen == [(1, 2.0)]
    weights.call_hooks(0)
    assert seen[1:] == [(0, 2.0), (1, 2.0)]
    backward(weights, 1.0)
    assert len(seen) == 3, "taken again, after they were called"
    weights.detach()
    (modules[0][0].get_parameter("weight") * 5.0).sum().backward()
    assert seen[3:] == [(0, 5.0)], "between steps they are where they were"


def test_hooks_draw_by_step_group_and_stage() -> None:
    def drawn(step: int) -> list[float]:
        modules = rows(1, 1)
        found: list[float] = []
        for (module,) in modules:
            module.get_parameter("weight").register_hook(lambda _: found.append(torch.rand(()).item()))
        weights = weights_of(modules)
        backward(weights, 1.0)
        weights.call_hooks(step)
        weights.detach()
        return found

    first = drawn(0)
    assert len({*first, *drawn(1)}) == 4
    assert drawn(0) == first


def test_hooks_of_two_tied_weights_draw_apart() -> None:
    modules = [[Row(), Row()], [Row(), Row()]]
    found: list[float] = []
    for place in range(2):
        weight = modules[0][place].get_parameter("weight")
        modules[1][place].weight = weight
        weight.register_hook(lambda _: found.append(torch.rand(()).item()))
    weights = weights_of(modules)
    backward(weights, 1.0)
    weights.call_hooks(0)
    assert len({*found}) == 2


def test_hooks_of_tied_weights_are_called_with_all_alone() -> None:
    modules = rows(1, 1)
    modules[1][0].weight = modules[0][0].weight
    seen: list[float] = []
    modules[0][0].get_parameter("weight").register_hook(lambda gradient: seen.append(gradient.item()))
    weights = weights_of(modules)
    backward(weights, 1.0)
    weights.call_hooks(0, 1)
    assert seen == []
    weights.call_hooks(0)
    assert seen == [2.0]


def test_a_hook_that_comes_too_late_is_refused() -> None:
    modules = rows(1, 1)
    weights = weights_of(modules)
    weights.call_hooks(0)  # there are none
    modules[1][0].get_parameter("weight").register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError) as refused:
        weights.attach()
    assert str(refused.value) == (
        "1.weight has a hook that was registered after the pipeline was made, and no parameter had one by "
        "then; register it before, or make the pipeline again"
    )


def test_a_hook_of_any_worker_is_known_to_all() -> None:
    def work(transport: Transport) -> bool:
        modules = rows(1, 1)
        if transport.rank == 1:
            modules[1][0].get_parameter("weight").register_hook(lambda gradient: gradient)
        return weights_of(modules, holders=[[0], [1]], transport=transport).hooked

    assert on_threads(2, work) == [True, True]


# -- sums


def sums(weights: Weights, what: Summed, stage: int, tied: tuple[int, ...] = ()) -> None:
    weights.start_sync(StartSync(stage, 0, (0, 1), what, tied))
    weights.wait_sync(WaitSync(stage, 0, (0, 1), what, tied))


def test_gradients_are_summed_stage_by_stage() -> None:
    def work(transport: Transport) -> list[Any]:
        weights = weights_of(rows(1, 2), holders=[[0, 1], [1, 0]], transport=transport)
        backward(weights, 1.0 + transport.rank)
        sums(weights, Summed.GRADIENTS, 1)
        found = [weights.squared_norm()]
        for stage in range(2):
            weights.update(stage, 0)
        return [*found, value(weights, 0), value(weights, 1)]

    first, second = on_threads(2, work)
    assert first[0] == 1.0, "the first holder of a stage counts it"
    assert second[0] == pytest.approx(18.0)
    assert first[1:] == [[0.5], [-0.5, -0.5]]
    assert second[1:] == [[0.0], [-0.5, -0.5]]


def test_tied_gradients_are_summed_with_their_stages() -> None:
    def work(transport: Transport) -> list[float]:
        modules = rows(1, 1, 1)
        modules[2][0].weight = modules[0][0].weight
        weights = weights_of(modules, holders=[[0], [0], [1]], transport=transport)
        stage = 2 * transport.rank
        backward(weights, 1.0 + transport.rank)
        sums(weights, Summed.TIED, 0, (2,))
        weights.update(stage, 0)
        return value(weights, stage)

    assert on_threads(2, work) == [[-0.5], [-0.5]]


def test_statistics_are_averaged() -> None:
    def work(transport: Transport) -> list[float]:
        norm = nn.BatchNorm1d(1)
        norm.get_buffer("running_mean").fill_(transport.rank)
        weights = weights_of([[norm]], holders=[[0, 1]], transport=transport)
        sums(weights, Summed.STATISTICS, 0)
        found: list[float] = norm.get_buffer("running_mean").tolist()
        return found

    assert on_threads(2, work) == [[0.5], [0.5]]


def test_counters_are_added_up() -> None:
    def work(transport: Transport) -> float:
        layer = nn.Linear(1, 1)
        layer.register_buffer("seen", torch.tensor(10))
        cf.sum_over_copies(layer, "seen")
        weights = weights_of([[layer]], holders=[[0, 1]], transport=transport)
        weights.attach()
        layer.get_buffer("seen").add_(1 + transport.rank)
        sums(weights, Summed.STATISTICS, 0)
        return layer.get_buffer("seen").item()

    assert on_threads(2, work) == [13, 13]


def test_running_statistics_wait_within_a_step() -> None:
    norm = nn.BatchNorm1d(1, momentum=0.5)
    defer([norm])
    weights = weights_of([[norm]])
    weights.attach()
    assert [norm.deferring] == [True]
    norm(torch.tensor([[1.0], [3.0]]))
    assert norm.get_buffer("running_mean").item() == 0.0
    weights.commit_statistics()
    assert norm.get_buffer("running_mean").item() == 1.0
    weights.detach()
    assert [norm.deferring] == [False]


def test_a_changed_weight_is_named_by_the_model() -> None:
    modules: list[list[nn.Module]] = [[nn.Linear(1, 1)], [nn.Linear(1, 1)]]
    weights = weights_of(modules)
    weights.mutations.note_parameters()
    change(modules[1][0].get_parameter("bias"))
    weights.mutations.check()
    assert weights.mutations.mutated_weights == {"1.bias"}


def test_ties_are_told_ascending() -> None:
    modules = rows(1, 1, 1, 1)
    modules[3][0].weight = modules[1][0].weight
    modules[2][0].weight = modules[0][0].weight
    weights = weights_of(modules)
    assert weights.ties == ((0, 2), (1, 3))
    assert weights.shared == ["0.weight", "1.weight"]
    assert weights.updated_names(0) == {id(modules[0][0].weight): "0.weight"}
    assert weights.updated_names(2) == {}, "it is updated with the first"
    assert [*weights.optimizers] == [0, 1]


# -- what is refused


def test_an_optimizer_of_what_is_not_the_stages_is_refused_later_too() -> None:
    weights = weights_of(rows(1, 1))
    weights.optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(7))]})
    with pytest.raises(ConfigError, match=r"stage 1 has a parameter of shape \(7,\)"):
        weights.updated_names(1)


def test_those_that_are_named_have_their_names() -> None:
    names: list[str] = []

    def optimizer(given: Parameters) -> torch.optim.Optimizer:
        names.extend(name for name, _ in given.named)
        return torch.optim.SGD(given, lr=0.5)

    weights_of([[Row(), Row()]], optimizer=optimizer)
    assert names == ["0.weight", "1.weight"]


class Coupled(torch.optim.SGD):
    """Divides its step by the norm of all gradients."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum((p.grad**2).sum() for p in every) ** 0.5
        with torch.no_grad():
            for p in every:
                p.sub_(0.1 * p.grad / (norm + 1))


def coupled(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Coupled(parameters, lr=0.1)


def test_an_optimizer_that_looks_at_all_weights_is_refused_where_there_are_several() -> None:
    weights_of([[Row(2), Row(2)]], optimizer=coupled)  # one of the whole model may
    weights_of([[Row(2), Row(2)], [Row(2, trains=False)]], optimizer=coupled)
    with pytest.raises(ConfigError, match="Coupled"):
        weights_of([[Row(2), Row(2)], [Row(2)]], optimizer=coupled)


def test_it_is_refused_on_all_workers() -> None:
    def work(transport: Transport) -> str:
        try:
            weights_of(
                [[Row(2), Row(2)], [Row(2)]], holders=[[0], [1]], optimizer=coupled, transport=transport
            )
        except ConfigError as refused:
            return str(refused)
        return ""

    assert all("Coupled" in each for each in on_threads(2, work))


def test_what_is_unfrozen_is_trained_and_tried() -> None:
    weights = weights_of([[Row(2), Row(2)], [Row(2, trains=False)]], optimizer=coupled)
    with pytest.raises(ConfigError, match="Coupled"):
        weights.set_trainable(lambda _: True)
    weights = weights_of([[Row(1)], [Row(1, trains=False)]])
    assert [stage.trains for stage in weights.stages.values()] == [True, False]
    weights.set_trainable(lambda name: name == "1.weight")
    assert [stage.trains for stage in weights.stages.values()] == [False, True]
    backward(weights, 1.0)
    for stage in range(2):
        weights.update(stage, 0)
    assert (value(weights, 0), value(weights, 1)) == ([1.0], [0.5])


def test_what_is_no_number_is_never_trained() -> None:
    whole = nn.Linear(1, 1)
    whole.count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    whole.turn = nn.Parameter(torch.ones(1, dtype=torch.complex64), requires_grad=False)
    weights = weights_of([[whole]])
    weights.set_trainable(lambda _: True)
    assert [p.requires_grad for p in whole.parameters()] == [True, True, False, True]


def test_what_fsdp_holds_stays_as_it_is() -> None:
    weights = weights_of(rows(1), dims={"0.weight": WeightDims(reduced=frozenset({2}))})
    weights.set_trainable(lambda name: name == "0.weight")
    with pytest.raises(ConfigError) as refused:
        weights.set_trainable(lambda _: False)
    assert str(refused.value) == (
        "0.weight is sharded by fully_shard, which knows from the first step on what is trained; freeze "
        "it in parallelize(), before fully_shard, or in the model"
    )


class Drawing(torch.optim.SGD):
    """Adds noise."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.rand_like(p))


def test_an_optimizer_that_draws_is_refused_for_a_weight_that_is_tied_apart() -> None:
    def work(transport: Transport) -> str:
        modules = rows(1, 1)
        modules[1][0].weight = modules[0][0].weight
        weights = weights_of(
            modules, holders=[[0], [1]], transport=transport, optimizer=lambda p: Drawing(p, lr=1.0)
        )
        backward(weights, 1.0)
        with pytest.raises(ConfigError) as refused:
            weights.update(transport.rank, 0)
        return str(refused.value)

    for rank, said in enumerate(on_threads(2, work)):
        assert said == (
            f"the optimizer of stage {rank}, a Drawing, draws random numbers in its step, and 0.weight is a "
            "weight of stages 0 and 1, whose workers would draw others for it; do not tie it, or take an "
            "optimizer that draws nothing"
        )


def test_what_an_optimizer_draws_goes_by_step_and_stage() -> None:
    def drawn(step: int) -> list[list[float]]:
        weights = weights_of(rows(1, 1), optimizer=lambda p: Drawing(p, lr=1.0))
        backward(weights, 1.0)
        for stage in range(2):
            weights.update(stage, step)
        return [value(weights, stage) for stage in range(2)]

    first, second = drawn(0), drawn(1)
    assert drawn(0) == first
    assert len({x for found in (first, second) for (x,) in found}) == 4


def test_messages_name_the_stage() -> None:
    def fails(given: Any) -> Any:
        raise ZeroDivisionError

    def second(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        assert parameters, "a stage without parameters is not asked for"
        return fails(parameters) if len(parameters[0]) == 2 else sgd(parameters)

    with pytest.raises(ConfigError, match="optimizer raised ZeroDivisionError for stage 2"):
        weights_of([[Row(1)], [nn.Identity()], [Row(2)]], optimizer=second)
    with pytest.raises(ConfigError, match="scheduler raised ZeroDivisionError for stage 0"):
        weights_of(rows(1), scheduler=fails)
    with pytest.raises(
        ConfigError, match=r"^the optimizer of stage 1, a Coupled, .* and each stage has its own; "
    ):
        weights_of([[Row(2, trains=False)], [Row(2), Row(2)], [Row(2)]], optimizer=coupled)
    with pytest.raises(
        ConfigError, match=r"^the optimizer of stage 0, a Coupled, .* and zero_stage = 1 lets "
    ):
        weights_of([[Row(2), Row(2)]], optimizer=coupled, sharded=True)


def test_a_worker_without_trained_stages_has_none_of_the_optimizers() -> None:
    def work(transport: Transport) -> None:
        modules: list[list[nn.Module]] = [[Row(2, trains=False)], [Row(2), Row(2)]]
        weights_of(modules, holders=[[0], [1]], optimizer=coupled, transport=transport)

    on_threads(2, work)


def test_each_kind_of_optimizer_is_tried() -> None:
    def either(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return coupled(parameters) if len(parameters[0]) == 3 else sgd(parameters)

    with pytest.raises(ConfigError, match="stage 1, a Coupled"):
        weights_of([[Row(2), Row(2)], [Row(3), Row(3)]], optimizer=either)


def test_one_that_goes_by_names_is_tried_with_names() -> None:
    def by_name(given: Parameters) -> torch.optim.Optimizer:
        assert all(isinstance(name, str) for name, _ in given.named)
        return Coupled([{"params": [p]} for _, p in given.named], lr=0.1)

    with pytest.raises(ConfigError, match="a Coupled, updates a weight otherwise"):
        weights_of([[Row(2), Row(2)], [Row(2)]], optimizer=by_name)


class Untried(torch.optim.SGD):
    """Halves its rate in a step, and is not to be tried: its function fails on what is small."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.5


class Prodigy(torch.optim.SGD):
    """Has the name of one that is known to look at all."""


def for_large(kind: type[torch.optim.SGD]) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A function that fails on the small copies of a trial."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        assert len(parameters[0]) > 50
        return kind(parameters, lr=0.5)

    return make


def test_what_cannot_be_tried_goes_by_its_name() -> None:
    with pytest.raises(ConfigError, match="stage 0, a Prodigy, updates a weight otherwise"):
        weights_of(rows(60, 60), optimizer=for_large(Prodigy))
    weights_of(rows(60), optimizer=for_large(Prodigy))  # one of the whole model


def test_what_could_not_be_tried_is_looked_at_in_its_first_step() -> None:
    weights = weights_of(rows(60, 60), optimizer=for_large(Untried))
    backward(weights, 1.0)
    with pytest.raises(ConfigError, match=r"^the optimizer of stage 1, a Untried, changed 'lr' of a group"):
        weights.update(1, 0)
    alone = weights_of(rows(60), optimizer=for_large(Untried))
    backward(alone, 1.0)
    alone.update(0, 0)
    assert alone.optimizers[0].param_groups[0]["lr"] == 0.25


def test_it_is_looked_at_in_its_first_step_alone() -> None:
    weights = weights_of(rows(60, 60), optimizer=for_large(torch.optim.SGD))
    backward(weights, 1.0)
    weights.update(1, 0)
    assert value(weights, 1) == [0.5] * 60
    weights.optimizers[1].step = lambda: weights.optimizers[1].param_groups[0].update(lr=7.0)  # type: ignore[assignment]
    backward(weights, 1.0)
    weights.update(1, 1)
    tried = weights_of(rows(2, 2), optimizer=sgd)
    tried.optimizers[1].step = lambda: tried.optimizers[1].param_groups[0].update(lr=7.0)  # type: ignore[assignment]
    backward(tried, 1.0)
    tried.update(1, 0)


def test_a_weight_of_three_stages_is_named_by_the_first_and_the_last() -> None:
    def work(transport: Transport) -> str:
        modules = rows(1, 1, 1)
        modules[1][0].weight = modules[2][0].weight = modules[0][0].weight
        weights = weights_of(
            modules, holders=[[0], [1], [2]], transport=transport, optimizer=lambda p: Drawing(p, lr=1.0)
        )
        backward(weights, 1.0)
        with pytest.raises(ConfigError) as refused:
            weights.update(transport.rank, 0)
        return str(refused.value)

    assert all("of stages 0 and 2, whose" in said for said in on_threads(3, work))


# -- sharded optimiser state


def test_each_weight_is_updated_by_one_and_sent_to_the_other() -> None:
    def work(transport: Transport) -> tuple[Any, ...]:
        modules: list[list[nn.Module]] = [[Row(3), Row(2)], [Row(1)]]
        weights = weights_of(modules, holders=[[0, 1], [1, 0]], transport=transport, sharded=True)
        assert weights.owners is not None
        assert [group.ranks for group in weights.groups] == [(0, 1)]
        mine = [len(p) for o in weights.optimizers.values() for g in o.param_groups for p in g["params"]]
        backward(weights, 1.0)
        for stage in range(2):
            weights.update(stage, 0)
        before = [p.tolist()[0] for stage in weights.stages.values() for p in stage.parameters()]
        weights.share()
        after = [p.tolist()[0] for stage in weights.stages.values() for p in stage.parameters()]
        return sorted(mine), sorted(before), after

    first, second = on_threads(2, work)
    assert sorted(first[0] + second[0]) == [1, 2, 3]
    assert first[0] != [1, 2, 3] != second[0]
    assert 1.0 in first[1]
    assert first[2] == second[2] == [0.5] * 3


def test_all_have_what_is_not_sharded() -> None:
    weights = weights_of(rows(1))
    assert weights.owners is None
    assert weights.groups == []
    weights.share()


# -- copies in memory, bytes, an average


def test_changes_wait_for_the_copies_that_are_made() -> None:
    weights = weights_of(rows(1))
    order: list[int] = []
    for number in range(2):
        weights.change_after(lambda number=number: order.append(number))  # type: ignore[misc]
    backward(weights, 1.0)
    assert order == []
    weights.update(0, 0)
    assert sorted(order) == [0, 1]
    weights.update(0, 1)
    assert len(order) == 2, "each once"
    weights.follow(0.5)
    weights.change_after(lambda: order.append(2))
    with weights.averaged():
        assert order[2:] == [2]
    for call in (weights.state.prepare_model, weights.state.prepare_training):
        weights.change_after(lambda: order.append(3))
        state = {**weights.state.state_dict(), **weights.state.training_state()}
        call(state)()
    assert order[3:] == [3, 3]


def test_bytes_are_those_of_all_that_is_held() -> None:
    adam = weights_of(
        [[Row(3), nn.BatchNorm1d(1, affine=False)]], optimizer=lambda p: torch.optim.Adam(p, lr=0.1)
    )
    buffers = 4 + 4 + 8
    assert adam.held_bytes() == 3 * 8 + 3 * 8 + buffers
    backward(adam, 1.0)
    adam.update(0, 0)
    assert adam.held_bytes() == 4 * 3 * 8 + buffers + 4  # two moments, and a count of steps in float32
    adam.follow(0.5)
    assert adam.held_bytes() == 5 * 3 * 8 + buffers + 4
    versions = weights_of(rows(3))
    stage = versions.stages[0]
    stage.versions = Versions(0, stage.parameters, lambda _: None)
    stage.versions.peak = 3
    assert versions.held_bytes() == 3 * 24 + 24


def test_an_average_follows_and_is_shown_for_a_while() -> None:
    modules = [[Row(), Row(trains=False)]]
    weights = weights_of(modules)
    with pytest.raises(ConfigError) as refused, weights.averaged():
        pass
    assert (
        str(refused.value)
        == "there is no average of the weights; call ema(decay) before the steps to average"
    )
    weights.follow(0.75)
    for step in range(3):  # 0.5, 0, -0.5
        backward(weights, 1.0)
        weights.update(0, step)
    assert value(weights, 0) == [-0.5]
    average = 0.75 * (0.75 * 0.5) + 0.25 * -0.5
    for _ in range(2):
        with weights.averaged():
            assert value(weights, 0) == [average]
            assert modules[0][1].get_parameter("weight").tolist() == [1.0]
        assert value(weights, 0) == [-0.5]
    with pytest.raises(ZeroDivisionError), weights.averaged():
        raise ZeroDivisionError
    assert value(weights, 0) == [-0.5]


def test_what_is_trained_later_is_averaged_from_then_on() -> None:
    weights = weights_of([[Row(1)], [Row(1, trains=False)]])
    weights.follow(0.5)
    assert weights.average is not None
    weights.set_trainable(lambda _: True)
    assert [[*weights.average.of(stage)] for stage in range(2)] == [["0.weight"], ["1.weight"]]


def test_workers_that_average_otherwise_are_refused() -> None:
    def work(transport: Transport) -> str:
        weights = weights_of(rows(1, 1), holders=[[0], [1]], transport=transport)
        with pytest.raises(ConfigError) as refused:
            weights.follow([0.5, 0.25][transport.rank])
        return str(refused.value)

    assert on_threads(2, work) == [
        "rank 0 averages weights with a decay of 0.5, rank 1 with 0.25; all workers make the same calls",
        "rank 1 averages weights with a decay of 0.25, rank 0 with 0.5; all workers make the same calls",
    ]


# -- comparing


def change(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor += 1


@pytest.mark.parametrize("what", ["weight", "buffer", "average", "tied", "tied average"])
def test_copies_that_differ_are_found(what: str) -> None:
    def work(transport: Transport) -> str:
        modules: list[list[nn.Module]] = [[nn.BatchNorm1d(1), Row()], [Row()]]
        apart = what.startswith("tied")
        if apart:
            modules[1][0].weight = modules[0][1].weight
        weights = weights_of(modules, holders=[[0], [1]] if apart else [[0, 1]] * 2, transport=transport)
        weights.follow(0.5)
        weights.check_copies("at first")
        assert weights.average is not None
        if transport.rank == 1:
            match what:
                case "weight":
                    change(modules[1][0].get_parameter("weight"))
                case "buffer":
                    change(modules[0][0].get_buffer("running_mean"))
                case "average":
                    change(weights.average.of(1)["2.weight"].average)
                case "tied":
                    change(modules[1][0].get_parameter("weight"))
                case _:
                    change(weights.average.of(1)["1.weight"].average)
        with pytest.raises(WorkerError) as refused:
            weights.check_copies("then")
        return str(refused.value)

    for said in on_threads(2, work):
        assert "then" in said
        where = "1.weight" if what.startswith("tied") else f"stage {0 if what == 'buffer' else 1}"
        assert where in said


def test_buffers_are_compared_where_asked() -> None:
    def work(transport: Transport) -> list[list[Any]]:
        norm = nn.BatchNorm1d(1)
        weights = weights_of([[norm]], holders=[[0, 1]], transport=transport)
        found = [weights.digests.digests({0}, buffers=asked).tolist() for asked in (False, True)]
        change(norm.get_buffer("running_mean"))
        return [*found, *(weights.digests.digests({0}, buffers=asked).tolist() for asked in (False, True))]

    for weights, both, same, other in on_threads(2, work):
        assert weights == same
        assert both != other


def test_parts_are_compared_at_equal_positions_only() -> None:
    """Two workers by two positions: of the tied weight and its average each position has another part."""
    part = WeightDims(shards=frozenset({2}))

    def compare(transport: Transport, dims: dict[str, WeightDims]) -> None:
        modules: list[list[nn.Module]] = [[Row(), Row()], [Row()]]
        modules[1][0].weight = modules[0][1].weight
        modules[0][1].get_parameter("weight").data += transport.rank % 2
        weights = weights_of(modules, holders=[[0], [1]], transport=transport, positions=2, dims=dims)
        weights.follow(0.5)
        weights.check_copies("now")

    on_threads(4, partial(compare, dims={"1.weight": part}))
    with pytest.raises(cf.WorkerError, match="now the copies of stage 0 on ranks 0 and 1 differ"):
        on_threads(4, partial(compare, dims={}))
