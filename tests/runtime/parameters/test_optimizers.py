"""Optimisers on several workers: what they draw, and what they look at."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.parameters.optimizers import Parameters, home_of
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.diagnosis.optimizer_coupling import OptimizerCouplingDiagnosis

from ...kit import mean_square, run


def linears(count: int = 4, *, dropout: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    found: list[nn.Module] = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(count)]
    return [nn.Sequential(each, nn.Dropout(0.5)) if dropout else each for each in found]


def numbers(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


class Noisy(torch.optim.SGD):
    """As Langevin dynamics, stochastic rounding and the noise of differential privacy: a step draws."""

    drawn: list[float]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randn_like(parameter)
                self.__dict__.setdefault("drawn", []).append(float(noise.flatten()[0]))
                parameter.add_(0.01 * noise)


def noisy(parameters: Any) -> torch.optim.Optimizer:
    return Noisy(parameters, lr=0.1)


def weights_by_stage(schedule: Schedule, options: dict[str, Any]) -> dict[int, list[Tensor]]:
    """Of this worker's copies, after steps and a flush that compares nothing."""
    layers = linears(dropout=True)
    pipeline = Pipeline(layers, mean_square, schedule, optimizer=noisy, digest_every=0, **options)
    for number in range(4):
        pipeline.step(*numbers(number))
    pipeline.flush()
    return {stage: [p.detach().clone() for p in copy.parameters()] for stage, copy in pipeline.stages.items()}


@pytest.mark.parametrize(
    ("schedule", "replicas", "options"),
    [
        (schemes.chimera(2, 4), 1, {}),
        (schemes.chimera(2, 4), 1, {"barrier": False}),
        (schemes.chimera(2, 4), 1, {"barrier": False, "clip_norm": 1.0}),
        (schemes.chimera(2, 4), 2, {"zero_stage": 1}),
        (schemes.dapple(2, 4), 2, {"barrier": False}),
        (schemes.pipedream(2), 2, {}),
        (schemes.pipedream_2bw(2, 2), 2, {"clip_norm": 1.0}),
        (schemes.wpipe(1, 2), 2, {}),
    ],
    ids=str,
)
def test_copies_stay_alike_under_an_optimizer_that_draws(
    schedule: Schedule, replicas: int, options: dict[str, Any]
) -> None:
    found = run(weights_by_stage, schedule, options, workers=schedule.workers * replicas)
    first: dict[int, list[Tensor]] = {}
    copies = 0
    for worker in found:
        for stage, tensors in worker.items():
            copies += stage in first
            assert all(map(torch.equal, tensors, first.setdefault(stage, tensors)))
    assert copies


@pytest.mark.parametrize("options", [{}, {"barrier": False}], ids=str)
def test_what_an_optimizer_draws_is_told_by_seed_step_and_stage(options: dict[str, Any]) -> None:
    """So it is the same under schemes with other layers on a worker before it, and with dropout."""

    def one(schedule: Schedule, options: dict[str, Any]) -> dict[int, list[float]]:
        layers = linears(dropout=True)
        pipeline = Pipeline(layers, mean_square, schedule, optimizer=noisy, digest_every=0, **options)
        for number in range(3):
            pipeline.step(*numbers(number))
        pipeline.flush()
        return {stage: made.drawn for stage, made in pipeline.optimizers.items()}  # type: ignore[attr-defined]

    plain = run(one, schemes.dapple(2, 2), {})
    expected = {stage: drawn for worker in plain for stage, drawn in worker.items()}
    for worker in run(one, schemes.chimera(2, 4), options):
        assert worker == expected
    for worker in run(one, schemes.pipedream_2bw(2, 2), {}):  # the last updates are made in the flush
        assert worker == {stage: expected[stage] for stage in worker}
    assert len(set(expected[0])) == len(expected[0])
    assert not {*expected[0]} & {*expected[1]}


