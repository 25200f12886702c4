"""A case of a user of another system: the same training by one plain process and by a pipeline.

The process knows nothing of this project: it calls the layers one after another on the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from counterflow import LossSum, Pipeline, launch, schemes
from counterflow.schedule.ir import Schedule

F = torch.float64
STEPS = 2
"""The second one has the optimiser's memory of the first."""
MODES = ("none", "stage", "layer")

SCHEMES: dict[int, list[Schedule]] = {
    2: [
        schemes.gpipe(2, 4),
        schemes.gpipe(2, 4, groups=2),
        schemes.dapple(2, 4),
        schemes.interleaved(2, 4, chunks=2),
        schemes.gems(2, 4),
        schemes.chimera(2, 4),
        schemes.chimera(2, 8, concat="forward-doubling"),
        schemes.chimera(2, 8, concat="backward-halving"),
        schemes.hanayo(2, 4, waves=1),
        schemes.zb_h1(2, 4),
        schemes.zb_v(2, 4),
        schemes.v_min(2, 4),
        schemes.dualpipe_v(2, 4),
        schemes.chimera(2, 8, concat="backward-halving", split=True),
    ],
    4: [schemes.dapple(4, 8), schemes.chimera(4, 4, pairs=2), schemes.mixpipe(4, 8), schemes.zb_h2(4, 8)],
}
"""By the number of workers; none has more than 4 stages."""


@dataclass(frozen=True)
class Given:
    """A mini-batch, and its micro-batches if they are ready."""

    inputs: Any
    targets: Any = None
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """What a user brings.

    Attributes:
        layers: makes the layers, four or more; the same at every call.
        given: the mini-batch of a step; 16 samples.
        loss: of output and target; None: the last layer gives it.
        options: of the pipeline.
        halves: whether what the layers do allows that a micro-batch is halved.
        modes: of recomputation, that it allows.
    """

    layers: Callable[[], list[nn.Module]]
    given: Callable[[int], Given]
    loss: Callable[[Any, Any], Any] | None = nn.functional.mse_loss
    options: Mapping[str, Any] = field(default_factory=dict)
    halves: bool = True
    modes: tuple[str, ...] = MODES


Told = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses, gradient norms, weights."""


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With decay, so that a parameter without a gradient must not be touched."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def alone(case: Case) -> Told:
    """One process."""
    model = nn.ModuleList(case.layers())
    optimizer = adamw(list(model.parameters()))
    losses, norms = [], []
    for step in range(STEPS):
        given = case.given(step)
        value = model[0](given.inputs, **(given.kwargs or {}))
        for layer in model[1:]:
            value = layer(value)
        found = value if case.loss is None else case.loss(value, given.targets)
        if isinstance(found, LossSum):
            found = found.sum / found.weight
        if isinstance(found, tuple):
            found = found[0]
        if not isinstance(found, Tensor):
            found = found["loss"] if isinstance(found, dict) else found.loss
        optimizer.zero_grad()
        found.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(found.detach()))
    return losses, norms, model.state_dict()


def piped(case: Case, pairs: Sequence[tuple[Schedule, Any]]) -> list[Told]:
    """What one worker found with each schedule and recomputation; named by the model's own names."""
    found = []
    for schedule, mode in pairs:
        with Pipeline(
            nn.ModuleList(case.layers()),
            case.loss,
            schedule,
            optimizer=adamw,
            clip_norm=1.0,
            recompute=mode,
            list_layers=list,  # type: ignore[arg-type]
            digest_every=1,
            **case.options,
        ) as pipeline:
            steps = []
            for number in range(STEPS):
                given = case.given(number)
                steps.append(pipeline.step(given.inputs, given.targets, kwargs=given.kwargs))
            found.append(([s.loss for s in steps], [s.grad_norm for s in steps], pipeline.model_state_dict()))
    return found


def agrees(
    case: Case,
    workers: int,
    *,
    every: bool = False,
    schedules: Sequence[Schedule] | None = None,
    turn: int | None = None,
    by_name: Callable[..., Any] | None = None,
) -> None:
    """A case gives the same numbers in a pipeline, whatever the schedule and the recomputation.

    Args:
        case: what is trained.
        workers: of the schedules.
        schedules: of that many workers; None: all.
        turn: number of the case, of which each runs in half of all schedules: every second one. None: in all.
        every: whether each schedule runs in every recomputation; else they take turns.
        by_name: trains the case in processes, which have to find it by a name.
    """
    if schedules is None:
        schedules = SCHEMES[workers] if turn is None else SCHEMES[workers][turn % 2 :: 2]
    if not case.halves:
        schedules = [one for one in schedules if all(op.parts == 1 for op in one.ops())]
    losses, norms, state = alone(case)
    if every:
        names = [(schedule, mode) for schedule in schedules for mode in case.modes]
    else:
        names = list(zip(schedules, case.modes * len(schedules), strict=False))
    if by_name is None:
        rows = launch(piped, case, names, workers=workers, transport="local", timeout_seconds=60)
    else:
        rows = launch(by_name, names, workers=workers, transport="gloo", timeout_seconds=60)
    for row in rows:
        for name, (ours, our_norms, ours_after) in zip(names, row, strict=True):
            for told, true in ((ours, losses), (our_norms, norms)):
                torch.testing.assert_close(
                    torch.tensor(told, dtype=F),
                    torch.tensor(true, dtype=F),
                    rtol=1e-10,
                    atol=1e-12,
                    msg=partial("{}: {}".format, name),
                )
            assert ours_after.keys() == state.keys(), name
            for key, tensor in state.items():
                torch.testing.assert_close(
                    ours_after[key],
                    tensor,
                    rtol=1e-9,
                    atol=1e-11,
                    msg=partial("{}, {}: {}".format, name, key),
                )


def numbers(step: int, *shape: int) -> Tensor:
    """Some numbers of a step's own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=F)


def seeded(make: Callable[[], list[nn.Module]]) -> Callable[[], list[nn.Module]]:
    """The same layers at every call, in double precision."""

    def made() -> list[nn.Module]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return [layer.to(F) for layer in make()]

    return made
