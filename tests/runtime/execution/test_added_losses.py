"""Losses that layers add: one process's numbers with every scheme, what is reported, and what is refused.

Most here insist on the balance of each micro-batch by itself, which is no mean over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import counterflow as cf
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.verification.training_agreement import verify

WIDTH, CLASSES = 6, 4
SGD = partial(torch.optim.SGD, lr=0.1)
INSISTS: dict[str, Any] = {"per_micro_batch_loss": True}


class Experts(nn.Module):
    """A mixture whose router adds its balance and a z-loss."""

    def __init__(self, balance: str = "balance", *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.mix, self.route, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Dropout(0.2)
        self.balance, self.reentrant = balance, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.mixed(x)
        found: Tensor = checkpoint(self.mixed, x, use_reentrant=self.reentrant)
        return found

    def mixed(self, x: Tensor) -> Tensor:
        logits = self.route(x)
        shares = logits.softmax(-1)
        cf.add_loss(0.9 * shares.flatten(0, -2).mean(0).square().sum(), self.balance)
        cf.add_loss(0.1 * logits.logsumexp(-1).square().mean(), "z")
        found: Tensor = x + self.drop(self.mix(x).tanh()) * shares.amax(-1, keepdim=True)
        return found


def layers(**options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    found = (
        nn.Linear(5, WIDTH),
        Experts(**options),
        nn.Sequential(Experts("other"), nn.Tanh()),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        Experts(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, CLASSES),
    )
    return [layer.double() for layer in found]


def data(*shape: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(len(shape))
    targets = torch.randint(CLASSES, shape, generator=draw)
    return torch.randn(*shape, 5, generator=draw, dtype=torch.float64), targets


def tokens(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the tokens that count, which are not known before the last stage."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=0)


def summed(output: Tensor, target: Tensor) -> cf.LossSum:
    loss = functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=1, reduction="sum")
    return cf.LossSum(loss, (target != 1).sum())


def squares(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, functional.one_hot(target, CLASSES).double())


def by_hand(
    loss_function: Callable[[Tensor, Tensor], Any], weight: Callable[[Tensor], float], count: int
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, sums of what was added and new weights in one process, micro-batch after micro-batch."""
    model = nn.Sequential(*layers()).eval()
    inputs, targets = data(12, 3)
    total, means = torch.zeros((), dtype=torch.float64), dict.fromkeys(("balance", "other", "z"), 0.0)
    pieces = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
    weights = [weight(target) for _, target in pieces]
    for (x, target), counts in zip(pieces, weights, strict=True):
        with cf.added_losses() as added:
            found = loss_function(model(x), target)
        mean = found.sum / found.weight if isinstance(found, cf.LossSum) else found
        share = counts / sum(weights)
        total = total + share * (mean + sum(added.values()))
        for name, term in added.items():
            means[name] += share * term.item()
    total.backward()
    SGD(model.parameters()).step()
    return total.item(), means, dict(model.state_dict())


def test_a_micro_batch_weighs_with_all_that_was_added_to_it() -> None:
    cases: Sequence[tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor], float]]] = [
        (squares, len),
        (tokens, lambda target: float((target != 0).sum())),
        (summed, lambda target: float((target != 1).sum())),
    ]
    for loss_function, weight in cases:
        loss, means, weights = by_hand(loss_function, weight, 4)

        def work(loss_function: Any = loss_function) -> tuple[float, dict[str, float], dict[str, Tensor]]:
            model = nn.Sequential(*layers())
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            with cf.Pipeline(
                model, loss_function, schemes.dapple(4, 4), optimizer=SGD, **INSISTS
            ) as pipeline:
                step = pipeline.step(*data(12, 3))
                return step.loss, dict(step.metrics), pipeline.model_state_dict()

        for found, metrics, ours in cf.launch(work, workers=4, transport="local"):
            assert found == pytest.approx(loss, abs=1e-12)
            assert metrics == pytest.approx(means, abs=1e-12)
            assert ours.keys() == weights.keys()
            assert all(torch.allclose(ours[name], weights[name], rtol=0, atol=1e-12) for name in ours)


