"""Lists of calls drawn at random."""

from __future__ import annotations

from random import Random

from counterflow.lint.calls import CallLists, CallSide, CallStep, CommunicatorScope, Part


def drawn_lists(seed: int) -> CallLists:
    """Messages of two to four ranks, each rank's in an order of its own, with batches and work that waits."""
    draw = Random(seed)
    ranks = draw.randint(2, 4)
    sides: list[list[tuple[CallSide, int, str, str]]] = [[] for _ in range(ranks)]
    for number in range(draw.randint(1, 7)):
        sender, receiver = draw.sample(range(ranks), 2)
        communicator = draw.choice(["group", f"{sender}→{receiver}", f"pair {min(sender, receiver)}"])
        sides[sender].append((CallSide.SEND, receiver, f"m{number}", communicator))
        sides[receiver].append((CallSide.RECEIVE, sender, f"m{number}", communicator))
    return CallLists(tuple(_row(draw, row) for row in sides), "drawn")


def _row(draw: Random, sides: list[tuple[CallSide, int, str, str]]) -> tuple[CallStep, ...]:
    if draw.random() < 0.6:
        draw.shuffle(sides)
    steps: list[CallStep] = []
    while sides:
        side, peer, name, communicator = sides.pop(0)
        parts = [Part(side, peer, name, communicator)]
        while sides and sides[0][3] == communicator and draw.random() < 0.3:
            parts.append(Part(*sides.pop(0)))
        needs = [step.number for step in steps if draw.random() < 0.15]
        label = ";".join(f"{part.side.value} {part.name}" for part in parts)
        steps.append(CallStep(len(steps), label, tuple(parts), tuple(needs)))
        if draw.random() < 0.4:
            calls = [step.number for step in steps if step.parts]
            steps.append(CallStep(len(steps), "work", needs=(draw.choice(calls),), seconds=1.0))
    return tuple(steps)


def correct_lists(seed: int, most: int = 20) -> CallLists:
    """Lists that end under every rule: all ranks have their calls in one order of all messages.

    Two ranks may exchange two messages, each in one batch; work and waits stand anywhere, on earlier calls.
    """
    draw = Random(seed)
    ranks = draw.randint(2, 8)
    known = draw.choice(list(CommunicatorScope))
    rows: list[list[CallStep]] = [[] for _ in range(ranks)]
    for number in range(draw.randint(4, most)):
        first, second = draw.sample(range(ranks), 2)
        exchange = draw.random() < 0.3 and known is not CommunicatorScope.EDGE
        for rank, peer, sides in ((first, second, CallSide), (second, first, reversed(CallSide))):
            way = {CallSide.SEND: (rank, peer), CallSide.RECEIVE: (peer, rank)}
            parts = [
                Part(side, peer, f"m{number} {way[side][0]}", known.of_message(*way[side])) for side in sides
            ]
            row = rows[rank]
            row.append(CallStep(len(row), f"call {number}", tuple(parts if exchange else parts[:1])))
            if draw.random() < 0.5:
                calls = tuple(sorted({draw.choice(row).number for _ in range(2)}))
                row.append(CallStep(len(row), f"work {number}", needs=calls, seconds=1.0))
    return CallLists(tuple(map(tuple, rows)), "drawn", connected=draw.random() < 0.5)
