"""Search for the fewest changes after which lists end under rules, proved by playing the changed lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from counterflow.common.plurals import plural

from .calls import CallLists
from .changes import ListChange, changes_for, edge_communicators, swap_for_crossed
from .pairing import is_crossed, pairing_faults
from .reposting import in_order_of_sending
from .splitting import large_batches, paired_rounds, split_batches
from .waiting import TransportRule, WaitPlay, play

STEPS = 25_000
"""Steps that a search plays at most."""

_LEAST_STEPS = 40
"""Steps that the play of a short list counts as."""

DEPTH = 3
"""Changes of calls up to which all sets are tried."""

_MOST_SWAPS = 4
"""Receives that are swapped at most, so that no message meets another."""


@dataclass(frozen=True, slots=True)
class Fix:
    """Changes after which lists end.

    Attributes:
        rules: the rules under which the changed lists were played to their end.
        changes: the changes, in order.
        lists: the changed lists.
    """

    rules: tuple[TransportRule, ...]
    changes: tuple[str, ...]
    lists: CallLists


class _ChangeSearch:
    def __init__(self, lists: CallLists, rules: Sequence[TransportRule]) -> None:
        self.rules = sorted(rules, key=_ORDER.index)
        self.lists = lists
        self.launched = split_batches(lists)
        self.steps = max(_LEAST_STEPS, sum(map(len, self.launched.ranks)))
        self.budget = STEPS
        self.faults = sum(1 for _ in pairing_faults(lists))

    def candidates(self) -> Iterator[tuple[ListChange, ...] | None]:
        """Sets of changes after which lists end, or None, stage by stage."""
        yield self._tried(_rounds(self.lists))
        yield self._uncrossed()
        yield next(self.fewest(self.launched, 1), None)
        yield self._tried(_connected(self.launched))
        yield self._tried(edge_communicators(self.launched))
        for depth in range(2, DEPTH + 1):
            yield next(self.fewest(self.launched, depth), None)
        yield self._tried(_reposted(self.launched))

    def _uncrossed(self) -> tuple[ListChange, ...] | None:
        changes: list[ListChange] = []
        lists = self.launched
        while len(changes) < _MOST_SWAPS and (change := swap_for_crossed(lists)) is not None:
            changes.append(change)
            lists = change.lists
        return tuple(changes) if changes and self.ends(lists) else None

    def _tried(self, change: ListChange | None) -> tuple[ListChange, ...] | None:
        return (change,) if change is not None and self.ends(change.lists) else None

    def first_stuck(self, lists: CallLists) -> WaitPlay | None:
        """The play of the first rule under which lists do not end; None if they end under all."""
        for rule in self.rules:
            self.budget -= self.steps
            result = play(lists, rule)
            if not result.ok:
                return result
        return None

    def ends(self, lists: CallLists) -> bool:
        """True if lists end under all rules, no message lost its other side, and none meets another."""
        faults = list(pairing_faults(lists))
        crossed = any(is_crossed(fault) for fault in faults)
        return not crossed and len(faults) <= self.faults and self.first_stuck(lists) is None

    def fewest(self, lists: CallLists, depth: int) -> Iterator[tuple[ListChange, ...]]:
        """Sets of ``depth`` changes after which lists end."""
        stuck = self.first_stuck(lists)
        if stuck is None or not stuck.closed:
            return
        for change in changes_for(lists, stuck):
            if self.budget <= 0:
                return
            if depth > 1:
                yield from ((change, *more) for more in self.fewest(change.lists, depth - 1))
            elif self.ends(change.lists):
                yield (change,)


def _rounds(lists: CallLists) -> ListChange | None:
    if next(large_batches(lists), None) is None:
        return None
    text = "split the large batches into rounds in each of which a rank exchanges messages with one rank"
    return ListChange(text, paired_rounds(lists))


def _connected(lists: CallLists) -> ListChange | None:
    if lists.connected:
        return None
    return ListChange(
        "connect before the first step: a small message each way", replace(lists, connected=True)
    )


def _reposted(lists: CallLists) -> ListChange | None:
    result = in_order_of_sending(lists)
    if result is None:
        return None
    text = f"post each receive in the order of sending ({plural(result[1], 'receive')} elsewhere)"
    return ListChange(text, result[0])


_ORDER = [
    TransportRule.EAGER,
    TransportRule.NCCL,
    TransportRule.ONE_QUEUE,
    TransportRule.RENDEZVOUS,
    TransportRule.BLOCKING,
    TransportRule.FIRST_USE,
]
"""Rules in the order in which a circle of theirs is broken."""


def fix_of(lists: CallLists, rules: Sequence[TransportRule]) -> Fix | None:
    """The fewest changes after which lists end under rules; None: no such changes.

    Swaps of receives that meet other messages come first, then one change of calls, connections before the
    first step, a communicator for each sender and receiver, two and three changes of calls, and at last
    receives in the order of sending.

    Args:
        lists: the lists of all ranks.
        rules: the rules under which they shall end.
    """
    search = _ChangeSearch(lists, rules)
    for changes in search.candidates():
        if changes:
            return Fix(tuple(rules), tuple(change.text for change in changes), changes[-1].lists)
    return None
