"""Micro-batches in slices of their sequence: one process's numbers, what is saved, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.api.carry import NOTHING
from counterflow.models.gpt import GPTConfig
from counterflow.models.loss import next_token_loss
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.schedule.registry import schedule_of
from counterflow.verification.training_agreement import TrainingAgreement, verify

from ...tables import table

VOCABULARY, WIDTH, POSITIONS = 17, 8, 22
Make = Callable[[], list[nn.Module]]


class Recurrent(nn.Module):
    """An LSTM, which leaves its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        found, state = self.lstm(x, self.carry.take())
        self.carry.leave(self.state(state))
        summed: Tensor = x + found
        return summed

    def state(self, state: Any) -> Any:
        return state


class Detached(Recurrent):
    """One whose state has no gradient."""

    def state(self, state: Any) -> Any:
        return tuple(tensor.detach() for tensor in state)


class Silent(Recurrent):
    """One that leaves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Convolved(nn.Module):
    """A causal convolution, which leaves its edge."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        edge = self.carry.take(x.new_zeros(len(x), 2, WIDTH))
        wide = torch.cat([edge, x], 1)
        self.carry.leave(wide[:, -2:])
        found: Tensor = x + self.conv(wide.mT).mT.tanh()
        return found


class BothSides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.lstm(x)[0]
        return found


class NormOfPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x.mT).mT
        return found


class CountedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(POSITIONS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.table(torch.arange(x.shape[1]))
        return found


class Attending(nn.Module):
    """Attention in which heads share keys, within a window perhaps."""

    def __init__(self, key_heads: int, window: int | None = None) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (
            nn.Linear(WIDTH, 2 * heads) for heads in (4, key_heads, key_heads)
        )
        self.window = window
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        made = (map_(x).unflatten(2, (-1, 2)) for map_ in (self.queries, self.keys, self.values))
        queries, keys, values = (tensor.transpose(1, 2) for tensor in made)
        mixed = cf.attend(self.carry, queries, keys, values, window=self.window)
        found: Tensor = x + mixed.transpose(1, 2).flatten(2)
        return found


class Sideways(nn.Module):
    """A linear layer that hands on the positions before the samples, or takes them so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x.transpose(0, 1))
        return found


def between(*layers: Callable[[], nn.Module]) -> list[nn.Module]:
    made = [nn.Embedding(VOCABULARY, WIDTH), *(make() for make in layers), nn.Linear(WIDTH, VOCABULARY)]
    return [layer.double() for layer in made]


own: Make = partial(between, Recurrent, Convolved, nn.GELU, Recurrent, Convolved, Sideways, Sideways)


def gpt(*, layers: int = 6, tied: bool = False, dropout: float = 0.0) -> list[nn.Module]:
    config = GPTConfig(layers, WIDTH, 2, VOCABULARY, POSITIONS, dropout=dropout, tied=tied, deviation=0.3)
    return [layer.double() for layer in config.build()]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def loss_sum(output: Tensor, target: Tensor) -> cf.LossSum:
    loss = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return cf.LossSum(loss, (target != -100).sum())


def error(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, functional.one_hot(target.clamp(min=0), VOCABULARY).double())


def mini_batch(samples: int, positions: int) -> tuple[Tensor, Tensor]:
    """Tokens and those after them, of which later ones count less often."""
    tokens = torch.randint(VOCABULARY, (samples, positions + 1))
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape) < torch.linspace(0.1, 0.8, positions)] = -100
    return tokens[:, :-1].contiguous(), targets


def agreement(
    schedule: Schedule,
    make: Make,
    loss: Callable[..., Any] = token_loss,
    *,
    replicas: int = 1,
    positions: int = POSITIONS,
    steps: int = 2,
    **options: Any,
) -> TrainingAgreement:
    torch.manual_seed(0)
    layers = make()
    batches = [[mini_batch(8, positions) for _ in range(replicas)] for _ in range(steps)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return verify(schedule, layers, loss, batches, optimizer=optimizer, **options)


GRID = (
    "gpipe(stages=2, micro_batches=2, slices=3)",
    "1f1b(stages=4, micro_batches=2, slices=2)",
    "1f1b(stages=2, micro_batches=1, slices=4)",
    "interleaved(workers=2, micro_batches=2, slices=3)",
    "gems(stages=2, micro_batches=4, slices=2)",
    "chimera(stages=4, micro_batches=4, slices=3)",
    "mixpipe(stages=2, micro_batches=4, slices=2)",
    "hanayo(workers=2, micro_batches=2, slices=3)",
    "zb-h1(stages=2, micro_batches=2, slices=3)",
    "zb-h2(stages=2, micro_batches=4, slices=2)",
    "zb-v(workers=2, micro_batches=4, slices=2)",
    "1f1b(stages=2, micro_batches=2, slices=4+3+2+1)",
    "chimera(stages=2, micro_batches=2, split=true, slices=3+1)",
    "v-half(workers=2, micro_batches=4, slices=2)",
    "v-min(workers=2, micro_batches=4, slices=3)",
    "dualpipe(workers=2, micro_batches=4, slices=2)",
    "dualpipe-v(workers=2, micro_batches=4, slices=2)",
)


def test_sliced_schemes_train_as_one_process() -> None:
    for text, (make, loss) in table(GRID, ((gpt, next_token_loss), (own, token_loss))):
        found = agreement(schedule_of(text, {}), make, loss, steps=1)
        assert found.ok, (text, loss, found)


OPTIONS: tuple[tuple[Make, Any, dict[str, Any]], ...] = (
    (own, loss_sum, {}),
    (own, error, {"replicas": 2}),
    (partial(gpt, tied=True), next_token_loss, {"clip_norm": 0.1, "barrier": False}),
    (gpt, next_token_loss, {"recompute": "stage", "zero_stage": 1}),
    (own, token_loss, {"recompute": "stage"}),
    (gpt, next_token_loss, {"recompute": "layer"}),
    (own, token_loss, {"recompute": "layer", "skip_non_finite": True}),
)


def test_options_with_slices() -> None:
    for (make, loss, options), scheme in table(OPTIONS, ("1f1b", "zb-h1", "chimera")):
        schedule = schedule_of(f"{scheme}(stages=2, micro_batches=4, slices=3)", {})
        found = agreement(schedule, make, loss, **options)
        assert found.ok, (scheme, options, found)


def attending() -> list[nn.Module]:
    return between(*(partial(Attending, 2, window) for window in (None, 5, None)))


def supports_lstm_under_autocast() -> bool:
    """oneDNN has LSTMs in bfloat16 for some processors alone."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(WIDTH, WIDTH)(torch.ones(1, 1, WIDTH))
    except RuntimeError:
        return False
    return True


def test_further_options_with_slices() -> None:
    """In float32 what compression and bfloat16 round is told from what slices get wrong."""

    def single(make: Make) -> Make:
        return lambda: [layer.float() for layer in make()]

    exact, rounded = 1e-10, 3e-3
    recurrent = own if supports_lstm_under_autocast() else attending
    for scheme, make, options, within in (
        (
            "chimera",
            attending,
            {"replicas": 2, "clip_norm": 0.1, "zero_stage": 1, "recompute": "layer"},
            exact,
        ),
        ("zb-h1", own, {"replicas": 2, "clip_norm": 0.1, "recompute": "stage"}, exact),
        ("1f1b", single(attending), {"compress": True}, rounded),
        ("chimera", single(own), {"compress": True, "steps": 3}, rounded),
        ("zb-h1", single(attending), {"autocast": torch.bfloat16}, rounded),
        ("1f1b", single(recurrent), {"autocast": torch.bfloat16, "recompute": "layer"}, rounded),
        ("chimera", single(attending), {"compute_dtype": torch.bfloat16, "recompute": "stage"}, rounded),
    ):
        schedule = schedule_of(f"{scheme}(stages=2, micro_batches=2, slices=3)", {})
        found = agreement(schedule, make, **{"steps": 1, **options})  # type: ignore[arg-type]
        assert max(found.loss_error, found.norm_error, found.weight_error) < within, (scheme, options, found)


def test_attention_of_groups_and_windows() -> None:
    for (heads, window), scheme in table(((4, None), (2, None), (1, 3), (2, 9)), ("1f1b", "zb-h1")):
        layers = partial(between, *[partial(Attending, heads, window)] * 3)
        schedule = schedule_of(f"{scheme}(stages=3, micro_batches=3, slices=4)", {})
        assert agreement(schedule, layers, steps=1).ok, (heads, window, scheme)


class Begins(nn.Module):
    """Tokens and their documents, 0 for padding, to vectors and both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.table(given["tokens"]), given["documents"]


class Packed(Attending):
    """Attention within documents."""

    def __init__(self, key_heads: int, window: int | None, dropout: float = 0.0) -> None:
        super().__init__(key_heads, window)
        self.dropout = dropout

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:  # type: ignore[override]
        x, documents = given
        made = (map_(x).unflatten(2, (-1, 2)) for map_ in (self.queries, self.keys, self.values))
        queries, keys, values = (tensor.transpose(1, 2) for tensor in made)
        mixed = cf.attend(
            self.carry, queries, keys, values, window=self.window, dropout=self.dropout,
            documents=documents, seen=documents > 0,
        )  # fmt: skip
        return x + mixed.transpose(1, 2).flatten(2), documents


class Ends(nn.Linear):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(given[0])


def _documents(samples: int) -> Tensor:
    """Three a sample of various lengths, and padding, of which some is between them."""
    found = torch.randint(4, (samples, POSITIONS)).sort(1).values
    found[:, 9] = 0
    return found


def test_attention_within_documents() -> None:
    batches = []
    for _ in range(2):
        tokens, targets = mini_batch(8, POSITIONS)
        batches.append([({"tokens": tokens, "documents": _documents(8)}, targets)])
    for heads, window, scheme in ((4, None, "1f1b"), (2, 9, "zb-h1"), (1, 3, "1f1b")):
        torch.manual_seed(0)
        packed = [Packed(heads, window) for _ in range(3)]
        layers = [layer.double() for layer in (Begins(), *packed, Ends(WIDTH, VOCABULARY))]
        schedule = schedule_of(f"{scheme}(stages=3, micro_batches=2, slices=4)", {})
        optimizer = partial(torch.optim.SGD, lr=0.1)
        assert verify(schedule, layers, token_loss, batches, optimizer=optimizer).ok, (heads, window)


def test_documents_of_lone_samples_in_recomputed_stages() -> None:
    """Two attentions of a stage leave the same documents, which lie within those of the whole sequence."""
    schedules = (
        "1f1b(stages=2, micro_batches=2, slices=2)",
        "chimera(stages=2, micro_batches=2, slices=3)",
        "gems(stages=2, micro_batches=2, slices=3)",
        "v-half(workers=2, micro_batches=4, slices=4)",
    )
    for text, recompute in table(schedules, ("stage", "layer")):
        torch.manual_seed(0)
        schedule = schedule_of(text, {})
        tokens, targets = mini_batch(schedule.micro_batches, POSITIONS)
        batches = [[({"tokens": tokens, "documents": _documents(len(tokens))}, targets)]] * 2
        packed = [Packed(2, None) for _ in range(2 * schedule.stages)]
        layers = [layer.double() for layer in (Begins(), *packed, Ends(WIDTH, VOCABULARY))]
        optimizer = partial(torch.optim.SGD, lr=0.1)
        found = verify(schedule, layers, token_loss, batches, optimizer=optimizer, recompute=recompute)
        assert found.ok, (text, recompute, found)


def test_attention_within_documents_is_that_of_a_mask() -> None:
    documents, at = _documents(3), torch.arange(POSITIONS)
    ahead = at[:, None] - at
    shape = 3, 2, POSITIONS, 4
    for window in (None, 5):
        mask = (ahead >= 0) & (ahead < (window or POSITIONS))
        pairs = documents[:, None, :, None] == documents[:, None, None]
        mask = mask & pairs & (documents > 0)[:, None, None]
        given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        options: dict[str, Any] = {"window": window, "documents": documents, "seen": documents > 0}
        expected = functional.scaled_dot_product_attention(given[0], given[1], given[2], mask)
        of_expected = torch.autograd.grad(expected.sin().sum(), given)
        for dropout in (0.0, 1e-300):  # with any above 0 the mask of pairs is made
            found = cf.attend(cf.Carry(), given[0], given[1], given[2], **options, dropout=dropout)
            assert torch.allclose(found, expected, rtol=1e-12)
            for one, other in zip(torch.autograd.grad(found.sin().sum(), given), of_expected, strict=True):
                assert torch.allclose(one, other, rtol=1e-12)
    with pytest.raises(
        cf.ConfigError, match=r"documents of shape \(22,\) are to be of 3 samples with 22 pos"
    ):
        cf.attend(cf.Carry(), *given, documents=documents[0])


class Conditions(nn.Module):
    """Tokens to vectors, and a class of each sample to a vector without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.classes = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(3, WIDTH)

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.table(given["tokens"]), self.classes(given["class"])


class Conditioned(nn.Module):
    """Shifts all positions by what all slices are given whole."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, condition = given
        return self.linear(x + self.shift(condition)[:, None]).tanh(), condition.tanh()


def test_values_without_positions() -> None:
    """The gradient of a value that all slices are given is the sum of theirs."""
    tokens, targets = mini_batch(8, POSITIONS)
    batches = [[({"tokens": tokens, "class": torch.randint(3, (8,))}, targets)]] * 2
    torch.manual_seed(0)
    layers = [Conditions(), Conditioned(), Conditioned(), Ends(WIDTH, VOCABULARY)]
    for scheme in ("1f1b", "zb-h1"):
        found = verify(
            schedule_of(f"{scheme}(stages=2, micro_batches=2, slices=3)", {}),
            [layer.double() for layer in layers],
            token_loss,
            batches,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            sequence_dims={"tokens": 1, "class": None},
        )
        assert found.ok, (scheme, found)


class Keyworded(nn.Embedding):
    """Tokens to vectors, scaled by a number of each sample and by one of each position."""

    def forward(self, x: Tensor, scale: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale[:, None, None] * weights[..., None]


def _with_keywords(layers: list[nn.Module], ready: bool, **options: Any) -> float:
    pipeline = cf.Pipeline(
        deepcopy(layers), error, schemes.dapple(stages=2, micro_batches=2, slices=3),
        optimizer=partial(torch.optim.SGD, lr=0.1), **options,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(VOCABULARY, (2, 8, POSITIONS), generator=drawn)
    kwargs = {"scale": torch.arange(8.0), "weights": torch.rand(8, POSITIONS, generator=drawn)}
    first, last = layers
    expected = error(last(first(tokens, **kwargs)), targets).item()
    if ready:
        halves = [slice(0, 4), slice(4, 8)]
        pieces = [(tokens[r], targets[r], {name: t[r] for name, t in kwargs.items()}) for r in halves]
        return pipeline.step(micro_batches=pieces).loss - expected
    return pipeline.step(tokens, targets, kwargs=kwargs).loss - expected


def test_keyword_arguments_with_and_without_positions() -> None:
    layers = [Keyworded(VOCABULARY, WIDTH).double(), nn.Linear(WIDTH, VOCABULARY).double()]
    run = partial(cf.launch, _with_keywords, layers, workers=2, transport="local")
    for ready in (False, True):
        losses = run(ready, kwarg_sequence_dims={"weights": 1, "scale": None})
        assert max(map(abs, losses)) < 1e-12
    with pytest.raises(cf.ConfigError, match=r"kwargs\['scale'\] .* say with kwarg_sequence_dims which one"):
        run(False)
    with pytest.raises(
        cf.ConfigError, match=r": kwarg_sequence_dims=\{'scale': None\} does not fit the keyword"
    ):
        run(False, kwarg_sequence_dims={"scale": None})
    with pytest.raises(cf.ConfigError, match=r": sequence_dims=\{'x': 1\} does not fit the inputs"):
        run(False, sequence_dims={"x": 1}, kwarg_sequence_dims={"weights": 1, "scale": None})


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def halving(output: Tensor, target: Tensor) -> Tensor:
    return token_loss(output.mul_(0.5), target)


def test_layers_and_losses_that_change_their_input_in_place() -> None:
    inplace = partial(nn.ReLU, inplace=True)
    make = partial(between, Recurrent, inplace, partial(nn.Linear, WIDTH, WIDTH), Halves, Convolved, Halves)
    for text in ("1f1b(stages=2, micro_batches=2, slices=3)", "zb-h1(stages=2, micro_batches=2, slices=2)"):
        assert agreement(schedule_of(text, {}), make, halving, steps=1).ok, text
    with pytest.raises(cf.ConfigError, match="the loss is no mean over positions"):
        agreement(
            schedule_of("1f1b(stages=2, micro_batches=2, slices=3)", {}),
            make,
            lambda output, target: halving(output, target) + output.sum().square(),
            recompute="stage",
        )


class Checkpoints(nn.Module):
    """A reentrant checkpoint, which computes all gradients or none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Any = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True)
        return x + found  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluations
