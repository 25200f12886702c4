"""The record of a scheme, which commands, planner, bounds and pictures read. Plain, frozen data.

Invariant: everything about a scheme is in its record, which is in the scheme's own file. No other code names
a scheme. A record makes no schedule; its builder does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial
from typing import Any

from counterflow.errors import ConfigError

from .ir import OptionValue, Schedule
from .orders.slices import lengths_of, sliced
from .workload import Workload

SLICES = "slices"
"""Option that every synchronous scheme accepts in addition to its own: number of slices of a sequence."""

DEPTH = ("stages", "workers")
"""The options that set the number of workers; a scheme has one of them."""

MOST_OPS = 1_000_000
"""Maximum ops of a schedule that is built by name, as many as 500 workers and 1,000 micro-batches have."""


class OptionType(Enum):
    """Type of an option's values."""

    NUMBER = "a whole number"
    WORD = "a word"
    FLAG = "true or false"


class Directions(StrEnum):
    """The directions in which the pipes of a scheme run over the workers."""

    SINGLE = "one"
    TWO = "two"
    WAVES = "waves"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a scheme.

    Attributes:
        name: the builder's argument.
        legal: legal range, in words.
        help: meaning of the option, in one line.
        default: default value; None: the option is required, or ``like`` gives its default.
        like: the option whose value is the default.
        kind: type of its values.
        words: the legal words; a number may accept some in addition.
        letter: the papers' letter for the option, which pictures use.
        noun: noun that pictures count, as in "2 waves"; instead of a letter.
        unsaid: the value that pictures omit.
        order_only: whether only the order depends on the option, and not the workload.
        multiplies: whether the number of stages is multiplied by the value.
        lengths: whether a number may also be given as lengths, such as ``512+256+256``.
    """

    name: str
    legal: str
    help: str
    default: OptionValue | None = None
    like: str | None = None
    kind: OptionType = OptionType.NUMBER
    words: tuple[str, ...] = ()
    letter: str | None = None
    noun: str | None = None
    unsaid: OptionValue | None = None
    order_only: bool = False
    multiplies: bool = False
    lengths: bool = False

    @property
    def required(self) -> bool:
        """True if the option is required."""
        return self.default is None and self.like is None

    @property
    def usual(self) -> OptionValue | None:
        """The default, for people."""
        return self.default if self.like is None else self.like

    @property
    def values(self) -> str:
        """Type of its values, as errors say it."""
        if self.kind is OptionType.WORD:
            return f"one of {', '.join(self.words)}"
        return " or ".join([self.kind.value, *self.words, *(["lengths such as 512+256"] * self.lengths)])

    def refuse(self, value: object) -> None:
        """Refuse a value of the wrong type.

        Raises:
            ConfigError: the value has the wrong type.

        >>> Option("waves", "1 or more", "down-and-up passes").refuse("two")
        Traceback (most recent call last):
        counterflow.errors.ConfigError: waves='two': must be a whole number (1 or more)
        """
        is_flag = isinstance(value, bool)
        if isinstance(value, str) and value in self.words:
            return
        if self.lengths:
            lengths_of(value)
            return
        if self.kind is OptionType.WORD:
            raise ConfigError(f"{self.name}={value!r}: unknown; legal: {', '.join(self.words)}")
        if is_flag is not (self.kind is OptionType.FLAG) or not isinstance(value, int):
            raise ConfigError(f"{self.name}={value!r}: must be {self.values} ({self.legal})")

    def describe(self, value: OptionValue) -> str:
        """A value in the words of pictures; empty if pictures omit it.

        >>> Option("waves", "1 or more", "down-and-up passes", noun="wave").describe(2)
        '2 waves'
        """
        if value == self.unsaid:
            return ""
        if self.kind is OptionType.FLAG:
            return self.name.replace("_", " ") if value else ""
        if self.kind is OptionType.WORD:
            return str(value)
        if self.noun is not None:
            return f"{value} {self.noun}{'' if value == 1 else 's'}"
        return f"{self.letter or self.name}={value}"


MICRO_BATCHES = Option("micro_batches", "1 or more", "N: micro-batches of a mini-batch", letter="N")
PERIODS = Option("periods", "1 or more", "updates to simulate", default=8, noun="period")
SLICED = Option(
    SLICES,
    "1 or more",
    "slices of a sequence: a number, or lengths (512+256)",
    default=1,
    lengths=True,
)
SPLIT = Option(
    "split",
    "true or false",
    "split backward; weight gradients fill bubbles",
    default=False,
    kind=OptionType.FLAG,
    unsaid=False,
)

Build = Callable[..., Schedule]
VersionRule = Callable[..., int]
"""Function of stages, stage and period: the weight version that the period's work uses on that stage. Further
arguments are options of the scheme."""

Planner = Callable[[int, int, int], Iterable[Mapping[str, OptionValue]]]
"""Function of workers, micro-batches and layers: options worth trying in addition to workers and
micro-batches.
"""


def plainly(_workers: int, _micro_batches: int, _layers: int) -> Iterator[Mapping[str, OptionValue]]:
    """The planner of a scheme without further options: one candidate, with all defaults."""
    yield {}


NumberLoop = Callable[..., list[int]]
"""A function that is one loop on numbers and lists of them, without calls, so numba compiles it as it is."""


@dataclass(frozen=True, slots=True)
class LoopedBuild:
    """The builder of a scheme if one loop takes nearly all of its time, so a caller may pass it compiled.

    Attributes:
        loop: the loop as plain Python.
        build: ``Scheme.build`` with a loop as its first argument.
    """

    loop: NumberLoop
    build: Build


@dataclass(frozen=True, slots=True)
class Scheme:
    """A named way to make schedules.

    Attributes:
        name: name of the scheme.
        build: function of the options that returns a schedule. It checks the options itself, and raises
            ``ConfigError``.
        summary: description in one line.
        source: publication.
        options: the builder's arguments, in its order; one of them is ``stages`` or ``workers``.
        directions: directions in which its pipes run.
        aliases: its other names.
        paper_name: name by which papers and torch know it, if that is another one; output shows both.
        workload: function of the options that returns the schedule's workload without an order; it accepts
            all options that are not ``order_only``, and refuses like the builder. None: take the workload of
            a built schedule.
        version: the weight versions that it promises; None for a synchronous scheme.
        planner: options worth trying; some of them the builder may refuse.
        needs: requirement for a candidate, for people; "" if there is always one.
        most_stashed: function of the options that returns an upper bound of the micro-batches (of one stage)
            that a worker stashes; None: no bound is promised.
        most_in_flight: function of the options that returns an upper bound of a pipe's micro-batches on its
            stage 0 between forward and input gradient; None: no bound beyond ``most_stashed``.
        chunk: name in pictures of one of several stages of a pipe that a worker holds.
        looped: the builder with its loop as an argument; None: no loop is worth compiling.
    """

    name: str
    build: Build
    summary: str
    source: str
    options: tuple[Option, ...]
    directions: Directions = Directions.SINGLE
    aliases: tuple[str, ...] = ()
    paper_name: str = ""
    workload: Callable[..., Workload] | None = None
    version: VersionRule | None = None
    planner: Planner = plainly
    needs: str = ""
    most_stashed: Callable[..., int | None] | None = None
    most_in_flight: Callable[..., int | None] | None = None
    chunk: str = "chunk"
    looped: LoopedBuild | None = None

    @property
    def title(self) -> str:
        """Name for people: ``1F1B (dapple)``."""
        return f"{self.paper_name} ({self.name})" if self.paper_name else self.name

    @property
    def synchronous(self) -> bool:
        """True if every update is preceded by a flush, so that no work uses old weights."""
        return self.version is None

    @property
    def depth(self) -> str:
        """Name of the option that sets the number of workers."""
        return next(option.name for option in self.options if option.name in DEPTH)

    def version_rule(self, options: Mapping[str, OptionValue]) -> VersionRule | None:
        """The weight versions that it promises with these options, as a function of stages, stage and period.

        Returns:
            None for a synchronous scheme.
        """
        if self.version is None:
            return None
        _, _, _, *names = inspect.signature(self.version).parameters
        arguments = {name: options[name] for name in names if name in options}
        return partial(self.version, **arguments) if arguments else self.version

    @property
    def updates_each_micro_batch(self) -> bool:
        """True if an update follows every micro-batch."""
        return self.option("micro_batches") is None

    def option(self, name: str) -> Option | None:
        """The option of that name, or None."""
        return next((option for option in self.options if option.name == name), None)

    def in_place_of(self, name: str) -> str | None:
        """The option with which this scheme sets the number of workers, if another scheme's is named; else
        None.
        """
        return self.depth if name in DEPTH and name != self.depth else None

    def with_own_depth(self, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """The options with this scheme's own option for workers, if the other one was given.

        Args:
            options: options that the user gave, with all that this scheme needs in addition to its depth.

        Raises:
            ConfigError: no number of workers fits these options, or both are given and disagree.
        """
        unit = next(name for name in DEPTH if name != self.depth)
        present, wanted = {name: v for name, v in options.items() if name != unit}, options.get(unit)
        if not isinstance(wanted, int):
            return dict(options)
        if self.depth in present:
            number = self._counted_in(unit, present)
            if number != wanted:
                raise ConfigError(
                    f"{unit}={wanted}: {self.name} with {self.depth}={present[self.depth]} has {number} "
                    f"{unit}; use only one of them"
                )
            return present
        per_worker = None
        for count in _divisors(wanted):
            try:
                number = self._counted_in(unit, present | {self.depth: count})
            except ConfigError as error:
                if count == wanted and (self.depth == DEPTH[0] or wanted < 1):
                    raise ConfigError(f"{unit}={wanted}: for {self.name} that is {error}") from None
                continue
            if number == wanted:
                return {self.depth: count, **present}
            per_worker = number // count
        per = (
            f"has {per_worker} {unit} on each of its {self.depth} with these options"
            if per_worker
            else "has no such depth"
        )
        raise ConfigError(f"{unit}={wanted}: {self.name} {per}; give {self.depth}=NUMBER")

    def _counted_in(self, unit: str, options: Mapping[str, OptionValue]) -> int:
        self.refuse_too_large(options)
        placement = self.workload_of(options).placement
        return placement.stages if unit == "stages" else placement.workers

    def missing(self, names: Iterable[str]) -> list[Option]:
        """The required options that are not given."""
        return [option for option in self.options if option.required and option.name not in names]

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Refuse options that the scheme does not have.

        Raises:
            ConfigError: it does not have one.
        """
        known = [option.name for option in self.options]
        for name in names:
            if name not in (*known, *DEPTH, SLICES):
                raise ConfigError(f"{self.name} has no option {name!r}; its options: {', '.join(known)}")

    def refuse_missing_or_illegal(
        self, options: Mapping[str, OptionValue], names: Iterable[str] | None = None
    ) -> None:
        """Refuse options that lack a required one, or contain an illegal value.

        Args:
            options: as they were given.
            names: names that count as given, if the depth is given by another name; None: the names in
                ``options``.

        Raises:
            ConfigError: an option is missing or illegal.
        """
        if missing := self.missing(options if names is None else names):
            wanted = "; ".join(f"{o.name} ({o.help}: {o.legal})" for o in missing)
            raise ConfigError(f"{self.name} needs {wanted}")
        for option in self.options:
            if option.name in options:
                option.refuse(options[option.name])

    def refuse_too_large(self, options: Mapping[str, OptionValue], most: int = MOST_OPS) -> None:
        """Refuse a schedule with too many ops before it is built.

        Raises:
            ConfigError: the schedule has more than ``most`` ops.
        """
        ops = self.least_ops(options)
        if ops > most:
            factors = [
                f"{name}={_counted(value)}" for name, value in self._factors(options).items() if value > 1
            ]
            raise ConfigError(
                f"{self.name} with {' and '.join(factors)} has at least {_counted(ops)} ops, but at most "
                f"{most:,} are built; choose smaller numbers"
            )

    def least_ops(self, options: Mapping[str, OptionValue]) -> int:
        """Minimum number of ops of the schedule with these options, without building it."""
        return 2 * math.prod(max(value, 0) for value in self._factors(options).values())

    def _factors(self, options: Mapping[str, OptionValue]) -> dict[str, int]:
        values = {option.name: options.get(option.name, option.default) for option in self.options}
        return {
            option.name: value
            for option in self.options
            if isinstance(value := values[option.name], int)
            and (option.multiplies or option.name in (*DEPTH, "micro_batches", "periods"))
        }

    def schedule(
        self, options: Mapping[str, Any], compiled: Callable[[NumberLoop], NumberLoop] | None = None
    ) -> Schedule:
        """The schedule with these options and with each micro-batch cut into ``slices``.

        Args:
            options: options of the scheme, with its depth as ``stages`` or ``workers``, and ``slices``, a
                number or lengths, which a scheme may also have as an option of its own.
            compiled: function that returns a faster loop for that of the builder; None: plain Python.

        Raises:
            ConfigError: the builder refuses the options, or the work cannot be sliced.
        """
        values = dict(options)
        slices = 1 if self.option(SLICES) else values.pop(SLICES, 1)
        values, micro_batches = self.with_own_depth(values), values.get("micro_batches", 1)
        if type(slices) is int:  # before a list is made of it
            self.refuse_too_large({**values, "micro_batches": _times(micro_batches, slices)})
        lengths = lengths_of(slices)
        self.refuse_too_large({**values, "micro_batches": _times(micro_batches, len(lengths))})
        build = self.build
        if compiled is not None and self.looped is not None:
            build = partial(self.looped.build, compiled(self.looped.loop))
        return sliced(build, values, lengths)

    def workload_of(self, options: Mapping[str, OptionValue]) -> Workload:
        """The workload of the schedule with these options.

        Raises:
            ConfigError: the builder refuses the options.
        """
        if self.workload is None:
            return self.build(**options).workload
        order_only = {option.name for option in self.options if option.order_only}
        return self.workload(**{name: v for name, v in options.items() if name not in order_only})


def _times(count: OptionValue, slices: int) -> OptionValue:
    return count * slices if isinstance(count, int) else count


def _counted(number: int) -> str:
    return f"{number:,}" if number < 10**12 else f"10^{int(number.bit_length() * 0.30103)}"


def _divisors(number: int) -> Iterator[int]:
    """The number, followed by its smaller divisors; only the number if it is out of range.

    >>> list(_divisors(12)), list(_divisors(0))
    ([12, 6, 4, 3, 2, 1], [0])
    """
    yield number
    if 0 < number <= MOST_OPS:
        yield from (d for d in range(number // 2, 0, -1) if number % d == 0)


def counts(least: int, most: int) -> Iterator[int]:
    """Numbers worth trying: every one up to 8, then 2^i and 3·2^i.

    >>> list(counts(6, 40))
    [6, 7, 8, 12, 16, 24, 32]
    """
    for count in range(least, most + 1):
        odd = count >> ((count & -count).bit_length() - 1)
        if count <= 8 or odd in (1, 3):
            yield count
