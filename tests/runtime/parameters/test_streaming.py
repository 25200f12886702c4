"""The whole model's state: on one rank or on all, tensor by tensor, also what is in no layer."""

from __future__ import annotations

import threading
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.parameters import streaming
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.transport.local import LocalTransport
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule


class Model(nn.Module):
    """Buffers, a frozen parameter and extra state in no layer; a tied weight and an empty tensor in one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((4,), 0.25))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.body[3].weight = self.body[0].weight
        self.body[2].register_buffer("empty", torch.zeros(0, 3))
        self.contact = nn.Linear(3, 1).requires_grad_(False)

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        assert state == 7


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def piped(model: nn.Module, schedule: Schedule, *, adam: bool = False, zero_stage: int = 0) -> Pipeline:
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    return Pipeline(
        model,
        nn.MSELoss(),
        schedule,
        optimizer=lambda parameters: kind(parameters, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        list_layers=lambda its: list(its.get_submodule("body").children()),
        zero_stage=zero_stage,
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def _states(schedule: Schedule) -> list[dict[str, Any]]:
    pipeline = piped(made(), schedule)
    pipeline.step(*batch())
    found = [pipeline.model_state_dict(), pipeline.model_state_dict(rank=1), dict(pipeline.stream_weights())]
    for name, _ in pipeline.stream_weights(1):
        assert name
        break  # the others do not wait for the rest
    found.append(dict(pipeline.stream_weights(1)))
    pipeline.step(*batch())
    return found


@pytest.mark.table
@pytest.mark.parametrize("transport", ["local", "strict-nccl", "gloo"])
@pytest.mark.parametrize("schedule", [schemes.dapple(2, 4), schemes.chimera(2, 4)], ids=str)
def test_a_state_goes_to_all_or_to_one(
    schedule: Schedule, transport: Literal["local", "gloo", "strict-nccl"]
) -> None:
    rows = launch(_states, schedule, workers=2, transport=transport, timeout_seconds=60)
    whole = rows[0][0]
    assert list(whole) == list(made().state_dict())
    assert not torch.equal(whole["body.0.weight"], made().body[0].get_parameter("weight"))
    for rank, (every, one, first, second) in enumerate(rows):
        for found, wanted in ((every, True), (one, rank == 1), (first, rank == 0), (second, rank == 1)):
            assert found.keys() == (whole.keys() if wanted else set())
            for name, value in found.items():
                torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
    model = made()
    model.load_state_dict(whole)


def test_a_rank_that_is_not_there() -> None:
    def work() -> None:
        piped(made(), schemes.dapple(2, 4)).model_state_dict(rank=2)

    with pytest.raises(ConfigError, match="rank=2; there are ranks 0 to 1"):
        launch(work, workers=2, transport="local", timeout_seconds=30)


def test_nobody_has_what_it_did_not_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By counting the bytes that each worker makes room for, and those that are between two workers."""
    room: dict[int, int] = {}
    between: dict[int, int] = {}
    monkeypatch.setattr(streaming, "_PIECE_BYTES", 1024)
    plain = LocalTransport.send_described

    def send(self: LocalTransport, tensors: Any, peer: int, tag: int) -> Any:
        between[self.rank] = max(between.get(self.rank, 0), sum(t.nbytes for t in tensors))
        return plain(self, tensors, peer, tag)

    def gathered(self: LocalTransport, value: object) -> list[object]:
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        room[self.rank] = room.get(self.rank, 0) + sum(t.nbytes for t in tensors)
        return gather(self, value)

    gather = LocalTransport.gather_objects

    def work() -> int:
        layers = [nn.Linear(32, 32, bias=False) for _ in range(4)]
        pipeline = Pipeline(
            layers, nn.MSELoss(), schemes.gpipe(4, 4), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )
        monkeypatch.setattr(LocalTransport, "send_described", send)
        monkeypatch.setattr(LocalTransport, "gather_objects", gathered)
        pipeline.transport.gather([])
        found = pipeline.model_state_dict(rank=0)
        return sum(t.nbytes for t in found.values())

    assert launch(work, workers=4, transport="local", timeout_seconds=30) == [4 * 4096, 0, 0, 0]
    assert set(room.values()) == {0}
    assert between == {0: 4, 1: 1024, 2: 1024, 3: 1024}


