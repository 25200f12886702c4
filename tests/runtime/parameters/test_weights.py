"""Parameters are treated as in one process: what has no gradient stays, hooks and attributes stay."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.parameters.optimizers import Parameters
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.reference import Reference, Staleness
from counterflow.verification.reference_parts import parts_of
from counterflow.verification.training_agreement import verify

from ...kit import mean_square, run

FLUSHING = [schemes.dapple(2, 2), schemes.chimera(2, 2)]
CONTINUOUS = [schemes.pipedream(2), schemes.pipedream_2bw(2, 2), schemes.wpipe(1, 2)]
EVERY = [*FLUSHING, *CONTINUOUS]

State = dict[str, Tensor]
F = torch.float64


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def linears(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4, dtype=torch.float64) for _ in range(count)]


def batch(seed: int = 0, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, 4, generator=generator, dtype=torch.float64)
    return x, y


def trained(
    schedule: Schedule,
    layers: Sequence[nn.Module],
    loss: Any = mean_square,
    steps: int = 3,
    **options: Any,
) -> State:
    options = {"optimizer": adamw} | options
    pipeline = Pipeline(list(layers), loss, schedule, **options)
    share = 8 // pipeline.replicas
    rows = slice(pipeline.replica * share, (pipeline.replica + 1) * share)
    for number in range(steps):
        x, y = batch(number)
        pipeline.step(x[rows], y[rows])
    return pipeline.model_state_dict()


def in_one_process(
    layers: Sequence[nn.Module], steps: int = 3, optimizer: Any = adamw, micro_batches: int = 1
) -> State:
    """Plain torch, in the modes that the layers are in."""
    model = nn.Sequential(*copy.deepcopy(list(layers)))
    updates = optimizer(list(model.parameters()))
    for number in range(steps):
        for x, y in zip(*(t.chunk(micro_batches) for t in batch(number)), strict=True):
            (mean_square(model(x), y) / micro_batches).backward()
        updates.step()
        updates.zero_grad()
    return model.state_dict()


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)


class Unused(nn.Linear):
    """It has a parameter that it never uses, and one that it uses for large mini-batches only."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.sometimes if float(x.detach()[0, 0]) > 0 else y


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", FLUSHING, ids=str)
def test_parameters_without_a_gradient_stay_as_they_are(schedule: Schedule, replicas: int) -> None:
    torch.manual_seed(0)
    layers = [Unused(), Unused()]
    # Which micro-batches use `sometimes` differs by micro-batch: copies and replicas have to agree.
    expected = in_one_process(layers, micro_batches=2 * replicas)
    for state in run(trained, schedule, layers, workers=2 * replicas):
        assert torch.equal(state["0.unused"], layers[0].unused)
        assert_equal(state, expected)


@pytest.mark.parametrize("schedule", CONTINUOUS, ids=str)
def test_without_a_flush_too(schedule: Schedule) -> None:
    torch.manual_seed(0)
    layers = [Unused(), Unused()]
    found = verify(
        schedule,
        layers,
        mean_square,
        [[batch(n)] for n in range(8)],
        optimizer=adamw,
        cuts=(1,),
        transport="strict-local",
    )
    assert found.ok, found


def test_an_optimizer_keeps_nothing_for_what_is_not_used() -> None:
    torch.manual_seed(0)
    layers = [Unused(), *linears(1)]

    def work() -> int:
        pipeline = Pipeline(layers, mean_square, schemes.dapple(2, 2), optimizer=adamw)
        pipeline.step(*batch())
        return sum(len(optimizer.state) for optimizer in pipeline.optimizers.values())

    assert run(work)[0] in (2, 3)  # weight and bias, perhaps `sometimes`; never `unused`


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_layer_frozen_between_steps_stays(schedule: Schedule) -> None:
    layers = linears()

    def work() -> list[State]:
        pipeline = Pipeline(layers, mean_square, schedule, optimizer=adamw, cuts=(1,))
        pipeline.step(*batch(0))
        states = [pipeline.model_state_dict()]
        for stage in pipeline.stages.values():
            for layer in stage.layers:
                layer.module.requires_grad_(layer.index > 0)
        for number in range(3):
            pipeline.step(*batch(number))
        return [*states, pipeline.model_state_dict()]

    for before, after in run(work, workers=schedule.workers):
        assert all(torch.equal(before[name], after[name]) == name.startswith("0.") for name in before)