class Tied(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def test_one_that_draws_is_refused_for_a_weight_of_stages_on_several_workers() -> None:
    layers = linears(2)
    assert isinstance(layers[0], nn.Linear)
    tied = [*layers, Tied(layers[0])]

    def work() -> None:
        pipeline = Pipeline(tied, mean_square, schemes.dapple(2, 4), optimizer=noisy)
        pipeline.step(*numbers())

    with pytest.raises(ConfigError, match=r"a Noisy, draws random numbers in its step, and 0\.weight is a"):
        run(work)


# -- what is loaded goes where the optimiser keeps it


@pytest.mark.parametrize(
    ("options", "slot", "kept", "home"),
    [
        ({}, "step", None, "cpu"),
        ({"fused": None, "capturable": False}, "step", None, "cpu"),
        ({"fused": True}, "step", None, "meta"),
        ({"capturable": True}, "step", None, "meta"),
        ({}, "mu_product", None, "meta"),
        ({}, "step", "meta", "meta"),
        ({"fused": True}, "step", "cpu", "cpu"),
    ],
)
def test_a_number_goes_where_the_optimizer_keeps_it(
    options: dict[str, Any], slot: str, kept: str | None, home: str
) -> None:
    parameter = nn.Parameter(torch.empty(4, device="meta"))  # stands for a device
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    group = optimizer.param_groups[0]
    group |= options
    if kept is not None:
        optimizer.state[parameter] = {slot: torch.zeros((), device=kept)}
    assert home_of(slot, optimizer, group, parameter).type == home
    if kept is None and slot == "step":
        policy = torch.optim.Optimizer._process_value_according_to_param_policy
        found = policy(parameter, torch.tensor(3.0), 0, [{"params": [0], **options}], slot)
        assert found.device.type == home


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_what_was_loaded_is_beside_what_is_kept(zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of a number is asked for with the options that were loaded."""
    asked: set[tuple[str, bool]] = set()

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    def noted(slot: str, optimizer: Any, group: Any, parameter: Any) -> torch.device:
        asked.add((slot, bool(group["fused"])))
        return home_of(slot, optimizer, group, parameter)

    monkeypatch.setattr("counterflow.runtime.parameters.local_state.home_of", noted)

    def work() -> bool:
        one, other = (
            Pipeline(linears(), mean_square, schemes.chimera(2, 4), optimizer=fused, zero_stage=zero_stage)
            for _ in range(2)
        )
        one.step(*numbers())
        other.load_state_dict(one.state_dict())
        for each in (one, other):
            each.step(*numbers(1))
        mine, its = one.model_state_dict(), other.model_state_dict()
        return all(torch.equal(mine[name], its[name]) for name in mine)

    assert all(run(work))
    assert asked == {("step", True), ("exp_avg", True), ("exp_avg_sq", True)}


# -- those that look at all of their parameters at once


class GlobalNorm(torch.optim.SGD):
    """As apex' FusedLAMB with max_grad_norm: one number of all parameters, and no option tells it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not given:
            return
        norm = torch.stack([p.grad.norm().double() for p in given if p.grad is not None]).norm()
        for parameter in given:
            parameter.sub_(0.1 * parameter.grad / norm.to(parameter.dtype))


class Distance(torch.optim.SGD):
    """As Prodigy and D-Adaptation: the rate follows from the products of all gradients and weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            found = sum(float((p.grad * p).sum()) for p in group["params"] if p.grad is not None)
            group["d"] = max(group.get("d", 1e-6), 1e-6 * abs(found))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["d"] * parameter.grad)


class Growing(torch.optim.SGD):
    """Changes its options from step to step, the same whatever its parameters are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 1.5
        super().step(closure)


class Untried(torch.optim.SGD):
    """Cannot be tried on small parameters: as those that have kernels for a device alone."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        given = list(parameters)
        if any(type(p) is not nn.Parameter or p.numel() < 32 for p in given):
            raise RuntimeError("only large parameters")
        super().__init__(given, **options)


class Rates(Untried, Growing):
    pass


class ProdigyOfThisDevice(Untried):
    pass


def by_place(parameters: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": 0.1 * 0.9**place} for place, p in enumerate(parameters)]
    return torch.optim.SGD(groups, lr=0.1)


def by_dimensions(parameters: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    assert all(group["params"] for group in groups)  # as every stage's of this model are
    return torch.optim.AdamW(groups, lr=0.01)


def by_name(given: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for name, p in given.named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for name, p in given.named if name == "1.bias"], "lr": 0.02},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def langevin(parameters: Any) -> torch.optim.Optimizer:
    return Noisy(parameters, lr=0.1, momentum=0.9)


def matrices(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.1)


FOR_THEMSELVES: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=0.1, capturable=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": matrices,
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Langevin": langevin,
    "growing": lambda p: Growing(p, lr=0.1),
    "by dimensions": by_dimensions,
}
COUPLED: dict[str, Any] = {
    "global norm": lambda p: GlobalNorm(p, lr=0.1),
    "distance": lambda p: Distance(p, lr=0.1),
    "by place": by_place,
}


def coupled(make: Any, dtype: torch.dtype = torch.float32, *, layers: int = 2) -> bool | None:
    model = nn.Sequential(*(nn.Linear(6, 7, dtype=dtype) for _ in range(layers)))
    given = list(model.named_parameters())
    made = make(Parameters(given))
    before = [p.detach().clone() for p in model.parameters()]
    kept = copy.deepcopy(made.state_dict())
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        diagnosis = OptimizerCouplingDiagnosis(lambda named: make(Parameters(named)), made, given)
        couples = diagnosis.run(nullcontext())
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, model.parameters()))
    assert str(made.state_dict()) == str(kept)
    return couples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FOR_THEMSELVES)
def test_optimizers_that_look_at_each_weight_for_itself_pass(name: str, dtype: torch.dtype) -> None:
    assert coupled(FOR_THEMSELVES[name], dtype) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("layers", [1, 3])
def test_those_that_look_at_all_are_found(name: str, dtype: torch.dtype, layers: int) -> None:
    assert coupled(COUPLED[name], dtype, layers=layers) is True


def test_functions_that_go_by_names_are_tried_with_names() -> None:
    assert coupled(by_name) is False
    assert coupled(lambda given: GlobalNorm([p for n, p in given.named if "weight" in n])) is True

    def one_of_its_kind(given: Any) -> torch.optim.Optimizer:
        return GlobalNorm([p for n, p in given.named if n.startswith("0.") and n.endswith("weight")])

    assert coupled(one_of_its_kind) is True


def test_what_cannot_be_tried_is_not_known() -> None:
    calls: list[int] = []

    def changing(parameters: Any) -> torch.optim.Optimizer:
        calls.append(1)
        return torch.optim.SGD(parameters, lr=0.1 * len(calls))

    assert coupled(lambda p: Untried([x for x in p if x.dim() > 1], lr=0.1)) is None
    assert coupled(changing) is None  # other numbers each time, also for the same parameters
    given: list[Any] = []

    def of_the_first_call(parameters: Any) -> torch.optim.Optimizer:
        given.append(parameters)
        return torch.optim.SGD(given[0], lr=0.1)

    assert coupled(of_the_first_call) is None
    assert coupled(lambda p: torch.optim.SGD([x.requires_grad_(False) for x in p], lr=0.1)) is None


def steps(make: Any, schedule: Schedule, layers: int = 2, **options: Any) -> None:
    torch.manual_seed(0)
    model = [nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(layers)]
    pipeline = Pipeline(model, mean_square, schedule, optimizer=make, **options)
    x, y = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pipeline.step(x, y)


@pytest.mark.parametrize(
    ("make", "schedule", "options", "words"),
    [
        (COUPLED["global norm"], schemes.dapple(2, 2), {}, "a GlobalNorm, updates a weight otherwise when"),
        (COUPLED["distance"], schemes.pipedream(2), {}, "and each stage has its own; take one that"),
        (COUPLED["distance"], schemes.chimera(2, 2), {"zero_stage": 1}, "zero_stage = 1 lets each worker"),
        (by_place, schemes.interleaved(2, 2, chunks=2), {"layers": 8}, "go by names"),
        (lambda p: ProdigyOfThisDevice(p, lr=1), schemes.dapple(2, 2), {}, "a ProdigyOfThisDevice, updates"),
        (lambda p: Rates(p, lr=0.1), schemes.dapple(2, 2), {}, "changed 'lr' of a group in its step"),
    ],
)
def test_they_are_refused_where_a_model_has_several(
    make: Any, schedule: Schedule, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(lambda: steps(make, schedule, **options))
    assert words in str(caught.value)


@pytest.mark.parametrize("make", [*COUPLED.values(), lambda p: Rates(p, lr=0.1)])
def test_one_optimizer_of_the_whole_model_may_look_at_all(make: Any) -> None:
    run(lambda: steps(make, schemes.dapple(1, 2)))  # two replicas


def test_a_stage_that_is_unfrozen_has_one_too() -> None:
    def work() -> None:
        first, second = linears(2)
        first.requires_grad_(requires_grad=False)
        pipeline = Pipeline(
            [first, second], mean_square, schemes.dapple(2, 2), optimizer=COUPLED["global norm"]
        )
        pipeline.step(*numbers())
        pipeline.set_trainable(lambda _: True)

    with pytest.raises(ConfigError, match="a GlobalNorm, updates a weight otherwise"):
        run(work)


def warmed_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Writes into a learning rate that is a tensor, first when it is made."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)


def decayed(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def two_groups(parameters: Any, rate: Tensor) -> torch.optim.Optimizer:
    """Both groups have one tensor; a stage may have one of them."""
    groups = [{"params": [p for p in parameters if p.dim() == dims], "lr": rate} for dims in (1, 2)]
    return torch.optim.Adam([group for group in groups if group["params"]], lr=rate)


def trained_by_hand(make: Any, scheduler: Any, by_hand: float | None) -> tuple[dict[str, Tensor], Tensor]:
    model, rate = nn.Sequential(*linears()), torch.tensor(0.05)
    optimizer = make(list(model.parameters()), rate)
    schedule = scheduler and scheduler(optimizer)
    for step in range(4):
        if step == 2 and by_hand is not None:
            rate.fill_(by_hand)
        inputs, targets = numbers(step)
        optimizer.zero_grad()
        mean_square(model(inputs), targets).mean().backward()
        optimizer.step()
        if schedule:
            schedule.step()
    return model.state_dict(), rate


@pytest.mark.parametrize("make", [two_groups, lambda parameters, rate: torch.optim.Adam(parameters, lr=rate)])
@pytest.mark.parametrize(
    ("scheduler", "by_hand"), [(warmed_up, None), (decayed, None), (None, 0.01), (decayed, 0.01)]
)
@pytest.mark.parametrize(
    "schedule", [schemes.zb_v(2, 4), schemes.interleaved(2, 4, chunks=2), schemes.chimera(2, 4)], ids=str
)
def test_stages_share_no_tensor_of_a_learning_rate(
    schedule: Schedule, scheduler: Any, by_hand: float | None, make: Any
) -> None:
    """The user's tensor keeps its value, and what he writes into it counts for all stages."""

    def work() -> tuple[dict[str, Tensor], float]:
        rate = torch.tensor(0.05)
        pipeline = Pipeline(
            nn.Sequential(*linears()),
            mean_square,
            schedule,
            optimizer=lambda parameters: make(parameters, rate),
            scheduler=scheduler,
        )
        for step in range(4):
            if step == 2 and by_hand is not None:
                rate.fill_(by_hand)
            pipeline.step(*numbers(step))
        return pipeline.model_state_dict(), float(rate)

    expected, _ = trained_by_hand(make, scheduler, by_hand)
    for weights, rate in run(work, workers=2):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
        assert rate == pytest.approx(0.05 if by_hand is None else by_hand)


def test_what_is_written_into_a_tensor_of_options_is_saved() -> None:
    def work() -> tuple[float, list[Tensor]]:
        rate = torch.tensor(0.05)
        pipeline = Pipeline(
            linears(),
            mean_square,
            schemes.zb_v(2, 4),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
        )
        rate.fill_(0.01)
        saved = pipeline.state_dict()["optimizer"]
        return float(rate), [slots["options"]["lr"] for slots in saved.values()]

    for rate, saved in run(work, workers=2):
        assert [float(option) for option in saved] == [rate] * 8