def agrees(schedule: Schedule, loss_function: Any = tokens, *, replicas: int = 1, **options: Any) -> None:
    made = options.pop("made", None) or layers(**options.pop("layers", {}))
    batches = [[data(12, 4)] * replicas] * 2
    options.setdefault("per_micro_batch_loss", schedule.workload.slices == 1)
    found = verify(schedule, made, loss_function, batches, optimizer=SGD, **options)
    assert found.ok, (str(schedule), options, str(found))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.STAGE])
@pytest.mark.parametrize(
    "schedule", [schemes.dapple(2, 4), schemes.zb_v(2, 4), schemes.chimera(2, 4)], ids=str
)
def test_gradients_of_added_losses_are_on_the_device(schedule: Schedule, recompute: Recompute) -> None:
    """The backward of a loss begins there; otherwise they would be sent as tensors of the host."""

    def work() -> tuple[list[float], list[Tensor]]:
        with cf.Pipeline(
            layers(), squares, schedule, optimizer=SGD, recompute=recompute, **INSISTS
        ) as pipeline:
            losses = [pipeline.step(*data(8, 3)).loss for _ in range(3)]
            return losses, [value.cpu() for value in pipeline.model_state_dict().values()]

    plain, on_device = (
        cf.launch(work, workers=2, transport=transport, timeout_seconds=60)[0]
        for transport in ("local", "strict-nccl")
    )
    torch.testing.assert_close(on_device, plain, rtol=1e-12, atol=1e-12)


def test_every_scheme_trains_as_one_process() -> None:
    for schedule in (
        schemes.gpipe(4, 4),
        schemes.dapple(3, 5),
        schemes.interleaved(2, 4, chunks=2),
        schemes.gems(4, 4),
        schemes.chimera(4, 4),
        schemes.chimera(4, 8, concat="forward-doubling"),
        schemes.chimera(4, 8, concat="backward-halving"),
        schemes.hanayo(2, 4, waves=2),
        schemes.zb_h1(4, 4),
        schemes.zb_v(2, 4),
        schemes.dualpipe(4, 8),
    ):
        agrees(schedule)
    for schedule in (schemes.pipedream(3), schemes.pipedream_2bw(3, 4), schemes.wpipe(2, 4)):
        agrees(schedule, squares)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return found


def deep() -> list[nn.Module]:
    """Stages whose graphs have several pieces; layers of the first two stages add."""
    torch.manual_seed(2)
    first = [nn.Linear(5, WIDTH), MeanOfPositions(), *(Residual() for _ in range(4))]
    second = [*(Residual() for _ in range(4)), MeanOfPositions(), *(Residual() for _ in range(4))]
    made = [*first, *second, *(Residual() for _ in range(6)), nn.Linear(WIDTH, CLASSES)]
    return [layer.double() for layer in made]


def test_what_is_added_goes_past_the_pieces_of_later_stages() -> None:
    for schedule in (schemes.zb_h1(3, 4), schemes.zb_v(2, 4), schemes.dapple(3, 4, split=True)):
        agrees(schedule, squares, made=deep())
    agrees(schemes.zb_h1(3, 4), squares, made=deep(), recompute="layer")
    agrees(schemes.zb_h1(3, 4), squares, made=deep(), recompute="stage")


class MeanOfPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.route(x)
        cf.add_loss(0.1 * logits.logsumexp(-1).square().mean(), "z")
        found: Tensor = x + logits
        return found


def test_slices_add_by_their_share() -> None:
    torch.manual_seed(1)
    made = [nn.Linear(5, WIDTH), MeanOfPositions(), MeanOfPositions(), nn.Linear(WIDTH, CLASSES)]
    for schedule in (
        schemes.dapple(stages=2, micro_batches=2, slices=2),
        schemes.zb_h1(stages=2, micro_batches=2, slices="1+3"),
    ):
        agrees(schedule, squares, made=[layer.double() for layer in made])


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code
def test_options() -> None:
    schedule = schemes.zb_h1(3, 4)
    options: list[dict[str, Any]] = [
        {"recompute": "layer", "layers": {"reentrant": False}},
        {"layers": {"reentrant": False}},
        {"compile": "eager"},
    ]
    for each in options:
        agrees(schedule, **each)
    agrees(schemes.dapple(2, 2), summed, autocast="bfloat16")


