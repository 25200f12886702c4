"""What ``--json`` prints: one model a command, each beside what it reads; as a page ``docs/json.md``.

Invariant: a command prints what its model says and nothing else; ``format`` changes when a key goes or
changes its meaning. Times are in seconds and end in ``_seconds``, sizes in bytes and end in ``_bytes``; what
the simulator plays is in its ``time_unit``.
"""

from __future__ import annotations

from counterflow.checkpoints.convert import ConvertedShown
from counterflow.measure.health import Doctor
from counterflow.papers.report import FigureShown, Reproducible, TableShown
from counterflow.planning.comparison_report import ComparisonShown
from counterflow.planning.report import Examples, Planned
from counterflow.program.report import Checked
from counterflow.schedule.report import Schemes
from counterflow.shown import Result, sections
from counterflow.simulation.report import Simulated
from counterflow.synthesis.report import Synthesized
from counterflow.training.profiling import Profiled
from counterflow.training.report import Keys, Prepared, Trained
from counterflow.verification.report import Verified

COMMANDS: tuple[type[Result], ...] = (
    *(Simulated, Synthesized, ComparisonShown, Checked, Verified, Schemes, Planned, Examples),
    *(Profiled, Trained, Prepared, Keys, ConvertedShown, Doctor),
    *(Reproducible, TableShown, FigureShown),
)


def page_sections() -> list[str]:
    """The tables of ``docs/json.md``, one a model or record: each key with what it means."""
    return list(sections(*COMMANDS).values())
