"""Tensors as long as the mini-batch by coincidence: refused, unless the user says how they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.verification.diagnosis.input_cuts import Verdict, compare_units

SAMPLES, POSITIONS, WIDTH, TOKENS = 6, 12, 12, 9


class Packed(nn.Module):
    """Attention within documents, whose offsets are those of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.queries = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.attend(self.table(x), cu_seqlens)

    def attend(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        document = torch.searchsorted(cu_seqlens, torch.arange(x.shape[1]), right=True)
        scores = (self.queries(x) @ x.mT).masked_fill(document[:, None] != document, -1e9)
        found: Tensor = x + scores.softmax(-1) @ x
        return found


class Passing(Packed):
    """The first of two layers: it passes the offsets on."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Any:
        return self.table(x), cu_seqlens


class Attending(Packed):
    """The second one."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return self.attend(*value)


class Rotary(Packed):
    """Three axes of positions."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        first, second, third = position_ids
        angles = torch.stack([first, second, third, first * second] * 3, -1)
        return self.attend(self.table(x) + angles.double().sin(), torch.zeros(1))


class RotaryPacked(Rotary):
    """Three axes of positions, and offsets of documents."""

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(super().forward(x, position_ids), cu_seqlens)


class Biased(Packed):
    """Attention of as many heads as there are samples, each with a bias of its own."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.table(x)
        queries, keys = (t.unflatten(-1, (SAMPLES, -1)).transpose(1, 2) for t in (self.queries(x), x))
        mixed = (queries @ keys.mT + bias).softmax(-1) @ keys
        found: Tensor = x + mixed.transpose(1, 2).flatten(2)
        return found


class Lengths(Packed):
    """Means over as many positions as each sample has."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.table(x)
        seen = torch.arange(x.shape[1]) < lengths[:, None]
        return x + (x * seen[..., None]).sum(1, keepdim=True) / lengths[:, None, None]


class Both(Lengths):
    """Lengths of samples, and offsets of all."""

    def forward(self, x: Tensor, lengths: Tensor, cu_seqlens: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(super().forward(x, lengths), cu_seqlens)


class Looks(Packed):
    """A table of all samples, in a tree of inputs."""

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        found: Tensor = self.table(inputs["tokens"]) + inputs["table"].mean(0)
        return found


class Mixed(Lengths):
    """A mean over the samples of a micro-batch."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        found = super().forward(x, lengths)
        return found + found.mean(0, keepdim=True)


OFFSETS = torch.tensor([0, 2, 5, 7, 9, 12])
AXES = torch.arange(108).view(3, 3, 12) * 7 % 11
BIAS = torch.arange(864).view(6, 12, 12).double().sin()
LENGTHS = torch.arange(1, 7)


def make(*layers: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        layer.double()
        for layer in (*(new() for new in layers), nn.Tanh(), nn.Tanh(), nn.Linear(WIDTH, TOKENS))
    ]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.mT, target)


def mini_batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    tokens = torch.randint(TOKENS, (samples, POSITIONS), generator=drawn)
    return tokens, torch.randint(TOKENS, (samples, POSITIONS), generator=drawn)