def step_of(*made: nn.Module, schedule: Schedule | None = None) -> list[Any]:
    def work() -> Any:
        with cf.Pipeline(
            nn.Sequential(*made), tokens, schedule or schemes.dapple(2, 2), optimizer=SGD
        ) as pipeline:
            step = pipeline.step(*data(4, 3))
            return step, pipeline.evaluate(*data(4, 3)), pipeline.predict(data(4, 3)[0])

    return cf.launch(work, workers=2, transport="local")


def test_evaluations_have_it_and_predictions_do_not() -> None:
    model = nn.Sequential(*layers())
    for _, evaluation, outputs in step_of(*model, schedule=schemes.dapple(2, 1)):
        with cf.added_losses() as added, torch.no_grad():
            found = model.eval()(data(4, 3)[0])
        assert evaluation.loss == pytest.approx((tokens(found, data(4, 3)[1]) + sum(added.values())).item())
        assert evaluation.metrics == pytest.approx({name: term.item() for name, term in added.items()})
        assert outputs is None or torch.allclose(outputs, found)


class Adds(nn.Module):
    """Adds what a function makes of its input."""

    def __init__(self, function: Callable[[Tensor], Any], *, name: str = "added_loss") -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, x: Tensor) -> Tensor:
        cf.add_loss(self.function(x), self.name)
        return x


def test_what_is_refused() -> None:
    first, last = nn.Linear(5, WIDTH).double(), nn.Linear(WIDTH, CLASSES).double()
    for function, match in (
        (lambda x: x, r"add_loss\('added_loss'\): a tensor of shape \(2, 3, 6\); give one real number"),
        (lambda _: 1.0, "float; give one real number as a tensor"),
    ):
        with pytest.raises(cf.ConfigError, match=match):
            step_of(first, Adds(function), last)
    with pytest.raises(cf.ConfigError, match="without gradients"):
        step_of(first, Experts(reentrant=True).double(), last)
    with pytest.raises(cf.ConfigError, match="nobody collects what is added"):
        Experts()(torch.zeros(2, WIDTH))
    with torch.no_grad():
        Experts()(torch.zeros(2, WIDTH))


def test_a_layer_adds_in_every_forward_or_shapes_are_dynamic() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0, 0] > 0:
                cf.add_loss(x.mean())
            return x

    def work(**options: Any) -> list[Mapping[str, float]]:
        made = [nn.Identity(), Sometimes(), nn.Linear(5, CLASSES)]
        with cf.Pipeline(made, tokens, schemes.dapple(3, 2), optimizer=SGD, **options) as pipeline:
            inputs = torch.ones(4, 3, 5)
            inputs[2:] *= -1
            steps = [pipeline.step(x, torch.ones(4, 3, dtype=torch.int64)) for x in (inputs, -inputs)]
            return [step.metrics for step in steps]

    with pytest.raises(cf.ConfigError, match="make the pipeline with dynamic_shapes=True"):
        cf.launch(work, workers=3, transport="local")
    found = cf.launch(partial(work, dynamic_shapes=True), workers=3, transport="local")
    assert found == [[{"added_loss": 0.5}, {"added_loss": 0.5}]] * 3


def test_the_metric_of_a_loss_function_has_another_name() -> None:
    def work() -> None:
        loss = lambda output, target: (tokens(output, target), {"z": 1.0})  # noqa: E731
        with cf.Pipeline(layers(), loss, schemes.dapple(2, 2), optimizer=SGD, **INSISTS) as pipeline:
            pipeline.step(*data(4, 3))

    with pytest.raises(
        cf.ConfigError, match="'z' is a metric of the loss function, and the name of what a layer adds"
    ):
        cf.launch(work, workers=2, transport="local")


