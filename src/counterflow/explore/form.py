"""Contents of the page's form: every scheme with its options, and every cost.

Invariant: names, meanings and defaults are those of the schemes' records and of the costs' fields.
"""

from __future__ import annotations

import re
from typing import Any

from counterflow.common.cli_fields import CliField
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
            "field": cost.field,
            "label": _LABELS.get(name, name.replace("_", " ")),
            "help": re.sub(r"--[a-z-]+", lambda flag: flag[0][2:].replace("-", " "), cost.spec.about),
            "group": _group(cost),
            "kind": _KINDS.get(cost.spec.kind, "word"),
            "words": _words(cost.spec.kind),
            "usual": _usual(name, cost),
        }
        for name, cost in COSTS.items()
    ]


def _usual(name: str, cost: CliField) -> str:
    if cost.spec.metavar == "BYTES":
        return "300MB"
    if isinstance(cost.default, (int, float)):
        return f"{cost.default:g}"
    return {"input_gradient": "half", "weight_gradient": "rest"}.get(name, "")


_LABELS = {"p2p": "message", "link": "links", "overlap": "messages"}
_KINDS = {str: "text", float: "number", int: "number", bool: "flag"}
"""How the page sends a cost of this kind."""


def _group(cost: CliField) -> str:
    if cost.record is ByteCosts:
        return "bytes"
    return "seconds" if cost.spec.metavar == "SECONDS" else "modes"


def _words(kind: Any) -> list[list[str]]:
    if kind is bool:
        return [["true", "overlap compute"], ["false", "stop compute"]]
    return [] if kind in _KINDS else [[word.value, word.value] for word in kind]
