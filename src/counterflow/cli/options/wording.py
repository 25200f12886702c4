"""Messages in the words of the command line: ``micro_batches=0`` becomes ``--micro-batches 0``."""

from __future__ import annotations

import re

from counterflow.schedule import registry
from counterflow.schedule.ir import OptionValue
from counterflow.simulation.cost_texts import COSTS

_SPELLED = {cost.field: name for name, cost in COSTS.items()} | {
    "depth": "workers",
    "context_parallel": "contexts",
    "expert_parallel": "experts",
    "micro_batch": "micro_batch_size",
    "memory_bytes": "memory",
}
"""Flags by the names that the library uses."""
_PLAN = ("mini_batch", "arrangement", "cuts", "option", "tensor_parallel", "contexts", "experts", "shards")
_ORDER = ("peak", "objective", "sweep")
_LAYOUT = ("layers", "mtp", "pp", "vpp")
_COMMAND_NAMES = (*_SPELLED, *_PLAN, *_ORDER, *_LAYOUT)


def flag(name: str) -> str:
    """The flag of an option.

    >>> flag("micro_batches")
    '--micro-batches'
    """
    return "--" + _SPELLED.get(name, name).replace("_", "-")


def flag_of(name: str, value: OptionValue) -> str:
    """An option with its value, as people type it.

    >>> flag_of("micro_batches", 8), flag_of("split", True), flag_of("split", False)
    ('--micro-batches 8', '--split', '--no-split')
    """
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"{flag(name)} {value}"


def in_flags(message: str) -> str:
    """A library message in which options are spelled as flags.

    >>> in_flags("micro_batches=0: must be 1 or more")
    '--micro-batches 0: must be 1 or more'
    >>> in_flags("weights: 3 numbers for 4 stages")
    '--weight-bytes: 3 numbers for 4 stages'
    """
    names = "|".join([*registry.options(), *_COMMAND_NAMES])
    message = re.sub(rf"(?<![\w.=-])(?<!--set )(?<!--option )({names})=", lambda m: f"{flag(m[1])} ", message)
    return re.sub(rf"^({names})(?=:)", lambda m: flag(m[1]), message)
