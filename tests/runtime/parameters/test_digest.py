"""The number that tells contents apart, and the copies of stages that are compared by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import WorkerError
from counterflow.runtime.parameters.digest import digest
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import mean_square, run

ROW = 2**16
KINDS = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.uint8, torch.bool,
]  # fmt: skip


def number(*tensors: Tensor) -> float:
    return float(digest(tensors, torch.device("cpu")))


def changed(tensor: Tensor, **values: float) -> Tensor:
    found = tensor.clone()
    for place, value in values.items():
        found[int(place[1:])] = value
    return found


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_one_value_that_differs_is_told(dtype: torch.dtype) -> None:
    whole = torch.zeros(70, dtype=torch.float32)
    whole[3] = 1
    for place in (0, 1, 68, 69):
        assert number(changed(whole, **{f"_{place}": 1.0}).to(dtype)) != number(whole.to(dtype))
    assert number(whole.to(dtype)) == number(whole.to(dtype).clone())


def test_what_is_alike_in_sum_or_exclusive_or_is_told() -> None:
    ones = torch.ones(4)
    plain = torch.arange(4.0)
    for one, other in (
        (ones, 2 * ones),
        (torch.zeros(4), -torch.zeros(4)),
        (plain, plain.flip(0)),
        (plain, changed(plain, _1=-1.0, _2=-2.0)),
        (plain.double(), changed(plain.double(), _1=-1.0, _2=-2.0)),
        (ones.bfloat16(), changed(ones.bfloat16(), _0=-1, _1=-1, _2=-1, _3=-1)),
    ):
        assert number(one) != number(other)
        assert number(one, other) != number(other, one)
    assert number(ones / 0 * 0) == number(ones / 0 * 0)  # not a number, and as good as one


@pytest.mark.parametrize("rows", [2, 3, 70])
def test_long_tensors_are_told_apart_wherever_they_differ(rows: int) -> None:
    long = torch.zeros(rows * ROW - 5, dtype=torch.int32)
    every = [number(long)] + [
        number(changed(long, **{f"_{place}": 1.0})) for place in (0, 1, ROW - 1, ROW, 2 * ROW - 6)
    ]
    assert len(set(every)) == len(every)
    # Places of a row and rows have factors of their own: what is mirrored at the diagonal is told.
    assert number(changed(long, _1=1.0)) != number(changed(long, **{f"_{ROW}": 1.0}))


def test_layouts_in_memory_make_no_difference() -> None:
    whole = torch.randn(6, 5)
    assert number(whole.t()) == number(whole.t().contiguous())
    assert number(torch.arange(9.0).bfloat16()[1:]) == number(torch.arange(1.0, 9).bfloat16())
    assert number(torch.tensor(3.0)) != number(torch.tensor(4.0))
    assert number() == number(torch.empty(0)) == 0.0
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert number(conjugate) == number(conjugate.resolve_conj())
    assert number(conjugate.imag) == number(conjugate.imag.resolve_neg())


# -- copies of stages


def numbers(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


def apart(schedule: Schedule, steps: int, options: dict[str, Any], metrics: int = 0) -> int:
    """Steps until it is told that the last worker's stages have come apart: in step 2, or in asynchronous
    schemes, which accept no change in flight, from step 0 on.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)]
    told = {f"m{n}": torch.tensor(1.0) for n in range(metrics)}

    def loss(output: Tensor, target: Tensor) -> Any:
        return (mean_square(output, target), told) if told else mean_square(output, target)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    pipeline = Pipeline(layers, loss, schedule, optimizer=sgd, **{"digest_every": 4} | options)
    last = pipeline.transport.rank == pipeline.transport.world_size - 1
    for step in range(steps):
        for optimizer in pipeline.optimizers.values():
            optimizer.param_groups[0]["lr"] = 0.1 + 1e-9 * (last and (step == 2 or not schedule.synchronous))
        try:
            pipeline.step(*numbers(step))
        except WorkerError as error:
            assert "after step 3 the copies of stage" in str(error)  # noqa: PT017 - the step counts too
            return step
    return steps


@pytest.mark.parametrize(
    ("schedule", "replicas", "options", "step"),
    [
        (schemes.chimera(4, 4), 1, {}, 3),
        (schemes.chimera(4, 4), 1, {"barrier": False}, 4),
        (schemes.chimera(4, 4), 1, {"barrier": False, "clip_norm": 1e9}, 4),
        (schemes.dapple(2, 4), 2, {"barrier": False}, 4),
        (schemes.interleaved(2, 4, chunks=2), 2, {"barrier": False, "metrics": 9}, 4),
        (schemes.dapple(2, 4), 2, {"barrier": False, "digest_every": 0}, 12),
        (schemes.pipedream(2), 2, {}, None),
        (schemes.pipedream_2bw(2, 4), 2, {}, None),
        (schemes.wpipe(1, 4), 2, {"clip_norm": 1e9}, None),
    ],
    ids=str,
)
def test_copies_that_come_apart_are_told_without_a_flush(
    schedule: Schedule, replicas: int, options: dict[str, Any], step: int | None
) -> None:
    metrics = int(options.pop("metrics", 0))
    steps = 12 if step is not None else 30
    every = run(apart, schedule, steps, options, metrics, workers=schedule.workers * replicas)
    if step is None:
        assert all(3 < each < 3 + schedule.workers + 14 for each in every)
    else:
        assert set(every) == {step}


class Scaled(nn.Linear):
    """Has a buffer that training leaves alone."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


@pytest.mark.parametrize("barrier", [True, False])
def test_buffers_that_come_apart_are_told(barrier: bool) -> None:
    def work() -> None:
        pipeline = Pipeline(
            [Scaled(), Scaled()],
            mean_square,
            schemes.chimera(2, 4),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            digest_every=2,
            barrier=barrier,
        )
        for step in range(4):
            if step == 1 and pipeline.worker:
                pipeline.stages[1].layers[0].module.get_buffer("scale").add_(1e-9)
            pipeline.step(*numbers(step))

    with pytest.raises(WorkerError, match=r"after step 1 the copies of stage .* on ranks 0 and 1 differ"):
        run(work, workers=2)


class Tied(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def test_a_weight_of_several_stages_is_compared_between_them() -> None:
    layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]
    tied = [*layers, Tied(layers[0])]

    def work() -> None:
        pipeline = Pipeline(
            tied, mean_square, schemes.dapple(2, 4), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )
        pipeline.step(*numbers())
        pipeline.weights.check_copies("before")
        if pipeline.worker:
            next(pipeline.stages[1].layers[1].module.parameters()).data[0] += 1e-9
        pipeline.model_state_dict()

    with pytest.raises(WorkerError, match=r"after 1 steps the copies of 0\.weight on ranks 0 and 1 differ"):
        run(work, workers=2)


def test_a_change_that_the_next_update_of_sharded_states_would_hide_is_told() -> None:
    def work() -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]
        tied = [*layers, Tied(layers[0])]
        pipeline = Pipeline(
            tied,
            mean_square,
            schemes.dapple(2, 4),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            zero_stage=1,
            digest_every=2,
        )
        for step in range(4):
            if step == 3 and pipeline.worker:
                next(tied[3].parameters()).data[0] += 1e-9
            pipeline.step(*numbers(step))

    with pytest.raises(WorkerError, match=r"before step 3 the copies of 0\.weight on ranks 0 and 1 differ"):
        run(work, workers=2)