def test_reentrant_checkpoints_without_a_carry(caplog: pytest.LogCaptureFixture) -> None:
    """In a loss, gradients are compared as well; beside the weights of layers, outputs are."""

    def checkpointed(loss: Callable[..., Tensor], output: Tensor, target: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(loss, output, target, use_reentrant=True)

    schedule = schedule_of("1f1b(stages=2, micro_batches=2, slices=3)", {})
    make = partial(between, Recurrent, Checkpoints, Recurrent)
    assert agreement(schedule, make, partial(checkpointed, error)).ok
    assert "could not verify that layer 2 (Checkpoints) computes the same from slices" in caplog.text
    with pytest.raises(cf.ConfigError, match="the loss is no mean over positions"):
        agreement(schedule, make, partial(checkpointed, shifted))


def _frozen() -> list[nn.Module]:
    layers = own()
    for layer in layers[:3]:
        layer.requires_grad_(False)
    return layers


def _skipping() -> list[nn.Module]:
    skip = cf.Skip("past")

    class Loads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.past, self.recurrent = skip.loader(), Recurrent()

        def forward(self, x: Tensor) -> Tensor:
            x, past = self.past(x)
            found: Tensor = self.recurrent(x) + 2 * past
            return found

    return between(lambda: nn.Sequential(Recurrent(), skip.saver()), nn.GELU, Convolved, Loads)


def test_frozen_layers_and_skip_connections() -> None:
    schedules = "1f1b(stages=4, micro_batches=2, slices=3)", "zb-h1(stages=3, micro_batches=3, slices=2)"
    for make, text, recompute in table((_frozen, _skipping), schedules, ("none", "layer")):
        found = agreement(schedule_of(text, {}), make, steps=1, recompute=recompute)
        assert found.ok, (make, text, recompute, found)


def test_lower_precisions() -> None:
    def single() -> list[nn.Module]:
        return [layer.float() for layer in gpt(layers=2)]

    schedule = schemes.dapple(stages=2, micro_batches=2, slices=3)
    for option in ("autocast", "compute_dtype"):
        options: dict[str, Any] = {option: torch.bfloat16}
        found = agreement(schedule, single, next_token_loss, **options)
        assert max(found.loss_error, found.norm_error) < 2e-2, (option, found)


# -- dropout


def _weights(schedule: Schedule, recompute: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layers = gpt(layers=2, dropout=0.2)
    pipeline = cf.Pipeline(
        layers, next_token_loss, schedule, optimizer=partial(torch.optim.SGD, lr=0.1), recompute=recompute
    )
    torch.manual_seed(1)
    pipeline.step(*mini_batch(4, POSITIONS))
    return {name: value.clone() for name, value in pipeline.state_dict()["model"].items()}


def test_dropout_is_drawn_by_slice_whatever_the_schedule_and_recomputation() -> None:
    found = []
    for scheme, stages, recompute in (
        ("1f1b", 1, "none"), ("1f1b", 2, "stage"), ("zb-h1", 2, "none"), ("1f1b", 4, "layer")
    ):  # fmt: skip
        schedule = schedule_of(f"{scheme}(stages={stages}, micro_batches=2, slices=3)", {})
        rows = cf.launch(_weights, schedule, recompute, workers=stages, transport="local")
        found.append({name: value for row in rows for name, value in row.items()})
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.allclose(value, other[name], rtol=1e-10, atol=1e-12), name


# -- what is saved


def _peak(schedule: Schedule) -> int:
    torch.manual_seed(0)
    config = GPTConfig(4, 32, 4, 32, 256, dropout=0.0)
    pipeline = cf.Pipeline(
        config.build(), next_token_loss, schedule, optimizer=partial(torch.optim.SGD, lr=0.1), cuts=[2, 3, 4]
    )
    pipeline.step(*config.sample(8, 256))
    return pipeline.peak_saved_bytes


def test_what_earlier_slices_left_is_saved_once() -> None:
    """Seq1F1B's first worker has P − 1 + n slices, and no more bytes, though each sees all before it."""
    most = []
    for slices in (1, 4, 8):
        schedule = schemes.dapple(stages=4, micro_batches=8, slices=slices)
        most.append(max(cf.launch(_peak, schedule, workers=4, transport="local")))
    assert most[1] < 0.45 * most[0]
    assert most[2] < 0.355 * most[0]


# -- what is refused


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (BothSides, "layer 2 (BothSides) of stage 1 makes something else of a whole sequence"),
        (NormOfPositions, "layer 2 (NormOfPositions) of stage 1 makes something else"),
        (CountedPositions, "layer 2 (CountedPositions) of stage 1 makes something else"),
        (Detached, "layer 2 (Detached) of stage 1 makes something else"),
        (Silent, "layer 2 (Silent) left nothing in a cf.Carry that it holds"),
    ],
)
def test_layers_that_look_across_slices_are_refused_by_name(
    layer: Callable[[], nn.Module], named: str
) -> None:
    for positions in (21, POSITIONS):
        with pytest.raises(cf.ConfigError) as caught:
            agreement(
                schemes.dapple(stages=2, micro_batches=2, slices=3),
                partial(between, Recurrent, layer),
                positions=positions,
            )
        assert named in str(caught.value)


