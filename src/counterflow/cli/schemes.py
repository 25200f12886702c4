"""``counterflow schemes``: every scheme with its options, their ranges and one line each."""

from __future__ import annotations

from typing import Any

from counterflow.schedule.registry import ALIASES, SCHEMES, Option, Scheme

from .flags import JsonFlag
from .output import WIDE, console, print_json
from .wording import flag


def schemes(*, as_json: JsonFlag = False) -> None:
    """List every scheme with its options, their ranges and defaults."""
    if as_json:
        print_json({"schemes": [_as_json(scheme) for scheme in SCHEMES.values()]})
        return
    from rich.table import Table  # noqa: PLC0415  (not for --json)
    from rich.text import Text  # noqa: PLC0415

    out = console(WIDE)
    for scheme in SCHEMES.values():
        names = ", also ".join([scheme.name, *_aliases(scheme)])
        kind = "" if scheme.synchronous else " (asynchronous)"
        out.print(Text.assemble((names, "bold"), f"  {scheme.summary}{kind}"))
        options = Table.grid(padding=(0, 2))
        for option in scheme.options:
            options.add_row("", f"[cyan]{flag(option.name)}[/]", _range(option), f"[dim]{option.help}[/]")
        out.print(options)
        out.print(Text(f"  {scheme.source}", style="dim italic"))
        out.print()


def _range(option: Option) -> str:
    if option.default is None:
        return option.legal
    return f"{option.legal}; default {option.default}"


def _aliases(scheme: Scheme) -> list[str]:
    return [alias for alias, name in ALIASES.items() if name == scheme.name]


def _as_json(scheme: Scheme) -> dict[str, Any]:
    return {
        "name": scheme.name,
        "aliases": _aliases(scheme),
        "summary": scheme.summary,
        "source": scheme.source,
        "synchronous": scheme.synchronous,
        "directions": scheme.directions,
        "options": [
            {
                "name": option.name,
                "legal": option.legal,
                "required": option.default is None,
                "default": option.default,
                "help": option.help,
            }
            for option in scheme.options
        ],
    }
