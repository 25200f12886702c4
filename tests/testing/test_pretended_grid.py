"""Every scheme on the pretended device, with what changes the engine's way: numbers are as on a CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.testing.strict_nccl.device import Device
from counterflow.testing.strict_nccl.operator_modes import computing
from counterflow.training.trial import small_trial
from counterflow.verification.reference import Staleness

SCHEDULES = [
    schemes.gpipe(2, 3),
    schemes.dapple(2, 3),
    schemes.interleaved(2, 4, chunks=2),
    schemes.interleaved_zb(2, 4, chunks=2),
    schemes.zb_h1(2, 3),
    schemes.zb_h2(2, 4),
    schemes.zb_v(2, 3),
    schemes.v_half(2, 4),
    schemes.v_min(2, 4),
    schemes.hanayo(2, 3, waves=2),
    schemes.gems(2, 2),
    schemes.chimera(2, 4, concat="direct"),
    schemes.chimera(2, 4, concat="forward-doubling"),
    schemes.chimera(2, 4, concat="backward-halving"),
    schemes.chimera(2, 2, split=True),
    schemes.mixpipe(2, 4, injected=2),
    schemes.dualpipe(2, 4),
    schemes.dualpipe_v(2, 4),
    schemes.pipedream(2, 4),
    schemes.pipedream_2bw(2, 2),
    schemes.wpipe(2, 2),
]

Options = dict[str, Any]


def options() -> Iterator[Options]:
    """Each pair of two options' values is in one of them.

    Those of a schedule, each fourth, have every recomputation, barrier, sharding and precision among them.
    """
    recompute = itertools.cycle(("none", "stage", "layer"))
    for autocast, (barrier, zero_stage), (skips, clip_norm) in itertools.product(
        (None, torch.bfloat16), ((True, 0), (False, 0), (True, 1)), ((False, 0.1), (True, None))
    ):
        yield {
            "recompute": next(recompute),
            "autocast": autocast,
            "barrier": barrier,
            "zero_stage": zero_stage,
            "clip_norm": clip_norm,
            "skips": skips,
        }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.dropout(self.linear(self.norm(x)).relu())
        return found


class Gives(Block):
    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.save = skip.saver()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.save(x))


class Takes(Block):
    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.load = skip.loader()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) + self.load()
        return found


def blocks(count: int, *, skips: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    if not skips:
        return [Block() for _ in range(count)]
    skip = cf.Skip("entry")
    return [Gives(skip), *(Block() for _ in range(count - 2)), Takes(skip)]


def work(schedule: Schedule, layers: list[nn.Module], samples: int, options: Options) -> Any:
    pipeline = cf.Pipeline(
        copy.deepcopy(layers),
        nn.functional.mse_loss,
        schedule,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        **options,
    )
    draws = torch.Generator().manual_seed(5)
    told: list[Any] = []
    for number in range(2 if schedule.synchronous else 4):
        inputs, targets = (torch.randn(samples, 4, generator=draws) for _ in range(2))
        if pipeline.device.type != "cpu":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        outputs = schedule.synchronous and number == 1
        step = pipeline.step(inputs, targets, outputs=outputs)
        told.append((step.loss, step.grad_norm))
        if outputs and step.outputs is not None:
            told.append(step.outputs.cpu())
    told += [(step.loss, step.grad_norm) for step in pipeline.flush()]
    told.append(pipeline.evaluate(inputs, targets).loss)
    told.append(pipeline.predict(inputs).cpu())
    return told, pipeline.model_state_dict()


def trained(transport: Any, *job: Any) -> list[Any] | str:
    """What each worker told, or why it was refused."""
    try:
        return cf.launch(work, *job, workers=2, transport=transport)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("turn", range(4))
def test_it_is_as_on_a_cpu(turn: int) -> None:
    every = list(options())
    for number, schedule in enumerate(SCHEDULES[turn::4]):
        for some in every[number % 4 :: 4]:
            chosen = dict(some)
            if not schedule.synchronous and not chosen["barrier"]:
                chosen["barrier"] = True
            layers = blocks(schedule.stages + 1, skips=chosen.pop("skips"))
            samples = 2 * schedule.micro_batches + 1
            job = schedule, layers, samples, chosen
            expected, found = trained("local", *job), trained("strict-nccl", *job)
            case = f"{schedule} {some}"
            if isinstance(expected, str):
                assert found == expected, case
            else:
                assert not isinstance(found, str), f"{case}: {found}"
                same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6, equal_nan=True)
                same(found, expected, msg=f"{case}: {{}}".format)


@pytest.mark.parametrize(
    "schedule", [schemes.dapple(2, 3), schemes.pipedream_2bw(2, 2), schemes.chimera(2, 2)], ids=str
)
def test_one_process_on_a_device_trains_what_the_host_has(schedule: Schedule) -> None:
    trial = small_trial(schedule, steps=2, tied=False, dropout=0.0)
    alone: dict[str, Any] = {"staleness": Staleness.of(schedule, [2])}
    expected = [step.loss for step in trial.one_process(**alone).steps]
    device = Device(0, lambda _launches, _why: None)
    with computing(device.stream, device):
        found = trial.one_process(device=device.handle, **alone)
    assert [step.loss for step in found.steps] == pytest.approx(expected, rel=1e-12)
