"""Plans of a search that the server stores, so that a page can open and save them.

They go from a search's process to the server, and a plan's costs from the server to a search, as text.

Invariant: nothing that came from a page is read by ``read``: it is pickle.
"""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass
from typing import Any

from counterflow.planning.prediction import Prediction
from counterflow.planning.task import PlanningTask
from counterflow.schedule.ir import Schedule
from counterflow.simulation import Costs


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan: its order, what the simulator is fed with for it, and what comes of it."""

    schedule: Schedule
    costs: Costs
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class SavedPlans:
    """Planning task and its plans, in the order of the page's table."""

    task: PlanningTask
    plans: tuple[SavedPlan, ...]


def written(value: SavedPlans | Costs) -> str:
    """Encode plans or costs as text."""
    return base64.b64encode(pickle.dumps(value)).decode()


def read(text: str) -> Any:
    """Decode text of ``written``, in a process that the server started or that started this one."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - see the invariant
