"""An agreement as ``counterflow verify --json`` prints it. Nothing is printed here."""

from __future__ import annotations

from typing import Annotated

from counterflow.common.json_models import describe, result_of
from counterflow.schedule.schedule_report import Scheduled

from .training_agreement import TrainingAgreement

Verified = result_of(
    "`counterflow verify`: largest relative errors. Its `workers` are those of all replicas.",
    Scheduled,
    TrainingAgreement,
    ok=Annotated[bool, describe("whether everything agrees")],
)