@pytest.mark.table
@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_changes_nothing(schedule: Schedule, to_none: bool) -> None:
    def work(calls: bool) -> tuple[list[float], State]:
        pipeline = Pipeline(linears(), mean_square, schedule, optimizer=sgd, clip_norm=0.1, cuts=(1,))
        told = []
        for number in range(4):
            if calls:
                for optimizer in pipeline.optimizers.values():
                    optimizer.zero_grad(set_to_none=to_none)
            told.append(pipeline.step(*batch(number)))
        told += pipeline.flush()
        return [step.grad_norm for step in told if step.reports_step is not None], pipeline.model_state_dict()

    (norms, state), (other_norms, other) = (run(work, c, workers=schedule.workers)[0] for c in (False, True))
    assert norms == other_norms
    assert min(norms) > 0
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_gradient_that_is_not_finite_stops_and_is_not_applied(
    schedule: Schedule, clip_norm: float | None
) -> None:
    layers = linears()
    kept: dict[int, Pipeline] = {}

    def odd(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + torch.sqrt(output.sum() * 0 + (target[0, 0] < 100))

    def work() -> None:
        pipeline = Pipeline(layers, odd, schedule, optimizer=sgd, clip_norm=clip_norm, cuts=(1,))
        kept[pipeline.transport.rank] = pipeline
        for number in range(20):
            x, y = batch(number)
            if number == 3:
                y[0, 0] = 101
            pipeline.step(x, y)
        pipeline.flush()

    name = r"0\.weight" if schedule.synchronous else "one of its weights"  # of which no host waits to see
    with pytest.raises(WorkerError, match=rf"step 3: the gradient of {name} \(stage 0\) is not finite"):
        run(work, workers=schedule.workers)
    for pipeline in kept.values():
        for stage in pipeline.stages.values():
            assert all(bool(p.isfinite().all()) for p in stage.parameters())


class Loss(nn.Module):
    """Has weights of its own, and one of the model's."""

    scale: Tensor

    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.register_buffer("scale", torch.full((4,), 2.0, dtype=torch.float64))
        self.shared = shared

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        error = (output - target) ** 2 * torch.exp(-self.log_variance) * self.scale + self.log_variance
        found = error.mean(dim=1).mean()
        return found if self.shared is None else found + (self.shared**2).mean()


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_loss_function_with_weights_is_trained(schedule: Schedule, recompute: Any) -> None:
    batches = [[batch(n)] for n in range(6)]
    found = verify(
        schedule,
        linears(),
        Loss(),
        batches,
        optimizer=adamw,
        cuts=(1,),
        transport="strict-local",
        recompute=recompute,
    )
    assert found.ok, found
    state = run(trained, schedule, linears(), Loss(), workers=schedule.workers)[0]
    assert float(state["loss_function.log_variance"].abs().min()) > 0.01
    assert "loss_function.scale" in state


class Within(nn.Module):
    """Has one of torch's losses, a weight and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=F))
        self.scale = nn.Parameter(torch.ones((), dtype=F))
        self.register_buffer("centre", torch.zeros((), dtype=F))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.entropy(output * self.scale, target)
        return found


def test_what_a_loss_was_given_is_not_in_the_state() -> None:
    schedule = schemes.dapple(2, 2)
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=F)
    model = nn.Sequential(*linears())
    x = batch(0)[0]
    classes = torch.arange(len(x)) % 4

    def work(loss: nn.Module) -> tuple[State, float, float]:
        with Pipeline(nn.Sequential(*linears()), loss, schedule, optimizer=adamw) as pipeline:
            before = pipeline.state_dict()
            first = pipeline.step(x, classes).loss
            pipeline.load_state_dict(before)
            return pipeline.model_state_dict(), first, pipeline.step(x, classes).loss

    state, first, again = run(work, nn.CrossEntropyLoss(weight=weight), workers=2)[0]
    model.load_state_dict(state)
    output = model(x)
    assert first == again == pytest.approx(nn.functional.cross_entropy(output, classes, weight).item())
    state, _, _ = run(work, Within(), workers=2)[0]
    of_loss = {name for name in state if name.startswith("loss_function.")}
    assert of_loss == {"loss_function.scale", "loss_function.centre"}


def test_a_loss_function_may_share_a_weight_with_the_first_stage() -> None:
    layers = linears()
    found = verify(
        schemes.chimera(2, 2),
        layers,
        Loss(layers[0].weight),  # type: ignore[arg-type]
        [[batch(n)] for n in range(3)],
        optimizer=adamw,
        transport="strict-local",
    )
    assert found.ok, found


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_hooks_and_attributes_of_parameters_are_kept(schedule: Schedule, device: str) -> None:
    with torch.device(device):
        layers = linears()
    accumulated: list[int] = []
    weight, bias = (layers[0].get_parameter(name) for name in ("weight", "bias"))
    weight.register_hook(lambda gradient: gradient * 0)
    bias.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.numel()))
    weight.no_decay = True  # type: ignore[attr-defined]
    layers[1].register_forward_hook(lambda _, __, output: output * 2)
    seen: list[bool] = []

    def plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        seen.extend(getattr(p, "no_decay", False) for p in parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    def work() -> tuple[State, State]:
        pipeline = Pipeline(layers, mean_square, schedule, optimizer=plain, cuts=(1,))
        before = pipeline.model_state_dict()
        for number in range(3):
            pipeline.step(*batch(number))
        return before, pipeline.model_state_dict()

    before, after = run(work, workers=schedule.workers)[0]
    assert any(seen)
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["0.bias"], after["0.bias"])
    holders = sum(0 in {s for _, s in schedule.placement.stages_on(w)} for w in range(schedule.workers))
    assert len(accumulated) == 3 * holders


class Keeps(nn.Module):
    """Finds its weight in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, dtype=torch.float64) / 2)
        self.kept = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.kept[0])


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", CONTINUOUS, ids=str)
def test_modules_that_keep_their_parameters_elsewhere(schedule: Schedule, recompute: Any) -> None:
    found = verify(
        schedule,
        [Keeps(), Keeps()],
        mean_square,
        [[batch(n)] for n in range(8)],
        optimizer=sgd,
        cuts=(1,),
        transport="strict-local",
        recompute=recompute,
    )
    assert found.ok, found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x[:, None])[0][:, 0]


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(requires_grad=False)
        self.down = nn.Linear(4, 2, dtype=torch.float64)
        self.up = nn.Linear(2, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


def made(kind: str) -> nn.Module:
    linear = nn.Linear(4, 4, dtype=torch.float64)
    if kind == "orthogonal":
        return parametrizations.orthogonal(linear)
    if kind == "weight norm":
        return cast("nn.Module", parametrizations.weight_norm(linear))
    if kind == "weight norm by a hook":
        return nn.utils.weight_norm(linear)
    return Recurrent() if kind == "recurrent" else Adapted()


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize(
    "kind", ["orthogonal", "weight norm", "weight norm by a hook", "recurrent", "adapted"]
)
def test_parameters_that_are_not_the_weights(kind: str, schedule: Schedule) -> None:
    torch.manual_seed(0)
    layers = [made(kind), made(kind)]
    batches = [[batch(n)] for n in range(5)]
    found = verify(
        schedule, layers, mean_square, batches, optimizer=adamw, cuts=(1,), transport="strict-local"
    )
    assert found.ok, found


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_every_module_stays_in_its_own_mode(alone: bool, evaluates: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, dtype=torch.float64).eval()
    first, last = linears()
    layers = [first, norm, last] if alone else [nn.Sequential(first, norm), last]
    name = "1." if alone else "0.1."

    def work() -> State:
        pipeline = Pipeline(copy.deepcopy(layers), mean_square, schemes.dapple(2, 2), optimizer=adamw)
        for number in range(2):
            if evaluates:
                pipeline.evaluate(*batch())
            pipeline.step(*batch(number))
        return pipeline.model_state_dict()

    state = run(work)[0]
    assert int(state[f"{name}num_batches_tracked"]) == 0
    assert torch.equal(state[f"{name}running_mean"], torch.zeros(4, dtype=torch.float64))
    assert_equal(state, dict(zip(state, in_one_process(layers, 2).values(), strict=True)))


@pytest.mark.table
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_complex_weights(schedule: Schedule, clip_norm: float | None) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=torch.complex128), Magnitude(), *linears(1)]
    batches = [[(x.to(torch.complex128), y)] for x, y in map(batch, range(6))]
    found = verify(
        schedule,
        layers,
        mean_square,
        batches,
        optimizer=adamw,
        cuts=(2,),
        transport="strict-local",
        clip_norm=clip_norm,
    )
    assert found.ok, found


