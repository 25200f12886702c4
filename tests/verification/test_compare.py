"""How far two trainings are from each other: literal numbers, and what is no number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from counterflow.runtime.execution.step import Step
from counterflow.verification.training_agreement import TrainingAgreement, TrainingResult, compare

D = torch.float64


def step(loss: float, norm: float) -> Step:
    return Step(0, loss, norm, 4, 0.0, 0)


def tensors(*values: float, dtype: torch.dtype = D) -> dict[str, Tensor]:
    return {
        f"{index}.weight": torch.tensor([value, 0.5 * value], dtype=dtype)
        for index, value in enumerate(values)
    }


THEIRS = TrainingResult([step(2.0, 5.0), step(1.0, 4.0)], 0.5, tensors(1.0, 2.0), tensors(4.0, 8.0))


def errors(found: TrainingAgreement) -> tuple[float, float, float, float]:
    return found.loss_error, found.norm_error, found.gradient_error, found.weight_error


def test_the_same_numbers_agree() -> None:
    found = compare(THEIRS, [THEIRS, THEIRS])
    assert errors(found) == (0.0, 0.0, 0.0, 0.0)
    assert (found.tolerance, found.ok) == (1e-10, True)


def test_errors_are_relative_to_one_process() -> None:
    ours = TrainingResult([step(2.5, 5.0), step(1.0, 3.0)], 0.5, tensors(1.0, 2.5), tensors(5.0, 8.0))
    assert errors(compare(THEIRS, [THEIRS, ours])) == (0.25, 0.25, 0.25, 0.25)
    assert errors(compare(THEIRS, [ours, THEIRS])) == (0.25, 0.25, 0.25, 0.25)
    assert errors(compare(THEIRS, [replace(THEIRS, evaluation=0.75)])) == (0.5, 0.0, 0.0, 0.0)
    second = replace(THEIRS, steps=[step(2.0, 5.0), step(3.0, 4.0)])
    assert errors(compare(THEIRS, [second])) == (2.0, 0.0, 0.0, 0.0)


def test_small_tensors_are_held_to_a_thousandth_of_the_largest() -> None:
    theirs = replace(
        THEIRS, gradients={"large": torch.tensor([-8.0], dtype=D), "small": torch.tensor([1e-9], dtype=D)}
    )
    ours = replace(
        THEIRS, gradients={"large": torch.tensor([-8.0], dtype=D), "small": torch.tensor([4e-3], dtype=D)}
    )
    assert compare(theirs, [ours]).gradient_error == pytest.approx(0.5)


def test_nothing_at_all_is_no_error() -> None:
    zero = torch.zeros(2, dtype=D)
    state = {"weight": zero, "empty": torch.zeros(0), "extra": "what is no tensor"}
    nothing = TrainingResult([step(0.0, 0.0)], 0.0, {"weight": zero}, state)  # type: ignore[arg-type]
    assert errors(compare(nothing, [nothing])) == (0.0, 0.0, 0.0, 0.0)
    one = replace(nothing, gradients={"weight": zero + 1e-30}, steps=[step(1e-30, 2e-30)])
    assert errors(compare(nothing, [one])) == pytest.approx((1.0, 2.0, 1.0, 0.0))


def test_a_training_without_numbers_agrees() -> None:
    empty = TrainingResult([], 0.0, {"weight": torch.zeros(0, dtype=D)}, {"weight": torch.zeros(0, dtype=D)})
    assert errors(compare(empty, [empty])) == (0.0, 0.0, 0.0, 0.0)


def test_complex_and_integer_tensors_are_compared() -> None:
    theirs = replace(
        THEIRS, state={"c": torch.tensor([3 + 4j], dtype=torch.complex128), "n": torch.tensor([4])}
    )
    ours = replace(
        THEIRS, state={"c": torch.tensor([3 + 9j], dtype=torch.complex128), "n": torch.tensor([4])}
    )
    assert compare(theirs, [ours]).weight_error == 1.0
    ours = replace(THEIRS, state={**theirs.state, "n": torch.tensor([5])})
    assert compare(theirs, [ours]).weight_error == 0.25


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_agree(wrong: float) -> None:
    worst = {
        "loss_error": replace(THEIRS, steps=[step(wrong, 5.0), step(1.0, 4.0)]),
        "norm_error": replace(THEIRS, steps=[step(2.0, wrong), step(1.0, 4.0)]),
        "gradient_error": replace(THEIRS, gradients=tensors(wrong, 2.0)),
        "weight_error": replace(THEIRS, state=tensors(wrong, 8.0)),
    }
    for name, ours in worst.items():
        for found in (
            compare(THEIRS, [ours]),
            compare(THEIRS, [ours, THEIRS]),
            compare(THEIRS, [THEIRS, ours]),
        ):
            assert not found.ok
            assert getattr(found, name) == math.inf
    assert not compare(THEIRS, [replace(THEIRS, evaluation=wrong)]).ok


def test_a_worker_that_lacks_something_is_told() -> None:
    with pytest.raises(KeyError, match=r"the pipeline's state has no 1\.weight"):
        compare(THEIRS, [replace(THEIRS, state=tensors(4.0))])
    with pytest.raises(ValueError, match="longer"):
        compare(THEIRS, [replace(THEIRS, steps=THEIRS.steps[:1])])


def test_a_gradient_that_no_worker_has_is_told() -> None:
    first, *_ = THEIRS.gradients
    one = replace(THEIRS, gradients={first: THEIRS.gradients[first]})
    rest = replace(THEIRS, gradients={n: g for n, g in THEIRS.gradients.items() if n != first})
    assert compare(THEIRS, [one, rest]).ok  # together they have all, as workers with stages of their own do
    with pytest.raises(KeyError, match=f"no worker has a gradient of {first}"):
        compare(THEIRS, [rest])
    zero = replace(THEIRS, gradients=THEIRS.gradients | {first: torch.zeros_like(THEIRS.gradients[first])})
    assert compare(zero, [rest]).ok  # a hook took it away


def test_tolerances_go_by_the_dtype_of_gradients() -> None:
    for dtype, limit in (
        (D, 1e-10),
        (torch.complex128, 1e-10),
        (torch.float32, 1e-5),
        (torch.bfloat16, 1e-2),
    ):
        same = replace(THEIRS, gradients={"weight": torch.ones(2, dtype=dtype)})
        assert compare(same, [same]).tolerance == limit
