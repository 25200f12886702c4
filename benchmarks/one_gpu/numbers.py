"""Workers as threads of one process on one GPU: losses, norms, gradients and weights are one process's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.models.gpt import GPTConfig
from counterflow.models.loss import next_token_loss
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import small_trial
from counterflow.verification.training_agreement import TrainingAgreement
from one_gpu import Report, case_name

s = cf.schemes

LOWER = {True: 3e-2, False: 0.2}
"""Maximum relative error where a part is computed in 16 bits, in synchronous and in asynchronous schemes:
kernels depend on the number of samples, and asynchronous schemes scale losses of unequal micro-batches
elsewhere."""

WAIT_SECONDS = 20.0
"""Time that a worker waits for another, so that a hang leaves time for other cases."""

SCHEDULES = (
    s.dapple(2, 3),
    s.chimera(2, 4, concat="direct"),
    s.zb_v(2, 3),
    s.interleaved(2, 4, chunks=2),
    s.pipedream_2bw(2, 2),
    s.hanayo(2, 3, waves=2),
    s.gpipe(2, 3),
    s.zb_h1(2, 3),
    s.zb_h2(2, 4),
    s.dualpipe_v(2, 4),
    s.chimera(2, 4, concat="forward-doubling"),
    s.chimera(2, 4, concat="backward-halving"),
    s.pipedream(2, 4),
    s.wpipe(2, 2),
    s.dualpipe(2, 4),
    s.mixpipe(2, 4, injected=2),
    s.gems(2, 2),
    s.interleaved_zb(2, 4, chunks=2),
    s.v_half(2, 4),
    s.v_min(2, 4),
    s.chimera(2, 2, split=True),
    s.chimera(4, 4),
    s.dapple(4, 6),
)
"""All schemes, those first that have most in them."""

SLICED = (
    s.gpipe(stages=2, micro_batches=2, slices=2),
    s.dapple(stages=2, micro_batches=2, slices=2),
    s.chimera(stages=2, micro_batches=2, slices=2),
    s.zb_h1(stages=2, micro_batches=2, slices=3),
)

PRECISIONS: tuple[dict[str, Any], ...] = (
    {"autocast": "bfloat16"},
    {"compute_dtype": "bfloat16"},
    {"autocast": "float16", "loss_scale": 2.0**12},
)

Case = tuple[Schedule, int, dict[str, Any]]
"""A schedule, a number of replicas, and options."""


def cases() -> Iterator[Case]:
    """Cases, those first that differ most."""
    for schedule in SCHEDULES:
        yield schedule, 1, {}
    recompute = itertools.cycle(("stage", "layer"))
    precision = itertools.cycle(PRECISIONS)
    for schedule in SCHEDULES:
        yield schedule, 1, {"recompute": next(recompute)}
        yield schedule, 1, dict(next(precision))
    for schedule in SLICED:
        yield schedule, 1, {}
    for schedule in (s.dapple(2, 3), s.chimera(2, 4), s.zb_v(2, 3), s.interleaved(2, 4, chunks=2)):
        yield schedule, 1, {"barrier": False, "clip_norm": None}
        yield schedule, 2, {"zero_stage": 1}
        yield schedule, 2, {"sync": "eager", "recompute": next(recompute)}
    for schedule in SCHEDULES:
        yield schedule, 1, {"recompute": next(recompute)} | next(precision)


def verified(report: Report, case: Case) -> tuple[str, str, dict[str, Any]]:
    """Train in threads and in one process on the same device, and compare."""
    schedule, replicas, options = case
    lower = bool({"autocast", "compute_dtype"} & options.keys())
    trial = small_trial(
        schedule,
        replicas=replicas,
        steps=3 if schedule.synchronous else 6,
        dtype=torch.float32 if lower else torch.float64,
        dropout=0.0 if lower or schedule.workload.slices > 1 else 0.1,
    )
    where = {"transport": "strict-nccl"} if report.pretend else {"transport": "local", "device": "cuda"}
    found: TrainingAgreement = trial.verify(**where, timeout_seconds=WAIT_SECONDS, **options)
    errors = found.loss_error, found.norm_error, found.gradient_error, found.weight_error
    limit = LOWER[schedule.synchronous] if lower else found.tolerance
    verdict = "agrees" if max(errors) <= limit else "differs"
    return verdict, "" if verdict == "agrees" else str(found), {"error": max(errors), "limit": limit}


# -- skip connections, outputs, predictions, generation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.linear(self.norm(x)).relu()
        return found


class Saves(Block):
    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.save = skip.saver()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.save(x))


class Loads(Block):
    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.load = skip.loader()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) + self.load()
        return found


class Plain(nn.Module):
    """The same layers in one process."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        entry = x
        for layer in self.layers:
            x = Block.forward(layer, x)
        return x + entry


