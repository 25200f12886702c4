"""What is saved of a worker's weights and loaded again, by hand: names, values, schedules, averages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import lr_scheduler

from counterflow.common.tensors.dtensors import part_of
from counterflow.errors import ConfigError
from counterflow.runtime.parameters.state_records import StateName, assembled
from counterflow.runtime.parameters.weights import Weights
from counterflow.runtime.transport.base import Transport
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport

from .by_hand import backward, weights_of


class Row(nn.Module):
    """A weight, and extra state."""

    def __init__(self, *values: float, trains: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float64), requires_grad=trains)
        self.more: dict[str, list[int]] = {"seen": [0]}

    def get_extra_state(self) -> dict[str, list[int]]:
        return self.more

    def set_extra_state(self, state: dict[str, list[int]]) -> None:
        self.more = state


class Model(nn.Module):
    """Has something that is in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor([7.0]))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.0)


def stepwise(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def made(**options: Any) -> Weights:
    usual: dict[str, Any] = {"optimizer": adam, "scheduler": stepwise, "model": Model()}
    return weights_of([[Row(1.0, 2.0)], [nn.Identity(), Row(3.0)]], **usual | options)


def trained(weights: Weights, steps: int = 2) -> Weights:
    for step in range(steps):
        backward(weights, 1.0 + step)
        for stage in weights.stages:
            weights.update(stage, step)
        weights.detach()
    return weights


def shown(state: Any) -> Any:
    """The same with lists in place of tensors."""
    if isinstance(state, Tensor):
        assert not state.requires_grad
        return state.tolist()
    if isinstance(state, dict):
        return {key: shown(value) for key, value in state.items()}
    return state


def on_threads(count: int, work: Callable[[Transport], Any]) -> list[Any]:
    return launch(
        lambda: work(current_transport()), workers=count, transport="strict-local", timeout_seconds=30
    )


# -- the model's state

ROWS = {
    "0.weight": [1.0, 2.0],
    "0._extra_state": {"seen": [0]},
    "2.weight": [3.0],
    "2._extra_state": {"seen": [0]},
    "mean": [7.0],
}


def test_a_state_has_weights_extra_state_and_what_is_in_no_layer() -> None:
    weights = made()
    state = weights.state.state_dict()
    assert shown(state) == ROWS
    state["0.weight"].zero_()
    state["2._extra_state"]["seen"].append(1)
    state["mean"].zero_()
    assert shown(weights.state.state_dict()) == ROWS, "what was given is a copy"


def test_a_weight_has_all_its_names() -> None:
    aliases = {"0.weight": ("0.weight", "head.weight"), "2.weight": ("2.weight", "x", "y")}
    weights = made(aliases=aliases)
    state = shown(weights.state.state_dict())
    assert state["head.weight"] == [1.0, 2.0]
    assert state["x"] == state["y"] == [3.0]
    other = made(aliases=aliases)
    given = {**{name: value for name, value in state.items() if name not in {"2.weight", "x"}}}
    given |= {"0.weight": torch.tensor([5.0, 6.0]), "y": torch.tensor([8.0]), "mean": torch.tensor([9.0])}
    given["0._extra_state"] = {"seen": [4]}
    other.state.prepare_model(given)()
    assert shown(other.state.state_dict()) == {
        "0.weight": [5.0, 6.0],
        "head.weight": [5.0, 6.0],
        "0._extra_state": {"seen": [4]},
        "2.weight": [8.0],
        "x": [8.0],
        "y": [8.0],
        "2._extra_state": {"seen": [0]},
        "mean": [9.0],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"2.weight": None}, "the state has no '2.weight'"),
        ({"mean": None}, "the state has no 'mean'"),
        (
            {"2.weight": torch.ones(1, 1)},
            r"2\.weight has shape \(1, 1\) in the state, \(1,\) in the model",
        ),
        ({"2.weight": "seven"}, r"2\.weight has shape None in the state, \(1,\) in the model"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    weights = made()
    state = {**weights.state.state_dict(), "0.weight": torch.tensor([5.0, 6.0]), **change}
    with pytest.raises(ConfigError, match=f"^{message}$"):
        weights.state.prepare_model({name: value for name, value in state.items() if value is not None})()
    assert shown(weights.state.state_dict()) == ROWS


def test_a_load_begins_an_average_anew() -> None:
    weights = made()
    weights.follow(0.5)
    trained(weights)
    assert weights.average is not None
    assert weights.average.updates(0) == 2
    weights.state.prepare_model({**weights.state.state_dict(), "0.weight": torch.tensor([5.0, 6.0])})()
    assert weights.average.updates(0) == 0
    assert weights.average.of(0)["0.weight"].average.tolist() == [5.0, 6.0]


# -- the training's state


def test_a_training_state_by_hand() -> None:
    weights = trained(made())
    state = weights.state.training_state()
    assert state.keys() == {"optimizer", "scheduler"}
    assert state["optimizer"].keys() == {"0.weight", "2.weight"}
    one = state["optimizer"]["2.weight"]
    assert one["state"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert one["state"]["step"].item() == 2.0
    assert one["state"]["exp_avg"].tolist() == [pytest.approx(0.1 * 0.9 + 0.2)]
    assert one["options"]["lr"] == 0.125
    assert one["options"]["initial_lr"] == 0.5
    assert not [key for key in one["options"] if key.startswith("param")]
    assert {stage: kept["last_epoch"] for stage, kept in state["scheduler"].items()} == {0: 2, 1: 2}
    one["state"]["exp_avg"].zero_()
    one["options"]["betas"] = (0, 0)
    again = weights.state.training_state()["optimizer"]["2.weight"]
    assert again["state"]["exp_avg"].item() > 0.2
    assert again["options"]["betas"] == (0.9, 0.999)


def test_entries_are_all_of_the_state_as_it_is() -> None:
    aliases = {"2.weight": ("2.weight", "x")}
    weights = made(aliases=aliases)
    weights.follow(0.5)
    entries = dict(trained(weights).state.entries())
    model = {kept.of: value for kept, value in entries.items() if kept.kind == "model"}
    assert shown(
        {name: value.detach() if isinstance(value, Tensor) else value for name, value in model.items()}
    ) == {name: value for name, value in shown(weights.state.state_dict()).items() if name != "x"}
    training = [(kept, value) for kept, value in entries.items() if kept.kind != "model"]
    torch.testing.assert_close(assembled(training), weights.state.training_state(), rtol=0, atol=0)
    parameter = weights.optimizers[1].param_groups[0]["params"][0]
    assert model["2.weight"].data_ptr() == parameter.data_ptr()
    state = weights.optimizers[1].state[parameter]
    assert entries[StateName("optimizer", "2.weight", "exp_avg")] is state["exp_avg"]


def test_a_training_goes_on_from_its_state() -> None:
    weights = trained(made())
    state, own = weights.state.training_state(), weights.state.state_dict()
    kept = shown(state)
    other = made()
    other.state.prepare_model(own)()
    other.state.prepare_training(state)()
    assert shown(other.state.training_state()) == kept
    trained(other, 1)
    assert shown(state) == kept, "what was loaded is copied"
    assert shown(trained(weights, 1).state.state_dict()) == shown(other.state.state_dict())


def test_options_and_schedules_are_taken_where_asked() -> None:
    state = trained(made()).state.training_state()
    other = made()
    other.state.prepare_training(state, options=False)()
    for optimizer in other.optimizers.values():
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]
        assert [kept["step"].item() for kept in optimizer.state.values()] == [2.0]
    assert [scheduler.last_epoch for scheduler in other.schedulers.values()] == [0, 0]
    other.state.prepare_training({**state, "scheduler": {}}, options=False)()


def test_a_training_state_goes_by_every_name() -> None:
    state = trained(made()).state.training_state()
    state["optimizer"]["y"] = state["optimizer"].pop("2.weight")
    other = made(aliases={"2.weight": ("2.weight", "x", "y")})
    other.state.prepare_training(state)()
    assert shown(other.state.training_state())["optimizer"]["2.weight"]["state"]["step"] == 2.0
    with pytest.raises(ConfigError) as refused:
        made().state.prepare_training(state)()
    assert str(refused.value) == "the training state has nothing of the optimizer for '2.weight'"


class Odd(torch.optim.SGD):
    """Keeps for each weight a tensor, a number without dimensions, and something that is no tensor."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state.setdefault(p, {"rows": [], "sum": torch.tensor(0.0), "last": None})
                kept["rows"].append(1)
                kept["sum"] += 1
                kept["last"] = p.detach().clone()


def test_what_is_no_tensor_is_copied_too() -> None:
    def odd(parameters: Any) -> torch.optim.Optimizer:
        return Odd(parameters, lr=0.5)

    weights = trained(made(optimizer=odd, scheduler=None))
    state = weights.state.training_state()
    found = state["optimizer"]["2.weight"]["state"]
    assert shown(found) == {"rows": [1, 1], "sum": 2.0, "last": [3.0]}
    other = made(optimizer=odd, scheduler=None)
    other.state.prepare_training(state)()
    trained(other, 1)
    trained(weights, 1)
    assert shown(found) == {"rows": [1, 1], "sum": 2.0, "last": [3.0]}
    for each in (weights, other):
        ours = each.state.training_state()["optimizer"]["2.weight"]["state"]
        assert shown(ours) == {"rows": [1, 1, 1], "sum": 3.0, "last": [3.0]}


# -- schedules under other cuts

LAMBDA = lr_scheduler.LambdaLR


def halves(rate: float) -> Callable[[Any], Any]:
    """Optimisers whose weights have rates of their own: ``rate`` where a weight has one value, else half."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": rate if len(p) == 1 else rate / 2} for p in parameters]
        return torch.optim.SGD(groups, lr=9.0)

    return make


