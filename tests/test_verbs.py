"""The verbs of ``cf`` that need a whole model: what they take, and what they return."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import counterflow as cf
from counterflow.planning.inputs import input_files
from counterflow.planning.prediction import Configuration
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.task import load_example
from counterflow.training import load_config

LIMITS: dict[str, Any] = {"schemes": ("dapple", "chimera"), "depths": (4,), "samples": (8,)}


def test_plan_takes_an_example_records_or_files(tmp_path: Path) -> None:
    task = load_example("chimera-bert48")
    found = cf.plan(example="chimera-bert48", **LIMITS)
    same = cf.plan(task.model, task.profile, task.cluster, task.mini_batch, constraints=Constraints(**LIMITS))
    assert found.best[0].seconds == same.best[0].seconds
    for name in ("model", "profile", "cluster"):
        (tmp_path / name).with_suffix(".toml").write_text(
            input_files.dumps(getattr(task, name)), encoding="utf-8"
        )
    model, profile, cluster = (tmp_path / f"{name}.toml" for name in ("model", "profile", "cluster"))
    read = cf.plan(model, profile, cluster, task.mini_batch, **LIMITS)
    assert read.best[0].seconds == found.best[0].seconds


def test_plan_takes_a_value_alone_and_the_names_of_modes() -> None:
    given: dict[str, Any] = {
        "schemes": "dapple",
        "depths": 4,
        "recompute": "none",
        "sync": ["end"],
        "zero_stages": 0,
    }
    found = cf.plan(example="chimera-bert48", **given, arrangements="pipeline-inside", cuts="even")
    plan = found.best[0].play.configuration
    assert (plan.scheme, plan.recompute, plan.sync, plan.cuts) == ("dapple", "none", "end", "even")
    options = [{"pairs": 1}, [("pairs", [1])], (("pairs", (1,)),)]
    assert len({Constraints(options=cast("Any", given)) for given in options}) == 1


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"sync": "nonsense"}, "sync='nonsense': unknown; legal: end, eager, eager-opt"),
        ({"sync": ()}, "sync=(): must have one value or more"),
        ({"arrangements": ("nonsense",)}, "arrangement='nonsense': unknown; legal: pipeline-inside, replic"),
        ({"recompute": ("none", 3)}, "recompute=3: unknown; legal: none, stage, layer"),
        ({"depths": "four"}, "depths: 'four' is not a whole number"),
        ({"slices": (True,)}, "slices: True is not a whole number"),
        ({"zero_stages": 2}, "zero_stage=2: must be 0 or 1"),
        ({"schemes": (4,)}, "schemes: 4 is not the name of a scheme"),
        ({"schemes": "dappel"}, "unknown scheme 'dappel'"),
        ({"stale": "yes"}, "stale='yes': must be True or False"),
        ({"options": "pairs=1"}, "options='pairs=1': must be pairs of an option's name and its values"),
        ({"options": {1: 2}}, "options={1: 2}: must be pairs of an option's name and its values"),
        ({"cuts": 4}, "cuts=4: must be balanced or even, or the layers at which stages begin"),
    ],
)
def test_plan_refuses_limits_that_are_not_legal(limit: dict[str, Any], message: str) -> None:
    with pytest.raises(cf.ConfigError, match=f"^{re.escape(message)}"):
        cf.plan(example="chimera-bert48", **limit)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "plan needs model, profile, cluster, mini_batch; give these, or the name of an example"),
        ({"example": "chimera-bert48", "depth": (4,)}, "depth: unknown limit; plan accepts schemes"),
        (
            {"example": "chimera-bert48", "constraints": Constraints(), "depths": (4,)},
            "depths: given in addition to constraints",
        ),
    ],
)
def test_plan_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(cf.ConfigError, match=message):
        cf.plan(**given)


def test_predict_takes_a_schemes_name() -> None:
    task = load_example("chimera-bert48")
    parts = task.model, task.profile, task.cluster
    found = cf.predict(*parts, "1f1b", workers=4, micro_batches=8, replicas=8, samples=8)
    whole = Configuration.of("dapple", {"stages": 4, "micro_batches": 8}, replicas=8, samples=8)
    assert found == cf.predict(*parts, whole)
    with pytest.raises(cf.ConfigError, match="workers: the configuration has its own sizes"):
        cf.predict(*parts, whole, workers=4)


def test_verify_has_a_small_model_or_takes_one() -> None:
    assert cf.verify("zb-v", workers=2, micro_batches=3, steps=1).ok
    torch.manual_seed(1)
    layers = [nn.Linear(3, 3) for _ in range(2)]
    batches = [[(torch.randn(4, 3), torch.randn(4, 3))] for _ in range(2)]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    found = cf.verify(
        cf.schemes.dapple(2, 2), layers, nn.MSELoss(), batches, optimizer=sgd, recompute="stage"
    )
    assert found.ok
    with pytest.raises(cf.ConfigError, match="verify needs batches and optimizer; give the whole model"):
        cf.verify("dapple(stages=2, micro_batches=2)", layers, nn.MSELoss())


def test_train_takes_a_config_or_its_keys(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "model.layers": 2,
        "model.hidden": 16,
        "model.heads": 2,
        "pipeline.transport": "local",
    }
    done = cf.train(steps=2, workers=2, scheme="dapple", out=tmp_path / "run", keys=keys)
    assert done is not None
    assert (done.summary.steps, done.folder) == (2, tmp_path / "run")
    with pytest.raises(cf.ConfigError, match="is changed by its model_copy; leave out"):
        cf.train(load_config(), steps=2)


def test_simulate_check_and_draw_take_a_schemes_name() -> None:
    sizes: dict[str, Any] = {"workers": 2, "micro_batches": 4}
    assert cf.simulate("zb-v", **sizes).makespan == cf.simulate(cf.schemes.zb_v(2, 4)).makespan
    cf.check("hanayo(stages=4, micro_batches=4)")
    assert cf.lower("dapple", **sizes).schedule == cf.schemes.dapple(2, 4)
    assert cf.draw("dapple", **sizes) is not None
    with pytest.raises(cf.ConfigError, match="draw: unknown option workers"):
        cf.draw(cf.simulate("dapple", **sizes), workers=2)
