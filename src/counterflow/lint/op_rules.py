"""The checker's rules of ops and messages, for lists of torch that contain a whole schedule."""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.errors import ConfigError
from counterflow.program.actions import Action, Compute, Matching, Program, Receive, Send
from counterflow.program.rules import (
    COMPLETE,
    FORWARD_FIRST,
    INPUT_GRADIENT_FIRST,
    MESSAGES,
    PLACED,
    CheckSubject,
    details,
)
from counterflow.schedule import torch_csv
from counterflow.schedule.ir import Op, OpKind
from counterflow.schedule.torch_cells import TorchAction

from .torch_lists import TorchCell, torch_rows
from .verdicts import LintFinding

_RULES = (COMPLETE, PLACED, FORWARD_FIRST, INPUT_GRADIENT_FIRST, MESSAGES)


def op_findings(text: str, name: str) -> tuple[list[LintFinding], str]:
    """Results of the checker's rules of ops and messages, and why there are none.

    Args:
        text: torch's schedule with communication.
        name: its name.
    """
    rows, partial = torch_rows(text, name)
    if partial:
        return [], "The lists are a part of a run: rules of its ops are not checked."
    try:
        schedule = torch_csv.schedule_of(([a for cell in row for a in cell.actions] for row in rows), name)
    except ConfigError as error:
        return [], f"Rules of the ops are not checked: {str(error).removeprefix(name).lstrip(': ')}"
    stages = {action.stage: rank for rank, row in enumerate(rows) for c in row for action in c.actions}
    makers: dict[tuple[int, int], OpKind] = {
        (op.stage, op.micro_batches[0]): op.kind
        for op in schedule.ops()
        if op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)
    }
    actions = tuple(tuple(_row_actions(row, stages, makers)) for row in rows)
    subject = CheckSubject(schedule, Program(schedule, actions, matching=Matching.TAG))
    findings: list[LintFinding] = []
    for rule in _RULES:
        if all(finding.ok for finding in findings):
            detail = details(rule, subject)
            rule_name = "every op has its messages" if rule is MESSAGES else rule.name
            findings.append(LintFinding(rule_name, not detail, tuple(detail.splitlines())))
    return findings, ""


def _row_actions(
    row: list[TorchCell], stages: dict[int, int], makers: dict[tuple[int, int], OpKind]
) -> Iterator[Action]:
    for cell in row:
        for action in cell.actions:
            if (op := action.op) is not None:
                yield Compute(op)
            elif action.is_message:
                yield _message(action, stages, makers)


def _message(
    action: TorchAction, stages: dict[int, int], makers: dict[tuple[int, int], OpKind]
) -> Send | Receive:
    forward, sends = action.kind.endswith("F"), action.kind.startswith("SEND")
    stage = action.stage + (1 if forward == sends else -1)
    maker = action.stage if sends else stage
    kind = OpKind.FORWARD if forward else makers.get((maker, action.micro_batch), OpKind.BACKWARD)
    output = Op(kind, maker, (action.micro_batch,))
    return Send(output, stages[stage]) if sends else Receive(output, stages[stage])
