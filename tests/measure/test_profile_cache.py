"""Names of kept profiles: another one for each model, loss and optimizer with other costs, and no more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import counterflow as cf
from counterflow.common.tensors.float32_precision import Float32Precision
from counterflow.execution import Execution
from counterflow.measure import profile_cache
from counterflow.measure.layer_chain import LayerChain
from counterflow.measure.model_profile import Measurement
from counterflow.measure.profile_cache import folder_of
from counterflow.measure.subject_pipeline import Subject
from counterflow.measure.survey import machines
from counterflow.measure.user_model import RepeatedSamples, UserModel
from counterflow.planning import Cluster, LayerProfile, Link, Model, Profile
from counterflow.runtime.counted_memory import WORKER_BYTES
from counterflow.runtime.workers.world import RankInfo

from .test_equal_layers import Elementwise

_SGD = partial(torch.optim.SGD, lr=0.1)
_TIMES = 2


def _name(
    loss: Any = mse_loss, optimizer: Callable[..., Any] = _SGD, layer: Callable[[], nn.Module] | None = None
) -> str:
    layers = [layer() if layer else nn.Linear(4, 4) for _ in range(3)]
    batch = RepeatedSamples((torch.ones(2, 4), torch.ones(2, 4)), 2)
    subject = Subject(layers, loss, optimizer, batch, 0, Execution())
    options: dict[str, Any] = {"transport": "gloo", "workers": 1, "device": "cpu", "threads": 1}
    return folder_of(subject, LayerChain.of(subject), [1], **options).name


def _repeated(output: Tensor, target: Tensor, times: Any) -> Tensor:
    for _ in range(int(times)):
        output = output.tanh()
    return mse_loss(output, target)


def _closure(times: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: _repeated(output, target, times)


class Loss(nn.Module):
    """A loss with a head and elementwise work."""

    def __init__(self, width: int, times: int = 1, *, decide: bool = False) -> None:
        super().__init__()
        self.head, self.times, self.decide = nn.Linear(4, width), times, decide

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss over the samples."""
        if self.decide and target.sum().item() > 1e30:
            return output.sum()
        return _repeated(self.head(output), target[:, :1].expand(-1, self.head.out_features), self.times)


class Method:
    """An object with a loss."""

    def __init__(self, times: int) -> None:
        self.times, self.start_time = times, object()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss over the samples."""
        return _repeated(output, target, self.times)


_LOSSES: dict[str, Callable[[int], Any]] = {
    "partial": lambda n: partial(_repeated, times=n),
    "function of a partial": lambda n: partial((mse_loss, _closure(1))[n - 1]),
    "closure": _closure,
    "weights": Loss,
    "operators": lambda n: Loss(2, n),
    "settings, if operators are not known": lambda n: Loss(2, n, decide=True),
    "method": lambda n: Method(n).loss,
    "object": lambda n: partial(_repeated, times=SimpleNamespace(times=n)),
    "torch's class": lambda n: (nn.MSELoss, nn.L1Loss)[n - 1](),
}


@pytest.mark.parametrize("kind", _LOSSES)
def test_another_loss_has_another_profile(kind: str) -> None:
    make = _LOSSES[kind]
    assert _name(make(1)) == _name(make(1))
    assert _name(make(1)) != _name(make(2))


def test_another_number_of_a_losss_module_has_another_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return _repeated(output, target, _TIMES)

    name = _name(loss)
    monkeypatch.setitem(globals(), "_TIMES", 3)
    assert _name(loss) != name


@pytest.mark.parametrize(
    ("optimizer", "same"),
    [
        (partial(torch.optim.SGD, lr=0.2), True),
        (lambda p: torch.optim.SGD(p, lr=0.3), True),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), False),
        (partial(torch.optim.SGD, lr=0.1, foreach=True), False),
        (partial(torch.optim.SGD, lr=0.1, weight_decay=0.1), False),
        (lambda p: torch.optim.SGD([{"params": p, "momentum": 0.9}], lr=0.1), False),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9 * (p[0].dim() < 2)), False),
        (partial(torch.optim.Adam, lr=0.1), False),
    ],
)
def test_another_optimizer_has_another_profile_and_another_rate_none(
    optimizer: Callable[..., Any], *, same: bool
) -> None:
    assert (_name(optimizer=optimizer) == _name()) is same


@pytest.mark.parametrize("decide", [False, True])
def test_another_model_has_another_profile(*, decide: bool) -> None:
    """Also if its layers have the same class and weights, and need values of tensors."""
    names = [_name(layer=partial(Elementwise, times, decide=decide)) for times in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


class Power(nn.Module):
    """A linear layer, and a power that no operator's shapes show."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.linear, self.power = nn.Linear(4, 4), power

    def forward(self, x: Tensor) -> Tensor:
        """Output of the layer."""
        return torch.as_tensor(self.linear(x)).abs().pow(self.power * _TIMES)


def test_numbers_of_layers_and_those_that_forwards_read_have_another_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = _name(layer=partial(Power, 2.0))
    assert _name(layer=partial(Power, 2.0)) == name != _name(layer=partial(Power, 2.5))
    monkeypatch.setitem(globals(), "_TIMES", 3)
    assert _name(layer=partial(Power, 2.0)) != name


def test_numbers_of_layers_that_are_found_have_another_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward that reads the number is the model's, whose layers are its modules with weights."""

    def name() -> str:
        data, loss = torch.ones(2, 4), mse_loss
        subject = UserModel(Power(2.0), loss, (data, data))()
        options: dict[str, Any] = {"transport": "gloo", "workers": 1, "device": "cpu", "threads": 1}
        return folder_of(subject, LayerChain.of(subject), [1], **options).name

    first = name()
    assert name() == first
    monkeypatch.setitem(globals(), "_TIMES", 3)
    assert name() != first


def test_other_settings_of_torch_have_another_profile() -> None:
    name, precision, backends = _name(), Float32Precision.current(), cast("Any", torch.backends)
    try:
        torch.set_float32_matmul_precision("medium")
        medium = _name()
        backends.mkldnn.matmul.fp32_precision = "tf32"
        reduced = _name()
    finally:
        precision.restore()
    torch.use_deterministic_algorithms(mode=True)
    try:
        deterministic = _name()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert len({name, medium, reduced, deterministic, _name()}) == 4


def test_another_number_of_machines_has_another_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    name = _name()
    for variable, value in RankInfo("torchrun", 0, 2, 0, "localhost", 1, machines=2).variables().items():
        monkeypatch.setenv(variable, value)
    assert machines() == 2
    assert _name() != name


def test_memory_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerProfile((1.0,), (1.0,), (2.0,), (1.0,), 4.0, 4.0)
    link = Link(0.0, 0.0)
    measurement = Measurement(
        Model("m", ("block",)),
        Profile("p", "", "", {"block": layer}),
        Cluster("c", 1, 2, 1e6, link, link),
        (),
        (),
    )
    profile_cache.write(measurement, tmp_path)
    amounts = []
    for limit in (3000, 5000):
        monkeypatch.setenv(WORKER_BYTES, str(limit))
        measurement_now = profile_cache.read(tmp_path, "cpu")
        assert measurement_now is not None
        amounts.append(measurement_now.cluster.memory_bytes)
    assert amounts == [3000.0, 5000.0]


def _named() -> list[str]:
    return [_name(make(1)) for make in _LOSSES.values()]


def test_a_name_is_the_same_in_every_process() -> None:
    assert cf.launch(_named, workers=1, transport="gloo") == [_named()]
