"""Micro-batches as the user has them, against one process: fewer samples than micro-batches, and so on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import momentum, run

F = torch.float64
SCHEMES = [
    schemes.gpipe(2, 4),
    schemes.dapple(2, 4),
    schemes.chimera(2, 4, concat="forward-doubling"),
    schemes.chimera(2, 4, concat="backward-halving"),
    schemes.hanayo(2, 4, waves=1),
]
MODES = ["none", "stage", "layer"]


class Packed(nn.Linear):
    """Hands on a dict, with something that has no gradient."""

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x).tanh(), "least": x.argmin(1)}


class Unpacked(nn.Linear):
    def forward(self, given: Any) -> Tensor:
        found: Tensor = super().forward(given["y"]) + given["least"][:, None]
        return found


def layers_of(schedule: Schedule) -> list[nn.Module]:
    torch.manual_seed(0)
    more = [nn.Linear(4, 4, dtype=F) for _ in range(schedule.stages - 2)]
    return [Packed(4, 4, dtype=F), Unpacked(4, 4, dtype=F), *more]


def numbers(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples + 1000 * seed), dtype=F)


COUNTS = (3, 8, 1, 3, 5, 1)


def _of_few_samples(layers: list[nn.Module], schedule: Schedule, mode: Any) -> Any:
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=momentum, recompute=mode)
    losses = []
    for samples in COUNTS:
        x = numbers(samples * pipeline.replicas).chunk(pipeline.replicas)[pipeline.replica]
        y = x.flip(1)
        losses += [pipeline.evaluate(x, y).loss, pipeline.step(x, y).loss]
    return losses, pipeline.model_state_dict()


def _in_one_process(layers: list[nn.Module], replicas: int) -> Any:
    model = nn.Sequential(*layers)
    optimizer = momentum(list(model.parameters()))
    losses = []
    for samples in COUNTS:
        x = numbers(samples * replicas)
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item()] * 2
    return losses, model.state_dict()


def same(found: Any, true: Any) -> None:
    assert found[0] == pytest.approx(true[0], rel=1e-10)
    for name, tensor in true[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.table
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_fewer_samples_than_micro_batches(schedule: Schedule, mode: Any) -> None:
    true = _in_one_process(layers_of(schedule), 1)
    for found in run(_of_few_samples, layers_of(schedule), schedule, mode):
        same(found, true)


@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_fewer_samples_than_micro_batches_on_replicas(transport: str) -> None:
    true = _in_one_process(layers_of(SCHEMES[1]), 2)
    job = layers_of(SCHEMES[1]), SCHEMES[1], "stage"
    for found in run(_of_few_samples, *job, workers=4, transport=transport):
        same(found, true)


def _none(layers: list[nn.Module], schedule: Schedule) -> None:
    x = numbers(0)
    Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=momentum).step(x, x)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="the mini-batch has no samples; give one or more"):
        run(_none, layers_of(SCHEMES[0]), SCHEMES[0])


def _ready(layers: list[nn.Module], schedule: Schedule, mode: Any, batches: Any, form: str) -> Any:
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=momentum, recompute=mode)
    first, last = 0 in pipeline.stages, schedule.stages - 1 in pipeline.stages
    losses, endless = [], iter([one for batch in batches for one in batch for _ in range(2)])
    for batch in batches:
        mine = [(x if first else None, y if last else None) for x, y in batch]
        if form == "iterator":
            once = [next(endless) for _ in range(2 * len(batch))][::2]
            losses += [
                pipeline.evaluate(micro_batches=batch).loss,
                pipeline.step(micro_batches=iter(once)).loss,
            ]
        elif first or last:
            losses += [pipeline.evaluate(micro_batches=mine).loss, pipeline.step(micro_batches=mine).loss]
        else:
            losses += [pipeline.evaluate().loss, pipeline.step().loss]
    return losses, pipeline.model_state_dict()


READY = [[3, 1, 2, 5], [2, 2, 2, 2], [1, 4, 4, 1], [3, 1, 2, 5]]


@pytest.mark.table
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", [*SCHEMES, schemes.dapple(4, 4)], ids=str)
def test_micro_batches_that_are_ready(schedule: Schedule, mode: Any) -> None:
    _are_exact(schedule, mode, "local")


def test_micro_batches_that_are_ready_between_processes() -> None:
    _are_exact(schemes.chimera(2, 4), "stage", "gloo")


def _are_exact(schedule: Schedule, mode: Any, transport: str) -> None:
    batches = [
        [(numbers(size, m), numbers(size, m).flip(1)) for m, size in enumerate(sizes)] for sizes in READY
    ]
    model = nn.Sequential(*layers_of(schedule))
    optimizer = momentum(list(model.parameters()))
    losses = []
    for batch in batches:
        x, y = (torch.cat(same) for same in zip(*batch, strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item()] * 2
    form = "iterator" if mode == "layer" else "where read"
    job = layers_of(schedule), schedule, mode, batches, form
    for found in run(_ready, *job, workers=schedule.workers, transport=transport):
        same(found, (losses, model.state_dict()))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([(8, 8)] * 3, [(8, 8)] * 3, "micro_batches has 3, and gpipe.* takes 4; give as many"),
        (
            [(8, 8), (8, 8), (8, 4), (8, 8)],
            None,
            "micro-batch 2 has 8 samples in its inputs and 4 in its tar",
        ),
        (
            [(2, None)] * 4,
            [(None, 2), (None, 1), (None, 3), (None, 2)],
            r"rank 0 have \[2, 2, 2, 2\] samples",
        ),
        ([(2, 2)] * 4, 8, "rank 1 was given a mini-batch and rank 0 micro_batches"),
        ([(2,)] * 4, None, r"each of micro_batches is \(inputs, targets\)"),
    ],
)
def test_micro_batches_that_do_not_fit_are_refused(first: Any, second: Any, message: str) -> None:
    def made(what: Any) -> dict[str, Any]:
        if isinstance(what, int):
            return {"inputs": numbers(what), "targets": numbers(what)}
        return {"micro_batches": [tuple(None if n is None else numbers(n) for n in each) for each in what]}

    job = made(first), made(first if second is None else second)
    with pytest.raises(ConfigError, match=message):
        run(_given, layers_of(SCHEMES[0]), job)


def _given(layers: list[nn.Module], each: Any) -> None:
    pipeline = Pipeline(layers, nn.functional.mse_loss, SCHEMES[0], optimizer=momentum)
    pipeline.step(**each[pipeline.worker])


class Takes(nn.Linear):
    """Takes keyword arguments: with samples, and without."""

    def forward(self, x: Tensor | None = None, *, mask: Tensor, scale: float, table: Tensor) -> Any:  # type: ignore[override]
        assert x is not None
        return super().forward(x * mask) * scale + table


class Only(Takes):
    """Takes nothing else."""

    def forward(self, *, x: Tensor, mask: Tensor, scale: float, table: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, mask=mask, scale=scale, table=table)


def _keyworded(layers: list[nn.Module], schedule: Schedule, mode: Any, only: bool, split: bool) -> Any:
    pipeline = Pipeline(
        deepcopy(layers), nn.functional.mse_loss, schedule, optimizer=momentum, recompute=mode,
        kwarg_dims={"mask": 0, "scale": None, "table": None, **({"x": 0} if only else {})},
    )  # fmt: skip
    losses = []
    for seed in range(2):
        x, y, kwargs = keywords(seed)
        given: dict[str, Any] = {"targets": y, "kwargs": {"x": x, **kwargs} if only else kwargs}
        given |= {} if only else {"inputs": x}
        losses.append(pipeline.evaluate(**given).loss)
        if split:
            rows = [slice(2 * m, 2 * m + 2) for m in range(4)]
            cut = [(x[r], y[r], {**kwargs, "mask": kwargs["mask"][r]}) for r in rows]
            losses.append(pipeline.step(micro_batches=cut).loss)
        else:
            losses.append(pipeline.step(**given).loss)
    return losses, pipeline.model_state_dict()


def keywords(seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    table = torch.arange(4, dtype=F)
    return (
        numbers(8, seed),
        numbers(8, seed + 1),
        {"mask": numbers(8, seed + 2) > 0, "scale": 0.5, "table": table},
    )


@pytest.mark.table
@pytest.mark.parametrize(
    ("mode", "only", "split"), [("none", False, True), ("stage", True, False), ("layer", False, False)]
)
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_keyword_arguments_of_the_first_layer(schedule: Schedule, mode: Any, only: bool, split: bool) -> None:
    torch.manual_seed(0)
    kind = Only if only else Takes
    more = [nn.Linear(4, 4, dtype=F) for _ in range(schedule.stages - 1)]
    layers: list[nn.Module] = [kind(4, 4, dtype=F), *more]
    found = run(_keyworded, layers, schedule, mode, only, split)
    optimizer = momentum([p for layer in layers for p in layer.parameters()])
    losses = []
    for seed in range(2):
        x, y, kwargs = keywords(seed)
        loss = nn.functional.mse_loss(nn.Sequential(*more)(Takes.forward(layers[0], x, **kwargs)), y)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item()] * 2
    for one in found:
        same(one, (losses, nn.Sequential(*layers).state_dict()))


def _with_outputs(layers: list[nn.Module], schedule: Schedule, mode: Any) -> Any:
    pipeline = Pipeline(layers, _changing, schedule, optimizer=momentum, recompute=mode)
    found = []
    for samples in (8, 3):
        x, y = numbers(samples), numbers(samples, 1)
        before = pipeline.model_state_dict()
        evaluation = pipeline.evaluate(x, y, outputs=True)
        step = pipeline.step(x, y, outputs=True)
        assert pipeline.step(x, y).outputs is None
        found.append((schedule.stages - 1 in pipeline.stages, before, x, evaluation.outputs, step.outputs))
    return found


def _changing(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.mul_(2), target)


@pytest.mark.table
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_outputs_of_a_step(schedule: Schedule, mode: Any) -> None:
    model = nn.Sequential(*layers_of(schedule))
    for told in run(_with_outputs, layers_of(schedule), schedule, mode):
        for has_last, state, x, evaluated, stepped in told:
            model.load_state_dict(state)
            if has_last:
                with torch.no_grad():
                    torch.testing.assert_close(evaluated, model(x), rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(stepped, evaluated, rtol=1e-10, atol=1e-12)
            else:
                assert evaluated is None
                assert stepped is None


def test_without_a_flush_a_step_has_no_outputs() -> None:
    schedule = schemes.pipedream(2)
    with pytest.raises(ConfigError, match=r"pipedream ends a mini-batch in later steps.* evaluate\(outputs"):
        run(_with_outputs, layers_of(schedule), schedule, "none")
