"""Layers as users have them, computed again, in halves and together: the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.reference_parts import parts_of
from counterflow.verification.training_agreement import one_process, verify

from ...kit import mean_square, sgd
from ...tables import table

RECOMPUTE = ("none", "stage", "layer")
DOUBLING = schemes.chimera(2, 8, concat="forward-doubling")
HALVING = schemes.chimera(2, 8, concat="backward-halving")
WHOLE = (
    schemes.dapple(2, 4),
    schemes.interleaved(1, 4, chunks=2),  # stages hand over within a worker
    schemes.chimera(2, 4),
    DOUBLING,
)
ALL = (*WHOLE, HALVING)


class Does(nn.Module):
    """A linear layer and what a function makes of its input and output."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return self.function(x, y) if self.training else y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.rnn(x)[0]
        return output


class Checkpointed(nn.Module):
    """Draws within the user's own checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.fc, self.reentrant = nn.Linear(8, 8), reentrant

    def body(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.tanh(self.fc(x)), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            output: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        else:
            output = self.fc(x)
        return output


class Spectrum(nn.Linear):
    """Hands on complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum: Tensor = torch.fft.fft(super().forward(x))
        return spectrum


class Back(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.ifft(x).real)


class Shift(nn.Linear):
    """Changes its input in place, and not so that a second time does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0))


class Apart(nn.Linear):
    """The same without changing it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1.0)


class Average(nn.Linear):
    """Computes with a buffer that each of its forwards changes, in place or as a new one."""

    seen: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(8, 8)
        self.in_place = in_place
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            moved = 0.5 * self.seen + x.detach().abs().mean()
            self.seen = self.seen.copy_(moved) if self.in_place else moved
        return super().forward(x * self.seen.clone())


def layer_drop(x: Tensor, y: Tensor) -> Tensor:
    return 1.5 * x if float(torch.rand(1)) < 0.5 else x + y


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)


def multinomial(_: Tensor, y: Tensor) -> Tensor:
    chosen = torch.multinomial(torch.ones(len(y), 4), 2).sum(dim=1)
    return y * (0.1 * chosen)[:, None, None]


def in_batch(_: Tensor, y: Tensor) -> Tensor:
    return y - y.mean(dim=0, keepdim=True)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(requires_grad=False)


ONE_BY_ONE: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)),
    "functional dropout": lambda: Does(lambda _, y: functional.dropout(y, 0.3)),
    "encoder layer": encoder_layer,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
}
"""Layers that draw for a half what they draw for the whole."""

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": Recurrent,
    "rrelu": lambda: Does(lambda _, y: functional.rrelu(y, training=True)),
    "layer drop": lambda: Does(layer_drop),
    "multinomial": lambda: Does(multinomial),
    "in-batch mean": lambda: Does(in_batch),
}
"""Layers that in halves are other layers."""


def numbers(shape: tuple[int, ...] = (16, 3, 8)) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4)]
    return [[pair] for pair in zip(made[:2], made[2:], strict=True)]