class Magnitude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class AddsItself(torch.autograd.Function):
    """A linear map that adds to its weight's gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad += gradient.T @ x
        return gradient @ weight, None


class Fused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return AddsItself.apply(x, self.weight) + self.bias  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_functions_that_add_to_gradients_themselves(schedule: Schedule, recompute: Any) -> None:
    torch.manual_seed(0)
    layers = [Fused(4, 4, dtype=torch.float64) for _ in range(2)]
    found = verify(
        schedule,
        layers,
        mean_square,
        [[batch(n)] for n in range(6)],
        optimizer=adamw,
        cuts=(1,),
        transport="strict-local",
        recompute=recompute,
    )
    assert found.ok, found


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("where", ["layer", "loss"])
@pytest.mark.parametrize("schedule", [FLUSHING[0], CONTINUOUS[0]], ids=str)
def test_weights_that_nobody_would_train_are_refused(schedule: Schedule, where: str, recompute: Any) -> None:
    loss = Loss()
    outside = nn.Parameter(torch.ones(4, dtype=torch.float64))

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (outside if where == "layer" else 1)

    layers: list[nn.Module] = [*linears(1), Scaled(4, 4, dtype=torch.float64)]

    def function(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target) if where == "loss" else mean_square(output, target)

    with pytest.raises(ConfigError, match=r"stage 1 computes with a tensor of shape \(4,\) that requires a"):
        run(lambda: trained(schedule, layers, function, recompute=recompute))
    for tensor in (outside, loss.log_variance):
        tensor.requires_grad_(False)
    run(lambda: trained(schedule, layers, function, recompute=recompute))


def test_functions_that_do_so_are_refused_where_layers_are_recomputed() -> None:
    layers = [Fused(4, 4, dtype=torch.float64) for _ in range(2)]
    with pytest.raises(
        ConfigError, match=r"AddsItselfBackward in stage 1 gives no gradient .* shape \(4, 4\)"
    ):
        run(lambda: trained(schemes.dapple(2, 2), layers, recompute="layer"))


class Model(nn.Module):
    """A weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped], ids=["submodules", "wrappers"])