def skip_layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    skip = cf.Skip("entry")
    layers = [Saves(skip), *(Block() for _ in range(count - 2)), Loads(skip)]
    return [layer.double() for layer in layers]


def _with_skips(schedule: Schedule, layers: list[nn.Module], batches: Any) -> dict[str, Any]:
    adam = partial(torch.optim.AdamW, lr=0.01)
    pipeline = cf.Pipeline(copy.deepcopy(layers), nn.functional.mse_loss, schedule, optimizer=adam)
    found: dict[str, Any] = {"losses": []}
    for batch in batches:
        on_gpu = pipeline.device.type == "cuda"
        step = pipeline.step(*(t.pin_memory() if on_gpu else t for t in batch), outputs=True)
        found["losses"].append(step.loss)
        if step.outputs is not None:
            found["outputs"] = step.outputs.cpu()
    found["evaluation"] = pipeline.evaluate(*batches[0]).loss
    found["prediction"] = pipeline.predict(batches[0][0]).cpu()
    pipeline.close()
    return found


def with_skips(report: Report, schedule: Schedule) -> tuple[str, str, dict[str, Any]]:
    """Skip connections, outputs of a step, an evaluation and a prediction."""
    layers = skip_layers(schedule.stages + 1)
    draws = torch.Generator().manual_seed(5)
    shape = 2 * schedule.micro_batches + 1, 8
    batches = [
        tuple(torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2)) for _ in range(3)
    ]
    plain = Plain(copy.deepcopy(layers)).to(report.device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    losses, outputs = [], None
    for inputs, targets in batches:
        optimizer.zero_grad()
        outputs = plain(inputs.to(report.device))
        loss = nn.functional.mse_loss(outputs, targets.to(report.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        prediction = plain(batches[0][0].to(report.device)).cpu()
        evaluation = nn.functional.mse_loss(prediction, batches[0][1]).item()
    where: dict[str, Any] = {"transport": "strict-nccl" if report.pretend else "local"}
    where |= {"device": None if report.pretend else "cuda", "timeout_seconds": WAIT_SECONDS}
    every = cf.launch(_with_skips, schedule, layers, batches, workers=schedule.workers, **where)
    errors = [abs(a - b) for found in every for a, b in zip(found["losses"], losses, strict=True)]
    assert outputs is not None
    for found in every:
        errors.append(abs(found["evaluation"] - evaluation))
        errors.append(float((found["prediction"] - prediction).abs().max()))
        if "outputs" in found:
            errors.append(float((found["outputs"] - outputs.detach().cpu()).abs().max()))
    verdict = "agrees" if max(errors) < 1e-9 else "differs"
    return verdict, "", {"error": max(errors)}


def _generated(schedule: Schedule, model: list[nn.Module], prompt: Tensor) -> Tensor:
    pipeline = cf.Pipeline(copy.deepcopy(model), next_token_loss, schedule, optimizer=torch.optim.SGD)
    return pipeline.generate(prompt if 0 in pipeline.stages else None, tokens=8).cpu()


def generates(report: Report, schedule: Schedule) -> tuple[str, str, dict[str, Any]]:
    """The most likely tokens after a prompt."""
    config = GPTConfig(vocabulary=19, positions=24, hidden=16, heads=4, layers=3, dropout=0.0)
    torch.manual_seed(0)
    layers = [layer.double() for layer in config.build()]
    for weight in nn.ModuleList(layers).parameters():
        nn.init.normal_(weight, std=0.4)
    prompt = torch.randint(19, (5, 7), generator=torch.Generator().manual_seed(3))
    plain = nn.Sequential(*copy.deepcopy(layers)).to(report.device).eval()
    expected = prompt.to(report.device)
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat([expected, plain(expected)[:, -1].argmax(-1, keepdim=True)], 1)
    where: dict[str, Any] = {"transport": "local", "device": None if report.pretend else "cuda"}
    where |= {"workers": schedule.workers, "timeout_seconds": WAIT_SECONDS}
    every = cf.launch(_generated, schedule, layers, prompt, **where)
    same = all(torch.equal(found, expected.cpu()) for found in every)
    return "agrees" if same else "differs", "", {}


def rows(report: Report) -> None:
    """All cases until the part's time is over."""
    every: list[tuple[str, Callable[[], Any]]] = [
        (case_name(*case), partial(verified, report, case)) for case in cases()
    ]
    further = [
        (f"skips, outputs, predict: {schedule}", partial(with_skips, report, schedule))
        for schedule in SCHEDULES[:4]
    ]
    further += [
        (f"generate: {schedule}", partial(generates, report, schedule))
        for schedule in (s.dapple(2, 2), s.zb_v(2, 4))
    ]
    first = len(SCHEDULES)
    for name, run in report.cases([*every[:first], *further, *every[first:]]):
        report.case(name, run)
