"""Lists of calls drawn at random."""

from __future__ import annotations

from random import Random

from counterflow.lint.calls import CallLists, Part, Side, Step


def drawn_lists(seed: int) -> CallLists:
    """Messages of two to four ranks, each rank's in an order of its own, with batches and work that waits."""
    draw = Random(seed)
    ranks = draw.randint(2, 4)
    sides: list[list[tuple[Side, int, str, str]]] = [[] for _ in range(ranks)]
    for number in range(draw.randint(1, 7)):
        sender, receiver = draw.sample(range(ranks), 2)
        communicator = draw.choice(["group", f"{sender}→{receiver}", f"pair {min(sender, receiver)}"])
        sides[sender].append((Side.SEND, receiver, f"m{number}", communicator))
        sides[receiver].append((Side.RECEIVE, sender, f"m{number}", communicator))
    return CallLists(tuple(_row(draw, row) for row in sides), "drawn")


def _row(draw: Random, sides: list[tuple[Side, int, str, str]]) -> tuple[Step, ...]:
    if draw.random() < 0.6:
        draw.shuffle(sides)
    steps: list[Step] = []
    while sides:
        side, peer, name, communicator = sides.pop(0)
        parts = [Part(side, peer, name, communicator)]
        while sides and sides[0][3] == communicator and draw.random() < 0.3:
            parts.append(Part(*sides.pop(0)))
        needs = [step.number for step in steps if draw.random() < 0.15]
        label = ";".join(f"{part.side.value} {part.name}" for part in parts)
        steps.append(Step(len(steps), label, tuple(parts), tuple(needs)))
        if draw.random() < 0.4:
            calls = [step.number for step in steps if step.parts]
            steps.append(Step(len(steps), "work", needs=(draw.choice(calls),), seconds=1.0))
    return tuple(steps)