def test_a_schedule_of_another_stage_is_taken_for_the_rates_at_hand() -> None:
    weights = trained(made(optimizer=halves(0.5)))
    state = weights.state.training_state()
    del state["scheduler"][1]
    other = made(optimizer=halves(0.5))
    other.state.prepare_training(state)()
    scheduler = other.schedulers[1]
    assert scheduler.last_epoch == 2
    assert scheduler.base_lrs == [0.5]
    assert scheduler.get_last_lr() == [0.125]
    assert other.schedulers[0].base_lrs == [0.25]
    assert state["scheduler"][0]["base_lrs"] == [0.25]


def test_the_stages_own_comes_before_others() -> None:
    state = trained(made()).state.training_state()
    state["scheduler"] = {0: {**state["scheduler"][0], "last_epoch": 7}, 1: state["scheduler"][1]}
    other = made()
    other.state.prepare_training(state)()
    assert [other.schedulers[stage].last_epoch for stage in range(2)] == [7, 2]


def test_a_schedule_that_does_not_fit_is_passed_over_or_refused() -> None:
    state = trained(made()).state.training_state()
    fits = state["scheduler"][1]
    state["scheduler"][1] = {key: value for key, value in fits.items() if key != "gamma"}
    other = made()
    other.state.prepare_training(state)()
    assert other.schedulers[1].last_epoch == 2, "the other stage's"
    state["scheduler"] = {1: {**fits, "more": 1}}
    with pytest.raises(ConfigError) as refused:
        made().state.prepare_training(state)()
    assert str(refused.value) == (
        "the training state has no learning-rate schedule for stage 0 with its 1 groups of parameters; "
        "load it with the stages it was saved with"
    )


