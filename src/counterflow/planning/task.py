"""The planning task: a model, its profile, a cluster and a mini-batch; given, or from an example.

The examples are papers' runs, and one that four processes of any machine run (``gpt-moe``), as data files in
``examples``, which state the origin of their numbers.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files as resources
from typing import Any

from counterflow.errors import ConfigError, hint

from .inputs import input_files
from .inputs.cluster import Cluster
from .inputs.model import Model
from .inputs.profile import Profile

PARTS = ("model", "profile", "cluster", "mini_batch")
"""Parts of a task."""

EXAMPLES = (
    "chimera-bert48",
    "chimera-bert48-64",
    "chimera-bert48-2048",
    "chimera-bert48-v100",
    "chimera-gpt2",
    "chimera-gpt2-2048",
    "mixpipe-bert48",
    "mixpipe-gpt72",
    "hanayo-bert64",
    "hanayo-gpt128",
    "wpipe-bert192",
    "wpipe-bert768",
    "wpipe-resnext200",
    "wpipe-resnext302",
    "wpipe-resnext500",
    "wpipe-resnext800",
    "gpt-moe",
)
"""Names of the examples."""


@dataclass(frozen=True, slots=True)
class PlanningTask:
    """A planning task.

    Attributes:
        name: name of the example; empty: none.
        about: description in one line.
        model: what is trained.
        profile: costs of its layers.
        cluster: the devices.
        mini_batch: samples of an update.
        source: section of the paper, for an example.
    """

    name: str
    about: str
    model: Model
    profile: Profile
    cluster: Cluster
    mini_batch: int
    source: str

    @classmethod
    def of(
        cls, example: str | None, parts: Mapping[str, Any], missing: Callable[[list[str]], str]
    ) -> PlanningTask:
        """An example with some of its parts replaced, or a task from all parts.

        Args:
            example: name of the example; None: all parts are given.
            parts: some of ``PARTS``.
            missing: function of the missing parts that returns the message.

        Raises:
            ConfigError: the example is unknown, or a part is missing.
        """
        if example is not None:
            return replace(load_example(example), **parts)
        if absent := [name for name in PARTS if name not in parts]:
            raise ConfigError(missing(absent))
        return cls("", "", source="", **parts)


def load_example(name: str) -> PlanningTask:
    """The paper's run of that name.

    Raises:
        ConfigError: the example is unknown; the message lists the names.

    >>> load_example("chimera-bert48").cluster.size
    32
    """
    if name not in EXAMPLES:
        raise ConfigError(f"unknown example {name!r}{hint(name, EXAMPLES)}")
    text = resources(__package__).joinpath("examples", f"{name}.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    readers = {
        "model": input_files.read_model,
        "profile": input_files.read_profile,
        "cluster": input_files.read_cluster,
    }
    parts: dict[str, Any] = {
        part: read(json.dumps(data.pop(part)), f"{name}.json") for part, read in readers.items()
    }
    return PlanningTask(name=name, **data, **parts)
