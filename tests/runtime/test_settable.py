"""Attributes of a pipeline that are set: those that count, and options, which would change nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import counterflow as cf
from counterflow.execution import Flat
from counterflow.runtime.pipeline import PARAMETERS
from counterflow.runtime.settable import SETTABLE

X = torch.ones(4, 2)


class Derived(cf.Pipeline):
    def noted(self, note: str) -> str:
        self.note = note
        return self.note


def made(kind: type[cf.Pipeline] = cf.Pipeline) -> cf.Pipeline:
    return kind(
        [nn.Linear(2, 2)],
        nn.MSELoss(),
        "gpipe(stages=1, micro_batches=2)",
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


@pytest.fixture
def pipeline() -> cf.Pipeline:
    found: list[cf.Pipeline] = []
    cf.launch(lambda: found.append(made()), workers=1, transport="local")
    return found[0]


def test_options_are_given_when_a_pipeline_is_made(pipeline: cf.Pipeline) -> None:
    for name in [*Flat.__annotations__, *PARAMETERS]:
        if name == "options":
            continue
        with pytest.raises(
            AttributeError, match=rf"^{name} is an option .* give it to cf\.Pipeline\(\.\.\., {name}="
        ):
            setattr(pipeline, name, 1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clip_nrom", "no attribute 'clip_nrom' to set; did you mean 'clip_norm'?"),
        ("keep_gradients", "did you mean 'keeps_gradients'?"),
        ("zzz", "no attribute 'zzz' to set. Only keeps_gradients and steps are set"),
        ("stages", "stages of a pipeline follows from how it was made, and cannot be set"),
        ("gradients", "gradients of a pipeline follows from how it was made, and cannot be set"),
        ("step", "step of a pipeline follows from how it was made, and cannot be set"),
    ],
)
def test_what_would_change_nothing_is_named(pipeline: cf.Pipeline, name: str, message: str) -> None:
    with pytest.raises(AttributeError) as error:
        setattr(pipeline, name, 1)
    assert message in str(error.value)


def test_what_is_settable_counts(pipeline: cf.Pipeline) -> None:
    assert sorted(SETTABLE) == ["keeps_gradients", "steps"]
    pipeline.keeps_gradients, pipeline.steps = True, 5
    assert (pipeline.keeps_gradients, pipeline.steps) == (True, 5)


def test_the_engine_sets_its_own() -> None:
    def work() -> list[Any]:
        pipeline = made()
        inner = pipeline.step
        pipeline.step = partial(inner, update=True)  # type: ignore[method-assign]
        found = [pipeline.step(X, X).number, pipeline.evaluate(X, X).loss > 0, pipeline.steps]
        pipeline.load_state_dict(pipeline.state_dict())
        pipeline.close()
        return found

    assert cf.launch(work, workers=1, transport="local") == [[0, True, 1]]


def test_derived_classes_have_attributes_of_their_own() -> None:
    def work() -> str:
        pipeline = made(Derived)
        assert isinstance(pipeline, Derived)
        with pytest.raises(AttributeError, match="clip_norm is an option"):
            pipeline.clip_norm = 1.0
        return pipeline.noted("mine")

    assert cf.launch(work, workers=1, transport="local") == ["mine"]


def test_records_of_options_cannot_be_changed(pipeline: cf.Pipeline) -> None:
    execution: Any = pipeline.execution
    with pytest.raises(
        AttributeError, match=r"^clip_norm cannot be set: an Execution is what a pipeline was made"
    ):
        execution.clip_norm = 1e-6
    with pytest.raises(AttributeError, match="did you mean seed"):
        execution.sed = 1
    batching: Any = cf.Batching()
    with pytest.raises(
        AttributeError, match=r"^input_dims cannot be set: a Batching is what a pipeline was made"
    ):
        batching.input_dims = 1
