"""Output of ``--json``: one model per command, each next to the records it reads; ``docs/json.md`` is made
from them.

Invariant: a command prints the keys of its model and nothing else; ``format`` changes when a key is removed
or changes its meaning. Keys of seconds end in ``_seconds``, keys of bytes in ``_bytes``; simulated times are
in ``time_unit``.
"""

from __future__ import annotations

from counterflow.common.json_models import Result, sections
from counterflow.integrations.conversion import ConvertedShown
from counterflow.integrations.torchtitan.job_config import TranslatedShown
from counterflow.measure.health import Doctor
from counterflow.papers.report import FigureShown, FiguresShown, Reproducible, TableShown
from counterflow.planning.comparison_report import ComparisonShown
from counterflow.planning.plan_report import Examples, Planned
from counterflow.program.report import Checked
from counterflow.schedule.layouts.report import LayoutShown
from counterflow.schedule.report import Schemes
from counterflow.simulation.report import Simulated
from counterflow.synthesis.report import Synthesized
from counterflow.training.profiling import Profiled
from counterflow.training.report import Keys, Prepared, Trained
from counterflow.verification.report import Verified

COMMANDS: tuple[type[Result], ...] = (
    *(Simulated, Synthesized, ComparisonShown, Checked, Verified, Schemes, Planned, Examples),
    *(LayoutShown, TranslatedShown),
    *(Profiled, Trained, Prepared, Keys, ConvertedShown, Doctor),
    *(Reproducible, TableShown, FigureShown, FiguresShown),
)


def page_sections() -> list[str]:
    """The tables of ``docs/json.md``, one per model or record: each key and its meaning."""
    return list(sections(*COMMANDS).values())
