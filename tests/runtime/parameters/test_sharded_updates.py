"""Optimiser state sharded over those who hold a weight (ZeRO stage 1): the same numbers, one keeper."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.models.gpt import GPTConfig
from counterflow.runtime.parameters.state_records import ParameterState
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import adamw, linears, mean_square, run, sgd


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)  # a parameter's values are not updated one by one


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    """As people write it: biases are not decayed, and no group is empty."""
    named = parameters.named
    groups = [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def numbers(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, 4, generator=generator, dtype=torch.float64)
    return x, y


SHARED = [
    (schemes.dapple(2, 2), 3),
    (schemes.interleaved(2, 2, chunks=2), 2),
    (schemes.gems(4, 4), 1),
    (schemes.chimera(4, 4), 1),
    (schemes.chimera(4, 4, pairs=2), 1),
    (schemes.chimera(2, 2), 2),
    (schemes.mixpipe(4, 4, injected=2), 1),
    (schemes.hanayo(2, 4, waves=1), 2),
    (schemes.zb_h1(2, 4), 2),
]
"""Schedules and replicas with which stages have several holders."""

NAMES = [f"{schedule.scheme}-{index}" for index, (schedule, _) in enumerate(SHARED)]


def trained(
    schedule: Schedule,
    layers: Callable[[], list[nn.Module]],
    optimizer: Any,
    steps: int = 3,
    zero_stage: int = 0,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Any], list[float], int]:
    """Weights, state of training and norms after some steps; the bytes of optimiser state at hand."""
    pipeline = Pipeline(
        layers(),
        mean_square,
        schedule,
        optimizer=optimizer,
        zero_stage=zero_stage,
        digest_every=1,
        **options,
    )
    norms = []
    for step in range(steps):
        x, y = numbers(8 * pipeline.replicas, step)
        rows = slice(8 * pipeline.replica, 8 * pipeline.replica + 8)
        norms.append(pipeline.step(x[rows], y[rows]).grad_norm)
    whole = pipeline.state_dict()
    return whole.pop("model"), whole, norms, state_bytes(pipeline)


def state_bytes(pipeline: Pipeline) -> int:
    return sum(
        value.nbytes
        for optimizer in pipeline.optimizers.values()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, ParameterState):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def compare(
    schedule: Schedule, replicas: int, layers: Callable[[], list[nn.Module]], optimizer: Any
) -> list[Any]:
    def both() -> Any:
        return [trained(schedule, layers, optimizer, zero_stage=zero) for zero in (0, 1)]

    found = run(both, workers=schedule.workers * replicas)
    for plain, sharded in found:
        assert same(plain[:3], sharded[:3])
        assert same(sharded[:3], found[0][1][:3])
    held = [[row[zero][3] for row in found] for zero in (0, 1)]
    assert sum(held[1]) <= sum(held[0]) / 2
    return found


@pytest.mark.table
@pytest.mark.parametrize("optimizer", [sgd, momentum, adamw, adafactor])
@pytest.mark.parametrize(("schedule", "replicas"), SHARED, ids=NAMES)
def test_numbers_are_those_of_unsharded_state_bit_for_bit(
    schedule: Schedule, replicas: int, optimizer: Any
) -> None:
    compare(schedule, replicas, lambda: linears(max(4, schedule.stages)), optimizer)


@pytest.mark.parametrize(("schedule", "replicas"), SHARED[:4], ids=NAMES[:4])
def test_groups_by_name_rates_and_clipping_are_the_same(schedule: Schedule, replicas: int) -> None:
    def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    found = run(
        lambda: [
            trained(
                schedule,
                lambda: linears(4),
                in_groups,
                zero_stage=zero,
                scheduler=falling,
                clip_norm=0.1,
            )
            for zero in (0, 1)
        ],
        workers=schedule.workers * replicas,
    )
    for plain, sharded in found:
        assert same(plain[0], sharded[0])
        assert same(plain[1]["optimizer"], sharded[1]["optimizer"])
        assert plain[2] == sharded[2]
        assert plain[2][0] > 0.1


def test_each_worker_of_chimera_keeps_half_of_the_state() -> None:
    # A linear layer of 4 x 4 in float64: 128 bytes of weight and 32 of bias, and AdamW keeps two of each
    # and a step of 4 bytes; a worker holds two stages of one layer.
    found = compare(schemes.chimera(4, 4), 1, lambda: linears(4), adamw)
    assert [plain[3] for plain, _ in found] == [656] * 4
    assert [sharded[3] for _, sharded in found] == [328] * 4


def test_unequal_weights_go_to_whoever_has_least() -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)]

    # Stage 0 has 256 and 64 bytes, stage 1 has 256 and 32: 256 + 64 on worker 0 would be 320, 288 on 1;
    # momentum keeps as much as there are weights.
    found = compare(schemes.chimera(2, 2), 1, layers, momentum)
    assert [sharded[3] for _, sharded in found] == [320, 288]


def test_a_worker_without_a_weight_of_its_own_has_no_optimizer() -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)]

    def work() -> Any:
        pipeline = Pipeline(layers(), mean_square, schemes.gpipe(2, 2), optimizer=adamw, zero_stage=1)
        rows = slice(pipeline.replica * 4, pipeline.replica * 4 + 4)
        pipeline.step(*(one[rows] for one in numbers(8)))
        return sorted(pipeline.optimizers), state_bytes(pipeline), pipeline.model_state_dict()

    found = run(work, workers=4)
    assert [row[:2] for row in found] == [([0], 260), ([1], 260), ([], 0), ([], 0)]


@pytest.mark.parametrize(("schedule", "replicas"), SHARED[:5], ids=NAMES[:5])
def test_tied_weights(schedule: Schedule, replicas: int) -> None:
    config = GPTConfig(layers=4, hidden=8, heads=2, vocabulary=11, positions=4, dropout=0.0, tied=True)
    batch = config.sample(8, generator=torch.Generator().manual_seed(0))

    def one(zero_stage: int) -> Any:
        torch.manual_seed(0)
        layers = list(nn.ModuleList(config.build()).double())
        pipeline = Pipeline(layers, config.loss, schedule, optimizer=adamw, zero_stage=zero_stage)
        for _ in range(3):
            pipeline.step(*batch)
        pipeline.weights.check_copies("in the test")
        return pipeline.state_dict()

    for plain, sharded in run(lambda: [one(0), one(1)], workers=schedule.workers * replicas):
        assert same(plain, sharded)
        assert "0.tokens.weight" in sharded["optimizer"]


class Branch(nn.Module):
    """Uses one of its weights only for some inputs, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.eye(4, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.always
        return y * self.sometimes if float(x.detach().abs().sum()) > 1e3 else y


def test_a_weight_without_a_gradient_stays_and_keeps_no_state() -> None:
    def one(zero_stage: int) -> Any:
        torch.manual_seed(0)
        layers = [Branch(), nn.Linear(4, 4, dtype=torch.float64), Branch(), Branch()]
        pipeline = Pipeline(
            layers, mean_square, schemes.chimera(4, 4), optimizer=adamw, zero_stage=zero_stage
        )
        for step, factor in enumerate((1.0, 1e4, 1.0)):
            x, y = numbers(8, step)
            pipeline.step(x * factor, y)
        return pipeline.state_dict()

    for plain, sharded in run(lambda: [one(0), one(1)], workers=4):
        assert same(plain, sharded)
        assert sharded["optimizer"]["0.never"]["state"] == {}
        assert sharded["optimizer"]["0.sometimes"]["state"] != {}


def test_frozen_weights_are_not_sent_and_may_be_unfrozen() -> None:
    def one(zero_stage: int) -> Any:
        layers = linears(4)
        for layer in layers[:2]:
            layer.requires_grad_(requires_grad=False)
        pipeline = Pipeline(
            layers, mean_square, schemes.chimera(4, 4), optimizer=adamw, zero_stage=zero_stage
        )
        pipeline.step(*numbers(8))
        pipeline.set_trainable(lambda name: not name.startswith("3"))
        pipeline.step(*numbers(8, 1))
        pipeline.step(*numbers(8, 2))
        return pipeline.state_dict()

    for plain, sharded in run(lambda: [one(0), one(1)], workers=4):
        assert same(plain, sharded)


def test_gradients_of_several_steps_and_of_hooks() -> None:
    def one(zero_stage: int) -> Any:
        layers = linears(4)
        layers[1].get_parameter("weight").register_hook(lambda gradient: gradient * 2)
        pipeline = Pipeline(
            layers, mean_square, schemes.chimera(4, 4), optimizer=adamw, zero_stage=zero_stage
        )
        for step in range(4):
            pipeline.step(*numbers(8, step), update=step % 2 == 1)
        return pipeline.state_dict()

    for plain, sharded in run(lambda: [one(0), one(1)], workers=4):
        assert same(plain, sharded)


def test_a_step_that_is_not_finite_updates_nothing() -> None:
    def one(zero_stage: int) -> Any:
        pipeline = Pipeline(
            linears(4),
            mean_square,
            schemes.chimera(4, 4),
            optimizer=adamw,
            zero_stage=zero_stage,
            skip_non_finite=True,
        )
        skipped = []
        for step in range(3):
            x, y = numbers(8, step)
            skipped.append(pipeline.step(x * (math.inf if step == 1 else 1), y).skipped)
        return pipeline.state_dict(), skipped

    for plain, sharded in run(lambda: [one(0), one(1)], workers=4):
        assert same(plain, sharded)
        assert sharded[1] == [False, True, False]


def test_in_lower_precision() -> None:
    def one(zero_stage: int) -> Any:
        pipeline = Pipeline(
            linears(4, dtype=torch.float32),
            mean_square,
            schemes.chimera(4, 4),
            optimizer=adamw,
            zero_stage=zero_stage,
            compute_dtype=torch.bfloat16,
        )
        batches = [tuple(each.float() for each in numbers(8, step)) for step in range(3)]
        losses = [pipeline.step(*batch).loss for batch in batches]
        return pipeline.state_dict(), losses, pipeline.evaluate(*batches[0]).loss

    for plain, sharded in run(lambda: [one(0), one(1)], workers=4):
        assert same(plain, sharded)


def test_state_goes_on_under_another_layout_sharded_or_not() -> None:
    layouts = [(schemes.chimera(4, 4), 1), (schemes.chimera(2, 4), 1), (schemes.dapple(2, 4), 0)]

    def on(schedule: Schedule, zero_stage: int, state: Any, first: int) -> Any:
        pipeline = Pipeline(linears(4), mean_square, schedule, optimizer=adamw, zero_stage=zero_stage)
        if state is not None:
            pipeline.load_state_dict(state)
        for step in range(first, first + 2):
            pipeline.step(*numbers(8, step))
        return pipeline.state_dict()

    state = None
    for index, (schedule, zero_stage) in enumerate(layouts):
        state = run(on, schedule, zero_stage, state, 2 * index, workers=schedule.workers)[0]

    def one() -> Any:
        pipeline = Pipeline(linears(4), mean_square, schemes.gpipe(1, 1), optimizer=adamw)
        for step in range(6):
            pipeline.step(*numbers(8, step))
        return pipeline.state_dict()

    expected = run(one, workers=1)[0]
    assert state is not None
    for name, weight in expected["model"].items():
        torch.testing.assert_close(state["model"][name], weight, rtol=1e-9, atol=1e-12)
        theirs, ours = expected["optimizer"][name], state["optimizer"][name]
        torch.testing.assert_close(ours["state"]["exp_avg_sq"], theirs["state"]["exp_avg_sq"])
        assert float(ours["state"]["step"]) == 6.0


def in_processes(zero_stage: int) -> Any:
    return trained(schemes.chimera(2, 2), _two, adamw, zero_stage=zero_stage)


def _two() -> list[nn.Module]:
    return linears(2)


def both_in_processes() -> Any:
    return [in_processes(0), in_processes(1)]


@pytest.mark.parametrize("transport", ["gloo", "strict-nccl"])
def test_processes(transport: str) -> None:
    for plain, sharded in run(both_in_processes, workers=2, transport=transport):
        assert same(plain[:3], sharded[:3])
        assert sharded[3] * 2 == plain[3]


# -- what is refused


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (schemes.gpipe(1, 1), {"zero_stage": 2}, "zero_stage = 2: must be a whole number, 0 to 1 "),
        (schemes.gpipe(1, 1), {"zero_stage": True}, "zero_stage = True: must be a whole number"),
        (schemes.pipedream_2bw(1, 2), {}, "pipedream-2bw updates each stage at its own time"),
        (schemes.gpipe(1, 1), {"barrier": False}, "omit it or barrier=False"),
        (schemes.gpipe(1, 1), {"parallelize": print}, "fully_shard shards optimiser state already"),
    ],
)
def test_refusals(schedule: Schedule, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline(linears(2), mean_square, schedule, optimizer=adamw, **({"zero_stage": 1} | options))
    assert words in str(caught.value)