def by_hand(layers: list[nn.Module], samples: int, more: dict[str, Tensor]) -> list[float]:
    """Losses of one process."""
    optimizer = torch.optim.SGD(nn.Sequential(*layers).parameters(), 0.1)
    losses = []
    for step in range(2):
        tokens, targets = mini_batch(step, samples)
        value = layers[0](tokens, **more) if "table" not in more else layers[0]({"tokens": tokens, **more})
        loss = token_loss(nn.Sequential(*layers[1:])(value), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(
    layers: tuple[Callable[[], nn.Module], ...],
    schedule: str,
    samples: int,
    more: dict[str, Tensor],
    **options: Any,
) -> list[float]:
    pipeline = cf.Pipeline(
        make(*layers), token_loss, schedule, optimizer=lambda p: torch.optim.SGD(p, 0.1), **options
    )
    losses = []
    for step in range(2):
        tokens, targets = mini_batch(step, samples)
        if "table" in more:
            losses.append(pipeline.step({"tokens": tokens, **more}, targets).loss)
        else:
            losses.append(pipeline.step(tokens, targets, kwargs=more).loss)
    return losses


def run(*job: Any, transport: str = "local", workers: int = 2, **options: Any) -> list[float]:
    found: list[float] = cf.launch(work, *job, workers=workers, transport=transport, **options)[0]
    return found


SCHEMES = (
    "dapple(stages=2, micro_batches=2)",
    "chimera(stages=2, micro_batches=2)",
    "zb-v(workers=2, micro_batches=6)",
    "dapple(stages=3, micro_batches=4)",
)
COINCIDENCES: tuple[tuple[tuple[Any, ...], int, dict[str, Tensor], str, dict[str, Any]], ...] = (
    ((Packed,), 6, {"cu_seqlens": OFFSETS}, "cu_seqlens", {"kwarg_dims": {"cu_seqlens": None}}),
    ((Passing, Attending), 6, {"cu_seqlens": OFFSETS}, "cu_seqlens", {"kwarg_dims": {"cu_seqlens": None}}),
    ((Rotary,), 3, {"position_ids": AXES}, "position_ids", {"kwarg_dims": {"position_ids": 1}}),
    (
        (RotaryPacked,),
        3,
        {"position_ids": AXES, "cu_seqlens": torch.tensor([0, 5, 9])},
        "position_ids",
        {"kwarg_dims": {"position_ids": 1, "cu_seqlens": None}},
    ),
    ((Biased,), 6, {"bias": BIAS}, "bias", {"kwarg_dims": {"bias": None}}),
    (
        (Both,),
        6,
        {"lengths": LENGTHS, "cu_seqlens": OFFSETS},
        "cu_seqlens",
        {"kwarg_dims": {"lengths": 0, "cu_seqlens": None}},
    ),
    (
        (Looks,),
        6,
        {"table": BIAS[:, 0]},
        "table",
        {"input_dims": {"tokens": 0, "table": None}},
    ),
)


def test_what_is_as_long_as_the_mini_batch_by_coincidence_is_refused() -> None:
    for place, (layers, samples, more, name, said) in enumerate(COINCIDENCES):
        (option, dims), expected = next(iter(said.items())), by_hand(make(*layers), samples, more)
        schedule = SCHEMES[place % 3]
        with pytest.raises(cf.ConfigError) as caught:
            run(layers, schedule, samples, more)
        assert f"['{name}'] of shape" in str(caught.value)
        assert f"say {option}={dims!r}" in str(caught.value)
        for scheme in (schedule, SCHEMES[0]):
            assert run(layers, scheme, samples, more, **said) == pytest.approx(expected, rel=1e-10)


def test_what_has_samples_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    expected = by_hand(make(Lengths), SAMPLES, {"lengths": LENGTHS})
    for scheme in SCHEMES:
        if "stages=3" in scheme:
            found = run((Lengths,), scheme, SAMPLES, {"lengths": LENGTHS}, workers=3)
        else:
            found = run((Lengths,), scheme, SAMPLES, {"lengths": LENGTHS})
        assert found == pytest.approx(expected, rel=1e-10), scheme
    assert not caplog.records


def test_processes_and_replicas_check_as_well() -> None:
    found = run((Lengths,), SCHEMES[0], SAMPLES, {"lengths": LENGTHS}, transport="gloo", workers=4)
    assert found == pytest.approx(by_hand(make(Lengths), SAMPLES, {"lengths": LENGTHS}), rel=1e-10)
    with pytest.raises(cf.ConfigError, match=r"say kwarg_dims=\{'cu_seqlens': None\}"):
        run((Packed,), SCHEMES[0], SAMPLES, {"cu_seqlens": OFFSETS}, workers=4)


class Whole(nn.Module):
    """A model whose layers are found."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(Packed))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Any:
        first, *others = self.layers
        return nn.Sequential(*others)(first(x, cu_seqlens))


def captured(samples: int, **options: Any) -> list[float]:
    model = Whole()
    layers = cf.layers(model, mini_batch(0, samples)[0], kwargs={"cu_seqlens": OFFSETS})
    pipeline = cf.Pipeline(
        layers, token_loss, SCHEMES[0], optimizer=lambda p: torch.optim.SGD(p, 0.1), **options
    )
    more = {"cu_seqlens": OFFSETS}
    return [pipeline.step(*mini_batch(step, SAMPLES), kwargs=more).loss for step in range(2)]


def test_layers_found_with_an_example_of_equal_sizes_are_checked_too() -> None:
    job: dict[str, Any] = {"workers": 2, "transport": "local"}
    with pytest.raises(cf.ConfigError, match=r"say kwarg_dims=\{'cu_seqlens': None\}"):
        cf.launch(captured, SAMPLES, **job)
    said: dict[str, Any] = {"kwarg_dims": {"cu_seqlens": None}}
    with pytest.raises(cf.ConfigError, match="find them with an example of these sizes"):
        cf.launch(captured, SAMPLES, **said, **job)
    expected = by_hand(make(Packed), SAMPLES, {"cu_seqlens": OFFSETS})
    assert cf.launch(captured, 4, **said, **job)[0] == pytest.approx(expected, rel=1e-10)


def halved(layers: tuple[Callable[[], nn.Module], ...], more: dict[str, Tensor]) -> list[float]:
    """Losses of micro-batches that are ready, each with arguments of its own, which the scheme halves."""
    pipeline = cf.Pipeline(
        make(*layers), token_loss, "chimera(stages=2, micro_batches=2, concat=backward-halving)",
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )  # fmt: skip
    return [
        pipeline.step(micro_batches=[(*mini_batch(number, SAMPLES), more) for number in range(2)]).loss
        for _ in range(2)
    ]


def test_micro_batches_that_are_ready_and_halved_are_checked_too() -> None:
    found = cf.launch(halved, (Lengths,), {"lengths": LENGTHS}, workers=2, transport="local")[0]
    layers = make(Lengths)
    losses = [
        token_loss(nn.Sequential(*layers[1:])(layers[0](tokens, LENGTHS)), targets).item()
        for tokens, targets in (mini_batch(number, SAMPLES) for number in range(2))
    ]
    assert found[0] == pytest.approx(sum(losses) / 2, rel=1e-10)
    with pytest.raises(cf.ConfigError, match=r"say kwarg_dims=\{'cu_seqlens': None\}"):
        cf.launch(halved, (Packed,), {"cu_seqlens": OFFSETS}, workers=2, transport="local")


def test_a_model_that_mixes_samples_needs_the_dimensions() -> None:
    with pytest.raises(
        cf.ConfigError, match=r"seen whether kwargs\['lengths'\].*: say kwarg_dims=\{'lengths': 0\}"
    ):
        run((Mixed,), SCHEMES[0], SAMPLES, {"lengths": LENGTHS})
    run((Mixed,), SCHEMES[0], SAMPLES, {"lengths": LENGTHS}, kwarg_dims={"lengths": 0})


def test_buffers_and_modes_are_as_before() -> None:
    class Counts(Lengths):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("runs", torch.zeros(()))
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            assert isinstance(self.runs, Tensor)
            self.runs += 1
            found: Tensor = self.norm(super().forward(x, lengths).mT).mT
            return found

    def counted() -> tuple[float, bool, float]:
        layers = make(Counts)
        pipeline = cf.Pipeline(
            layers, token_loss, SCHEMES[0], optimizer=lambda p: torch.optim.SGD(p, 0.1), cuts=[1]
        )
        tokens, targets = mini_batch(0, SAMPLES)
        drawn = torch.get_rng_state()
        pipeline.step(tokens, targets, kwargs={"lengths": LENGTHS})
        assert torch.equal(torch.get_rng_state(), drawn)
        state = pipeline.model_state_dict()
        assert state is not None
        return float(state["0.runs"]), layers[0].training, float(state["0.norm.num_batches_tracked"])

    assert cf.launch(counted, workers=2, transport="local")[0] == (2.0, True, 2.0)


def test_outputs_are_compared_by_samples() -> None:
    rows = torch.arange(12.0).view(6, 2)
    sizes = 2, 4
    for apart, together, verdict in (
        ((rows[:2], rows[2:]), rows, Verdict.SAME),
        ((rows[:2], rows[2:]), rows + 1, Verdict.DIFFERENT),
        ((rows[:2].T, rows[2:].T), rows.T, Verdict.SAME),
        (({"x": rows[:2], "n": 1}, {"x": rows[2:], "n": 2}), {"x": rows, "n": 3}, Verdict.SAME),
        ((rows[0], rows[0]), rows[0], Verdict.UNKNOWN),
        ((rows[0], rows[0]), rows[1], Verdict.DIFFERENT),
        ((rows[:2] @ rows[:2].T, rows[2:] @ rows[2:].T), rows @ rows.T, Verdict.UNKNOWN),
        ((rows[:2].mean(), rows[2:].mean()), rows.mean(), Verdict.SAME),
        ((rows[:2].sum(), rows[2:].sum()), rows.sum(), Verdict.SAME),
        ((rows[:2].std(), rows[2:].std()), rows.std(), Verdict.NEITHER),
        ((rows.sum(), rows.sum()), rows.sum(), Verdict.UNKNOWN),
        ((rows[:2].bfloat16() * 1.01, rows[2:].bfloat16()), rows.bfloat16(), Verdict.SAME),
        ((rows[:2] * -torch.inf, rows[2:]), torch.cat([rows[:2] * -torch.inf, rows[2:]]), Verdict.SAME),
    ):
        assert compare_units(apart, together, sizes) is verdict, (apart, together)


class Gated(nn.Module):
    """A table behind a gate that begins at zero."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gate = nn.Linear(4, 4), nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.layer(x) + self.gate * table[:, :4].mean(0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", ["1f1b(workers=2, micro_batches=3)", "zb-v(workers=2, micro_batches=2)"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tensor_that_outputs_do_not_show_at_first_is_compared_again(scheme: str, replicas: int) -> None:
    table = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1)) + 1

    def train(*, stated: bool, gate: float = 0.0) -> list[float]:
        layers = [Gated(gate), *(nn.Linear(4, 4) for _ in range(3))]
        options: dict[str, Any] = {"kwarg_dims": {"table": None}} if stated else {}
        pipeline = cf.Pipeline(
            layers, functional.mse_loss, scheme,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options,
        )  # fmt: skip
        losses = []
        for step in range(5):
            x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
            losses.append(pipeline.step(x, x, kwargs={"table": table}).loss)
        return losses

    workers = 2 * replicas
    assert len(cf.launch(lambda: train(stated=True), workers=workers, transport="local")[0]) == 5
    for gate in (0.0, 0.5):
        with pytest.raises(cf.ConfigError, match=r"kwargs\['table'\] of shape \(6, 8\) has no samples"):
            cf.launch(lambda gate=gate: train(stated=False, gate=gate), workers=workers, transport="local")


