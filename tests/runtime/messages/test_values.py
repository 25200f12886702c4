"""What stages pass on: any pytree, the same on the other side, in every scheme and recomputation."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from copy import deepcopy
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from counterflow.api.skip import Skip
from counterflow.errors import ConfigError
from counterflow.runtime.messages.values import (
    described,
    flatten_value,
    read_description,
    takes_gradient,
    unflatten_value,
)
from counterflow.runtime.mini_batch.samples import cut, samples_in, split_points
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import verify

from ...kit import run, sgd

F = torch.float64

SCHEMES = [
    schemes.gpipe(3, 4),
    schemes.dapple(3, 4),
    schemes.interleaved(2, 4, chunks=2),
    schemes.chimera(4, 4, concat="forward-doubling"),
    schemes.chimera(4, 4, concat="backward-halving"),
    schemes.hanayo(2, 4, waves=1),
]
MODES = ["none", "stage", "layer"]


class Pair(NamedTuple):
    first: Any
    second: Any


class Columns(Pair):
    """Looks at what it is made of, as torch's ``PackedSequence`` does."""

    def __new__(cls, first: Tensor, second: Tensor) -> Self:
        if first.shape[0] != second.shape[0] or second.dtype is not torch.long:
            raise ValueError(f"{first.shape} and {second.shape}")
        return super().__new__(cls, first, second)


X, Y = torch.ones(2, 3), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    "value",
    [
        X,
        (X,),
        (X, Y),
        [X, Y],
        {"x": X, "more": [Y, (X, None)]},
        (X, X),
        Pair(X, OrderedDict(a=1, b=True, c="text", d=2.5)),
        {"columns": Columns(Y[:, None].float(), Y)},
        {"dtype": torch.bfloat16, "big": 2**60, "z": 1 + 2j, "inf": -math.inf, "0": -0.0},
        (),
        {},
        None,
        3,
    ],
)
def test_a_value_is_the_same_after_a_message(value: Any) -> None:
    structure, tensors = flatten_value(value, "here")
    head = described([structure, structure], [len(tensors)] * 2)
    (found, other), counts = read_description(head, 2)
    assert found == other == structure
    assert list(counts) == [len(tensors)] * 2
    result = unflatten_value(found, [tensor.clone() for tensor in tensors])
    assert str(result) == str(value)
    assert type(result) is type(value)
    assert not isinstance(value, Tensor) or not head.numel()


def test_a_tensor_goes_once() -> None:
    structure, tensors = flatten_value({"a": X, "b": [X, Y]}, "here")
    assert [tensor is other for tensor, other in zip(tensors, (X, Y), strict=True)] == [True, True]
    found = unflatten_value(structure, tensors)
    assert found["a"] is found["b"][0]


def test_what_cannot_be_handed_on_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stage 3 gives a torch._C.Generator at \['a'\]\[1\]; "):
        flatten_value({"a": [X, torch.Generator()]}, "stage 3")

    class Own(NamedTuple):
        x: Tensor

    structure, tensors = flatten_value(Own(X), "here")
    with pytest.raises(ConfigError, match="cannot go to another worker"):
        described([structure], [len(tensors)])


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    del b, h
    return q >= kv


def test_a_mask_by_blocks_is_the_same_after_a_message() -> None:
    mask = create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    structure, tensors = flatten_value({"x": X, "masks": [mask]}, "here")
    assert all(isinstance(t, Tensor) and not takes_gradient(t) for t in tensors[1:])
    (found,), _ = read_description(described([structure], [len(tensors)]), 1)
    assert found == structure
    (again,) = unflatten_value(found, [tensor.clone() for tensor in tensors])["masks"]
    assert again.mask_mod is causal
    assert (again.seq_lengths, again.BLOCK_SIZE, again.shape) == (
        mask.seq_lengths,
        mask.BLOCK_SIZE,
        mask.shape,
    )
    assert torch.equal(again.to_dense(), mask.to_dense())
    torch.testing.assert_close(again.q_indices, mask.q_indices)
    own = create_block_mask(lambda b, h, q, kv: q + b >= kv + h, None, None, 64, 64, "cpu")
    structure, tensors = flatten_value(own, "here")
    with pytest.raises(ConfigError, match="the function of a BlockMask has to be one of a module"):
        described([structure], [len(tensors)])


