"""The user's own modules are what is trained; what lives on other workers is not in his model any more."""

from __future__ import annotations

import copy
import io
import threading
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.ownership import ThreadLocalModules
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import sgd

F = torch.float64
DAPPLE = schemes.dapple(2, 4)
CHIMERA = schemes.chimera(2, 4)
SCHEMES = [DAPPLE, schemes.interleaved(2, 4, chunks=2), CHIMERA, schemes.pipedream_2bw(2, 4)]


def linear() -> nn.Linear:
    return nn.Linear(4, 4, dtype=F)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.BatchNorm1d(4, dtype=F), linear(), linear())


def tied() -> nn.Sequential:
    model = plain()
    model[5].weight = model[0].weight
    return model


class Configured(nn.Module):
    """Looks up its scale where all layers do, in an object and in a module, as models of transformers do."""

    def __init__(self, config: dict[str, list[float]], scales: nn.Module) -> None:
        super().__init__()
        self.linear, self.config, self.scales = linear(), config, scales

    def forward(self, x: Tensor) -> Tensor:
        self.config["calls"].append(1.0)
        found: Tensor = self.linear(x) * self.config["scale"][0] * self.scales.get_buffer("scale")
        return found.tanh()


def configured() -> nn.Sequential:
    torch.manual_seed(0)
    scales = nn.Module()
    scales.register_buffer("scale", torch.tensor(0.5, dtype=F))
    config = {"scale": [2.0], "calls": []}
    return nn.Sequential(*(Configured(config, scales) for _ in range(6)))


MODELS = [plain, tied, configured]


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs, targets = (torch.randn(16, 4, generator=generator, dtype=F) for _ in range(2))
    return inputs, targets


def piped(model: nn.Module, schedule: Schedule, **options: Any) -> Pipeline:
    return Pipeline(model, nn.MSELoss(), schedule, optimizer=sgd, **options)


def threads(work: Callable[..., Any], *args: object, workers: int = 2) -> list[Any]:
    return launch(work, *args, workers=workers, transport="local", timeout_seconds=30)


def _trained(model: nn.Module, schedule: Schedule, replicas: int) -> dict[str, Tensor]:
    pipeline = piped(model, schedule)
    share = 16 // replicas
    rows = slice(pipeline.replica * share, (pipeline.replica + 1) * share)
    for number in range(3):
        inputs, targets = batch(number)
        pipeline.step(inputs[rows], targets[rows])
        if schedule.synchronous:
            with torch.no_grad():  # his own model, between steps
                model.eval()
                mine = float(functional.mse_loss(model(batch(0)[0]), batch(0)[1]))
                model.train()
            assert pipeline.evaluate(*(part[rows] for part in batch(0))).loss == pytest.approx(mine, rel=1e-9)
    return pipeline.model_state_dict()


@pytest.mark.table
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_threads_train_the_model_they_are_given(
    schedule: Schedule, make: Callable[[], nn.Sequential], replicas: int
) -> None:
    if make is tied and not schedule.synchronous:
        pytest.skip("it updates each stage at its own time")
    model = make()
    before = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    state, *_ = threads(_trained, model, schedule, replicas, workers=2 * replicas)
    assert dict(model.named_modules()) == modules
    assert model.state_dict().keys() == state.keys()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is before[name]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)
    assert not torch.equal(next(model.parameters()), next(make().parameters()))


class Doubles(nn.Module):
    """Shows in which mode it is, and what was set in it."""

    def __init__(self, shared: list[float]) -> None:
        super().__init__()
        self.shared, self.times = shared, 1.0

    def forward(self, value: Tensor) -> Tensor:
        return 2 * self.times * value if self.training else self.times * value


def with_modes() -> nn.Sequential:
    torch.manual_seed(0)
    shared: list[float] = []
    return nn.Sequential(linear(), Doubles(shared), linear(), linear(), Doubles(shared), linear())


