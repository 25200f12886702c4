"""Consecutive layers compiled as one function: how many graphs that is, and the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.models.gpt import GPTConfig
from counterflow.runtime.stages.compiled import CompiledLayers
from counterflow.runtime.workers.launch import launch
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own code

D = torch.float64
GRAPHS: list[Any] = []

sgd = partial(torch.optim.SGD, lr=0.1)


def counted(graph: Any, _: object) -> Any:
    GRAPHS.append(graph)
    return graph


torch._dynamo.register_backend(counted, name="counted")


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()  # or what is compiled already runs
    GRAPHS.clear()


class Block(nn.Module):
    """A layer in which ``also`` does something beside its work."""

    def __init__(self, also: Callable[[Tensor], Tensor] | None = None, dropout: float | None = None) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4, dtype=D), nn.Linear(4, 4, dtype=D)
        self.also = also
        self.dropout = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(torch.tanh(self.linear(self.norm(x))))
        return x if self.also is None or not self.training else self.also(x)


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 2


def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


Told = dict[int, tuple[CompiledLayers, ...]]


def train(
    schedule: Schedule,
    make: Callable[[], Sequence[nn.Module]],
    *,
    samples: Sequence[int] = (8, 8),
    between: Callable[[Sequence[nn.Module]], None] = lambda _: None,
    **options: Any,
) -> tuple[list[object], Told]:
    """Train on mini-batches of some samples: losses, an evaluation and weights, and what was compiled."""

    def job() -> tuple[list[object], Told]:
        torch.manual_seed(0)
        layers = make()
        generator = torch.Generator().manual_seed(1)
        pipeline = cf.Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, **options)
        losses: list[float] = []
        for count in samples:
            x, y = (torch.randn(count, 4, dtype=D, generator=generator) for _ in range(2))
            losses += [pipeline.step(x, y).loss]
            between(layers)
        told = pipeline.compiled
        return [losses, pipeline.evaluate(x, y).loss, pipeline.model_state_dict()], told

    per_worker = launch(job, workers=schedule.workers, transport="local", timeout_seconds=60)
    return per_worker[0][0], {stage: its for _, told in per_worker for stage, its in told.items()}


def same(schedule: Schedule, make: Callable[[], Sequence[nn.Module]], **options: Any) -> Told:
    """What is compiled of a model, which trains to the numbers of the same pipeline uncompiled."""
    plain, _ = train(schedule, make, **options)
    found, told = train(schedule, make, compile="counted", **options)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    return told


def shape_of(told: Told) -> dict[int, list[tuple[int, ...]]]:
    return {stage: [block.layers for block in blocks] for stage, blocks in told.items()}


CONFIG = GPTConfig(layers=4, hidden=8, heads=2, vocabulary=11, positions=4, dropout=0.0)


def test_a_stage_of_several_blocks_of_a_gpt_is_one_graph() -> None:
    def job() -> tuple[int, int, Told]:
        torch.manual_seed(0)
        pipeline = cf.Pipeline(
            CONFIG.build(), CONFIG.loss, cf.schemes.dapple(2, 4), optimizer=sgd, compile="counted"
        )
        batch = CONFIG.sample(8, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            pipeline.step(*batch)
        before = len(GRAPHS)
        pipeline.evaluate(*batch)
        return before, len(GRAPHS), pipeline.compiled

    (trained, evaluated, first), (_, _, second) = launch(job, workers=2, transport="local")
    assert (trained, evaluated) == (2, 4)  # one a stage, and one more for no gradients
    assert first | second == {
        0: (CompiledLayers((0, 1, 2), graphs=1, compiled=2, alone=None),),
        1: (CompiledLayers((3, 4, 5), graphs=1, compiled=2, alone=None),),
    }


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 4, dtype=D, generator=generator)
    return x, y


def test_gradients_and_weights_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    for schedule, replicas, recompute, backend in (
        (cf.schemes.dapple(2, 2), 1, "none", "aot_eager"),
        (cf.schemes.dapple(2, 2), 2, "stage", "eager"),
        (cf.schemes.interleaved(2, 2, chunks=2), 1, "stage", "eager"),
        (cf.schemes.chimera(2, 2), 1, "none", "eager"),
        (cf.schemes.chimera(2, 4, concat="forward-doubling"), 1, "stage", "eager"),
        (cf.schemes.zb_h1(2, 2), 1, "none", "eager"),
    ):
        layers = [Block() for _ in range(2 * schedule.stages)]
        generator = torch.Generator().manual_seed(replicas)
        batches = [[batch(generator) for _ in range(replicas)] for _ in range(2)]
        found = verify(
            schedule, layers, nn.functional.mse_loss, batches,
            optimizer=sgd, recompute=recompute, compile=backend,
        )  # fmt: skip
        errors = found.loss_error, found.norm_error, found.gradient_error, found.weight_error
        assert max(errors) < 1e-10, (schedule.scheme, recompute, errors)


def test_layers_that_draw_are_compiled_alone_and_draw_what_they_did() -> None:
    def make() -> list[nn.Module]:
        return [Block(), Block(), Block(dropout=0.5), Block(noise), Block(), Block(), Block(), Block()]

    for schedule, recompute in (cf.schemes.dapple(2, 4), "stage"), (cf.schemes.chimera(2, 4), "none"):
        told = same(schedule, make, recompute=recompute)
        assert shape_of(told) == {0: [(0, 1), (2,), (3,)], 1: [(4, 5, 6, 7)]}
        assert [block.alone for block in told[0]] == [None, *["it draws random numbers"] * 2]


def test_layers_that_begin_to_draw_run_one_by_one_from_then_on() -> None:
    def later(layers: Sequence[nn.Module]) -> None:
        block = layers[2]
        assert isinstance(block, Block)
        block.also = noise

    def make() -> list[nn.Module]:
        return [Block() for _ in range(8)]

    told = same(cf.schemes.dapple(2, 4), make, samples=[8] * 3, between=later)
    assert shape_of(told) == {0: [(0,), (1,), (2,), (3,)], 1: [(4, 5, 6, 7)]}


def test_layers_that_add_to_the_loss_add_once() -> None:
    def adds(x: Tensor) -> Tensor:
        cf.add_loss(0.1 * x.square().mean())
        return x

    def adds_noise(x: Tensor) -> Tensor:
        return adds(noise(x))

    def later(layers: Sequence[nn.Module]) -> None:
        block = layers[1]
        assert isinstance(block, Block)
        block.also = adds_noise

    def make() -> list[nn.Module]:
        return [Block(), Block(adds), Block(), Block(adds)]

    told = same(cf.schemes.dapple(2, 2), make, between=later, samples=[8] * 3)
    assert shape_of(told) == {0: [(0,), (1,)], 1: [(2, 3)]}


def test_dropout_counts_in_evaluation_mode_too() -> None:
    def make() -> list[nn.Module]:
        return [Block(), Block(dropout=0.5).eval(), Block(), nn.Linear(4, 4, dtype=D)]

    def train_all(layers: Sequence[nn.Module]) -> None:
        for layer in layers:
            layer.train()

    told = same(cf.schemes.dapple(2, 2), make, between=train_all, samples=[8] * 3)
    assert shape_of(told)[0] == [(0,), (1,)]


def test_layers_that_begin_to_draw_and_change_buffers_are_refused() -> None:
    def later(layers: Sequence[nn.Module]) -> None:
        block = layers[1]
        assert isinstance(block, Block)
        block.also = noise

    def make() -> list[nn.Module]:
        return [nn.BatchNorm1d(4, dtype=D), Block(), Block(), Block()]

    with pytest.raises(
        cf.ConfigError, match=r"layer 0 \(BatchNorm1d\) to layer 1 \(Block\) are compiled as one function"
    ):
        train(cf.schemes.dapple(2, 2), make, compile="counted", between=later)


def test_finding_who_draws_changes_no_buffer() -> None:
    def make() -> list[nn.Module]:
        return [nn.BatchNorm1d(4, dtype=D), Block(), nn.BatchNorm1d(4, dtype=D), Block()]

    assert shape_of(same(cf.schemes.dapple(2, 2), make)) == {0: [(0, 1)], 1: [(2, 3)]}


def test_a_layer_that_breaks_its_graph_is_found() -> None:
    told = same(cf.schemes.dapple(2, 2), lambda: [Block(), Block(breaks), Block(), Block()])
    assert [(block.layers, block.graphs > 1) for its in told.values() for block in its] == [
        ((0, 1), True),
        ((2, 3), False),
    ]
    assert str(told[1][0]) == "layers 2 to 3 in 1 graph"
    assert "TORCH_LOGS" in str(told[0][0])


def test_sizes_that_vary_are_not_compiled_in_each_step() -> None:
    """The second size makes a graph for all, and the first views into a mini-batch may make one more."""
    counts = []
    for steps in 2, 6:
        torch._dynamo.reset()
        samples = [9, 14, 11, 13, 10, 15][:steps]  # micro-batches of 2, 3 and 4
        _, told = train(
            cf.schemes.dapple(2, 4), lambda: [Block() for _ in range(4)], compile="counted", samples=samples
        )
        counts.append([block.compiled for block in (*told[0], *told[1])])
    assert counts[0] == counts[1]
    assert max(counts[1]) <= 3


def test_what_is_around_each_layer_leaves_them_alone() -> None:
    def make() -> list[nn.Module]:
        return [Block() for _ in range(4)]

    for schedule, options, why in (
        (cf.schemes.zb_h1(2, 4), {}, "the stage's backward is split"),
        (cf.schemes.dapple(2, 4), {"recompute": "layer"}, "layers are computed again one by one"),
    ):
        told = same(schedule, make, **options)
        assert shape_of(told) == {0: [(0,), (1,)], 1: [(2,), (3,)]}
        assert {block.alone for its in told.values() for block in its} == {why}


def test_a_last_layer_that_gives_the_loss_is_alone() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.mse_loss(x, torch.zeros_like(x))

    def job() -> Told:
        layers = [Block(), Block(), Block(), Block(), Loss()]
        pipeline = cf.Pipeline(
            layers, None, cf.schemes.dapple(2, 2), optimizer=sgd, compile="counted", cuts=[2]
        )
        pipeline.step(torch.ones(4, 4, dtype=D))
        return pipeline.compiled

    told = launch(job, workers=2, transport="local")[1]
    assert [(block.layers, block.alone) for block in told[1]] == [((2, 3), None), ((4,), "it gives the loss")]


def test_nothing_is_said_without_compile() -> None:
    assert train(cf.schemes.dapple(2, 2), lambda: [Block(), Block()])[1] == {}
