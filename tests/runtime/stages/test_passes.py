"""Passes that wrap others leave no verb out."""

from __future__ import annotations

import inspect

import pytest

from counterflow.runtime.stages.passes import StagePass
from counterflow.runtime.stages.recomputed_pass import RecomputedPass
from counterflow.runtime.stages.sliced_pass import SlicedPass
from counterflow.runtime.stages.wrapping_pass import WrappingPass
from counterflow.schedule.op import OpKind

OF_SLICES = {"count_state", "release_state"}
"""Verbs of slices alone, which wrap all other passes."""


@pytest.mark.parametrize("kind", [WrappingPass, RecomputedPass, SlicedPass])
def test_each_verb_reaches_the_pass_that_owns_the_graph(kind: type[StagePass]) -> None:
    verbs = {name for name, _ in inspect.getmembers(StagePass, inspect.isfunction) if name[0] != "_"}
    own = verbs - OF_SLICES - {"forward"}
    assert own >= {"recompute", "prepare", "backward", "weight_gradients", "settle", "release"}
    assert [name for name in sorted(own) if getattr(kind, name) is getattr(StagePass, name)] == []


def test_verbs_of_kinds_are_those_of_passes() -> None:
    verbs = [kind.verb for kind in OpKind if kind.verb]
    assert verbs == ["recompute"]
    assert all(inspect.isfunction(getattr(StagePass, verb)) for verb in verbs)
