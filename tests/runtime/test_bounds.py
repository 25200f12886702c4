"""Nothing that the engine keeps grows with the steps, whatever shapes come."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import Pipeline, launch, schemes
from counterflow.runtime.mini_batch import first_steps, known_shapes
from counterflow.runtime.stages import split_backward
from counterflow.schedule.ir import Schedule

KINDS = 4
ROOMS = "counterflow.runtime", "counterflow.verification.diagnosis"
STEPS = 8


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        yield from (("[]", each) for pair in thing.items() for each in pair)
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from (("[]", each) for each in thing)
    elif type(thing).__module__.startswith(ROOMS):
        for name in {*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())}:
            if hasattr(thing, name):
                yield f".{name}", getattr(thing, name)


def _sizes(roots: dict[str, Any]) -> Counter[str]:
    """How much is in all containers that are reached from some things, by the way to them."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting = list(roots.items())
    keep = []
    while waiting:
        way, thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, Tensor, nn.Module, torch.Size)):
            continue
        seen.add(id(thing))
        keep.append(thing)  # so that its id stays its own
        if isinstance(thing, (dict, list, set, deque)):
            found[way] += len(thing)
        waiting += [(way + name, part) for name, part in _parts(thing)]
    return found


def _shared() -> dict[str, Any]:
    modules = {name: vars(module) for name, module in sys.modules.items() if name.startswith(ROOMS)}
    return {
        f"{name}.{key}": value
        for name, held in modules.items()
        for key, value in held.items()
        if isinstance(value, (dict, list, set, deque)) and not key.startswith("__")
    }


class Apart(nn.Module):
    """Hands on as many tensors as its input is long."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.layer(value).unbind(1))


class Together(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        return self.layer(torch.stack(value, 1))  # type: ignore[no-any-return]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output.mean(1) - target) ** 2).mean()


def _grown(schedule: Schedule, options: dict[str, Any]) -> dict[str, tuple[int, int]]:
    pipeline = Pipeline(
        [Apart(), Together()],
        _loss,
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **options,
    )
    sizes = []
    lengths = iter(
        range(82, 64, -1)
    )  # each step's inputs are shorter than all before, so that less is enough
    for _ in range(2):
        for _ in range(STEPS):
            pipeline.step(torch.ones(4, next(lengths), 4), torch.ones(4, 4))
            pipeline.flush()
        sizes.append(_sizes({"pipeline": pipeline, **_shared()}))
    return {
        way: (sizes[0][way], sizes[1][way])
        for way in sizes[1]
        # Another worker's function may have returned by now.
        if sizes[1][way] > sizes[0][way] and not way.endswith("hub.returned")
    }


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (schemes.zb_v(1, 2), {}),
        (schemes.chimera(2, 2), {"recompute": "layer", "autocast": torch.bfloat16}),
        (schemes.dapple(2, 2), {"dynamic_shapes": True, "compute_dtype": torch.bfloat16}),
        (schemes.pipedream(2), {}),
        (schemes.dapple(2, 2), {"barrier": False, "compress": True}),
    ],
    ids=str,
)
def test_nothing_grows_with_the_steps(
    schedule: Schedule, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in ("_KINDS", "_MICRO_BATCHES"):
        monkeypatch.setattr(known_shapes, most, KINDS)
    monkeypatch.setattr(first_steps, "_LOSS_KINDS", KINDS)
    monkeypatch.setattr(split_backward, "_MOST_SHAPES", KINDS)
    for grown in launch(_grown, schedule, options, workers=schedule.workers, transport="local"):
        assert not grown