def test_a_schedule_has_as_many_rates_as_groups() -> None:
    def two(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [p]} for p in parameters]
        return torch.optim.SGD(groups, lr=0.5)

    modules: Callable[[], list[list[nn.Module]]] = lambda: [[Row(1.0), Row(2.0)], [Row(3.0)]]  # noqa: E731
    state = trained(weights_of(modules(), optimizer=two, scheduler=stepwise)).state.training_state()
    other = weights_of([[Row(1.0)], [Row(2.0), Row(3.0)]], optimizer=two, scheduler=stepwise)
    other.state.prepare_training(state)()  # with initial rates the lists are made anew
    assert [len(other.schedulers[stage].base_lrs) for stage in range(2)] == [1, 2]
    cyclic: Callable[[Any], Any] = lambda o: LAMBDA(o, [lambda n: 0.5**n] * len(o.param_groups))  # noqa: E731
    state = trained(weights_of(modules(), optimizer=two, scheduler=cyclic)).state.training_state()
    other = weights_of([[Row(1.0)], [Row(2.0), Row(3.0)]], optimizer=two, scheduler=cyclic)
    other.state.prepare_training(state)()
    assert [other.schedulers[stage].last_epoch for stage in range(2)] == [2, 2]
    assert [len(other.schedulers[stage].state_dict()["lr_lambdas"]) for stage in range(2)] == [1, 2]
    trained(other, 1)
    assert other.schedulers[1].get_last_lr() == [0.0625, 0.0625]
    state = trained(
        weights_of([[*modules()[0], Row(3.0)]], optimizer=two, scheduler=cyclic)
    ).state.training_state()
    other.state.prepare_training(state)()  # of one stage with three groups
    assert [len(other.schedulers[stage].state_dict()["lr_lambdas"]) for stage in range(2)] == [1, 2]