class Ignoring(Gated):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        del table
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_tensor_that_no_layer_reads_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> list[float]:
        pipeline = cf.Pipeline(
            [Ignoring(0.0), nn.Linear(4, 4)], functional.mse_loss, "1f1b(workers=2, micro_batches=3)",
            optimizer=lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.1),
        )  # fmt: skip
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        return [pipeline.step(x, x, kwargs={"table": x[:, :2]}).loss for _ in range(5)]

    losses = cf.launch(train, workers=2, transport="local")[0]
    assert losses == sorted(losses, reverse=True)
    assert "could not verify" not in caplog.text


class Scales(Packed):
    """Factors of samples, which the layer changes in place."""

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        found: Tensor = self.table(x) * factors.mul_(0.5)[:, None, None]
        return found


def test_layers_may_change_the_samples_in_place() -> None:
    """The same samples run several times, apart and together."""

    def run_scaled() -> float:
        pipeline = cf.Pipeline(
            make(Scales), token_loss, SCHEMES[0], optimizer=lambda p: torch.optim.SGD(p, 0.1)
        )
        return pipeline.step(*mini_batch(0, SAMPLES), kwargs={"factors": torch.arange(1.0, 7.0)}).loss

    losses = cf.launch(run_scaled, workers=2, transport="local")
    first, *layers = make(Scales)
    tokens, targets = mini_batch(0, SAMPLES)
    expected = token_loss(nn.Sequential(*layers)(first(tokens, torch.arange(1.0, 7.0))), targets)
    assert abs(losses[0] - expected.item()) < 1e-12