class Forgets(Recurrent):
    """Sums, of which a slice leaves its own alone."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.carry.take(0)
        self.carry.leave(x.sum(1, keepdim=True))
        found: Tensor = x + (x.cumsum(1) + before).tanh()
        return found


class CountsOnce(nn.Module):
    """Positions, of which a slice leaves the number of its own alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.carry = nn.Embedding(POSITIONS, WIDTH), cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        first = self.carry.take(0)
        self.carry.leave(x.shape[1])
        found: Tensor = x + self.table(torch.arange(first, first + x.shape[1]))
        return found


class DetachedLater(Recurrent):
    """One whose state has no gradient from the second slice on."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.carry.take()
        found, (one, other) = self.lstm(x, before)
        self.carry.leave((one, other) if before is None else (one.detach(), other.detach()))
        summed: Tensor = x + found
        return summed


class Edge(Convolved):
    """A convolution whose slices leave an edge of their own positions, which may be too few."""

    def forward(self, x: Tensor) -> Tensor:
        edge = self.carry.take(x.new_zeros(len(x), 2, WIDTH))
        wide = torch.cat([edge, x], 1)
        self.carry.leave(functional.pad(x[:, -2:], (0, 0, max(2 - x.shape[1], 0), 0)))
        found: Tensor = x + self.conv(wide.mT).mT.tanh()
        return found


class ShortWindow(nn.Module):
    """A mean over all positions, of which 12 are left."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([self.carry.take(x[:, :0]), x], 1)
        self.carry.leave(wide[:, -12:])
        found: Tensor = x + wide.cumsum(1)[:, -x.shape[1] :].tanh()
        return found