def seeded(make: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [module.double() for module in make()]


def agree(
    layers: list[nn.Module],
    schedules: tuple[Schedule, ...],
    batches: list[list[tuple[Tensor, Tensor]]] | None = None,
    of: str = "",
    **options: Any,
) -> None:
    """Train in every scheme and recomputation as one process does."""
    batches = batches or numbers()
    for schedule, recompute in table(schedules, RECOMPUTE, of=of):
        found = verify(
            schedule,
            layers,
            mean_square,
            batches,
            optimizer=sgd,
            recompute=recompute,
            timeout_seconds=30,
            **options,
        )
        assert found.ok, (schedule, recompute, found)


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # torch's, of reentrant checkpoints
@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_layers_that_draw_are_exact(kind: str) -> None:
    make = ONE_BY_ONE[kind]
    agree(seeded(lambda: [nn.Linear(8, 8), make(), make(), make()]), ALL, of=kind)


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_that_draw_otherwise_are_exact_for_whole_micro_batches(kind: str) -> None:
    make = OTHERS[kind]
    agree(seeded(lambda: [nn.Linear(8, 8), make(), make(), make()]), WHOLE, of=kind)


def _derivative(schedule: Schedule, layers: list[nn.Module], recompute: Any) -> tuple[float, float]:
    """Along some direction, by the gradient and by the loss."""
    pipeline = Pipeline(
        layers,
        mean_square,
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        recompute=recompute,
    )
    pipeline.keeps_gradients = True
    ((x, y),) = numbers()[0]
    weights = pipeline.model_state_dict()
    generator = torch.Generator().manual_seed(5)
    direction = {
        name: torch.randn(t.shape, generator=generator, dtype=torch.float64)
        for name, t in weights.items()
        if t.is_floating_point()
    }
    pipeline.step(x, y)
    gradients: dict[str, Tensor] = {}
    for part in pipeline.transport.gather_objects(pipeline.gradients):
        assert isinstance(part, dict)
        gradients |= part

    def loss_at(distance: float) -> float:
        pipeline.load_model_state_dict(
            {name: t + distance * direction.get(name, 0) for name, t in weights.items()}
        )
        pipeline.steps = 0  # the same draws
        return pipeline.step(x, y).loss

    slope = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
    return sum(float((gradients[name] * direction[name]).sum()) for name in gradients), slope


@pytest.mark.table
@pytest.mark.parametrize("schedule", [DOUBLING, HALVING], ids=["doubling", "halving"])
@pytest.mark.parametrize("kind", [*OTHERS, "batch norm"])
def test_the_gradient_is_that_of_the_loss_told(kind: str, schedule: Schedule) -> None:
    make = OTHERS.get(kind, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(3)))
    layers = seeded(lambda: [nn.Linear(8, 8), make(), make(), make()])
    for recompute in RECOMPUTE:
        gradient, slope = launch(_derivative, schedule, layers, recompute, workers=2, transport="local")[0]
        assert gradient == pytest.approx(slope, rel=1e-6, abs=1e-6), recompute


def decides(x: Tensor, y: Tensor) -> Tensor:
    return y if float(x.detach().sum()) > 0 else 2 * y


def test_what_decides_by_its_samples_runs_for_each_micro_batch_by_itself() -> None:
    """The first mini-batch, by which it is seen whether two may run together, decides all alike."""
    batches = numbers()
    batches[0] = [(batches[0][0][0].abs(), batches[0][0][1])]
    agree(seeded(lambda: [Does(decides), *(nn.Linear(8, 8) for _ in range(3))]), (DOUBLING,), batches)


def test_complex_activations_have_gradients() -> None:
    agree(seeded(lambda: [Spectrum(8, 8), Back(8, 8), Spectrum(8, 8), Back(8, 8)]), ALL, cuts=[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)],
        lambda: [nn.Linear(8, 8), nn.Identity(), Shift(8, 8), Shift(8, 8)],
        lambda: [nn.Linear(8, 8), nn.Linear(8, 8), Shift(8, 8), nn.Linear(8, 8)],
    ],
    ids=["relu", "two shifts", "shift"],
)
def test_a_stage_may_change_its_input_in_place(
    make: Callable[[], list[nn.Module]], request: pytest.FixtureRequest
) -> None:
    agree(seeded(make), ALL, cuts=[2], of=request.node.name)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_what_the_stage_before_needs_is_not_changed(schedule: Schedule) -> None:
    make = lambda: [nn.Linear(8, 8), nn.Tanh(), Shift(8, 8), nn.Linear(8, 8)]  # noqa: E731
    apart = seeded(make)
    apart[2] = Apart(8, 8).double()
    apart[2].load_state_dict(
        seeded(make)[2].state_dict()
    )  # in one process torch refuses to change what Tanh saved
    expected = one_process(apart, mean_square, parts_of(schedule), numbers(), optimizer=sgd)
    for recompute in RECOMPUTE:
        options: dict[str, Any] = {"optimizer": sgd, "recompute": recompute, "reference": expected}
        found = verify(schedule, seeded(make), mean_square, numbers(), cuts=[2], **options)
        assert found.ok, (recompute, found)


