"""The record of a scheme: all that commands, planner, bounds and pictures know of it. Plain, frozen data.

Invariant: what is said of a scheme is said in its record, which stands in the scheme's own file. Nothing else
knows a scheme by name. A record makes no schedule; its builder does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import wraps
from typing import Any, ParamSpec, Protocol, overload

from counterflow.errors import ConfigError

from .ir import OptionValue, Schedule
from .orders.slices import sliced
from .workload import Workload

SLICES = "slices"
"""What every synchronous scheme accepts besides its options: into how many slices a sequence is cut."""

DEPTH = ("stages", "workers")
"""The options that say how many workers there are; a scheme has one of them."""

MOST_OPS = 1_000_000
"""Ops of the largest schedule that is built by name: 500 workers and 1,000 micro-batches have so many."""


class OptionType(Enum):
    """What an option's values are."""

    NUMBER = "a whole number"
    WORD = "a word"
    FLAG = "true or false"


class Directions(StrEnum):
    """Which way the pipes of a scheme run over the workers."""

    ONE = "one"
    TWO = "two"
    WAVES = "waves"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a scheme.

    Attributes:
        name: the builder's argument.
        legal: its range, in words.
        help: what it means, in one line.
        default: its value where it is not given; None: it must be given, or is as ``like`` says.
        like: the option whose value it then has.
        kind: what its values are.
        words: the legal words; a number may have some besides.
        letter: the papers' letter for it, which pictures use.
        noun: what pictures count with it, as in "2 waves"; in place of a letter.
        unsaid: the value that pictures leave out.
        order_only: whether only the order depends on it, and not the workload.
        multiplies: whether there are as many times more stages.
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

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is None and self.like is None

    @property
    def usual(self) -> OptionValue | None:
        """What it is where it is not given, for people."""
        return self.default if self.like is None else self.like

    @property
    def values(self) -> str:
        """What its values are, in the words of an error."""
        if self.kind is OptionType.WORD:
            return f"one of {', '.join(self.words)}"
        return " or ".join([self.kind.value, *self.words])

    def refuse(self, value: object) -> None:
        """Refuse a value of another kind.

        Raises:
            ConfigError: it is one.

        >>> Option("waves", "1 or more", "down-and-up passes").refuse("two")
        Traceback (most recent call last):
        counterflow.errors.ConfigError: waves='two': must be a whole number (1 or more)
        """
        is_flag = isinstance(value, bool)
        if isinstance(value, str) and value in self.words:
            return
        if self.kind is OptionType.WORD:
            raise ConfigError(f"{self.name}={value!r}: unknown; legal: {', '.join(self.words)}")
        if is_flag is not (self.kind is OptionType.FLAG) or not isinstance(value, int):
            raise ConfigError(f"{self.name}={value!r}: must be {self.values} ({self.legal})")

    def told(self, value: OptionValue) -> str:
        """A value as pictures say it; nothing where it is left out.

        >>> Option("waves", "1 or more", "down-and-up passes", noun="wave").told(2)
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
PERIODS = Option("periods", "1 or more", "updates to play", default=8, noun="period")
SLICED = Option(SLICES, "1 or more", "into how many slices of its sequence a micro-batch is cut", default=1)
SPLIT = Option(
    "split",
    "true or false",
    "split backward; weight gradients fill bubbles",
    default=False,
    kind=OptionType.FLAG,
    unsaid=False,
)

Build = Callable[..., Schedule]
VersionRule = Callable[[int, int, int], int]
"""(stages, stage, period) -> the weight version that period's work uses on that stage."""

Planner = Callable[[int, int, int], Iterable[Mapping[str, OptionValue]]]
"""(workers, micro-batches, layers of the model) -> options worth trying, beside workers and micro-batches."""