def test_the_state_has_all_names_of_a_tied_weight(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Model()
    ids = torch.randint(0, 7, (8, 3))

    def work() -> tuple[State, State]:
        pipeline = Pipeline(
            model,
            lambda o, t: nn.functional.cross_entropy(o.flatten(0, 1), t.flatten()),
            schemes.chimera(2, 2),
            optimizer=adamw,
            list_layers=lambda m: [wrap(each) for each in m.children()],
        )
        pipeline.step(ids, ids)
        state = pipeline.model_state_dict()
        del state["embed.weight"]  # one of the names is enough
        pipeline.load_model_state_dict(state)
        return pipeline.model_state_dict(), pipeline.model_state_dict(local=True)

    whole, local = run(work)[0]
    assert list(whole) == list(model.state_dict())
    Model().load_state_dict(whole)
    assert {"embed.weight", "head.weight"} <= local.keys()


class Extra(nn.Linear):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Extra(), Extra()


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped], ids=["submodules", "wrappers"])
def test_extra_state_is_saved_and_loaded(wrap: Callable[[nn.Module], nn.Module]) -> None:
    def work(load: dict[str, Any] | None) -> dict[str, Any]:
        pipeline = Pipeline(
            Both(),
            mean_square,
            schemes.dapple(2, 2),
            optimizer=adamw,
            list_layers=lambda m: [wrap(each) for each in m.children()],
        )
        if load is not None:
            pipeline.load_model_state_dict(load)
        pipeline.step(*batch())
        return pipeline.model_state_dict()

    first = run(work, None)[0]
    assert first["last._extra_state"] == {"calls": 2}
    Both().load_state_dict(first)
    assert run(work, first)[0]["first._extra_state"] == {"calls": 4}