def attention(q: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """By the mask's blocks and its function; flex_attention itself has no backward on a CPU."""
    at = torch.arange(q.shape[1])
    blocks = mask.to_dense()[0, 0].bool().repeat_interleave(16, 0).repeat_interleave(16, 1)
    seen = blocks & mask.mask_mod(at[:1], at[:1], at[:, None], at)
    return (q @ q.transpose(1, 2)).masked_fill(~seen, -math.inf).softmax(-1) @ v


class Attend(nn.Linear):
    """Attention by a mask that is handed on."""

    def __init__(self) -> None:
        super().__init__(16, 16, dtype=F)

    def forward(self, given: Any) -> Any:
        x, mask = given
        return attention(super().forward(x), x, mask), mask


class Masks(nn.Linear):
    """Makes the mask, by a skip or for the next layer; the last one takes it off."""

    def __init__(self, skip: Any) -> None:
        super().__init__(16, 16, dtype=F)
        self.mask = create_block_mask(causal, None, None, 32, 32, "cpu", BLOCK_SIZE=16)
        self.skip = skip.saver()

    def forward(self, x: Tensor) -> Any:
        self.skip(self.mask)
        return super().forward(x), self.mask


class Unmasked(nn.Linear):
    def __init__(self, skip: Any) -> None:
        super().__init__(16, 16, dtype=F)
        self.skip = skip.loader()

    def forward(self, given: Any) -> Tensor:
        return attention(super().forward(given[0]), given[0], self.skip())


@pytest.mark.parametrize("mode", MODES)
def test_masks_by_blocks_are_handed_on(mode: str) -> None:
    torch.manual_seed(0)
    skip = Skip("mask", once=True)
    layers = [Masks(skip), Attend(), Attend(), Unmasked(skip)]
    batches = [(torch.randn(4, 32, 16, dtype=F), torch.randn(4, 32, 16, dtype=F)) for _ in range(2)]
    for schedule in (schemes.dapple(4, 4), schemes.chimera(4, 4, concat="backward-halving")):
        rows = [[batch] for batch in batches]
        found = verify(
            schedule, layers, nn.MSELoss(), rows, optimizer=sgd, recompute=mode, transport="strict-local"
        )
        assert found.ok, found


class First(nn.Linear):
    """Gives everything there is."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=F)
        self.register_buffer("table", torch.randn(1, 4, dtype=F))
        self.scale = nn.Parameter(torch.ones(4, dtype=F))

    def forward(self, given: Any) -> Any:
        x = given.pop("x")
        h = super().forward(x)
        return {
            "h": h,
            "again": [h, (given["ids"],)],
            "columns": Columns(h, given["ids"]),
            "view": h[:, :2],
            "table": self.table,
            "scale": self.scale,
            "square": self.scale.square().sum(),
            "keep": x > 0,
            "wave": torch.complex(h, 2 * h),
            "turned": h.t(),
            "rows": x.shape[0],
            "half": 0.5,
            "name": "add" if given["flag"] else "",
            "nothing": None,
        }


class Middle(nn.Linear):
    """Changes some of it, and the container."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=F)

    def forward(self, given: Any) -> Any:
        assert given["nothing"] is None
        assert given["rows"] == given["h"].shape[0]
        assert type(given["columns"]) is Columns
        h = super().forward(given["h"] + given["again"][0]) + given["turned"].t()
        if given["name"] == "add" and "wave" in given:
            wave = given.pop("wave") * given.pop("half")
            h = h + wave.real + wave.imag
        given["h"] = h + given["view"].repeat(1, 2) * given["square"]
        return given


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, dtype=F)

    def forward(self, given: Any) -> Any:
        h = super().forward(given["h"].tanh() + given["table"]) * given["scale"]
        h = torch.where(given["keep"], h, h * 2) + given["again"][1][0][:, None]
        return {"logits": (h,)}