class Router(nn.Module):
    """Adds what a function makes of its probabilities and choices, of shapes [B, S, 3]."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *, mode: str = "") -> None:
        super().__init__()
        self.function, self.mode = function, mode
        self.route = nn.Linear(WIDTH, 3).double()
        if mode == "norm":
            self.norm = nn.BatchNorm1d(WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "norm":
            x = self.norm(x.mT).mT
        logits = self.route(x.transpose(0, 1) if self.mode == "sequence first" else x)
        shares = functional.dropout(logits, 0.1, self.training and self.mode == "dropout").softmax(-1)
        if self.training or self.mode != "training":
            cf.add_loss(0.1 * self.function(shares, functional.one_hot(shares.argmax(-1), 3)), "balance")
        return x


class SequenceFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()


def switch(shares: Tensor, chosen: Tensor) -> Tensor:
    """The Switch Transformer's: a product of two means over all tokens."""
    return (shares.flatten(0, 1).mean(0) * chosen.flatten(0, 1).double().mean(0)).sum()


def by_sequence(shares: Tensor, chosen: Tensor) -> Tensor:
    return (shares.mean(1) * chosen.double().mean(1)).sum(-1).mean()


def by_token(shares: Tensor, chosen: Tensor) -> Tensor:
    del chosen
    return shares.square().sum(-1).mean()


def scaled(shares: Tensor, chosen: Tensor) -> Tensor:
    """A mean by value alone."""
    found = by_token(shares, chosen)
    return found / found.detach()


def sum_of_all(shares: Tensor, chosen: Tensor) -> Tensor:
    del chosen
    return shares.square().sum()


def routed(
    function: Any, schedule: Schedule, samples: int, *, mode: str = "", replicas: int = 1, **options: Any
) -> tuple[float, float]:
    """The first step's loss, and one process's."""
    torch.manual_seed(3)
    layers = [nn.Linear(5, WIDTH).double(), Router(function, mode=mode), nn.Linear(WIDTH, CLASSES).double()]
    if mode == "sequence first":
        layers[0] = nn.Sequential(layers[0], SequenceFirst())
    x, y = data(samples * replicas, 4)
    with cf.added_losses() as added:
        output = nn.Sequential(*layers)(x)
    y = y.T if mode == "sequence first" else y
    expected = squares(output, y) + sum(added.values())
    if mode == "sequence first":
        options |= {"target_dims": 1, "output_dims": 1}

    def work() -> float:
        with cf.Pipeline(layers, squares, schedule, optimizer=SGD, cuts=(2,), **options) as pipeline:
            rows = slice(pipeline.replica * samples, (pipeline.replica + 1) * samples)
            step = pipeline.step(x[rows], y[:, rows] if mode == "sequence first" else y[rows])
            return [step, *pipeline.flush()][-1].loss

    return cf.launch(work, workers=2 * replicas, transport="local")[0], expected.item()