def _norms(schedule: Schedule, layers: list[nn.Module], recompute: Any) -> list[float]:
    pipeline = Pipeline(deepcopy(layers), mean_square, schedule, optimizer=sgd, recompute=recompute)
    return [pipeline.step(x.clone(), y).grad_norm for ((x, y),) in numbers()]


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_the_first_stage_may_change_the_mini_batch(schedule: Schedule) -> None:
    layers = seeded(lambda: [Shift(8, 8), nn.Linear(8, 8)])
    expected = one_process(
        layers, mean_square, parts_of(schedule), numbers(), optimizer=sgd
    )  # its micro-batches are views of its own
    for recompute in RECOMPUTE:
        found = launch(_norms, schedule, layers, recompute, workers=schedule.workers, transport="local")[0]
        assert found == pytest.approx([step.grad_norm for step in expected.steps], rel=1e-10), recompute


@pytest.mark.parametrize(
    "make",
    [
        lambda: [frozen(nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)],
        lambda: [frozen(nn.Linear(8, 8)), frozen(nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 8)],
        lambda: [nn.Linear(8, 8), frozen(nn.Linear(8, 8)), frozen(nn.Linear(8, 8)), nn.Linear(8, 8)],
        lambda: [nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 8), frozen(nn.Linear(8, 8))],
        lambda: [nn.Linear(8, 8), nn.Linear(8, 8), frozen(nn.Linear(8, 8)), nn.Identity()],
    ],
    ids=["first layer", "first stage", "middle", "ends", "last stage"],
)
def test_layers_without_anything_to_train(
    make: Callable[[], list[nn.Module]], request: pytest.FixtureRequest
) -> None:
    agree(seeded(make), ALL, cuts=[2], of=request.node.name)


def test_a_first_layer_without_weights() -> None:
    make = lambda: [nn.Flatten(), *(nn.Linear(8, 8) for _ in range(3))]  # noqa: E731
    batches = [[(x.view(16, 2, 4), y)] for ((x, y),) in numbers((16, 8))]
    agree(seeded(make), ALL, batches)


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_are_changed_once_and_found_as_they_were(in_place: bool) -> None:
    layers = seeded(lambda: [nn.Linear(8, 8), *(Average(in_place=in_place) for _ in range(3))])
    agree(layers, (schemes.gpipe(2, 4), schemes.dapple(2, 4), schemes.interleaved(1, 4, chunks=2)))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    ("schedule", "workers"),
    [
        (schemes.chimera(2, 4), 2),
        (schemes.gems(2, 4), 2),
        (schemes.dapple(2, 4), 4),
        (schemes.wpipe(2, 4, periods=6), 4),
    ],
    ids=str,
)
def test_copies_that_change_buffers_are_refused(schedule: Schedule, workers: int, recompute: Any) -> None:
    layers = seeded(lambda: [Average(in_place=True), *(nn.Linear(8, 8) for _ in range(3))])
    message = (
        r"layer 0 \(Average\) changes its buffer 'seen' in training, and each of the 2 copies of stage 0"
    )
    with pytest.raises(ConfigError, match=message):
        launch(_norms, schedule, layers, recompute, workers=workers, transport="local")


def spectral() -> nn.Module:
    module: nn.Module = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return module


def test_spectral_norms() -> None:
    agree(seeded(lambda: [spectral() for _ in range(4)]), (schemes.gpipe(2, 4), schemes.dapple(2, 4)))


def test_a_loss_may_draw() -> None:
    layers = seeded(lambda: [nn.Linear(8, 8) for _ in range(4)])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(functional.dropout(output, 0.3), target)

    for schedule in ALL:
        told = [
            launch(_told, schedule, layers, loss, recompute, workers=schedule.workers, transport="local")[0]
            for recompute in RECOMPUTE
        ]
        assert told[1:] == [pytest.approx(told[0], rel=1e-10)] * 2, schedule


def _told(schedule: Schedule, layers: list[nn.Module], loss: Any, recompute: Any) -> list[float]:
    pipeline = Pipeline(deepcopy(layers), loss, schedule, optimizer=sgd, recompute=recompute)
    steps = [pipeline.step(x, y) for ((x, y),) in numbers()]
    return [value for step in steps for value in (step.loss, step.grad_norm)]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_what_torch_refuses_is_refused_where_bytes_are_counted(recompute: Any) -> None:
    layers = seeded(lambda: [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.ReLU(inplace=True))])
    kind = ConfigError if recompute == "layer" else WorkerError
    with pytest.raises(kind, match=r"in ?place"):
        launch(_trained, layers, recompute, workers=1, transport="local")


