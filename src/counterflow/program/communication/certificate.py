"""A communication plan as JSON: what it decides, and what proves it; docs/communication.md has the keys."""

from __future__ import annotations

from typing import Any

from ..actions import Program, named
from .communication_plan import CommunicationPlan


def certificate(program: Program, plan: CommunicationPlan) -> dict[str, Any]:
    """The plan with its proofs.

    Args:
        program: one action list per worker.
        plan: its plan.
    """
    communicators = plan.communicators
    return {
        "communicators": {
            "rounds": [list(map(list, row)) for row in communicators.rounds],
            "proof": list(map(list, communicators.proof)),
            "fewest": communicators.bound if communicators.proof else len(communicators.rounds),
            "proved": communicators.proved,
        },
        "workers": [
            {
                "actions": list(map(str, actions)),
                "buffers": table.count,
                "in_use": table.in_use,
                "in_use_at": table.peak,
                "receives": [
                    {
                        "message": named(life.receive),
                        "from": life.receive.peer,
                        "posted": life.start,
                        "ahead": ahead,
                        "needed": life.needed,
                        "until": life.end,
                        "buffer": slot,
                    }
                    for life, slot, ahead in zip(table.lifetimes, table.slots, row, strict=True)
                ],
            }
            for actions, table, row in zip(program.actions, plan.buffers, plan.ahead, strict=True)
        ],
    }