CASES: list[dict[str, Any]] = [
    {"schedule": schemes.dapple(2, 4), "samples": 16},
    {"schedule": schemes.dapple(2, 4), "samples": 4},  # of one sample each
    {"schedule": schemes.zb_h1(2, 4), "samples": 10, "recompute": "stage"},
    {"schedule": schemes.chimera(2, 4, concat="backward-halving"), "samples": 8, "recompute": "layer"},
    {"schedule": schemes.pipedream_2bw(2, 4), "samples": 8},
    {"schedule": schemes.dapple(2, 1), "samples": 6, "replicas": 2},
    {"schedule": schemes.dapple(2, 4), "samples": 12, "mode": "sequence first"},
    {"schedule": schemes.dapple(2, 4), "samples": 16, "mode": "training"},
    {"schedule": schemes.dapple(2, 4), "samples": 16, "mode": "dropout"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_added_has_to_be_a_mean_over_samples(case: dict[str, Any]) -> None:
    for function in (switch, scaled, sum_of_all):
        with pytest.raises(
            cf.ConfigError, match=r"layer 1 \(Router\) .* adds 'balance' .* no mean over samples"
        ):
            routed(function, **case)
    for function in (by_sequence, by_token):
        found, expected = routed(function, **case)
        assert case.get("mode") == "dropout" or found == pytest.approx(expected, rel=1e-9)


def test_batch_norms_before_it_are_no_reason_to_refuse_it() -> None:
    routed(by_token, schemes.dapple(2, 4), 16, mode="norm")
    with pytest.raises(cf.ConfigError, match="no mean over samples"):
        routed(switch, schemes.dapple(2, 4), 16, mode="norm")


def test_what_is_added_of_slices_has_to_be_a_mean_over_positions() -> None:
    schedule = schemes.dapple(stages=2, micro_batches=2, slices=2)
    with pytest.raises(cf.ConfigError, match="no mean over positions"):
        routed(by_sequence, schedule, 8)
    found, expected = routed(by_token, schedule, 8)
    assert found == pytest.approx(expected, rel=1e-9)


def test_one_unit_and_who_insists_may_add_anything() -> None:
    for function in (switch, scaled, sum_of_all):
        found, expected = routed(function, schemes.dapple(2, 1), 8)
        assert found == pytest.approx(expected, rel=1e-9)
        routed(function, schemes.dapple(2, 4), 8, **INSISTS)


def adding(output: Tensor, target: Tensor) -> Tensor:
    cf.add_loss(0.1 * output.square().mean(), "size")
    return squares(output, target)


def adding_a_product(output: Tensor, target: Tensor) -> Tensor:
    cf.add_loss(0.1 * output.mean((0, 1)).square().sum(), "size")
    return squares(output, target)


def test_a_loss_function_may_add_too() -> None:
    for schedule in (schemes.dapple(4, 4), schemes.zb_h1(4, 4), schemes.chimera(4, 4)):
        for recompute in ("none", "stage"):
            agrees(schedule, adding, recompute=recompute)

    def work(loss: Any) -> tuple[Any, float]:
        made = [nn.Linear(5, WIDTH).double(), nn.Linear(WIDTH, CLASSES).double()]
        with cf.Pipeline(made, loss, schemes.dapple(2, 2), optimizer=SGD) as pipeline:
            return pipeline.step(*data(4, 3)).metrics, pipeline.evaluate(*data(4, 3)).metrics["size"]

    for metrics, evaluated in cf.launch(work, adding, workers=2, transport="local"):
        assert set(metrics) == {"size"}
        assert evaluated > 0
    with pytest.raises(cf.ConfigError, match="the loss is no mean over samples"):
        cf.launch(work, adding_a_product, workers=2, transport="local")


def test_what_is_added_beside_other_shares_of_tokens_is_refused() -> None:
    """It would weigh by the tokens that count in each micro-batch, where one process takes a mean of all."""

    def work(loss: Any, *, even: bool) -> float:
        torch.manual_seed(3)
        made = [nn.Linear(5, WIDTH).double(), Router(by_token), nn.Linear(WIDTH, CLASSES).double()]
        x, y = data(8, 4)
        if even:
            y = y.clamp(min=2)
            y[:, 0], y[:, 1] = 0, 1
        with cf.added_losses() as added:
            found = loss(nn.Sequential(*made)(x), y)
        mean = found.sum / found.weight if isinstance(found, cf.LossSum) else found
        with cf.Pipeline(made, loss, schemes.dapple(2, 4), optimizer=SGD) as pipeline:
            return pipeline.step(x, y).loss - (mean + sum(added.values())).item()

    for loss in (tokens, summed):
        with pytest.raises(cf.ConfigError, match=r"layers add to it by cf\.add_loss"):
            cf.launch(partial(work, loss, even=False), workers=2, transport="local")
        found = cf.launch(partial(work, loss, even=True), workers=2, transport="local")
        assert found == pytest.approx([0.0, 0.0], abs=1e-12)