def plainly(_workers: int, _micro_batches: int, _layers: int) -> Iterator[Mapping[str, OptionValue]]:
    """The planner of a scheme without further options: one candidate, with all defaults."""
    yield {}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A named way to make schedules.

    Attributes:
        name: what users call it.
        build: from options to a schedule. It checks them itself, and raises ``ConfigError``.
        summary: one line.
        source: who published it.
        options: the builder's arguments, in its order; one of them is ``stages`` or ``workers``.
        directions: which way its pipes run.
        aliases: its other names.
        workload: from options to the schedule's workload, for those who need no order; it takes all options
            that are not ``order_only``, and refuses like the builder. None: the workload of a schedule built.
        version: the weight versions it promises; None for a synchronous one.
        planner: what is worth trying. What the builder refuses may be among it.
        needs: what it needs to have a candidate, for people; "" where there always is one.
        most_stashed: from options to the micro-batches (of one stage) that a worker never stashes more of;
            None: nothing is promised.
        most_in_flight: from options to the micro-batches of a pipe that are never more on its stage 0 between
            forward and input gradient; None: nothing beyond ``most_stashed``.
        chunk: what pictures call one of several stages that a worker holds of a pipe.
    """

    name: str
    build: Build
    summary: str
    source: str
    options: tuple[Option, ...]
    directions: Directions = Directions.ONE
    aliases: tuple[str, ...] = ()
    workload: Callable[..., Workload] | None = None
    version: VersionRule | None = None
    planner: Planner = plainly
    needs: str = ""
    most_stashed: Callable[..., int | None] | None = None
    most_in_flight: Callable[..., int | None] | None = None
    chunk: str = "chunk"

    @property
    def synchronous(self) -> bool:
        """Whether every update is preceded by a flush, so that no work uses old weights."""
        return self.version is None

    @property
    def depth(self) -> str:
        """The name of the option that says how many workers there are."""
        return next(option.name for option in self.options if option.name in DEPTH)

    @property
    def updates_each_micro_batch(self) -> bool:
        """Whether every micro-batch is followed by an update of its own."""
        return self.option("micro_batches") is None

    def option(self, name: str) -> Option | None:
        """The option of that name; None if there is none."""
        return next((option for option in self.options if option.name == name), None)

    def in_place_of(self, name: str) -> str | None:
        """The option that this scheme has for workers, where another's is named; else None."""
        return self.depth if name in DEPTH and name != self.depth else None

    def with_own_depth(self, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """Options in which this scheme's own one says how many workers there are, where the other was given.

        Args:
            options: as a user gave them, with all that this scheme needs beside its depth.

        Raises:
            ConfigError: with these options there is no such number, or both are given and do not agree.
        """
        other = next(name for name in DEPTH if name != self.depth)
        own, wanted = {name: v for name, v in options.items() if name != other}, options.get(other)
        if not isinstance(wanted, int):
            return dict(options)
        if self.depth in own:
            found = self._counted_in(other, own)
            if found != wanted:
                raise ConfigError(
                    f"{other}={wanted}: {self.name} with {self.depth}={own[self.depth]} has {found} {other}; "
                    f"leave out one of them"
                )
            return own
        each = None
        for count in _divisors(wanted):
            try:
                found = self._counted_in(other, own | {self.depth: count})
            except ConfigError as error:
                if count == wanted and (self.depth == DEPTH[0] or wanted < 1):
                    raise ConfigError(f"{other}={wanted}: for {self.name} that is {error}") from None
                continue
            if found == wanted:
                return {self.depth: count, **own}
            each = found // count
        per = (
            f"has {each} {other} on each of its {self.depth} with these options"
            if each
            else "has no such depth"
        )
        raise ConfigError(f"{other}={wanted}: {self.name} {per}; give {self.depth}=NUMBER")

    def _counted_in(self, other: str, options: Mapping[str, OptionValue]) -> int:
        """How many workers or stages there are with these options."""
        self.refuse_too_large(options)
        placement = self.workload_of(options).placement
        return placement.stages if other == "stages" else placement.workers

    def missing(self, given: Iterable[str]) -> list[Option]:
        """The options that must be given, and are not."""
        return [option for option in self.options if option.required and option.name not in given]

    def refuse_missing_or_illegal(
        self, options: Mapping[str, OptionValue], given: Iterable[str] | None = None
    ) -> None:
        """Refuse what lacks an option that must be given, or has one with an illegal value.

        Args:
            options: as they were given.
            given: the names that count as given, where that is another's words for the depth; None: theirs.

        Raises:
            ConfigError: an option is missing or illegal.
        """
        if missing := self.missing(options if given is None else given):
            wanted = "; ".join(f"{o.name} ({o.help}: {o.legal})" for o in missing)
            raise ConfigError(f"{self.name} needs {wanted}")
        for option in self.options:
            if option.name in options:
                option.refuse(options[option.name])

    def refuse_too_large(self, options: Mapping[str, OptionValue], most: int = MOST_OPS) -> None:
        """Refuse, before anything is built, what has more ops than can be built.

        Raises:
            ConfigError: there are more than ``most``.
        """
        ops, factors = 2, []  # a forward and a backward
        for option in self.options:
            value = options.get(option.name, option.default)
            if not isinstance(value, int):
                continue
            if option.multiplies or option.name in (*DEPTH, "micro_batches", "periods"):
                ops *= max(value, 0)
                if value > 1:
                    factors.append(f"{option.name}={_counted(value)}")
        if ops > most:
            raise ConfigError(
                f"{self.name} with {' and '.join(factors)} has at least {_counted(ops)} ops, and at most "
                f"{most:,} are built; choose smaller numbers"
            )

    def schedule(self, options: Mapping[str, OptionValue]) -> Schedule:
        """The schedule with these options and ``slices`` of each micro-batch.

        Args:
            options: the scheme's, its depth as ``stages`` or ``workers``, and ``slices``, which a scheme may
                also have as an option of its own.

        Raises:
            ConfigError: the builder refuses them, or there are slices of what has none.
        """
        own = dict(options)
        slices = 1 if self.option(SLICES) else own.pop(SLICES, 1)
        if isinstance(slices, bool) or not isinstance(slices, int) or slices < 1:
            raise ConfigError(f"{SLICES}={slices!r}: must be a whole number, 1 or more")
        own = self.with_own_depth(own)
        self.refuse_too_large({**own, "micro_batches": _times(own.get("micro_batches", 1), slices)})
        return sliced(self.build, own, slices)

    def workload_of(self, options: Mapping[str, OptionValue]) -> Workload:
        """The workload of the schedule with these options.

        Raises:
            ConfigError: the builder refuses them.
        """
        if self.workload is None:
            return self.build(**options).workload
        order_only = {option.name for option in self.options if option.order_only}
        return self.workload(**{name: v for name, v in options.items() if name not in order_only})


_P = ParamSpec("_P")


class EitherDepth(Protocol[_P]):
    """A scheme's builder, which also accepts the other scheme option for the depth: workers or stages."""

    __name__: str

    @overload
    def __call__(self, *given: _P.args, **options: _P.kwargs) -> Schedule: ...
    @overload
    def __call__(self, **options: OptionValue) -> Schedule: ...


def either_depth(scheme: Scheme, build: Callable[_P, Schedule]) -> EitherDepth[_P]:
    """The builder of a scheme, with ``workers=`` and ``stages=`` both understood.

    Args:
        scheme: its record.
        build: its own builder, which knows one of the two.
    """
    names = [*inspect.signature(build).parameters]

    @wraps(build)
    def by_either(*given: Any, **options: Any) -> Schedule:
        if any(name in options for name in (*DEPTH, SLICES) if name != scheme.depth):
            return scheme.schedule({**dict(zip(names, given, strict=False)), **options})
        return scheme.build(*given, **options)

    by_either.__module__ = build.__module__.rpartition(".")[0]  # where it is found, also to be pickled
    return by_either


def _times(count: OptionValue, slices: int) -> OptionValue:
    return count * slices if isinstance(count, int) else count


def _counted(number: int) -> str:
    """A count in few characters."""
    return f"{number:,}" if number < 10**12 else f"10^{int(number.bit_length() * 0.30103)}"


def _divisors(number: int) -> Iterator[int]:
    """The number, and below it its divisors; the number alone where it is out of range.

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