def _evaluated(layers: list[nn.Module], recompute: Any, *, inference: bool) -> list[float]:
    pipeline = Pipeline(
        deepcopy(layers), mean_square, schemes.chimera(2, 4), optimizer=sgd, recompute=recompute
    )
    ((x, y),) = numbers()[0]
    with torch.inference_mode(mode=inference):
        x, y = x.clone(), y.clone()
        told = [pipeline.evaluate(x, y).loss for _ in range(3)]
    told += [pipeline.step(x, y).loss for _ in range(3)]
    with torch.inference_mode(mode=inference):
        return [*told, pipeline.evaluate(x, y).loss]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_evaluation_and_inputs_of_inference_mode(recompute: Any) -> None:
    layers = seeded(lambda: [nn.Linear(8, 8) for _ in range(4)])
    plain, found = (
        launch(partial(_evaluated, inference=mode), layers, recompute, workers=2, transport="local")[0]
        for mode in (False, True)
    )
    assert found == plain


class Moody(nn.Linear):
    """Changes its input in place from its third forward on."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x.add_(1.0) if self.runs > 2 else x)


class Forgetful(nn.Linear):
    """Decides by what it does not get: how often it ran."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = super().forward(x)
        return y if self.runs < 5 else y.tanh()


class Fading(nn.Linear):
    """Gives less each time it runs."""

    share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.share *= 0.9
        y: Tensor = (super().forward(x) * self.share).exp()
        return y


class Late(nn.Linear):
    """Gives less each time it runs, from its 11th run on: in the second step."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y: Tensor = super().forward(x) * min(1.0, 0.9 ** (self.runs - 10))
        return y


def _trained(layers: list[nn.Module], recompute: Any) -> None:
    pipeline = Pipeline(layers, mean_square, schemes.gpipe(1, 4), optimizer=sgd, recompute=recompute)
    for ((x, y),) in numbers():
        pipeline.step(x, y)


@pytest.mark.parametrize(
    ("layer", "recompute", "message"),
    [
        (Moody, "stage", "the input of stage 0 was changed in place before"),
        (Moody, "layer", r"the input of layer 0 \(Moody\) was changed in place before"),
        (Forgetful, "layer", r"layer 0 \(Forgetful\) saved 1 tensors .* and 2 of other"),
        (Fading, "stage", "stage 0 gives other values when it is computed again"),
        (Fading, "layer", r"layer 0 \(Fading\) gives other values when it is computed again"),
        (Late, "stage", "stage 0 gives other values when it is computed again"),
        (Late, "layer", r"layer 0 \(Late\) gives other values when it is computed again"),
    ],
)
def test_what_cannot_be_computed_again_is_said(layer: type[nn.Linear], recompute: Any, message: str) -> None:
    layers = seeded(lambda: [layer(8, 8)])
    with pytest.raises(ConfigError, match=message):
        launch(_trained, layers, recompute, workers=1, transport="local")


class Gives(nn.Module):
    """Gives a tensor with gaps, and one that the next layer changes in place."""

    def __init__(self, gaps: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.gaps = nn.Linear(8, 8), gaps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return self.gaps(y), y * 2


class TakesGaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        one, other = given
        other += self.fc(one)
        return other


@pytest.mark.parametrize(
    "gaps",
    [
        lambda y: functional.pad(y, (0, 0, 1, 0))[:, :-1],
        lambda y: torch.cat([y, y], -1)[..., ::2],
        lambda y: y.mean(1, keepdim=True).expand(y.shape),
        lambda y: torch.cat([y, y], -1)[:, :1, 8:].expand(y.shape),
        lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["cut", "strided", "expanded", "cut and expanded", "transposed"],
)
def test_a_layer_is_computed_again_with_the_strides_of_its_inputs(gaps: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layers = [Gives(gaps), TakesGaps(), nn.Linear(8, 8), nn.Linear(8, 8)]
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))

    def work(recompute: Any) -> list[float]:
        made = deepcopy(layers)
        pipeline = Pipeline(made, mean_square, schemes.dapple(2, 2), optimizer=sgd, recompute=recompute)
        return [pipeline.step(x, x.flip(1)).loss for _ in range(2)]

    plain, *others = (
        launch(work, how, workers=2, transport="local", timeout_seconds=30)[0] for how in RECOMPUTE
    )
    assert others == [plain, plain]
