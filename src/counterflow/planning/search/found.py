"""What a search finds: plans, what does not fit, and what became of every scheme's candidates.

What it does not do: search (``search.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.html import titled

from ..play import Play
from ..prediction import Configuration, Prediction, ranking
from .space import Omission


@dataclass(frozen=True, slots=True)
class Plan:
    """A candidate that fits, with its simulated step.

    Attributes:
        seconds: of one step.
        place: its place in the space; of two equal plans the first is taken.
        play: the candidate, played.
    """

    seconds: float
    place: int
    play: Play

    @property
    def prediction(self) -> Prediction:
        """All of it as a record."""
        return self.play.prediction()


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A candidate that does not fit.

    Attributes:
        scheme: its scheme.
        candidate: what it was.
        needed_bytes: memory of the fullest worker, at least; without the reserve.
        worker: that worker; where devices differ, the one that has most too many.
        usable_bytes: what it has.
    """

    scheme: str
    candidate: Configuration
    needed_bytes: float
    worker: int
    usable_bytes: float

    @property
    def excess_bytes(self) -> float:
        """What that worker lacks."""
        return self.needed_bytes - self.usable_bytes


@dataclass(slots=True)
class Rejections:
    """What became of a scheme's candidates, in numbers; a search counts them.

    Attributes:
        scheme: its name.
        candidates: all of them.
        too_large: those that do not fit, unless they were known to be slower before.
        slower: those whose work, bound, or sketch is above what was found, so that they were never simulated.
        simulated: those that were, in each sync mode.
        closest: of those that do not fit the one that needs the least memory; None if there is none.
    """

    scheme: str
    candidates: int = 0
    too_large: int = 0
    slower: int = 0
    simulated: int = 0
    closest: TooLarge | None = None

    def refuse(self, found: TooLarge) -> None:
        """Count a candidate that does not fit."""
        self.too_large += 1
        if self.closest is None or found.excess_bytes < self.closest.excess_bytes:
            self.closest = found


@dataclass(frozen=True, slots=True)
class Found:
    """What the search found.

    Attributes:
        best: the best plans of all, best first.
        of_schemes: the best plan of every scheme that has one, best first.
        rejections: by scheme.
        omissions: parts of the space without a candidate.
        in_more_memory: the best candidate that was refused for memory alone and would beat all plans.
        mini_batch: samples of a step.
        usable_bytes: memory of a device without the reserve.
    """

    best: tuple[Plan, ...]
    of_schemes: tuple[Plan, ...]
    rejections: tuple[Rejections, ...]
    omissions: tuple[Omission, ...]
    in_more_memory: Plan | None
    mini_batch: int
    usable_bytes: float

    def _repr_html_(self) -> str:
        """The best plan of every scheme in a notebook."""
        plans = [plan.play.prediction() for plan in self.of_schemes]
        return titled(f"Mini-batch {self.mini_batch:,}: the best plan of each scheme", ranking(plans))
