"""Names and records in the state of a pipeline, for rooms that save, convert or resume it.

A list of names and nothing else: ``Pipeline.state_dict`` and its relatives make and read the state.
"""

from __future__ import annotations

from .parameters.extra_state import extra_state_names
from .parameters.group_state import FURTHER
from .parameters.loss_scale import BACKOFF, GROWTH, LossScale
from .parameters.names import refuse_untied
from .parameters.sharded_updates import Owners
from .parameters.state_records import (
    BY_STAGE,
    LOSS_SCALE,
    RESIDUAL,
    ParameterState,
    StateName,
    assembled,
    refuse_other_ranks,
)

__all__ = [
    "BACKOFF",
    "BY_STAGE",
    "FURTHER",
    "GROWTH",
    "LOSS_SCALE",
    "RESIDUAL",
    "LossScale",
    "Owners",
    "ParameterState",
    "StateName",
    "assembled",
    "extra_state_names",
    "refuse_other_ranks",
    "refuse_untied",
]