@pytest.mark.parametrize("real", ["weight", "bias"])
def test_a_layer_that_is_partly_on_the_meta_device_is_refused(real: str) -> None:
    layer = nn.Linear(4, 4, device="meta")
    setattr(layer, real, nn.Parameter(torch.ones(4)))
    other = {"weight": "bias", "bias": "weight"}[real]
    with pytest.raises(
        ConfigError, match=rf"layer 1 \(Linear\) has {other} on the meta device and {real} on"
    ):
        run(trained, schemes.dapple(2, 2), [nn.Linear(4, 4), layer])


def test_layers_without_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight of layer 1 \(LazyLinear\) has no shape yet"):
        run(trained, schemes.dapple(2, 2), [nn.Linear(4, 4), nn.LazyLinear(4)])


@pytest.mark.parametrize("schedule", [schemes.chimera(2, 2), schemes.wpipe(1, 2)], ids=str)
def test_copies_start_as_the_first_holders(schedule: Schedule) -> None:
    def work() -> tuple[State, State]:
        rank = current_transport().rank
        layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)]
        model = nn.Sequential(*layers).double()
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(rank + 1)
        pipeline = Pipeline(layers, mean_square, schedule, optimizer=adamw, cuts=(1,))
        before = pipeline.model_state_dict(local=True)
        pipeline.step(*batch(pipeline.replica))
        return before, pipeline.model_state_dict()

    workers = schedule.workers * (3 - schedule.workers)
    found = run(work, workers=max(2, workers))
    assert all(float(t.double().min()) == 1 for n, t in found[1][0].items() if n.startswith("0."))
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_copies_of_other_shapes_are_refused() -> None:
    def work() -> None:
        rank = current_transport().rank
        layers = [nn.Linear(4, 4), nn.Linear(4, 4 + rank)]
        Pipeline(layers, mean_square, schemes.chimera(2, 2), optimizer=adamw)

    with pytest.raises(ConfigError, match=r"1\.out_features of the model is 4 on rank 0, and 5 on rank 1"):
        run(work)


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_layers_are_unfrozen_between_steps(schedule: Schedule, recompute: Any) -> None:
    layers = linears()
    layers[0].requires_grad_(requires_grad=False)
    alone = Reference(
        layers, mean_square, parts_of(schedule), optimizer=adamw, staleness=Staleness.of(schedule, (1,))
    )

    def everything(_: str) -> bool:
        return True

    def first_alone(name: str) -> bool:
        return name.startswith("0.")

    def work() -> State:
        pipeline = Pipeline(layers, mean_square, schedule, optimizer=adamw, cuts=(1,), recompute=recompute)
        for number in range(9):
            if number in (3, 6):
                pipeline.set_trainable(everything if number == 3 else first_alone)
            pipeline.step(*batch(number))
        return pipeline.model_state_dict()

    for number in range(9):
        if number in (3, 6):
            alone.flush()
            alone.layers[0].module.requires_grad_(requires_grad=True)
            alone.layers[1].module.requires_grad_(requires_grad=number == 3)
        alone.step([batch(number)])
    for state in run(work, workers=schedule.workers):
        assert_equal(state, alone.state_dict())


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_unfreezing_without_a_word_is_refused(schedule: Schedule) -> None:
    layers = linears()
    layers[0].requires_grad_(requires_grad=False)

    def work() -> None:
        pipeline = Pipeline(layers, mean_square, schedule, optimizer=adamw, cuts=(1,))
        pipeline.step(*batch())
        for stage in pipeline.stages.values():
            for layer in stage.layers:
                layer.module.requires_grad_(requires_grad=True)
        pipeline.step(*batch())

    with pytest.raises(ConfigError, match=r"0\.weight of stage 0 requires a gradient.*set_trainable\(\)"):
        run(work, workers=schedule.workers)


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_an_optimizer_may_take_names(schedule: Schedule) -> None:
    layers = linears()

    def groups(parameters: Parameters) -> torch.optim.Optimizer:
        bias = [pair for pair in parameters.named if pair[0].endswith("bias")]
        weight = [pair for pair in parameters.named if not pair[0].endswith("bias")]
        return torch.optim.AdamW(
            [{"params": bias, "weight_decay": 0.0}, {"params": weight, "weight_decay": 0.5}], lr=0.1
        )

    def by_shape(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        bias = [p for p in parameters if p.dim() == 1]
        weight = [p for p in parameters if p.dim() > 1]
        return torch.optim.AdamW(
            [{"params": bias, "weight_decay": 0.0}, {"params": weight, "weight_decay": 0.5}], lr=0.1
        )

    def work() -> tuple[State, list[str]]:
        pipeline = Pipeline(copy.deepcopy(layers), mean_square, schedule, optimizer=groups, cuts=(1,))
        for number in range(3):
            pipeline.step(*batch(number))
        made = pipeline.optimizers.values()
        return pipeline.model_state_dict(), [
            n for o in made for g in o.param_groups for n in g["param_names"]
        ]

    def without() -> State:
        return trained(schedule, layers, optimizer=by_shape, cuts=(1,))

    found = run(work, workers=schedule.workers)
    assert {name for _, names in found for name in names} == set(found[0][0])
    assert_equal(found[0][0], run(without, workers=schedule.workers)[0])


@pytest.mark.table
@pytest.mark.parametrize("sync", ["end", "eager-opt"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", [*FLUSHING, schemes.gpipe(1, 2)], ids=str)
def test_gradients_of_several_steps_make_one_update(schedule: Schedule, replicas: int, sync: Any) -> None:
    """As large mini-batches do, of unequal parts."""
    layers: list[nn.Module] = [nn.Sequential(*linears(1), Idle()), *linears(1)]
    options: dict[str, Any] = {"optimizer": adamw, "clip_norm": 0.05, "sync": sync}

    def work(parts: Sequence[int]) -> tuple[list[float], list[float], State]:
        pipeline = Pipeline(copy.deepcopy(layers), mean_square, schedule, **options)
        losses, norms = [0.0], []
        for number in range(3):
            x, y = (
                torch.cat(each[pipeline.replica :: pipeline.replicas])
                for each in zip(*(batch(10 * number + i, 4) for i in range(4)), strict=True)
            )
            for index, (inputs, targets) in enumerate(zip(x.split(parts), y.split(parts), strict=True)):
                step = pipeline.step(inputs, targets, update=index == len(parts) - 1)
                losses[-1] += step.loss * step.samples
                pipeline.evaluate(inputs, targets)
            norms.append(step.grad_norm)
            losses.append(0.0)
            assert step.samples == parts[-1] * replicas
        return losses, norms, pipeline.model_state_dict()

    share = 16 // replicas
    losses, norms, whole = run(work, [share], workers=schedule.workers * replicas)[0]
    for others, other, state in run(work, [4, share - 6, 2], workers=schedule.workers * replicas):
        assert others == pytest.approx(losses, rel=1e-9)
        assert other == pytest.approx(norms, rel=1e-9)
        assert_equal(state, whole)


def test_steps_without_an_update_need_a_flush_and_end_with_one() -> None:
    layers = linears()

    def late() -> None:
        Pipeline(layers, mean_square, schemes.pipedream(2), optimizer=adamw).step(*batch(), update=False)

    with pytest.raises(ConfigError, match=r"pipedream .* cannot make a step without an update"):
        run(late)

    def work() -> Any:
        pipeline = Pipeline(layers, mean_square, schemes.dapple(2, 2), optimizer=adamw)
        step = pipeline.step(*batch(), update=False)
        assert math.isnan(step.grad_norm)
        return pipeline.state_dict()

    with pytest.raises(ConfigError, match="state_dict while gradients wait for an update"):
        run(work)

    def apart() -> None:
        pipeline = Pipeline(layers, mean_square, schemes.dapple(2, 2), optimizer=adamw)
        pipeline.step(*batch(), update=pipeline.worker == 0)

    with pytest.raises(ConfigError, match=r"calls step.*; rank . calls step"):
        run(apart)


class Idle(nn.Module):
    """Does nothing, and has a weight for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def _goes_on(schedule: Schedule, layers: list[nn.Module], state: Any, steps: range, scheduler: Any) -> Any:
    pipeline = Pipeline(
        copy.deepcopy(layers),
        mean_square,
        schedule,
        optimizer=adamw,
        scheduler=scheduler,
        seed=3 if state is None else 4,
        cuts=(1,),
    )
    if state is not None:
        pipeline.load_state_dict(state)
    for number in steps:
        pipeline.step(*batch(number))
    return pipeline.state_dict()


@pytest.mark.parametrize("scheduler", [None, stepped])
@pytest.mark.parametrize("schedule", FLUSHING, ids=str)
def test_a_training_goes_on_from_its_state_under_any_schedule(schedule: Schedule, scheduler: Any) -> None:
    layers: list[nn.Module] = [nn.Sequential(*linears(1), nn.Dropout(0.5)), *linears(1)]
    whole = run(_goes_on, schedule, layers, None, range(7), scheduler)[0]
    half = run(_goes_on, schemes.chimera(2, 2), layers, None, range(3), scheduler)[0]
    resumed = run(_goes_on, schedule, layers, half, range(3, 7), scheduler)[0]
    assert (resumed["step"], resumed["seed"]) == (whole["step"], whole["seed"]) == (7, 3)
    assert_equal(resumed["model"], whole["model"])
    assert resumed["scheduler"] == whole["scheduler"]
    for name, kept in whole["optimizer"].items():
        assert_equal(resumed["optimizer"][name]["state"], kept["state"])
        assert resumed["optimizer"][name]["options"] == kept["options"]


@pytest.mark.parametrize("schedule", CONTINUOUS, ids=str)
def test_a_training_without_a_flush_goes_on_from_its_state(schedule: Schedule) -> None:
    layers = linears()

    def signals_blocked() -> State:
        pipeline = Pipeline(copy.deepcopy(layers), mean_square, schedule, optimizer=adamw, cuts=(1,), seed=3)
        for number in range(7):
            pipeline.step(*batch(number))
            if number == 2:
                pipeline.flush()
        return pipeline.model_state_dict()

    half = run(_goes_on, schedule, layers, None, range(3), stepped, workers=schedule.workers)[0]
    missing = half | {"optimizer": {}}
    with pytest.raises(ConfigError, match=r"has nothing of the optimizer for '[01]\.weight'"):
        run(_goes_on, schedule, layers, missing, range(3, 7), None, workers=schedule.workers)
    half = run(_goes_on, schedule, layers, None, range(3), None, workers=schedule.workers)[0]
    with pytest.raises(ConfigError, match=r"has no learning-rate schedule for stage [01] with its 1 group"):
        run(_goes_on, schedule, layers, half, range(3, 7), stepped, workers=schedule.workers)
    resumed = run(_goes_on, schedule, layers, half, range(3, 7), None, workers=schedule.workers)[0]
    assert_equal(resumed["model"], run(signals_blocked, workers=schedule.workers)[0])


def _statistics(layers: Sequence[nn.Module], x: Tensor) -> State:
    pipeline = Pipeline(layers, mean_square, schemes.chimera(2, 2), optimizer=sgd)
    pipeline.step(x, torch.zeros(8, 4))
    return pipeline.model_state_dict()


def test_running_statistics_are_the_mean_of_the_copies() -> None:
    """Each copy has one micro-batch: of the first column 0, 4, 8, 12 and 16, 20, 24, 28."""
    layers = [nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 4)]
    for state in run(_statistics, layers, torch.arange(32.0).reshape(8, 4)):
        assert state["0.running_mean"].tolist() == [14, 15, 16, 17]
        assert state["0.running_var"].tolist() == pytest.approx([80 / 3] * 4)  # of four numbers 4 apart


def _clipped(clip_norm: float | None) -> State:
    pipeline = Pipeline(
        linears(1), mean_square, schemes.pipedream_2bw(1, 2), optimizer=sgd, clip_norm=clip_norm
    )
    for seed in range(3):
        pipeline.step(*batch(seed))
    pipeline.flush()
    return pipeline.model_state_dict()


def test_a_limit_above_the_norm_changes_nothing() -> None:
    """Also in asynchronous schemes, where a stage clips by itself."""
    (free,), (limited,), (clipped,) = (run(_clipped, limit, workers=1) for limit in (None, 1e6, 1e-3))
    assert all(torch.equal(limited[name], tensor) for name, tensor in free.items())
    assert not any(torch.equal(clipped[name], tensor) for name, tensor in free.items())
