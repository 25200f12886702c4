"""Output of ``--json``: one model per command, each next to the records it reads.

``docs/reference/json.md`` is made from them.

Invariant: a command prints the keys of its model and nothing else; ``format`` changes when a key is removed
or changes its meaning. Keys of seconds end in ``_seconds``, keys of bytes in ``_bytes``; simulated times are
in ``time_unit``.
"""

from __future__ import annotations

from counterflow.common.json_models import Result, sections
from counterflow.integrations.conversion import ConvertedShown
from counterflow.integrations.torchtitan.job_config import TranslatedShown
from counterflow.lint.lint_report import Linted
from counterflow.measure.health import Doctor
from counterflow.papers.reproduction_report import FigureShown, FiguresShown, Reproducible, TableShown
from counterflow.planning.comparison_report import ComparisonShown, SweepShown
from counterflow.planning.plan_report import Examples, Planned
from counterflow.program.program_report import Checked
from counterflow.schedule.layouts.layout_report import LayoutShown
from counterflow.schedule.schedule_report import Schemes
from counterflow.simulation.report import Simulated
from counterflow.synthesis.synthesis_report import Synthesized
from counterflow.training.mesh_report import MeshShown
from counterflow.training.profiling import Profiled
from counterflow.training.training_report import ConfigKeys, Prepared, Trained
from counterflow.verification.verification_report import Verified

COMMANDS: tuple[type[Result], ...] = (
    *(Simulated, Synthesized, ComparisonShown, SweepShown, Checked, Verified, Schemes, Planned, Examples),
    *(LayoutShown, TranslatedShown, Linted),
    *(Profiled, Trained, Prepared, MeshShown, ConfigKeys, ConvertedShown, Doctor),
    *(Reproducible, TableShown, FigureShown, FiguresShown),
)


def page_sections() -> list[str]:
    """The tables of ``docs/reference/json.md``, one per model or record: each key and its meaning."""
    return list(sections(*COMMANDS).values())
