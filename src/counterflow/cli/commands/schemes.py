"""``counterflow schemes``: every scheme with its options, their ranges and one line each."""

from __future__ import annotations

from counterflow.schedule.registry import SCHEMES
from counterflow.schedule.scheme import Option

from ..options.flags import JsonFlag
from ..options.wording import flag
from ..output.console import WIDE, console, print_json


def schemes(*, as_json: JsonFlag = False) -> None:
    """List every scheme with its options, their ranges and defaults."""
    if as_json:
        from counterflow.schedule.schedule_report import Schemes

        print_json(Schemes.of(schemes=list(SCHEMES.values())))
        return
    from rich.table import Table
    from rich.text import Text

    out = console(WIDE)
    for scheme in SCHEMES.values():
        names = ", also ".join([scheme.name, *scheme.aliases])
        kind = "" if scheme.synchronous else " (asynchronous)"
        out.print(Text.assemble((names, "bold"), f"  {scheme.summary}{kind}"))
        options = Table.grid(padding=(0, 2))
        for option in scheme.options:
            options.add_row("", f"[cyan]{flag(option.name)}[/]", _range(option), f"[dim]{option.help}[/]")
        out.print(options)
        out.print(Text(f"  {scheme.source}", style="dim italic"))
        out.print()


def _range(option: Option) -> str:
    return option.legal if option.required else f"{option.legal}; default {option.usual}"
