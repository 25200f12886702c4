"""Pipelines against one process: losses, norms, gradients and weights, on threads with strict sends.

The whole grid of `benchmarks/agreement_grid.py` is a script; here is what covers every scheme, option and
mode at least once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import TrialTraining, small_trial
from counterflow.verification.training_agreement import TrainingAgreement, TrainingResult

SCHEDULES: list[Schedule] = [
    *(schemes.gpipe(d, n) for d, n in ((2, 1), (4, 5))),
    schemes.gpipe(2, 4, groups=2),
    schemes.gpipe(4, 3, groups=2),
    *(schemes.dapple(d, n) for d, n in ((2, 3), (4, 3), (4, 4))),
    *(schemes.interleaved(w, n, chunks=c) for w, n, c in ((2, 3, 2), (4, 4, 2), (2, 5, 4))),
    *(schemes.gems(d, n) for d, n in ((2, 2), (4, 1), (4, 5))),
    *(schemes.chimera(d, n) for d, n in ((2, 1), (2, 5), (4, 3), (4, 4), (4, 9), (8, 3))),
    schemes.chimera(4, 4, pairs=2),
    *(
        schemes.chimera(d, n, pairs=f, concat=concat)
        for concat in ("forward-doubling", "backward-halving")
        for d, n, f in ((2, 4, 1), (4, 8, 1), (4, 9, 1), (4, 8, 2))
    ),
    *(
        schemes.mixpipe(4, n, injected=k, early_forwards=g)
        for n, k, g in ((4, 2, 0), (4, 2, 1), (4, 4, 0), (3, 2, 0), (6, 4, 0), (9, 2, 1))
    ),
    schemes.mixpipe(4, 8, injected="max"),
    schemes.mixpipe(6, 6, injected=2, early_forwards=1, asymmetric=True),
    *(schemes.hanayo(w, n, waves=v) for w, n, v in ((2, 2, 1), (2, 3, 2), (2, 4, 3), (4, 4, 1), (4, 6, 2))),
]

SPLIT: list[Schedule] = [
    *(schemes.zb_h1(d, n) for d, n in ((2, 1), (4, 6))),
    *(schemes.zb_h2(d, n) for d, n in ((2, 3), (4, 8))),
    *(schemes.zb_v(w, n) for w, n in ((2, 4), (3, 2))),
    schemes.v_half(4, 5),
    schemes.v_min(3, 5),
    *(schemes.interleaved_zb(w, n) for w, n in ((2, 4), (2, 3))),
    schemes.dualpipe(4, 8),
    schemes.dualpipe_v(2, 5),
    schemes.dapple(4, 6, split=True),
    schemes.interleaved(2, 4, chunks=2, split=True),
    schemes.gems(4, 5, split=True),
    schemes.chimera(4, 4, split=True),
    schemes.chimera(4, 8, pairs=2, split=True),
    schemes.chimera(4, 8, concat="forward-doubling", split=True),
    schemes.chimera(4, 8, concat="backward-halving", split=True),
    schemes.mixpipe(4, 6, injected=2, split=True),
    schemes.hanayo(2, 4, waves=2, split=True),
]


@cache
def trial(text: str, replicas: int, dtype: torch.dtype) -> tuple[TrialTraining, TrainingResult]:
    """A schedule's trial and what one process makes of it."""
    schedule = loads(text, "trial")
    made = small_trial(schedule, replicas=replicas, dtype=dtype, steps=2)
    return made, made.one_process()


def agreement(
    schedule: Schedule,
    *,
    replicas: int = 1,
    dtype: torch.dtype = torch.float64,
    transport: str = "strict-local",
    **options: Any,
) -> TrainingAgreement:
    made, reference = trial(dumps(schedule), replicas, dtype)
    return made.verify(transport=transport, reference=reference, **options)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_scheme_agrees_with_one_process(schedule: Schedule) -> None:
    found = agreement(schedule)
    assert found.ok, found


@pytest.mark.parametrize("schedule", SPLIT, ids=str)
def test_split_backwards_agree(schedule: Schedule) -> None:
    found = agreement(schedule)
    assert found.ok, found


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize(
    "schedule",
    [
        schemes.zb_h1(3, 4),
        schemes.zb_v(2, 4),
        schemes.dualpipe(2, 4),
        schemes.chimera(4, 8, concat="forward-doubling", split=True),
        schemes.chimera(4, 4, concat="backward-halving", split=True),
    ],
    ids=str,
)
def test_recomputation_agrees_with_split_backwards(schedule: Schedule, recompute: str) -> None:
    found = agreement(schedule, recompute=recompute)
    assert found.ok, found


