"""Tables that stages pass on in trees: each micro-batch has its own, whatever stages do to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.errors import ConfigError, CounterflowError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

WIDTH = 4

SCHEMES = [
    schemes.gpipe(4, 8),
    schemes.dapple(4, 8),
    schemes.zb_h1(4, 8),
    schemes.interleaved(2, 4, chunks=2),
    schemes.zb_v(2, 4),
    schemes.hanayo(2, 4, waves=1),
    schemes.chimera(4, 4),
    schemes.chimera(4, 8, concat="forward-doubling"),
    schemes.chimera(4, 8, concat="backward-halving"),
    schemes.pipedream(4, 4),
    schemes.pipedream_2bw(4, 4),
    schemes.wpipe(2, 4),
]


class Stage(nn.Module):
    """Uses a table that it hands on, and makes one of its samples that is mostly the same for all.

    ``does``: what else it does.
    """

    def __init__(self, does: str = "", *, last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.does, self.last = does, last
        self.register_buffer("own", torch.linspace(0.0, 1.0, 400, dtype=torch.float64).reshape(20, 20))

    def forward(self, given: dict[str, Any]) -> Any:
        table, x = given["table"], given["x"]
        chance = given["chance"]
        if self.does == "writes":
            table.mul_(0.5)
        if self.does == "writes later" and float(table.detach()[0, 0]) > 0.5:
            table.mul_(0.5)
        if self.does == "hands on a buffer":
            table = self.own
        if self.does == "makes it anew":
            table = torch.arange(400, dtype=torch.float64).reshape(20, 20) / 400
        if self.does == "by chance":  # what is in no sample of the first step
            chance = torch.zeros(20, 20, dtype=torch.float64) + (x.detach()[:, 0] > 0.5).sum()
        y = torch.tanh(self.linear(x)) + table.mean() + chance.mean()
        if self.last:
            return y
        return {"x": y, "table": table, "chance": chance, "number": 3, "none": None}


class Found(NamedTuple):
    """What a worker saw: by step and peer the bytes that it sent."""

    losses: list[float]
    state: dict[str, Tensor]
    evaluated: float
    outputs: Tensor | None
    sent: list[dict[int, int]]


def batch(number: int, samples: int) -> tuple[dict[str, Tensor], Tensor]:
    """Only from the third on are there samples, and tables, whose first number is above 0.5."""
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(samples, WIDTH, dtype=torch.float64, generator=generator) * (0.5 if number < 2 else 1.0)
    table = torch.rand(20, 20, dtype=torch.float64, generator=generator)
    table[0, 0] = number > 1
    return {"x": x, "table": table, "chance": torch.zeros(20, 20, dtype=torch.float64)}, x.sin()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


DIMS = {"x": 0, "table": None, "chance": None}


def _metered(pipeline: Pipeline) -> list[dict[int, int]]:
    transport: Any = pipeline.transport
    steps: list[dict[int, int]] = []

    def metered(send: Any) -> Any:
        def counted(tensors: Sequence[Tensor], peer: int, *more: Any, **options: Any) -> Any:
            if steps:
                steps[-1][peer] += sum(tensor.nbytes for tensor in tensors)
            return send(tensors, peer, *more, **options)

        return counted

    transport.send = metered(transport.send)
    transport.send_described = metered(transport.send_described)
    return steps


def _train(layers: list[nn.Module], schedule: Schedule, samples: Sequence[int], options: Any) -> Found:
    loss = functional.mse_loss
    pipeline = Pipeline(layers, loss, schedule, optimizer=sgd, input_dims=DIMS, **options)
    sent = _metered(pipeline)
    steps = []
    for number, count in enumerate(samples):
        sent.append(defaultdict(int))
        steps.append(pipeline.step(*batch(number, count)))
    steps += pipeline.flush()
    sent.append(defaultdict(int))
    evaluated, outputs = 0.0, None
    for number in (1, 3):  # the second time shapes are known
        evaluated = pipeline.evaluate(*batch(number, samples[0])).loss
    for number in (1, 3):
        outputs = pipeline.predict(batch(number, samples[0] - 1)[0])
    told = [step.loss for step in steps if step.reports_step is not None]
    return Found(told, pipeline.model_state_dict(), evaluated, outputs, [dict(one) for one in sent])


def layers_for(schedule: Schedule, does: dict[int, str] | None = None) -> list[nn.Module]:
    torch.manual_seed(0)
    count = schedule.stages
    return [Stage((does or {}).get(stage, ""), last=stage == count - 1) for stage in range(count)]


def trained(
    schedule: Schedule,
    does: dict[int, str] | None = None,
    *,
    samples: Sequence[int] = (16,) * 4,
    transport: Any = "local",
    **options: Any,
) -> list[Found]:
    job = layers_for(schedule, does), schedule, samples, options
    found: list[Found] = launch(
        _train, *job, workers=schedule.workers, transport=transport, timeout_seconds=60
    )
    return found


def same(one: list[Found], other: list[Found]) -> None:
    """Bit for bit."""
    for ours, theirs in zip(one, other, strict=True):
        assert ours.losses == theirs.losses
        assert ours.evaluated == theirs.evaluated
        if ours.outputs is None or theirs.outputs is None:
            assert ours.outputs is theirs.outputs
        else:
            assert torch.equal(ours.outputs, theirs.outputs)
        assert ours.state.keys() == theirs.state.keys()
        assert all(torch.equal(ours.state[name], theirs.state[name]) for name in ours.state)


def test_a_table_goes_with_every_micro_batch() -> None:
    x = 2 * WIDTH * 8  # a micro-batch's
    table, number = 20 * 20 * 8, 8
    for worker, each in enumerate(trained(schemes.dapple(4, 8))):
        for step in each.sent[1:4]:
            forward = {worker + 1: 8 * (2 * table + x + number)} if worker < 3 else {}
            assert step == forward | ({worker - 1: 8 * x} if worker else {})


@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_numbers_are_those_of_messages_with_their_shapes(schedule: Schedule) -> None:
    same(trained(schedule), trained(schedule, dynamic_shapes=True))


def test_one_process_finds_the_same() -> None:
    schedule = schemes.dapple(2, 4)
    layers = nn.Sequential(*layers_for(schedule, {0: "by chance"}))
    optimizer = sgd([*layers.parameters()])
    losses = []
    for number in range(4):
        inputs, targets = batch(number, 16)
        optimizer.zero_grad()
        losses.append(0.0)
        for rows in torch.arange(16).split(4):
            loss = functional.mse_loss(layers(inputs | {"x": inputs["x"][rows]}), targets[rows]) / 4
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    found = trained(schedule, {0: "by chance"})
    for each in found:
        assert each.losses == pytest.approx(losses, rel=1e-12)


@pytest.mark.table
@pytest.mark.parametrize(
    "does", ["by chance", "writes", "writes later", "hands on a buffer", "makes it anew"]
)
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        (schemes.dapple(3, 4), "none"),
        (schemes.gpipe(3, 4), "stage"),
        (schemes.dapple(3, 4), "layer"),
        (schemes.chimera(4, 8, concat="backward-halving"), "none"),
    ],
    ids=str,
)
def test_what_stages_do_to_it_stays_with_its_micro_batch(
    schedule: Schedule, recompute: str, does: str
) -> None:
    every = dict.fromkeys((0, 1) if does == "by chance" else (1,), does)
    if does == "writes later" and recompute != "none":
        with pytest.raises(CounterflowError, match="which did not happen in the first forward"):
            trained(schedule, every, recompute=recompute)
        return
    found = trained(schedule, every, recompute=recompute)
    same(found, trained(schedule, every, recompute=recompute, dynamic_shapes=True))


def test_shapes_that_change_are_refused() -> None:
    with pytest.raises(ConfigError, match="make the pipeline with dynamic_shapes=True"):
        launch(_grown, workers=2, transport="local", timeout_seconds=30)


class Grows(nn.Linear):
    """Gives a table that is longer in its fifth forward."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x), torch.zeros(400 + (self.calls > 4))


class Takes(nn.Linear):
    """Takes it."""

    def forward(self, given: Any) -> Tensor:
        return super().forward(given[0])


def _grown() -> None:
    pipeline = Pipeline(
        [Grows(4, 4), Takes(4, 4)], functional.mse_loss, schemes.gpipe(2, 2), optimizer=sgd, seed=0
    )
    for _ in range(3):
        pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