def change(model: nn.Sequential) -> None:
    """What a user may do with his model between steps."""
    model.requires_grad_(requires_grad=False)[5].requires_grad_(requires_grad=True)
    model.eval()
    model[4].times = 3.0  # type: ignore[assignment]
    model[4].register_forward_hook(lambda _, __, output: output + 1)


def _changed(model: nn.Sequential | None, schedule: Schedule) -> dict[str, Tensor]:
    model = with_modes() if model is None else model
    pipeline = piped(model, schedule)
    pipeline.step(*batch(0))
    if pipeline.worker == 0 or not pipeline._engine.local.owned.shared:
        change(model)
    pipeline.step(*batch(1))
    return pipeline.model_state_dict()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("schedule", SCHEMES[:3], ids=str)
def test_what_is_set_in_the_users_model_counts(schedule: Schedule, given: bool) -> None:
    alone = with_modes()
    optimizer = sgd(list(alone.parameters()))
    for number in range(2):
        if number:
            change(alone)
        optimizer.zero_grad()
        for part, target in zip(*(each.split(4) for each in batch(number)), strict=True):
            (functional.mse_loss(alone(part), target) / 4).backward()
        optimizer.step()
    expected = dict(alone.state_dict())
    for state in threads(_changed, with_modes() if given else None, schedule):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


