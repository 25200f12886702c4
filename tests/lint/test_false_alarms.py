"""Correct lists, of which none raises an alarm; benchmarks/lint.py draws 10,000 of them."""

from __future__ import annotations

from random import Random

from counterflow.lint.calls import CommunicatorScope
from counterflow.lint.program_lists import program_lists
from counterflow.lint.verdicts import lint
from counterflow.program.lowering import lower
from counterflow.schedule import schemes
from counterflow.schedule.graph import OpGraph

from .drawn import correct_lists


def test_recorded_calls_in_one_order_end() -> None:
    assert [seed for seed in range(200) if not lint(correct_lists(seed), mend=False).ok] == []


def test_programs_end() -> None:
    draw = Random(0)
    for scheme in (schemes.dapple, schemes.zb_h1, schemes.gpipe):
        for _ in range(6):
            schedule = scheme(stages=draw.randint(2, 4), micro_batches=draw.randint(1, 6))
            lists = program_lists(lower(schedule), OpGraph(schedule), CommunicatorScope.EDGE)
            assert lint(lists, mend=False).ok, schedule