class Factor:
    """A function of steps that is an object, whose fields are state."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        return self.factor**step


def test_functions_that_are_objects_keep_their_state() -> None:
    state = trained(made(scheduler=lambda o: LAMBDA(o, Factor(0.5)))).state.training_state()
    assert state["scheduler"][0]["lr_lambdas"] == [{"factor": 0.5}]
    other = made(scheduler=lambda o: LAMBDA(o, Factor(0.25)))
    other.state.prepare_training(state)()
    assert other.schedulers[0].state_dict()["lr_lambdas"] == [{"factor": 0.5}]


# -- averages


def test_an_average_is_saved_and_loaded() -> None:
    weights = made()
    weights.follow(0.5)
    trained(weights, 3)
    state = weights.state.training_state()
    assert state["averaged"] == {0: 3, 1: 3}
    assert state["ema"].keys() == {"0.weight", "2.weight"}
    kept = shown(state["ema"])
    other = made(aliases={"2.weight": ("2.weight", "y")})
    other.follow(0.5)
    state["ema"]["y"] = state["ema"].pop("2.weight")
    state["averaged"] = {0: 3, 1: 2}
    other.state.prepare_training(state)()
    assert other.average is not None
    assert [other.average.updates(stage) for stage in range(2)] == [3, 3]
    assert shown(other.state.training_state()["ema"]) == kept
    other.state.prepare_training({**state, "averaged": {}})()
    assert other.average.updates(0) == 0


def test_an_average_that_is_missing_or_not_asked_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    weights, plain = made(), made()
    weights.follow(0.5)
    trained(weights)
    trained(plain)
    plain.state.prepare_training(plain.state.training_state())()
    assert not caplog.records
    plain.state.prepare_training(weights.state.training_state())()
    assert [record.getMessage() for record in caplog.records] == [
        "the training state has an average of the weights, and it is not taken: call ema(decay) before "
        "the state is loaded"
    ]
    caplog.clear()
    weights.state.prepare_training(plain.state.training_state())()
    assert [record.getMessage() for record in caplog.records] == [
        "the training state has no average of the weights: it begins with those loaded"
    ]
    caplog.clear()
    frozen = weights_of([[Row(1.0, trains=False)]])
    frozen.follow(0.5)
    frozen.state.prepare_training({"optimizer": {"0.weight": {"state": {}, "options": {}}}})()
    assert not caplog.records, "it averages nothing"
    other = made()
    other.follow(0.5)
    state = weights.state.training_state()
    del state["ema"]["2.weight"]
    with pytest.raises(ConfigError, match=r"has no average of '2\.weight'"):
        other.state.prepare_training(state)()


# -- sharded over further dimensions of a mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_sharded_weight_is_saved_whole_and_loaded_in_parts(mesh: DeviceMesh) -> None:
    def sharded() -> Weights:
        row = Row(1.0, 2.0)
        row.weight = nn.Parameter(distribute_tensor(row.weight.detach(), mesh, [Shard(0)]))
        return weights_of(
            [[row], [Row(3.0, 4.0)]], optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5)
        )

    weights = sharded()
    for stage in weights.stages.values():
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        weights.optimizers[stage.stage].step()
    state, training = weights.state.state_dict(), weights.state.training_state()
    assert type(state["0.weight"]) is Tensor
    assert state["0.weight"].tolist() == [0.5, 1.5]
    kept = training["optimizer"]["0.weight"]["state"]["momentum_buffer"]
    assert type(kept) is Tensor
    other = sharded()
    other.state.prepare_model(state)()
    other.state.prepare_training(training)()
    for name, stage in zip(("0.weight", "1.weight"), other.stages.values(), strict=True):
        (parameter,) = stage.parameters()
        mine = other.optimizers[stage.stage].state[parameter]["momentum_buffer"]
        assert isinstance(parameter, DTensor) == isinstance(mine, DTensor) == (name == "0.weight")
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert whole.tolist() == state[name].tolist()
        assert (mine.full_tensor() if isinstance(mine, DTensor) else mine).tolist() == [1.0, 1.0]
    kept += 1
    state["0.weight"] += 1
    assert shown(other.state.state_dict())["0.weight"] == [0.5, 1.5], "it is a copy"
    assert (
        shown(other.state.training_state())["optimizer"]["0.weight"]["state"]["momentum_buffer"] == [1.0] * 2
    )


def test_parts_are_those_of_the_weight(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def noted(value: Tensor, like: Tensor) -> Tensor:
        asked.append(like)
        return part_of(value, like)

    monkeypatch.setattr("counterflow.runtime.parameters.local_state.part_of", noted)
    row = Row(1.0, 2.0)
    row.weight = nn.Parameter(distribute_tensor(row.weight.detach(), mesh, [Shard(0)]))
    weights = weights_of([[row]], optimizer=adam)
    row.weight.grad = torch.ones_like(row.weight)
    weights.optimizers[0].step()
    weights.state.prepare_model(weights.state.state_dict())()
    assert len(asked) == 1
    weights.state.prepare_training(weights.state.training_state())()
    assert len(asked) == 3
    assert all(isinstance(one, DTensor) for one in asked)


def test_what_an_optimizer_keeps_in_another_shape_stays_whole(mesh: DeviceMesh) -> None:
    row = Row(1.0, 2.0)
    row.weight = nn.Parameter(distribute_tensor(row.weight.detach(), mesh, [Shard(0)]))
    weights = weights_of([[row]])
    given = {"optimizer": {"0.weight": {"options": {}, "state": {"factors": torch.ones(3)}}}}
    weights.state.prepare_training({**given, "scheduler": {}})()
    found = weights.optimizers[0].state[row.weight]["factors"]
    assert type(found) is Tensor
    assert found.tolist() == [1.0] * 3


# -- several workers


def test_a_number_goes_where_the_optimizer_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def home(slot: str, *_: object) -> torch.device:
        asked.append(slot)
        return torch.device("meta" if slot == "step" else "cpu")

    state = trained(made()).state.training_state()
    monkeypatch.setattr("counterflow.runtime.parameters.local_state.home_of", home)
    other = made()
    other.state.prepare_training(state)()
    for optimizer in other.optimizers.values():
        for kept in optimizer.state.values():
            assert {slot: value.device.type for slot, value in kept.items()} == {
                "step": "meta",
                "exp_avg": "cpu",
                "exp_avg_sq": "cpu",
            }
    assert asked == ["step", "exp_avg", "exp_avg_sq"] * 2


def test_what_is_in_no_layer_comes_from_the_first_rank() -> None:
    def work(transport: Transport) -> Any:
        model = Model()
        weights = weights_of([[Row(1.0)]], holders=[[0, 1]], transport=transport, model=model)
        model.mean.fill_(transport.rank)  # they should not differ; here they tell whose was taken
        seen: list[bool] = []
        entries = weights.extra_state.entries
        weights.extra_state.entries = lambda: seen.append(True) or entries()  # type: ignore[method-assign,func-returns-value]
        return shown(dict(weights.state.stream(None)))["mean"], len(seen)

    assert on_threads(2, work) == [([0.0], 1), ([0.0], 0)]


def test_a_stage_is_told_by_its_first_holder_alone() -> None:
    def work(transport: Transport) -> Any:
        row = Row(1.0)
        weights = weights_of([[row]], holders=[[1, 0]], transport=transport)
        with torch.no_grad():
            row.weight.fill_(transport.rank)
        return shown(dict(weights.state.stream(None)))["0.weight"]

    assert on_threads(2, work) == [[1.0], [1.0]]


def test_replicas_leave_it_to_the_first() -> None:
    def work(transport: Transport) -> Any:
        row = Row(1.0)
        weights = weights_of([[row]], transport=transport)
        with torch.no_grad():
            row.weight.fill_(transport.rank)
        return shown(dict(weights.state.stream(None)))["0.weight"]

    assert on_threads(2, work) == [[0.0], [0.0]]


def test_a_schedule_with_no_initial_rate_in_a_group_keeps_its_own() -> None:
    state = trained(made()).state.training_state()
    other = made()
    del other.optimizers[0].param_groups[0]["initial_lr"]
    del state["optimizer"]["0.weight"]["options"]["initial_lr"]
    state["scheduler"][0]["base_lrs"] = [9.0]
    other.state.prepare_training(state)()
    assert other.schedulers[0].base_lrs == [9.0]


class Bare:
    """A schedule that keeps no rates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_a_schedule_of_ones_own_is_loaded_as_it_is() -> None:
    weights = trained(made(scheduler=Bare))
    other = made(scheduler=Bare)
    other.state.prepare_training(weights.state.training_state())()
    assert other.state.training_state()["scheduler"] == {0: {"steps": 2}, 1: {"steps": 2}}