def _sliced_step(layer: Callable[[], nn.Module], slices: object, *lengths: int) -> None:
    torch.manual_seed(0)
    pipeline = cf.Pipeline(
        between(layer, nn.GELU), token_loss, f"1f1b(stages=2, micro_batches=1, slices={slices})",
        cuts=[2], optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    for length in lengths:
        pipeline.step(*mini_batch(2, length))


def test_what_is_wrong_from_the_third_slice_on_is_refused() -> None:
    job: dict[str, Any] = {"workers": 2, "transport": "local"}
    for layer, right, slices in (
        (Forgets, 2, 3),
        (Forgets, 2, 5),
        (CountsOnce, 2, 4),
        (CountsOnce, 2, "5+4+3"),
        (DetachedLater, 2, 3),
        (Edge, 6, 12),
    ):
        cf.launch(_sliced_step, layer, right, 12, **job)
        named = rf"layer 1 \({layer.__name__}\) of stage 0 .* of its {slices if slices != '5+4+3' else 3} sl"
        with pytest.raises(cf.ConfigError, match=named):
            cf.launch(_sliced_step, layer, slices, 12, **job)
    cf.launch(_sliced_step, ShortWindow, 3, 12, 16, **job)
    with pytest.raises(cf.ConfigError, match=r"layer 1 \(ShortWindow\) of stage 0 .* of its 3 slices"):
        cf.launch(_sliced_step, ShortWindow, 3, 12, 16, 24, **job)
    cf.launch(_sliced_step, Edge, 4, 12, 8, 12, **job)
    with pytest.raises(cf.ConfigError, match=r"layer 1 \(Edge\) of stage 0 .* of its 4 slices"):
        cf.launch(_sliced_step, Edge, 4, 12, 12, 4, **job)  # shorter slices have fewer than are left
    with pytest.raises(cf.ConfigError, match=r"layer 1 \(ShortWindow\) of stage 0 .* of its 3 slices"):
        cf.launch(_sliced_step, ShortWindow, 3, 16, 20, **job)


def test_memory_that_does_not_suffice_for_all_slices(caplog: pytest.LogCaptureFixture) -> None:
    class Wide(nn.Module):
        def __init__(self, most: int) -> None:
            super().__init__()
            self.most = most

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.most:
                raise torch.OutOfMemoryError
            return x.tanh()

    cf.launch(_sliced_step, partial(Wide, 9), 4, 12, workers=2, transport="local")
    assert "not suffice to compare all 4 slices of stage 0" in caplog.text
    with pytest.raises(cf.ConfigError, match=r"layer 1 \(Sequential\) .* of its 3 slices"):
        cf.launch(
            _sliced_step, lambda: nn.Sequential(Forgets(), Wide(9)), 4, 12, workers=2, transport="local"
        )


def test_where_a_slice_begins_may_be_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    """A number that differs between slices is the first one's in the whole sequence."""

    class Begin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.carry = cf.Carry()

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            first = self.carry.take(0)
            self.carry.leave(first + x.shape[1])
            return x, first

    class Use(nn.Module):
        def __init__(self, *, right: bool) -> None:
            super().__init__()
            self.table, self.right = nn.Embedding(POSITIONS, WIDTH), right

        def forward(self, value: tuple[Tensor, int]) -> Tensor:
            x, first = value
            begin = first if self.right else 0
            found: Tensor = x + self.table(torch.arange(begin, begin + x.shape[1]))
            return found

    schedule = schemes.dapple(stages=2, micro_batches=2, slices=3)
    layers = partial(between, Begin, partial(Use, right=True), Recurrent)
    assert agreement(schedule, layers, cuts=[3]).ok
    assert not caplog.records
    with pytest.raises(cf.ConfigError, match=r"layer 2 \(Use\) of stage 0 makes something else"):
        agreement(schedule, partial(between, Begin, partial(Use, right=False), Recurrent), cuts=[3])


def test_a_carry_of_two_layers_is_refused() -> None:
    layer = Recurrent().double()
    first, last = between()
    with pytest.raises(cf.ConfigError, match=r"hold the same cf\.Carry; make one for each"):
        agreement(
            schemes.dapple(stages=2, micro_batches=2, slices=2),
            lambda: [first, nn.Sequential(layer), layer, last],
        )


def test_a_checkpoint_of_the_users_around_a_carry_is_refused() -> None:
    class Checkpointed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            found: Any = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return found  # type: ignore[no-any-return]

    assert agreement(schemes.dapple(2, 2), partial(between, Checkpointed)).ok
    with pytest.raises(cf.ConfigError, match=r"taken in a torch\.utils\.checkpoint"):
        agreement(schemes.dapple(stages=2, micro_batches=2, slices=2), partial(between, Checkpointed))


def test_a_parameter_may_be_a_state() -> None:
    """As the state that a layer learns to begin with; the carry has no parameters of its own."""
    carry, state = cf.Carry(), nn.Parameter(torch.ones(2))
    carry.expect_slices(expected=True)
    carry.begin(NOTHING)
    assert carry.take(state) is state
    carry.leave(state)
    assert carry.end() is state
    carry.begin(state)
    assert carry.take() is state
    carry.leave(None)
    assert carry.end() is None
    assert not [*carry.parameters()]


def by_sample(output: Tensor, target: Tensor) -> Tensor:
    """As ``next_token_loss``, which knows the whole target; this one does not."""
    losses = functional.cross_entropy(output.mT, target, reduction="none", ignore_index=-100)
    return (losses.sum(1) / (target != -100).sum(1).clamp(min=1)).mean()


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.mT, target, reduction="sum")