class Between(nn.Module):
    """Hands on what it got, as it got it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=F))

    def forward(self, given: Any) -> Any:
        given["again"][0] = given["again"][0] * self.weight
        return given


def loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output["logits"][0], target)


def model(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [First(), *[Middle() for _ in range(2)], *[Between() for _ in range(stages)], Last()]


def mini_batch(samples: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    x, y = (torch.randn(samples, 4, generator=generator, dtype=F) for _ in range(2))
    return {"x": x, "ids": torch.arange(samples), "flag": True}, y


def one_process(layers: list[nn.Module], batches: list[Any], micro_batches: int) -> Any:
    whole = nn.Sequential(*layers)
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    optimizer, losses = sgd(list(whole.parameters())), []
    for inputs, targets in batches:
        samples, told = samples_in(inputs), 0.0
        points = split_points(samples, micro_batches)
        for begin, end in itertools.pairwise(points):
            part = slice(begin, end)
            one = loss(whole(cut(inputs, part)), targets[part]) * ((end - begin) / samples)
            one.backward()
            told += one.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(told)
    after = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    whole.load_state_dict(before)
    return losses, after


def _train(layers: list[nn.Module], schedule: Schedule, batches: list[Any], options: dict[str, Any]) -> Any:
    pipeline = Pipeline(deepcopy(layers), loss, schedule, optimizer=sgd, **options)
    losses = []
    for inputs, targets in batches:
        losses.append(pipeline.step(dict(inputs), targets).loss)
        pipeline.evaluate(dict(inputs), targets)
    return losses, pipeline.model_state_dict()


def agree(schedule: Schedule, found: list[Any], layers: list[nn.Module], batches: list[Any]) -> None:
    losses, state = one_process(layers, batches, schedule.micro_batches)
    for told, ours in found:
        assert told == pytest.approx(losses, rel=1e-10)
        for name, tensor in state.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-12)


BATCHES = [mini_batch(samples) for samples in (8, 8, 9, 8)]


@pytest.mark.table
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_any_pytree_flows(schedule: Schedule, mode: str) -> None:
    layers = model(schedule.stages)
    options = {"recompute": mode, "clip_norm": None}
    found = run(_train, layers, schedule, BATCHES, options, workers=schedule.workers)
    agree(schedule, found, layers, BATCHES)


def test_any_pytree_flows_between_processes() -> None:
    schedule = schemes.chimera(2, 4)
    layers = model(2)
    options = {"dynamic_shapes": True}
    found = run(_train, layers, schedule, BATCHES, options, workers=2, transport="gloo")
    agree(schedule, found, layers, BATCHES)


class Loose(nn.Linear):
    """Gives another structure, from its third micro-batch on."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=F)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        h = super().forward(x)
        return {"logits": (h,)} if self.calls < 3 else {"logits": (h, h)}


def _loose(layers: list[nn.Module], dynamic: bool) -> list[float]:
    options: dict[str, Any] = {"dynamic_shapes": dynamic, "cuts": [1]}
    pipeline = Pipeline(deepcopy(layers), loss, schemes.dapple(2, 2), optimizer=sgd, **options)
    x = torch.ones(4, 4, dtype=F)
    return [pipeline.step(x, x).loss for _ in range(3)]


def test_another_structure_for_inputs_of_the_same_shapes() -> None:
    layers = [Loose(), nn.Identity()]
    assert len(run(_loose, layers, True, workers=2)[0]) == 3
    with pytest.raises(ConfigError, match=r"stage 0 gave .* where it gave .* dynamic_shapes=True"):
        run(_loose, layers, False, workers=2)
