"""Files of lists of calls, by what they contain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from counterflow.common.text_files import read_text
from counterflow.errors import ConfigError
from counterflow.program.lowering import lower
from counterflow.program.rules import RULES, CheckSubject, require
from counterflow.schedule import formats
from counterflow.schedule.graph import OpGraph

from .calls import CallLists, Communicators
from .op_rules import op_findings
from .program_lists import program_lists
from .recorded import read_json, recorded_lists
from .torch_lists import read_torch_lists
from .verdicts import Finding


@dataclass(frozen=True, slots=True)
class LintSubject:
    """Lists that were read, and what is known of their ops.

    Attributes:
        lists: the lists of all ranks.
        findings: results of the rules of ops.
        remark: why there are none; empty: there are.
    """

    lists: CallLists
    findings: tuple[Finding, ...] = ()
    remark: str = ""


def read_lists(path: Path, communicators: Communicators | None = None) -> LintSubject:
    """The lists in a file.

    Args:
        path: torch's schedule with communication (CSV, or printed rows), recorded calls (JSON), or a schedule
            file of this library, whose program is read.
        communicators: communicators of a schedule's messages; None: that of the group for torch's, one for a
            sender and a receiver for this library's.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    name = str(path)
    text = read_text(path, "is a folder; name a file")
    if not text.lstrip().startswith("{"):
        lists = read_torch_lists(text, name, communicators or Communicators.GROUP)
        findings, remark = op_findings(text, name)
        return LintSubject(lists, tuple(findings), remark)
    values = read_json(text, name)
    if "scheme" in values or "orders" in values:
        schedule = formats.loads(text, name)
        require(CheckSubject(schedule), (rule for rule in RULES if not rule.lowered))
        graph = OpGraph(schedule)
        lists = program_lists(lower(schedule), graph, communicators or Communicators.EDGE)
        return LintSubject(lists)
    if communicators is not None:
        raise ConfigError(f'{name}: recorded calls say their "communicators"; leave out communicators')
    return LintSubject(recorded_lists(values, name))
