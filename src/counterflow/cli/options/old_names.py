"""Flags under their earlier names, and flags that mean something else elsewhere.

Invariant: a command declares each of its flags under one name and knows of no other. What was renamed is
rewritten here, before the command line is parsed, with one note that says the new name. What cannot be told
apart is refused. Values are not looked at otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from counterflow.errors import ConfigError
from counterflow.schedule.modes import Sync

from ..output.console import note


@dataclass(frozen=True, slots=True)
class Renamed:
    """An earlier name of a flag.

    Attributes:
        words: what takes its place; none: that is how it is without it.
        only: values with which it means that; None: any. Others are refused.
        otherwise: what a refusal says of them.
    """

    words: tuple[str, ...]
    only: tuple[str, ...] | None = None
    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A flag that this command does not have, or not with such a value.

    Attributes:
        told: what to give in its place.
        only: values with which it is refused; None: any.
    """

    told: str
    only: tuple[str, ...] | None = None


_MODES = tuple(Sync)
_SECONDS = "--sync is the seconds of a sync, which simulate and show take; here give --sync-mode, one of " + (
    ", ".join(_MODES)
)
_SYNC_MODE = Renamed(("--sync-mode",), only=_MODES, otherwise=_SECONDS)
_SYNC_SECONDS = Elsewhere("--sync is the seconds of a sync; its mode is --sync-mode {value}", only=_MODES)

_FLAGS: dict[str, dict[str, Renamed | Elsewhere]] = {
    "plan": {
        "--depth": Renamed(("--workers",)),
        "--micro-batch": Renamed(("--micro-batch-size",)),
        "--also-micro-batch": Renamed(("--also-micro-batch-size",)),
        "--even": Renamed(("--cuts", "even")),
        "--synchronous": Renamed(()),
        "--sync": _SYNC_MODE,
        "--micro-batches": Elsewhere(
            "plan takes the size of a micro-batch, --micro-batch-size SAMPLES; their number is "
            "--option micro_batches={value}"
        ),
        "--stages": Elsewhere("plan takes the depth in workers: --workers {value}"),
    },
    "verify": {"--sync": _SYNC_MODE},
    "simulate": {"--sync": _SYNC_SECONDS},
    "show": {"--sync": _SYNC_SECONDS},
}


class Command(TyperCommand):
    """A command that also takes the earlier names of its flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what was given, under today's names."""
        told: list[str] = []
        today = list(_rewritten(_FLAGS.get(self.name or "", {}), args, told.append))
        if told:
            note(f"Note: {', '.join(dict.fromkeys(told))}")
        return super().parse_args(ctx, today)


def _rewritten(
    known: dict[str, Renamed | Elsewhere], args: Sequence[str], told: Callable[[str], None]
) -> Iterator[str]:
    """The arguments under today's names.

    Raises:
        ConfigError: a flag that means something else here.

    >>> notes = []
    >>> list(_rewritten(_FLAGS["plan"], ["--sync=end", "--even", "--", "--even"], notes.append))
    ['--sync-mode', 'end', '--cuts', 'even', '--', '--even']
    >>> notes
    ['--sync is now --sync-mode', '--even is now --cuts even']
    """
    for place, arg in enumerate(args):
        if arg == "--":
            yield from args[place:]
            return
        name, equals, value = arg.partition("=")
        found = known.get(name)
        if found is None:
            yield arg
            continue
        if not equals:
            value = next(iter(args[place + 1 : place + 2]), "")
        if isinstance(found, Elsewhere):
            if found.only is None or value in found.only:
                raise ConfigError(
                    f"{f'{name} {value}'.strip()}: {found.told.format(value=value or 'NUMBER')}"
                )
            yield arg
            continue
        if found.only is not None and value not in found.only:
            raise ConfigError(f"{f'{name} {value}'.strip()}: {found.otherwise}")
        told(f"{name} is now {' '.join(found.words) or 'the default'}")
        yield from found.words
        if equals:
            yield value
