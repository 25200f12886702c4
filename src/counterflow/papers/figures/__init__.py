"""The papers' figures that ``counterflow reproduce`` accepts, by name; each paper has a data file.

A file contains the common data of its figures (``assumptions``, ``competitors`` by label, changes of every
``run``), then ``figures`` by name, with their own ``competitors``, ``runs`` (an example of the
planner, with changes: ``figure_changes.py``) and ``published`` values, which belong to the runs ``of_runs``
if they name none. A published value that is missed names one of the file's ``causes``, with the change
(``vary``) of runs and competitors that shows it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter

from .figure_changes import example_task
from .published import Figure, MissCause, Quantity, Run

PAPERS = ("chimera", "mixpipe", "hanayo", "wpipe")

_FIGURE = TypeAdapter(Figure)

_Data = dict[str, Any]


def _figures(paper: str) -> Iterator[Figure]:
    data = tomllib.loads(files(__package__).joinpath(f"{paper}.toml").read_text(encoding="utf-8"))
    for name, figure in data["figures"].items():
        yield _figure(name, data, figure)


def _figure(name: str, common: _Data, data: _Data, *, causes: bool = True) -> Figure:
    shared = common.get("competitors", {})
    competitors = [_competitor(shared.get(table["label"], {}) | table) for table in data["competitors"]]
    subject = data.get("subject", "")
    usual = {"quantity": Quantity.SPEEDUP, "runs": data.get("of_runs", ())}
    published = [usual | _value(table, subject) for table in data.get("published", ())]
    for value in published:
        key = value.pop("cause", None)
        value["cause"] = _cause(name, common, data, common["causes"][key]) if causes and key else None
    parts = {
        "name": name,
        "title": data["title"],
        "setting": data["setting"],
        "statements": data.get("statements", ()),
        "assumptions": [*common.get("assumptions", []), *data.get("assumptions", [])],
        "missing": data.get("missing", ()),
        "unlimited": data.get("unlimited", False),
        "competitors": competitors,
        "runs": [_run(run, common.get("run", {}), data["setting"]) for run in data["runs"]],
        "published": published,
    }
    return _FIGURE.validate_python(parts)


def _competitor(data: _Data) -> _Data:
    pairs = {"options": tuple(data.get("options", {}).items())}
    by_run = tuple((run, _stated(stated)) for run, stated in data.get("stated_by_run", {}).items())
    stated = {"stated": _stated(data["stated"])} if "stated" in data else {}
    return data | pairs | stated | {"stated_by_run": by_run}


def _stated(data: _Data) -> _Data:
    return data | {"options": tuple(data.get("options", {}).items())}


def _value(data: _Data, subject: str) -> _Data:
    if "label" not in data and "over" in data:
        return data | {"label": subject}
    return data if "label" in data else data | {"label": data["order"][0]}


def _run(data: _Data, common: _Data, about: str) -> Run:
    task = partial(example_task, data, common, about)
    return Run(data["label"], task, *(data.get(name) for name in ("micro_batches", "depth", "samples")))


def _cause(name: str, common: _Data, data: _Data, cause: _Data) -> MissCause:
    vary = cause.get("vary")
    make = partial(_varied, name, common, data, vary) if vary else None
    return MissCause(cause["text"], cause.get("change", ""), make)


def _varied(name: str, common: _Data, data: _Data, vary: _Data) -> Figure:
    copy, shared = deepcopy(data), common.get("competitors", {})
    for run in copy["runs"]:
        _merge(run, vary.get("run", {}))
        _merge(run, vary.get("runs", {}).get(run["label"], {}))
    changes = vary.get("competitors", {})
    for competitor in copy["competitors"]:
        change = changes.get("all", {}) | changes.get(competitor["label"], {})
        if change:
            competitor.update(deepcopy(shared.get(competitor["label"], {})) | competitor)
            _merge(competitor, change)
    return _figure(name, common, copy, causes=False)


def _merge(data: _Data, change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and value:
            _merge(data.setdefault(key, {}), value)
        elif value == {}:
            data.pop(key, None)
        else:
            data[key] = value


FIGURES: dict[str, Figure] = {figure.name: figure for paper in PAPERS for figure in _figures(paper)}
"""In the papers' order."""
