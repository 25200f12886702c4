"""What is planned: a model, what its layers cost, a cluster and a mini-batch; given, or a known example.

The examples are papers' runs, as files of data in ``examples``. Not here: how their numbers were found.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files as resources
from typing import Any

from counterflow.errors import ConfigError, hint

from .inputs import files
from .inputs.cluster import Cluster
from .inputs.model import Model
from .inputs.profile import Profile

PARTS = ("model", "profile", "cluster", "mini_batch")
"""What a task needs."""

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
    "wpipe-bert192",
    "wpipe-bert768",
)
"""The names of the examples."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is planned.

    Attributes:
        name: what an example is asked for by; empty: none.
        about: one line.
        model: what is trained.
        profile: what its layers cost.
        cluster: the devices.
        mini_batch: samples of an update.
        source: of an example, the paper's section.
    """

    name: str
    about: str
    model: Model
    profile: Profile
    cluster: Cluster
    mini_batch: int
    source: str

    @classmethod
    def of(cls, example: str | None, given: Mapping[str, Any], missing: Callable[[list[str]], str]) -> Task:
        """An example with what was given in place of its own parts, or all of it given.

        Args:
            example: its name; None: all is given.
            given: some of ``PARTS``.
            missing: the message if these parts are missing.

        Raises:
            ConfigError: there is no such example, or a part is missing.
        """
        if example is not None:
            return replace(load_example(example), **given)
        if absent := [name for name in PARTS if name not in given]:
            raise ConfigError(missing(absent))
        return cls("", "", source="", **given)


def load_example(name: str) -> Task:
    """The paper's run of that name.

    Raises:
        ConfigError: there is none; the message lists the names.

    >>> load_example("chimera-bert48").cluster.size
    32
    """
    if name not in EXAMPLES:
        raise ConfigError(f"unknown example {name!r}{hint(name, EXAMPLES)}")
    text = resources(__package__).joinpath("examples", f"{name}.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    readers = {"model": files.read_model, "profile": files.read_profile, "cluster": files.read_cluster}
    parts: dict[str, Any] = {
        part: read(json.dumps(data.pop(part)), f"{name}.json") for part, read in readers.items()
    }
    return Task(name=name, **data, **parts)
