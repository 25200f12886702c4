"""``schedule="auto"``: measured once, planned within the memory, said in a line, and equal to one process."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, mse_loss, silu

import counterflow as cf
from counterflow import automatic
from counterflow.automatic import sizes_of
from counterflow.errors import ConfigError
from counterflow.measure import profile_cache
from counterflow.planning import Cluster, Configuration, Model, Profile
from counterflow.planning.inputs.cluster import Link
from counterflow.planning.inputs.profile import LayerProfile
from counterflow.planning.search.constraints import Constraints
from counterflow.schedule.modes import Recompute

torch.manual_seed(0)


class Down(nn.Module):
    """Two convolutions."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(1, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Output of both."""
        return silu(self.second(silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Two levels, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Down(3, 4), Down(4, 8), Down(8, 8)
        self.d, self.e = Down(16, 4), Down(8, 3)
        self.up = nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the model."""
        a = self.a(x)
        b = self.b(max_pool2d(a, 2))
        c = self.c(max_pool2d(b, 2))
        d = self.d(torch.cat([self.up(c), b], 1))
        return torch.as_tensor(self.e(torch.cat([self.up(d), a], 1)))


class Residual(nn.Module):
    """Blocks with batch norms and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(4)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the model."""
        x = self.stem(x)
        for block in self.blocks:
            x = (x + block(x)).relu_()
        return torch.as_tensor(self.head(x.mean((2, 3))))


class Routed(nn.Module):
    """A residual mixture of two experts with a balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.Parameter(torch.randn(2, 8, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block."""
        shares = self.gate(x).softmax(-1)
        cf.add_loss(0.01 * shares.square().sum(-1).mean(), "balance")
        return x + torch.einsum("sw,ewv,se->sv", x, self.experts, shares)


class Counted(nn.Module):
    """A linear layer that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Output of the layer."""
        self.count += 1
        return torch.as_tensor(self.layer(x))


def _model(kind: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    torch.manual_seed(3)
    if kind == "unet":
        return UNet(), mse_loss, torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    if kind == "resnet":
        return Residual(), cross_entropy, torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    if kind == "counted":
        return nn.Sequential(*(Counted() for _ in range(3))), mse_loss, torch.randn(4, 6), torch.randn(4, 6)
    layers = [nn.Linear(6, 8), *(Routed() for _ in range(4)), nn.Linear(8, 2)]
    return nn.Sequential(*layers), mse_loss, torch.randn(4, 6), torch.randn(4, 2)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _train(kind: str) -> tuple[list[float], str, str | None, Any]:
    model, loss, inputs, targets = _model(kind)
    pipeline = cf.Pipeline(model, loss, "auto", example=(inputs, targets), optimizer=_sgd)
    losses = [float(pipeline.step(inputs, targets).loss or 0.0) for _ in range(3)]
    assert pipeline.choice is not None
    assert pipeline.choice.step_seconds > 0
    return losses, str(pipeline.schedule), str(pipeline.choice), pipeline.schedule.micro_batches


def _alone(kind: str, micro_batches: int) -> list[float]:
    model, loss, inputs, targets = _model(kind)
    optimizer = _sgd([*model.parameters()])
    losses = []
    for _ in range(3):
        total = 0.0
        for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with cf.added_losses() as added:
                value = loss(model(x), y)
            value = (value + sum(added.values())) / micro_batches
            value.backward()
            total += value.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(profile_cache.CACHE, str(tmp_path))
    monkeypatch.setattr(profile_cache, "REPEATS", 1)
    return tmp_path / "profiles"


@pytest.mark.parametrize("kind", ["unet", "resnet", "moe", "counted"])
def test_the_planned_schedule_trains_as_one_process(kind: str, cache: Path) -> None:
    rows = cf.launch(_train, kind, workers=2, transport="local", threads=1)
    losses, schedule, choice, micro_batches = rows[0]
    assert [row[1:] for row in rows[1:]] == [(schedule, choice, micro_batches)]
    assert losses == pytest.approx(_alone(kind, micro_batches), rel=2e-5)


def test_the_choice_is_said_once_and_the_profile_is_measured_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    surveys: list[int] = []
    survey = automatic.survey_of_workers

    def counted(*arguments: Any, **options: Any) -> Any:
        surveys.append(1)
        return survey(*arguments, **options)

    monkeypatch.setattr(automatic, "survey_of_workers", counted)
    with caplog.at_level(logging.WARNING, "counterflow.auto"):
        first = cf.launch(_train, "moe", workers=2, transport="local", threads=1)[0]
        again = cf.launch(_train, "moe", workers=2, transport="local", threads=1)[0]
    assert len(surveys) == 2  # by both workers, in the first run
    assert first == again
    assert len([*cache.iterdir()]) == 1
    lines = [record.message for record in caplog.records if record.name == "counterflow.auto"]
    assert lines == [lines[0], first[2], first[2]]
    assert lines[0].startswith("measuring 6 of 6 layers on 2 workers, once")
    assert str(cache) in lines[0]
    assert lines[1].startswith(f'schedule="auto": {first[1]}')
    for part in (" ms a step planned", " GiB; second-best ", " of "):
        assert part in lines[1]


def test_an_unreadable_profile_is_measured_again(cache: Path) -> None:
    cf.launch(_train, "moe", workers=1, transport="local", threads=1)
    (folder,) = cache.iterdir()
    (folder / "profile.toml").write_text("nothing", encoding="utf-8")
    cf.launch(_train, "moe", workers=1, transport="local", threads=1)
    assert "layers" in (folder / "profile.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs example=\(inputs, targets\), .*; example is missing"),
        ({"example": torch.ones(2, 6)}, "example is a Tensor"),
        ({"example": (torch.ones(2, 6), torch.ones(2, 2)), "cuts": [1]}, "decides cuts; leave it out"),
        ({"example": (torch.ones(2, 6), torch.ones(2, 2)), "input_dims": 1}, "samples in dimension 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str) -> None:
    def make() -> None:
        cf.Pipeline(_model("moe")[0], mse_loss, "auto", optimizer=_sgd, **options)

    with pytest.raises(ConfigError, match=message):
        cf.launch(make, workers=1, transport="local")


def test_sizes_of_micro_batches_divide_the_mini_batch() -> None:
    assert sizes_of(64, 2) == [8, 16, 32]
    assert sizes_of(12, 2) == [1, 2, 4]
    assert sizes_of(7, 2) == [1]


def _inputs(seconds: float = 1.0) -> tuple[Model, Profile, Cluster]:
    """A model of four equal layers on two workers with free messages, without overheads."""
    layer = LayerProfile(
        samples=(1.0,),
        forward_seconds=(seconds,),
        backward_seconds=(2.0 * seconds,),
        saved_bytes=(1.0,),
        weights_bytes=0.0,
        output_bytes=0.0,
    )
    profile = Profile("own", "own", "2026-01-01", {"block": layer})
    link = Link(0.0, 0.0)
    cluster = Cluster("own", 1, 2, 1e9, link, link)
    return Model("own", ("block",) * 4, optimizer_states=0.0), profile, cluster


def test_a_planned_step_is_the_simulated_one() -> None:
    """With the profile's seconds, free messages and no overheads, a plan's step is that of ``simulate``."""
    model, profile, cluster = _inputs()
    configuration = Configuration.of("dapple", {"stages": 2, "micro_batches": 4}, replicas=1, samples=1)
    predicted = cf.predict(model, profile, cluster, configuration)
    simulated = cf.simulate("dapple(stages=2, micro_batches=4)", cf.Costs(forward=2.0, backward=4.0))
    assert predicted.step_seconds == pytest.approx(simulated.makespan)


def test_of_plans_as_fast_the_simplest_is_taken() -> None:
    """Chimera and ZB-V have fewer bubbles than 1F1B, but by less than the tolerance."""
    limits = Constraints(depths=(2,), samples=(1,), recompute=(Recompute.NONE,))
    schemes = "chimera", "dapple", "gpipe", "zb-v"
    result = cf.plan(*_inputs(), 64, constraints=replace(limits, schemes=schemes))
    fastest = result.of_schemes[0]
    assert fastest.play.configuration.scheme != "dapple"
    assert result.simplest(tolerance=0.0) is min(
        (plan for plan in result.of_schemes if plan.seconds == fastest.seconds), key=lambda p: p.complexity
    )
    plan = result.simplest()
    assert plan.play.configuration.scheme == "dapple"  # GPipe is as fast, and saves more
    assert fastest.seconds < plan.seconds <= 1.02 * fastest.seconds
    text = automatic.text_of(result)
    assert text.startswith('schedule="auto": dapple(stages=2, micro_batches=64)')
    assert text.endswith("(within 2% the simpler one is taken)")
    assert ", 390 s a step planned (" in text
    model, profile, cluster = _inputs()
    layer = replace(profile.layers["block"], low_factors=(0.5,), high_factors=(1.5,))
    spread = replace(profile, layers={"block": layer})
    ranged = cf.plan(model, spread, cluster, 64, constraints=replace(limits, schemes=schemes))
    assert ", 390 ± 195 s a step planned (" in automatic.text_of(ranged)
    slower = cf.plan(*_inputs(), 4, constraints=replace(limits, schemes=("dapple", "zb-v")))
    assert slower.simplest() is slower.of_schemes[0]


def test_a_module_is_planned_from_its_loss_and_example(cache: Path) -> None:
    model, loss, inputs, targets = _model("moe")
    result = cf.plan(model, loss=loss, example=(inputs, targets), depths=(1,))
    assert result.mini_batch == 4
    assert len(result.best[0].play.inputs.model.layers) == 6
    assert len([*cache.iterdir()]) == 1
    again = cf.plan(model, loss=loss, example=(inputs, targets), depths=(1,), mini_batch=8, sizes=(1, 2, 4))
    assert again.mini_batch == 8
    assert again.best[0].play.inputs.profile == result.best[0].play.inputs.profile  # measured once
    for wrong, message in (
        ({"model": model}, "needs loss and example"),
        ({"model": model, "loss": loss, "example": "hanayo-bert64"}, "needs loss and example"),
        ({"model": model, "profile": "a.toml"}, "profile: given in addition to a module"),
        ({"loss": loss, "example": "hanayo-bert64"}, "are for a module; leave them out"),
        ({"sizes": (1,), "example": "hanayo-bert64"}, "are for a module; leave them out"),
    ):
        with pytest.raises(ConfigError, match=message):
            cf.plan(**wrong)
