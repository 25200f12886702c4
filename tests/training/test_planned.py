"""Configs of plans: which keys of the profiled run they have."""

from __future__ import annotations

from dataclasses import replace

from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.task import load_example
from counterflow.training import load_config
from counterflow.training.planned import carried_tables, planned_config


def test_a_plan_does_not_write_into_the_folder_of_the_profiled_run() -> None:
    task = load_example("gpt-moe")
    model = replace(task.model, config={"train": {"out": "tuned", "resume": "auto", "steps": 7}})
    constraints = Constraints(("dapple",), samples=(4,), depths=(4,))
    result = search(model, task.profile, task.cluster, task.mini_batch, constraints, count=1)
    config = planned_config(model, task.profile, task.cluster, result.best[0].play.prediction())
    assert (config.train.out, config.train.resume, config.train.steps) == (None, None, 7)
    carried = carried_tables(load_config(sets=["train.out=tuned", "train.steps=7"]))["train"]
    assert carried["steps"] == 7
    assert "out" not in carried
