"""Seven public hangs, each found with its circle or its loss of time, and with a change that ends it."""

from __future__ import annotations

import pytest

from counterflow.lint.pairing import is_crossed
from counterflow.lint.verdicts import PAIRED, lint
from counterflow.lint.waiting import TransportRule, play

from .hangs.cases import HANGS, few_micro_batches

THREADS = {
    *(f"pytorch/pytorch#{number}" for number in (172668, 188833, 175225, 174942, 178815)),
    "NVIDIA/Megatron-LM#5100",
    "pytorch/torchtitan#775",
}


def test_all_threads_are_rebuilt() -> None:
    assert {hang.thread for hang in HANGS.values()} == THREADS


@pytest.mark.parametrize("name", list(HANGS))
def test_it_is_diagnosed(name: str) -> None:
    hang = HANGS[name]
    verdict = lint(hang.lists())
    plays = [finding.play for finding in verdict.findings if finding.play is not None]
    assert tuple(result.rule for result in plays if not result.ok) == hang.broken
    assert all(result.closed for result in plays if not result.ok)
    faults = next(finding.faults for finding in verdict.findings if finding.rule == PAIRED)
    assert any(map(is_crossed, faults)) is hang.crossed
    assert (verdict.stalls is not None) is hang.stalls
    if not hang.fix:
        assert verdict.fix is None
        return
    assert verdict.fix is not None
    assert verdict.fix.changes[0].startswith(hang.fix)
    assert lint(verdict.fix.lists, verdict.fix.rules, mend=False).ok


@pytest.mark.parametrize("micro_batches", range(1, 7))
def test_torch_1f1b_connects_in_order_from_as_many_micro_batches_as_ranks(micro_batches: int) -> None:
    """As torchtitan 775 says: fewer hang."""
    lists = few_micro_batches(ranks=4, micro_batches=micro_batches)
    assert play(lists, TransportRule.FIRST_USE).ok is (micro_batches >= 4)
    assert play(lists, TransportRule.BLOCKING).ok


def test_head_of_line_is_measured() -> None:
    verdict = lint(HANGS["pytorch-188833"].lists())
    assert verdict.stalls is not None
    assert verdict.stalls.makespan > 1.2 * verdict.stalls.eager
    assert verdict.stalls.by_edge == verdict.stalls.eager
    assert verdict.stalls.longest[0].behind.startswith("8RECV_F")