def test_a_state_goes_to_one_or_all() -> None:
    def work(transport: Transport) -> tuple[Any, ...]:
        weights = made(holders=[[0], [1, 0]], transport=transport)
        weights.follow(0.5)
        trained(weights)
        own = shown(weights.state.training_state())
        everywhere = shown(dict(weights.state.stream(None)))
        there = shown(dict(weights.state.stream(1)))
        training, at_one = weights.state.whole_training_state(), weights.state.whole_training_state(1)
        return own, everywhere, there, shown(training), shown(at_one)

    first, second = on_threads(2, work)
    (whole, everywhere, nothing, training, none), (part, also, there, too, at_one) = first, second
    assert everywhere == also == there
    assert [*everywhere] == [*ROWS]
    assert nothing == {}
    assert training == too == at_one == whole
    assert none == {"optimizer": {}, "scheduler": {}}
    assert part["optimizer"].keys() == {"2.weight"}
    assert whole["averaged"] == {0: 2, 1: 2}


def test_sharded_state_is_gathered_of_all() -> None:
    def work(transport: Transport) -> tuple[Any, ...]:
        weights = weights_of(
            [[Row(1.0), Row(2.0)], [Row(3.0)]],
            holders=[[0, 1], [1, 0]],
            transport=transport,
            sharded=True,
            optimizer=adam,
            scheduler=stepwise,
        )
        weights.follow(0.5)
        backward(weights, 1.0)
        for stage in range(2):
            weights.update(stage, 0)
        weights.share()
        own = weights.state.training_state()["optimizer"]
        whole = weights.state.whole_training_state()
        return (
            [*own],
            sorted(whole["optimizer"]),
            sorted(whole["scheduler"]),
            shown(weights.state.state_dict()),
        )

    first, second = on_threads(2, work)
    assert sorted([*first[0], *second[0]]) == ["0.weight", "1.weight", "2.weight"]
    assert first[1:] == second[1:]
    assert first[1] == ["0.weight", "1.weight", "2.weight"]
    assert first[2] == [0, 1]


def test_sharded_state_of_stages_that_are_held_apart() -> None:
    def work(transport: Transport) -> Any:
        weights = weights_of(
            [[Row(1.0)], [Row(2.0)]], holders=[[0], [1]], transport=transport, sharded=True, optimizer=adam
        )
        weights.follow(0.5)
        state = weights.state.whole_training_state()
        return sorted(state["optimizer"]), state["averaged"], sorted(state["ema"])

    found = ["0.weight", "1.weight"], {0: 0, 1: 0}, ["0.weight", "1.weight"]
    assert on_threads(2, work) == [found, found]
