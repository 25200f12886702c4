"""The papers' figures that ``counterflow reproduce`` accepts, by name; each paper has a data file.

A file contains the common data of its figures (``assumptions``, ``competitors`` by label, ``cluster`` in
place of the example's), then ``figures`` by name, with their own ``competitors``, ``runs`` (an example of the
planner, with another size) and ``published`` values, which belong to the runs ``of_runs`` if they name none.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter

from counterflow.planning.inputs.cluster import Cluster
from counterflow.planning.task import Task, load_example

from .published import Figure, Quantity, Run

_CLUSTER, _FIGURE = TypeAdapter(Cluster), TypeAdapter(Figure)


def _figures(paper: str) -> Iterator[Figure]:
    data = tomllib.loads(files(__package__).joinpath(f"{paper}.toml").read_text(encoding="utf-8"))
    assumptions, shared = data.get("assumptions", []), data.get("competitors", {})
    for name, given in data["figures"].items():
        competitors = [shared.get(one["label"], {}) | one for one in given["competitors"]]
        for one in competitors:
            one["options"] = tuple(one.get("options", {}).items())
        task = partial(_task, cluster=data.get("cluster", {}), about=given["setting"])
        usual = {"quantity": Quantity.SPEEDUP, "value": None, "runs": given.pop("of_runs", ())}
        parts = {
            "name": name,
            "assumptions": [*assumptions, *given.pop("assumptions", [])],
            "competitors": competitors,
            "runs": [Run(one.pop("label"), partial(task, one)) for one in given["runs"]],
            "published": [usual | one for one in given["published"]],
        }
        yield _FIGURE.validate_python(given | parts)


def _task(run: dict[str, Any], cluster: dict[str, Any], about: str) -> Task:
    """An example of the planner on a run's cluster, with its mini-batch."""
    task = load_example(run["example"])
    own = _CLUSTER.validate_json(json.dumps(asdict(task.cluster) | cluster | run.get("cluster", {})))
    mini_batch = run.get("mini_batch", task.mini_batch)
    return replace(task, name="", about=about, cluster=own, mini_batch=mini_batch)


FIGURES: dict[str, Figure] = {
    figure.name: figure for paper in ("chimera", "mixpipe", "hanayo", "wpipe") for figure in _figures(paper)
}
"""In the papers' order."""
