"""What is the same for all micro-batches goes once a step over each link, and nothing else comes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from counterflow.errors import ConfigError, CounterflowError
from counterflow.runtime.messages.once import OncePerStep, Sharing, forget_others
from counterflow.runtime.messages.values import BufferPool, Layout, Same, TensorSpec, Unit
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule, SkipLink

WIDTH = 4
TABLE = 20 * 20 * 8
"""Bytes of what every stage hands on."""

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
    """What a worker saw: by step and peer the bytes that it sent; tables that lie about at the end."""

    losses: list[float]
    state: dict[str, Tensor]
    evaluated: float
    outputs: Tensor | None
    sent: list[dict[int, int]]
    left: int


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
        evaluated = pipeline.evaluate(*batch(number, samples[0]))
    for number in (1, 3):
        outputs = pipeline.predict(batch(number, samples[0] - 1)[0])
    queues = [pipeline._run.interpreter._messages, pipeline._evaluation._messages]
    left = sum(len(queue._once._sent) + len(queue._once._come) for queue in queues)
    told = [step.loss for step in steps if step.about is not None]
    return Found(told, pipeline.state_dict(), evaluated, outputs, [dict(one) for one in sent], left)


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
        assert ours.left == 0


def test_a_table_goes_once_a_step_over_each_link() -> None:
    schedule = schemes.dapple(4, 8)
    found = trained(schedule)
    x = 2 * WIDTH * 8  # a micro-batch's
    marks, numbers = 2, 8
    first, later = 2 * TABLE + x + numbers, x + numbers + marks
    back = 8 * x
    for worker, each in enumerate(found):
        for step in each.sent[1:4]:
            forward = {worker + 1: first + 7 * later} if worker < 3 else {}
            assert step == forward | ({worker - 1: back} if worker else {})
        if worker < 3:
            assert each.sent[0][worker + 1] > 16 * TABLE  # shapes are learnt


@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_numbers_are_those_of_what_goes_with_every_micro_batch(schedule: Schedule) -> None:
    found = trained(schedule)
    everything = trained(schedule, dynamic_shapes=True)
    same(found, everything)
    ours, theirs = (sum(sum(each.sent[3].values()) for each in one) for one in (found, everything))
    assert ours < 0.6 * theirs or schedule.micro_batches == 1


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
    """Also what was the same by chance in the first steps alone: it follows in full."""
    every = dict.fromkeys((0, 1) if does == "by chance" else (1,), does)
    if does == "writes later" and recompute != "none":  # nor where everything goes with every micro-batch
        with pytest.raises(CounterflowError, match="which did not happen in the first forward"):
            trained(schedule, every, recompute=recompute)
        return
    found = trained(schedule, every, recompute=recompute)
    same(found, trained(schedule, every, recompute=recompute, dynamic_shapes=True))


@pytest.mark.parametrize("samples", [(3,) * 4, (10, 7, 10, 7)], ids=str)
@pytest.mark.parametrize("schedule", [schemes.dapple(3, 4), schemes.chimera(2, 4)], ids=str)
def test_mini_batches_that_are_half_filled_or_differ_in_length(
    schedule: Schedule, samples: tuple[int, ...]
) -> None:
    found = trained(schedule, {0: "by chance"}, samples=samples)
    same(found, trained(schedule, {0: "by chance"}, samples=samples, dynamic_shapes=True))


@pytest.mark.parametrize("strict", [False, True])
def test_smaller_messages_have_it_once_too(strict: bool) -> None:
    """What half precision holds is exact; what is not finite, and what differs, follow in one message."""
    schedule = schemes.dapple(3, 4)
    layers = layers_for(schedule, {0: "by chance"})
    job = layers, schedule, (16,) * 4, {"compress": True}
    found: list[Found] = launch(_train, *job, workers=3, transport="local", strict=strict)
    plain = trained(schedule, {0: "by chance"})
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-2)
        assert ours.left == 0
    assert sum(found[0].sent[1].values()) < sum(plain[0].sent[1].values())


def test_processes_send_it_once() -> None:
    schedule = schemes.dapple(2, 4)
    found = trained(schedule, {0: "by chance"}, transport="gloo")
    same(found, trained(schedule, {0: "by chance"}))
    assert found[0].sent[1][1] < 3 * TABLE
    assert found[0].sent[3][1] > 3 * TABLE  # what was the same by chance


def test_small_tables_and_samples_go_with_every_micro_batch() -> None:
    once = OncePerStep(BufferPool(torch.device("cpu")), reads=True)
    link = 0, 0, 0
    tensors = [torch.zeros(8), torch.zeros(4, 100), torch.zeros(100, 4), torch.ones(400, requires_grad=True)]
    (kept, none) = once.learn(link, 0, tensors * 2, [(4, 4), (4, 4)], first=True)
    assert kept.kept == {2} == none.once
    assert not kept.once
    assert not none.kept


def test_what_is_not_the_same_is_not_kept() -> None:
    layout = Layout.of(None, [])
    learnt: dict[tuple[int | SkipLink, Unit], Layout] = {
        (0, Unit(0)): replace(layout, same=Same(kept=frozenset({0, 1, 2}))),
        (0, Unit(1)): replace(layout, same=Same(once=frozenset({1}))),
        (0, Unit(2)): layout,
        (1, Unit(0)): replace(layout, same=Same(kept=frozenset({1}))),
    }
    forget_others(learnt)
    assert [[*one.same.kept] for one in learnt.values()] == [[1], [], [], []]


def _once() -> tuple[OncePerStep, Sharing, Sharing]:
    spec = TensorSpec(torch.Size((2,)), torch.float64, requires_grad=False)
    marks = TensorSpec(torch.Size((1,)), torch.uint8, requires_grad=False)
    first = Sharing((0, 0, 0), False, [spec, spec], [spec, spec], [1], {})
    later = Sharing((0, 0, 0), True, [spec, spec], [spec, marks], [], {1: 1})
    return OncePerStep(BufferPool(torch.device("cpu")), reads=True), first, later


FLOATS = st.floats() | st.sampled_from([0.0, -0.0, float("nan")])


@given(st.lists(FLOATS, min_size=2, max_size=2), st.lists(FLOATS, min_size=2, max_size=2))
def test_what_comes_has_the_bits_of_what_was_given(one: list[float], other: list[float]) -> None:
    once, first, later = _once()
    a, b = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    for sharing, table in ((first, a), (later, b)):
        message, full = once.to_send(sharing, 0, [a, table])
        came = [tensor.clone() for tensor in message]
        found = once.restored(sharing, came, partial(list, full))
        assert torch.equal(found[1].view(torch.int64), table.view(torch.int64))
        assert len({tensor.data_ptr() for tensor in (a, b, *found)}) == 4  # in memory of its own
        alike = torch.equal(a.view(torch.int64), table.view(torch.int64))
        assert len(full) == (not alike)
    assert not once._sent
    assert not once._come


def test_what_is_written_to_memory_that_was_sent_is_seen() -> None:
    once, first, later = _once()
    table = torch.zeros(2, dtype=torch.float64)
    once.to_send(first, 0, [table, table])
    table.data.add_(1.0)  # which torch does not count
    message, full = once.to_send(later, 0, [table, table])
    assert message[1].tolist() == [1]
    assert len(full) == 1


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