def shifted(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(output[:, :-1].mT, target[:, 1:], reduction=reduction).mean()


def shifted_from_the_whole(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.mT, cf.next_target(target, -100))


def test_losses_that_are_no_mean_are_refused() -> None:
    schedule = schemes.dapple(stages=2, micro_batches=2, slices=2)
    with pytest.raises(cf.ConfigError, match=r"no mean over positions: .* counts in cf\.whole_target"):
        agreement(schedule, own, by_sample)
    for loss in (summed, shifted, partial(shifted, reduction="none")):
        with pytest.raises(cf.ConfigError, match="the loss is no mean over positions"):
            agreement(schedule, own, loss)
    assert agreement(schedule, own, shifted_from_the_whole).ok
    with pytest.raises(cf.ConfigError, match="per_micro_batch_loss: dapple has no loss of a whole"):
        agreement(schedule, own, per_micro_batch_loss=True)


def test_what_does_not_go_with_slices_is_refused() -> None:
    schedule = schemes.dapple(stages=2, micro_batches=2, slices=3)
    with pytest.raises(cf.ConfigError, match="2 positions cannot be cut in 3 slices; take fewer"):
        agreement(schedule, own, positions=2)
    with pytest.raises(cf.ConfigError, match="deferred_batch_norm: dapple in 3 slices would normalise"):
        agreement(schedule, own, deferred_batch_norm=True)
    with pytest.raises(cf.ConfigError, match="along the dimensions target_sequence_dims=1: targets of shape"):
        cf.launch(_classes, schedule, workers=2, transport="local")


def _classes(schedule: Schedule) -> None:
    pipeline = cf.Pipeline(
        between(Recurrent), token_loss, schedule, optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    pipeline.step(torch.zeros(8, POSITIONS, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))


# -- steps


def _steps(schedule: Schedule) -> list[Any]:
    torch.manual_seed(0)
    pipeline = cf.Pipeline(
        between(Recurrent), token_loss, schedule, optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    torch.manual_seed(1)
    pieces = [mini_batch(2, length) for length in (9, 14)]
    found: list[Any] = [pipeline.step(micro_batches=pieces, update=False).loss]
    found += [pipeline.step(*mini_batch(3, 12)).loss, pipeline.step(*mini_batch(1, 12)).loss]
    found += [pipeline.evaluate(*mini_batch(4, 12)).loss, pipeline.predict(mini_batch(4, 12)[0]).sum().item()]
    with pytest.raises(cf.ConfigError, match="a step gives none of their outputs; call evaluate"):
        pipeline.step(*mini_batch(3, 12), outputs=True)
    return found


def test_lengths_and_numbers_of_samples_that_differ() -> None:
    rows: list[Sequence[float]] = [
        cf.launch(_steps, schedule, workers=2, transport="local")[0]
        for schedule in (
            schemes.dapple(stages=2, micro_batches=2, slices=3),
            schemes.dapple(stages=2, micro_batches=2, slices=2),
        )
    ]
    whole = cf.launch(_whole_steps, workers=2, transport="local")[0]
    for row in rows:
        assert row == pytest.approx(whole, rel=1e-10)


def _whole_steps() -> list[float]:
    torch.manual_seed(0)
    pipeline = cf.Pipeline(
        between(Recurrent), token_loss, schemes.dapple(2, 2), optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    torch.manual_seed(1)
    pieces = [mini_batch(2, length) for length in (9, 14)]
    found = [pipeline.step(micro_batches=pieces, update=False).loss]
    found += [pipeline.step(*mini_batch(3, 12)).loss, pipeline.step(*mini_batch(1, 12)).loss]
    found += [pipeline.evaluate(*mini_batch(4, 12)).loss, pipeline.predict(mini_batch(4, 12)[0]).sum().item()]
    return found


def test_a_layer_without_positions_in_its_output_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(0, 1)

    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = x.unflatten(0, (4, -1))
            return found

    with caplog.at_level(logging.WARNING):
        assert agreement(
            schemes.dapple(stages=2, micro_batches=2, slices=2), partial(between, Recurrent, Flat, Deep)
        ).ok
    assert "could not verify that layer 2 (Flat)" in caplog.text