@pytest.mark.parametrize("sync", ["end", "eager"])
def test_two_replicas_agree_with_split_backwards(sync: str) -> None:
    found = agreement(schemes.zb_v(2, 3), replicas=2, sync=sync)
    assert found.ok, found


@pytest.mark.table
@pytest.mark.parametrize("sync", ["end", "eager", "eager-opt"])
@pytest.mark.parametrize(
    "schedule",
    [schemes.dapple(4, 5), schemes.chimera(4, 4), schemes.gems(4, 3), schemes.hanayo(2, 3, waves=1)],
    ids=str,
)
def test_two_replicas_agree(schedule: Schedule, sync: str) -> None:
    found = agreement(schedule, replicas=2, sync=sync)
    assert found.ok, found


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize(
    "schedule",
    [
        schemes.gpipe(4, 3),
        schemes.interleaved(2, 3, chunks=2),
        schemes.chimera(4, 6),
        schemes.chimera(4, 8, concat="forward-doubling"),
        schemes.chimera(4, 8, concat="backward-halving"),
        schemes.mixpipe(4, 4, injected=2, early_forwards=1),
        schemes.hanayo(2, 4, waves=2),
    ],
    ids=str,
)
def test_recomputation_agrees(schedule: Schedule, recompute: str) -> None:
    found = agreement(schedule, recompute=recompute)
    assert found.ok, found


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", [schemes.dapple(2, 3), schemes.chimera(4, 4)], ids=str)
def test_single_precision_agrees(schedule: Schedule, recompute: str) -> None:
    found = agreement(schedule, replicas=2, dtype=torch.float32, recompute=recompute)
    assert found.tolerance == 1e-5
    assert found.ok, found


def test_buffered_sends_agree() -> None:
    assert agreement(schemes.chimera(4, 8), transport="local").ok


def test_dynamic_shapes_agree() -> None:
    assert agreement(schemes.chimera(4, 4), dynamic_shapes=True).ok


def test_an_edited_schedule_trains() -> None:
    text = dumps(schemes.gpipe(2, 3))
    last_in_first_out = '"B2.0", "B1.0", "B0.0"'
    assert last_in_first_out in text
    schedule = loads(text.replace(last_in_first_out, '"B0.0", "B2.0", "B1.0"'), "edited")
    assert schedule.orders != schemes.gpipe(2, 3).orders
    found = agreement(schedule)
    assert found.ok, found


@pytest.mark.parametrize(
    ("schedule", "backward"),
    [(schemes.dapple(2, 3), "B1.1"), (schemes.chimera(2, 2, concat="backward-halving"), "B0.1:0/2")],
    ids=str,
)
def test_some_backwards_of_a_stage_may_be_split(schedule: Schedule, backward: str) -> None:
    text = dumps(schedule)
    assert f'"{backward}"' in text
    split = backward.replace("B", "I"), backward.replace("B", "W")
    schedule = loads(text.replace(f'"{backward}"', '"{}", "{}"'.format(*split)), "edited")
    found = agreement(schedule)
    assert found.ok, found


@pytest.mark.parametrize("field", ["loss_error", "norm_error", "gradient_error", "weight_error"])
def test_each_error_alone_is_a_disagreement(field: str) -> None:
    none = TrainingAgreement(
        loss_error=0.0, norm_error=0.0, gradient_error=0.0, weight_error=0.0, tolerance=1e-5
    )
    assert none.ok
    assert replace(none, **{field: 1e-5}).ok
    assert not replace(none, **{field: 1.001e-5}).ok
    assert not replace(none, **{field: float("nan")}).ok


def test_weights_do_not_agree_when_the_pipeline_is_wrong() -> None:
    schedule = schemes.dapple(2, 3)
    made, reference = trial(dumps(schedule), 1, torch.float64)
    found = made.verify(clip_norm=None, reference=reference)  # the reference clips
    assert not found.ok
    assert found.norm_error > found.tolerance  # from the second step on
    assert found.weight_error > found.tolerance
