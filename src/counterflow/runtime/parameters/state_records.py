"""Records of a training's state by name, in which it is saved and loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from counterflow.errors import ConfigError

LOSS_SCALE = "loss_scale"
RESIDUAL = "residual"
"""What workers have lost of a weight's gradient in compressed sums so far, by rank."""

BY_STAGE = "scheduler", "averaged", LOSS_SCALE
"""The kinds of a training's state that are kept by stage, and not by a weight's name; the loss scale is the
same for all stages.
"""


@dataclass(frozen=True, eq=False)
class ParameterState:
    """Optimiser state of one parameter; ``saved["state"]`` reads as ``saved.state``.

    It is no dict, so ``torch.distributed.checkpoint`` reads it whole into a new optimiser, which has no
    tensors yet that a dict's could be read into.

    Attributes:
        state: by the optimiser's slot.
        options: those of the parameter's group.
    """

    state: dict[str, Any]
    options: dict[str, Any]

    def __getitem__(self, name: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"state": self.state, "options": self.options}[name]
        return fields


torch.serialization.add_safe_globals([ParameterState])  # torch.load reads it with weights_only=True


class StateName(NamedTuple):
    """Name of a value of the optimiser for a weight (a slot, or its options), or of other state of a weight
    or stage.

    Attributes:
        kind: ``optimizer``, ``ema``, ``model`` or ``RESIDUAL`` of a weight, one of ``BY_STAGE`` of a stage.
        of: the weight's name, or the stage.
        slot: the optimiser's, or a residual's rank; None: its options, or another kind.
    """

    kind: str
    of: str | int
    slot: str | None = None


def assembled(entries: Iterable[tuple[StateName, Any]]) -> dict[str, Any]:
    """A training's state of its entries, in which an optimiser's options come before what it keeps."""
    state: dict[str, Any] = {"optimizer": {}, "scheduler": {}}
    for key, value in entries:
        if key.kind == RESIDUAL:
            state.setdefault(RESIDUAL, {}).setdefault(key.of, {})[key.slot] = value
        elif key.kind != "optimizer":
            state.setdefault(key.kind, {})[key.of] = value
        elif key.slot is None:
            state["optimizer"][key.of] = {"state": {}, "options": value}
        else:
            state["optimizer"][key.of]["state"][key.slot] = value
    return state


def refuse_other_ranks(name: str, saved: Iterable[str], holders: Iterable[int], rank: str) -> None:
    """Refuse residuals of a weight that other workers hold than those that saved them.

    Args:
        name: the weight's.
        saved: ranks of the residuals.
        holders: ranks that hold the weight.
        rank: this worker's.

    Raises:
        ConfigError: there is none of this rank, or one of a rank that does not hold the weight.
    """
    ranks, holders = sorted(map(int, saved)), sorted(holders)
    if int(rank) not in ranks or not {*ranks} <= {*holders}:
        raise ConfigError(
            f"the training state has residuals of {name!r} of ranks {ranks}, and ranks {holders} sum its "
            "gradient here; load it with the scheme, workers and replicas it was saved with, or leave out "
            "gradient_compression"
        )