@pytest.mark.parametrize(
    ("schedule", "zero_stage"),
    [(schemes.dapple(2, 4), 0), (schemes.chimera(2, 4), 0), (schemes.chimera(2, 4), 1)],
)
def test_the_training_state_goes_to_all_or_to_one(schedule: Schedule, zero_stage: int) -> None:
    def work() -> list[dict[str, Any]]:
        pipeline = piped(made(), schedule, adam=True, zero_stage=zero_stage)
        pipeline.step(*batch())
        return [pipeline.state_dict(), pipeline.state_dict(rank=1)]

    def one() -> dict[str, Any]:
        pipeline = piped(made(), schemes.gpipe(1, 4), adam=True)
        pipeline.step(*batch())
        return pipeline.state_dict()

    (expected,) = launch(one, workers=1, transport="local", timeout_seconds=30)
    rows = launch(work, workers=2, transport="local", timeout_seconds=30)
    assert rows[0][1] == {}
    for found in (rows[0][0], rows[1][0], rows[1][1]):
        assert found["optimizer"].keys() == expected["optimizer"].keys()
        assert list(found["scheduler"]) == ["0", "1"]
        for name, kept in expected["optimizer"].items():
            assert found["optimizer"][name]["options"] == kept["options"]
            torch.testing.assert_close(found["optimizer"][name]["state"], kept["state"])


def test_a_training_state_is_padded_on_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all are told has no tensors but single numbers."""
    told: list[int] = []
    gather = LocalTransport.gather_objects

    def gathered(self: LocalTransport, value: object) -> list[object]:
        told.extend(t.numel() for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
        return gather(self, value)

    def work() -> None:
        pipeline = piped(made(), schemes.dapple(2, 4), adam=True)
        pipeline.step(*batch())
        monkeypatch.setattr(LocalTransport, "gather_objects", gathered)
        pipeline.transport.gather([])
        assert pipeline.state_dict()["optimizer"]

    launch(work, workers=2, transport="local", timeout_seconds=30)
    assert told
    assert set(told) == {1}


def test_weights_are_taken_before_the_next_call() -> None:
    def work() -> None:
        pipeline = piped(made(), schemes.dapple(2, 4))
        given = pipeline.stream_weights(0)
        if pipeline.transport.rank == 0:
            with pytest.raises(ConfigError, match="is not at its end, and other workers wait in it"):
                pipeline.flush()
            next(given)
            pipeline.step(*batch())

    with pytest.raises(ConfigError, match="is not at its end, and other workers wait in it"):
        launch(work, workers=2, transport="local", timeout_seconds=30)


def test_who_takes_nothing_is_waited_for_no_longer_than_for_anything() -> None:
    ended = threading.Event()

    def work() -> None:
        pipeline = piped(made(), schemes.dapple(2, 4))
        pipeline.flush()
        hub = cast("LocalTransport", pipeline.transport).hub
        pipeline.transport.gather([])
        hub.timeout_seconds = 1.0
        given = pipeline.stream_weights(0) if pipeline.transport.rank == 0 else None
        if given is not None:
            ended.wait()
            return
        try:
            pipeline.stream_weights(0)
        finally:
            ended.set()

    with pytest.raises(WorkerError, match="sending the state to rank 0, which has to take all of it"):
        launch(work, workers=2, transport="local", timeout_seconds=60)


def test_a_weight_in_no_layer_is_refused_unless_it_is_frozen() -> None:
    def work(frozen: bool) -> None:
        model = made()
        model.contact.requires_grad_(not frozen)
        piped(model, schemes.dapple(2, 4)).step(*batch())

    launch(work, True, workers=2, transport="local", timeout_seconds=30)
    with pytest.raises(ConfigError, match=r"contact.weight of the Model .* freeze it by"):
        launch(work, False, workers=2, transport="local", timeout_seconds=30)