class Settings(nn.Module):
    """Multiplies by what it holds in attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: Any = {"a": {"scale": [1.0]}, "unused": (1, 2)}
        self.config: Any = types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.0))
        self.array: Any = np.ones(4)
        self.act: Any = torch.tanh
        self.extra: Any = 1.0
        self.count = 0

    def forward(self, value: Tensor) -> Tensor:
        self.count += 1
        value = value * self.tables["a"]["scale"][0] * self.config.inner.gain * torch.from_numpy(self.array)
        found: Tensor = self.act(value) * getattr(self, "extra", 0.25)
        return found


def set_config(layer: Settings) -> None:
    layer.config.inner.gain = 0.5


def delete_extra(layer: Settings) -> None:
    del layer.extra


def set_extra(layer: Settings) -> None:
    layer.extra = torch.full((4,), 0.5, dtype=F)


SET: dict[str, Callable[[Settings], object]] = {
    "an entry of an entry": lambda layer: layer.tables["a"]["scale"].__setitem__(0, 3.0),
    "a key that is deleted": lambda layer: layer.tables.pop("unused"),
    "an attribute of an attribute": set_config,
    "an array": lambda layer: layer.array.__setitem__(slice(2), 0.5),
    "a function": lambda layer: setattr(layer, "act", partial(torch.mul, other=0.5)),
    "a tensor": set_extra,
    "an attribute that is deleted": delete_extra,
}


@pytest.mark.parametrize("name", SET)
def test_attributes_of_all_kinds_that_are_set_count(name: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(linear(), Settings(), linear(), linear(), Settings(), linear())

    def work(model: nn.Sequential) -> dict[str, Tensor]:
        pipeline = piped(model, CHIMERA)
        for number in range(3):
            pipeline.step(*batch(number))
            if number == 0 and pipeline.worker == 0:
                SET[name](cast("Settings", model[4]))
        return pipeline.model_state_dict()

    alone = make()
    optimizer = sgd(list(alone.parameters()))
    for number in range(3):
        optimizer.zero_grad()
        for part, target in zip(*(each.split(4) for each in batch(number)), strict=True):
            (functional.mse_loss(alone(part), target) / 4).backward()
        optimizer.step()
        if number == 0:
            SET[name](cast("Settings", alone[4]))
    for state in threads(work, make()):
        torch.testing.assert_close(state, dict(alone.state_dict()), rtol=0, atol=1e-12)


def test_an_attribute_that_cannot_be_copied_is_refused() -> None:
    def work(model: nn.Sequential) -> None:
        pipeline = piped(model, CHIMERA)
        pipeline.step(*batch(0))
        if pipeline.worker == 0:
            cast("Settings", model[1]).extra = (number for number in (1.0, 2.0))
        pipeline.step(*batch(1))

    with pytest.raises(ConfigError, match="'extra' of a Settings changed and cannot be copied"):
        threads(work, nn.Sequential(linear(), Settings(), linear(), linear()))


def _shown() -> None:
    model = plain()
    rank = current_transport().rank
    mine, theirs = (model[5], model[0]) if rank else (model[0], model[5])
    assert isinstance(theirs, nn.Linear)
    gone, stays = weakref.ref(theirs.weight), mine.get_parameter("weight")
    pipeline = piped(model, DAPPLE)
    assert gone() is None
    model.requires_grad_(requires_grad=False)
    model.requires_grad_(requires_grad=True)
    pipeline.step(*batch(0))
    assert mine.get_parameter("weight") is stays
    assert torch.equal(stays, pipeline.model_state_dict()[f"{5 if rank else 0}.weight"])
    for use in (
        lambda: model(batch(0)[0]),
        theirs.weight.sum,
        theirs.weight.tolist,
        lambda: copy.deepcopy(model),
        lambda: torch.optim.swa_utils.AveragedModel(model),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: plain().load_state_dict(model.state_dict()),
        lambda: model.load_state_dict(plain().state_dict()),
        lambda: model.to(torch.float32),
        lambda: torch.cat([theirs.bias, theirs.bias]),
        lambda: torch.stack(tensors=[theirs.bias]),
    ):
        with pytest.raises((ConfigError, RuntimeError)) as error:
            use()
        where = f"lives on rank {1 - rank} and not on rank {rank}, because a pipeline trains its model"
        assert where in str(error.value)
        assert "evaluate() or predict()" in str(error.value)
    assert sum(parameter.numel() for parameter in model.parameters()) == 88
    assert isinstance(theirs.weight, nn.Parameter)
    assert theirs.weight.shape == (4, 4)
    assert "Linear(in_features=4" in repr(model)
    model.zero_grad()


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")  # and then it is refused
@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_what_lives_elsewhere_says_so(transport: Literal["local", "gloo"]) -> None:
    launch(_shown, workers=2, transport=transport, timeout_seconds=60)


def _tied_at_both_ends() -> bool:
    model = tied()
    piped(model, DAPPLE).step(*batch(0))
    return model[0].weight is model[5].weight and not model[0].get_parameter("weight").is_meta


@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_a_weight_that_stages_share_is_on_both_workers(transport: Literal["local", "gloo"]) -> None:
    assert launch(_tied_at_both_ends, workers=2, transport=transport, timeout_seconds=60) == [True, True]


def _twice(other: Schedule) -> None:
    model = plain()
    with piped(model, DAPPLE) as pipeline:
        pipeline.step(*batch(0))
    with piped(model, other) as pipeline:
        pipeline.step(*batch(1))


def test_a_second_pipeline_with_the_same_cut_goes_on() -> None:
    threads(_twice, schemes.gpipe(2, 2))


def test_a_second_pipeline_with_another_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight of layer \d \(.*\) was left to another worker"):
        threads(_twice, schemes.interleaved(2, 4, chunks=2))


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, dtype=F)
        self.lock = threading.Lock()


def _locked(model: nn.Module | None, schedule: Schedule) -> None:
    piped(nn.Sequential(Locked(), Locked()) if model is None else model, schedule).step(*batch(0))


@pytest.mark.parametrize("schedule", [DAPPLE, CHIMERA], ids=str)
def test_what_a_thread_made_for_itself_need_not_be_copied(schedule: Schedule) -> None:
    torch.manual_seed(0)
    threads(_locked, None, schedule)


@pytest.mark.parametrize("schedule", [DAPPLE, CHIMERA], ids=str)
def test_copies_of_layers_share_their_locks(schedule: Schedule) -> None:
    found = []
    makes: list[Callable[[], nn.Module]] = [Locked, lambda: nn.Linear(4, 4, dtype=F)]
    for make in makes:
        torch.manual_seed(0)
        model = nn.Sequential(make(), make())
        threads(_locked, model, schedule)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


class Opened(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, dtype=F)
        self.numbers = iter([1, 2])
        self.source = (number for number in self.numbers)


def test_a_layer_that_cannot_be_copied_and_one_thread_uses_is_itself() -> None:
    threads(_locked, nn.Sequential(Opened(), Opened()), DAPPLE)


def test_a_layer_that_cannot_be_copied_and_two_threads_use_is_named() -> None:
    shared = [Opened(), Opened()]
    for layer in shared:
        layer.common = {"shared": shared}  # type: ignore[assignment]
    refused = r"layer \d \(Opened\) cannot be copied .*make the model in the function"
    with pytest.raises(ConfigError, match=refused):
        threads(_locked, nn.Sequential(Opened(), Opened()), CHIMERA)
    with pytest.raises(ConfigError, match=refused):
        threads(_locked, nn.Sequential(*shared), DAPPLE)


@pytest.mark.parametrize("make", [plain, tied])
@pytest.mark.parametrize("schedule", SCHEMES[:3], ids=str)
def test_a_model_on_the_meta_device_is_made_in_the_users_object(
    schedule: Schedule, make: Callable[[], nn.Sequential]
) -> None:
    with torch.device("meta"):
        model = make()
    state, *_ = threads(_trained, model, schedule, 1)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)
    assert (model[5].weight is model[0].weight) == (make is tied)


CONFIG: dict[str, list[float]] = {"scale": [2.0], "calls": []}


def _one_config(schedule: Schedule) -> tuple[dict[str, Tensor], bool]:
    torch.manual_seed(0)
    scales = nn.Module()
    scales.register_buffer("scale", torch.tensor(0.5, dtype=F))
    model = nn.Sequential(*(Configured(CONFIG, scales) for _ in range(6)))
    pipeline = piped(model, schedule)
    pipeline.step(*batch(0))
    layers = [layer for copy in pipeline.stages.values() for layer in copy.layers]
    return pipeline.model_state_dict(), all(
        parameter is model[layer.index].get_parameter(name)
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    )


@pytest.mark.parametrize("schedule", SCHEMES[:3], ids=str)
def test_models_that_reach_one_object_train_their_own_weights(schedule: Schedule) -> None:
    CONFIG["calls"].clear()
    first, *others = threads(_one_config, schedule)
    assert first[1]
    for state, own in others:
        assert own
        torch.testing.assert_close(state, first[0], rtol=0, atol=0)


def _on_a_device(model: nn.Sequential, schedule: Schedule) -> None:
    parameters = dict(model.named_parameters())
    pipeline = piped(model, schedule)
    for number in range(2):
        pipeline.step(*batch(number))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    if schedule is DAPPLE or pipeline.worker == 0:  # the first holder of each stage
        state = model.state_dict()
        for name, tensor in pipeline.model_state_dict(local=True).items():
            if pipeline.worker and "scales" in name:  # the first worker's
                continue
            assert state[name].device == pipeline.device
            assert torch.equal(state[name].cpu(), tensor), name
    pipeline.close()


@pytest.mark.parametrize("make", [plain, configured])
@pytest.mark.parametrize("schedule", [DAPPLE, CHIMERA], ids=str)
def test_the_users_model_moves_to_the_device(schedule: Schedule, make: Callable[[], nn.Sequential]) -> None:
    launch(_on_a_device, make(), schedule, workers=2, transport="strict-nccl", timeout_seconds=60)


def test_replaced_weights_are_in_every_module_that_had_them() -> None:
    def work() -> None:
        model: Any = linear()
        layer, stage = nn.Module(), linear()
        layer.register_parameter("model_weight", model.weight)  # as layers that are found have it
        stage.bias = model.bias
        modules = ThreadLocalModules(
            [("layer 0", layer), ("layer 1", stage)], [model, stage], current_transport()
        )
        before = weakref.ref(stage.weight)
        with modules.rebinding():
            layer.model_weight = nn.Parameter(torch.zeros(4, 4, dtype=F))
            del stage.weight
            assert before() is None  # a weight is freed as soon as nothing has it
        assert model.weight is layer.model_weight
        assert model.bias is stage.bias

    launch(work, workers=1, transport="local")
