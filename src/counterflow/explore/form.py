"""What the page's form offers: every scheme with its options, and every cost.

Invariant: names, meanings and defaults are those of the schemes' records and of the costs' fields.
"""

from __future__ import annotations

import re
from typing import Any

from counterflow.fields import AskedField
from counterflow.schedule import registry
from counterflow.simulation import ByteCosts
from counterflow.simulation.cost_texts import COSTS


def schemes() -> list[dict[str, Any]]:
    """Every scheme as its record has it, for the page's form."""
    return [
        {
            "name": scheme.name,
            "summary": scheme.summary,
            "source": scheme.source,
            "synchronous": scheme.synchronous,
            "depth": scheme.depth,
            "options": [
                {
                    "name": option.name,
                    "kind": option.kind.name.lower(),
                    "words": list(option.words),
                    "legal": option.legal,
                    "help": option.help,
                    "required": option.required,
                    "usual": option.usual,
                }
                for option in scheme.options
            ],
        }
        for scheme in registry.SCHEMES.values()
    ]


def costs() -> list[dict[str, Any]]:
    """Every cost as its field says it, for the page's form."""
    return [
        {
            "name": name,
            "field": one.field,
            "label": _LABELS.get(name, name.replace("_", " ")),
            "help": re.sub(r"--[a-z-]+", lambda flag: flag[0][2:].replace("-", " "), one.asked.about),
            "group": _group(one),
            "kind": _KINDS.get(one.asked.kind, "word"),
            "words": _words(one.asked.kind),
            "usual": _usual(name, one),
        }
        for name, one in COSTS.items()
    ]


def _usual(name: str, one: AskedField) -> str:
    """What stands in a box that is empty: what then holds, or how one gives bytes."""
    if one.asked.metavar == "BYTES":
        return "300MB"
    if isinstance(one.default, (int, float)):
        return f"{one.default:g}"
    return {"input_gradient": "half", "weight_gradient": "rest"}.get(name, "")


_LABELS = {"p2p": "message", "link": "links", "overlap": "messages"}
_KINDS = {str: "text", float: "number", int: "number", bool: "flag"}
"""How the page sends a cost of this kind."""


def _group(one: AskedField) -> str:
    """The part of the form that a cost stands in."""
    if one.record is ByteCosts:
        return "bytes"
    return "seconds" if one.asked.metavar == "SECONDS" else "modes"


def _words(kind: Any) -> list[list[str]]:
    """What may be chosen, as it is sent and as it is shown."""
    if kind is bool:
        return [["true", "overlap compute"], ["false", "stop compute"]]
    return [] if kind in _KINDS else [[word.value, word.value] for word in kind]
