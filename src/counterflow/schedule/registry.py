"""The table of schemes: names, options, and how to build one by name.

A new scheme is a file in ``schemes/`` and an entry here; the command line, the config files and the
planner know schemes only through this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from counterflow.errors import ConfigError

from .ir import OptionValue, Schedule
from .schemes.chimera import Concat, chimera
from .schemes.dapple import dapple
from .schemes.gems import gems
from .schemes.gpipe import gpipe
from .schemes.hanayo import hanayo
from .schemes.interleaved import interleaved
from .schemes.mixpipe import mixpipe
from .schemes.pipedream import pipedream
from .schemes.pipedream import version as pipedream_version
from .schemes.pipedream_2bw import pipedream_2bw
from .schemes.pipedream_2bw import version as pipedream_2bw_version
from .schemes.wpipe import version as wpipe_version
from .schemes.wpipe import wpipe

VersionRule = Callable[[int, int, int], int]
"""(stages, stage, period) -> the weight version that period's work uses on that stage."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a scheme. ``default`` None means it must be given; ``words`` are legal non-numbers."""

    name: str
    legal: str
    help: str
    default: OptionValue | None = None
    number: bool = True
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scheme:
    """A named way to make schedules."""

    name: str
    build: Callable[..., Schedule]
    summary: str
    source: str
    options: tuple[Option, ...]
    directions: str
    version: VersionRule | None = None

    @property
    def synchronous(self) -> bool:
        """Whether every update is preceded by a flush, so that no work uses old weights."""
        return self.version is None


_DEPTH = Option("stages", "1 or more", "depth D: stages, one on each worker")
_EVEN_DEPTH = Option("stages", "even, 2 or more", "depth D: stages of each pipe, and workers")
_WORKERS = Option("workers", "1 or more", "workers of one pipeline group")
_MICRO_BATCHES = Option("micro_batches", "1 or more", "N: micro-batches of a mini-batch")
_PERIODS = Option("periods", "1 or more", "updates to play", default=8)

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "gpipe",
            gpipe,
            "all forwards, then all backwards",
            "Huang et al. 2019; groups: WPipe, appendix A.4",
            (
                Option("stages", "1 or more", "depth D: workers; the model is cut in D·groups"),
                _MICRO_BATCHES,
                Option("groups", "1 or more", "chunks of the model a worker holds", default=1),
            ),
            "one",
        ),
        Scheme(
            "dapple",
            dapple,
            "1F1B with a flush",
            "Fan et al. 2021",
            (_DEPTH, _MICRO_BATCHES),
            "one",
        ),
        Scheme(
            "interleaved",
            interleaved,
            "1F1B with several chunks of the model on each worker",
            "Narayanan et al. 2021 (Megatron-LM)",
            (
                _WORKERS,
                _MICRO_BATCHES,
                Option("chunks", "1 or more", "stages a worker holds", default=2),
            ),
            "one",
        ),
        Scheme(
            "gems",
            gems,
            "two directions, one micro-batch in memory at a time",
            "Jain et al. 2020",
            (_EVEN_DEPTH, _MICRO_BATCHES),
            "two",
        ),
        Scheme(
            "chimera",
            chimera,
            "1F1B in two directions whose bubbles fill each other",
            "Li and Hoefler 2021",
            (
                _EVEN_DEPTH,
                _MICRO_BATCHES,
                Option("pairs", "a divisor of stages/2", "f: pipes in each direction", default=1),
                Option(
                    "concat",
                    ", ".join(Concat),
                    "how units of D micro-batches follow each other",
                    default=Concat.DIRECT.value,
                    number=False,
                    words=tuple(Concat),
                ),
            ),
            "two",
        ),
        Scheme(
            "mixpipe",
            mixpipe,
            "two directions with a chosen number of micro-batches in flight",
            "Zhang et al. 2023",
            (
                _EVEN_DEPTH,
                _MICRO_BATCHES,
                Option(
                    "injected",
                    "even, 2..stages, or max",
                    "K: micro-batches injected before the first backward (default: stages)",
                    default="stages",
                    words=("max",),
                ),
                Option(
                    "early_forwards",
                    "0..(stages - injected)/2",
                    "Γ: forwards advanced on the middle workers",
                    default=0,
                ),
            ),
            "two",
        ),
        Scheme(
            "hanayo",
            hanayo,
            "waves: one pipe that turns around at both ends",
            "Liu et al. 2023",
            (
                _WORKERS,
                _MICRO_BATCHES,
                Option("waves", "1 or more", "down-and-up passes of one forward", default=1),
            ),
            "waves",
        ),
        Scheme(
            "pipedream",
            pipedream,
            "1F1B without a flush, an update after every backward",
            "Harlap et al. 2018",
            (_DEPTH, _PERIODS),
            "one",
            pipedream_version,
        ),
        Scheme(
            "pipedream-2bw",
            pipedream_2bw,
            "1F1B without a flush, two weight versions",
            "Narayanan et al. 2021 (PipeDream-2BW)",
            (
                _DEPTH,
                Option("micro_batches", "stages or more", "N: micro-batches between updates"),
                _PERIODS,
            ),
            "one",
            pipedream_2bw_version,
        ),
        Scheme(
            "wpipe",
            wpipe,
            "two groups of stages updated in turn, without a flush",
            "Yang et al. 2022",
            (
                _WORKERS,
                Option("micro_batches", "workers or more", "M: micro-batches between updates"),
                _PERIODS,
            ),
            "one",
            wpipe_version,
        ),
    )
}

ALIASES = {"1f1b": "dapple"}


def scheme(name: str) -> Scheme:
    """The scheme called ``name``.

    Raises:
        ConfigError: there is none; the message lists the names and the nearest one.
    """
    known = SCHEMES.get(ALIASES.get(name, name))
    if known is None:
        near = difflib.get_close_matches(name, [*SCHEMES, *ALIASES], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"unknown scheme {name!r}{hint} Known: {', '.join(SCHEMES)}")
    return known


def build(name: str, options: Mapping[str, OptionValue]) -> Schedule:
    """The schedule of the scheme ``name`` with ``options``.

    Raises:
        ConfigError: an unknown scheme, an option it does not have, one that is missing or illegal.

    >>> str(build("1f1b", {"stages": 2, "micro_batches": 2}))
    'dapple(stages=2, micro_batches=2)'
    """
    found = scheme(name)
    names = [option.name for option in found.options]
    for given in options:
        if given not in names:
            swapped = {"stages": "workers", "workers": "stages"}.get(given)
            hint = f" (use {swapped} instead)" if swapped in names else ""
            raise ConfigError(f"{found.name} has no option {given!r}{hint}; its options: {', '.join(names)}")
    missing = [o for o in found.options if o.default is None and o.name not in options]
    if missing:
        wanted = "; ".join(f"{o.name} ({o.help}: {o.legal})" for o in missing)
        raise ConfigError(f"{found.name} needs {wanted}")
    for option in found.options:
        value = options.get(option.name)
        if isinstance(value, str) and option.number and value not in option.words:
            words = f" or {', '.join(option.words)}" if option.words else ""
            raise ConfigError(f"{option.name}={value!r}: must be a whole number{words} ({option.legal})")
    return found.build(**options)
