"""Communicators of messages: one for each direction between two workers, made in the fewest rounds.

A link is a sender and a receiver. Links of one worker never share a communicator: their messages would wait
for each other in its queue. A call that splits a group (``split_group``, ``ncclCommSplit``) makes a
communicator for every pair of a round, in which no worker is twice. So rounds are the colours of an edge
colouring. Some links prove that there are no fewer rounds: those of one worker, one in each round, or those
among n workers, n ÷ 2 in each; else a search over all colourings does (Vizing 1964; Shannon 1949).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..actions import Program, Send

Link = tuple[int, int]
"""Sender and receiver."""

_MOST_WORKERS = 12
"""Largest number of workers of which all subsets are tried for a proof."""
_MOST_STEPS = 200_000
"""Number of steps after which the search for a colouring gives up."""


@dataclass(frozen=True, slots=True)
class Communicators:
    """Communicators of the messages of one pipeline group.

    Attributes:
        rounds: the links whose communicators are made at once, round by round.
        proof: links of which ``at_once`` fit into a round, so that there are no fewer rounds; empty: all
            colourings were searched, if ``proved``.
        proved: True if there is no way with fewer rounds.
    """

    rounds: tuple[tuple[Link, ...], ...]
    proof: tuple[Link, ...]
    proved: bool

    @property
    def bound(self) -> int:
        """Number of rounds that ``proof`` proves."""
        return -(-len(self.proof) // at_once(self.proof)) if self.proof else 0


def links_of(program: Program) -> tuple[Link, ...]:
    """The links of a program, by sender in the order of their first messages."""
    return tuple(
        dict.fromkeys(
            (worker, action.peer)
            for worker, actions in enumerate(program.actions)
            for action in actions
            if isinstance(action, Send)
        )
    )


def at_once(links: Sequence[Link]) -> int:
    """Upper bound of the number of links in which no worker is twice.

    >>> at_once([(0, 1), (1, 2), (2, 1)]), at_once([(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)])
    (1, 2)
    """
    if set[int].intersection(*({*link} for link in links)):
        return 1
    return len({worker for link in links for worker in link}) // 2


def greedy_rounds(links: Iterable[Link]) -> list[list[Link]]:
    """Rounds by greedy matching: each takes the remaining links, in order, of workers that it does not have.

    >>> greedy_rounds([(0, 1), (1, 2), (2, 3)])
    [[(0, 1), (2, 3)], [(1, 2)]]
    """
    remaining, rounds = [*links], list[list[Link]]()
    while remaining:
        workers = set[int]()
        chosen = list[Link]()
        for link in remaining:
            if workers.isdisjoint(link):
                chosen.append(link)
                workers.update(link)
        rounds.append(chosen)
        remaining = [link for link in remaining if link not in chosen]
    return rounds


def fewest_rounds(links: Sequence[Link]) -> Communicators:
    """The fewest rounds for some links, with a proof.

    >>> plan = fewest_rounds([(0, 1), (1, 2), (2, 1), (1, 0)])
    >>> len(plan.rounds), plan.bound, plan.proved
    (4, 4, True)
    """
    if not links:
        return Communicators((), (), proved=True)
    proof = _proof(links)
    bound = Communicators((), proof, proved=False).bound
    rounds = greedy_rounds(links)
    complete = True
    """True if the search has refused all smaller numbers."""
    for count in range(bound, len(rounds)):
        colouring, searched = search(links, count)
        if colouring is not None:
            rounds = colouring
            break
        complete = complete and searched
    if len(rounds) > bound:
        proof = ()
    return Communicators(tuple(map(tuple, rounds)), proof, proved=bool(proof) or complete)


def _proof(links: Sequence[Link]) -> tuple[Link, ...]:
    workers = sorted({worker for link in links for worker in link})
    proofs = [tuple(link for link in links if worker in link) for worker in workers]
    sizes = range(3, len(workers) + 1, 2) if len(workers) <= _MOST_WORKERS else ()
    subsets = [subset for size in sizes for subset in combinations(workers, size)]
    proofs += [tuple(link for link in links if {*link} <= {*subset}) for subset in (*subsets, workers)]
    return max(filter(None, proofs), key=lambda proof: -(-len(proof) // at_once(proof)))


def search(links: Sequence[Link], count: int) -> tuple[list[list[Link]] | None, bool]:
    """Rounds for some links, and True if the search was complete.

    Args:
        links: the links.
        count: number of rounds.
    """
    neighbors: defaultdict[Link, list[Link]] = defaultdict(list)
    for first, second in combinations(links, 2):
        if {*first} & {*second}:
            neighbors[first].append(second)
            neighbors[second].append(first)
    colours: dict[Link, int] = {}
    steps = 0

    def extend() -> bool:
        nonlocal steps
        steps += 1
        if len(colours) == len(links) or steps > _MOST_STEPS:
            return len(colours) == len(links)
        used = {
            link: {colours.get(near) for near in neighbors[link]} for link in links if link not in colours
        }
        link = max(used, key=lambda link: (len(used[link]), len(neighbors[link])))
        for colour in range(min(count, 1 + max(colours.values(), default=-1) + 1)):
            if colour not in used[link]:
                colours[link] = colour
                if extend():
                    return True
                del colours[link]
        return False

    if not extend():
        return None, steps <= _MOST_STEPS
    return [[link for link in links if colours[link] == colour] for colour in range(count)], True
