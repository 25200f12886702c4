"""Travel times of messages: latency of their link, and time of their bytes."""

from __future__ import annotations

import numpy as np

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.program.lists import Messages
from counterflow.program.player import Floats, Ints
from counterflow.schedule.ir import Schedule

from .costs import Costs, PerLink
from .op_costs import per_stage


def travel_seconds(costs: Costs, schedule: Schedule, messages: Messages, sent: tuple[Ints, Floats]) -> Floats:
    """Travel time of each message.

    Args:
        costs: latency, time per byte, and bytes of whole micro-batches.
        schedule: the schedule that sends them.
        messages: the messages.
        sent: for each message the stage whose output it is, and its share of a micro-batch.

    Raises:
        ConfigError: a table of links or the bytes of skip connections have another size.
    """
    seconds = _by_message("p2p", costs.p2p, schedule.workers, messages)
    if costs.p2p_per_byte == 0.0:
        return seconds
    outputs, work = sent
    sizes: Floats = np.array(per_stage("message_bytes", costs.message_bytes, schedule.stages))[outputs]
    by_skip = messages.skips >= 0
    if by_skip.any():
        skips = schedule.workload.skips
        if not isinstance(costs.skip_bytes, (int, float)) and len(costs.skip_bytes) != len(skips):
            raise ConfigError(
                f"skip_bytes: {len(costs.skip_bytes)} numbers for {len(skips)} skip connections; give one "
                "number, or one per skip connection"
            )
        skip_sizes = np.broadcast_to(np.array(costs.skip_bytes, dtype=np.float64), (len(skips),))
        sizes[by_skip] = skip_sizes[messages.skips[by_skip]]
    per_byte = _by_message("p2p_per_byte", costs.p2p_per_byte, schedule.workers, messages)
    return seconds + per_byte * (sizes * work)


def _by_message(name: str, value: PerLink, workers: int, messages: Messages) -> Floats:
    if isinstance(value, (int, float)):
        return np.full(len(messages.makers), float(value))
    links = np.array(value, dtype=np.float64)
    if links.shape != (workers, workers):
        raise ConfigError(
            f"{name}: a table of shape {links.shape} for {plural(workers, 'worker')}; "
            "give one number, or one row of numbers per worker"
        )
    return links[messages.senders, messages.receivers]
