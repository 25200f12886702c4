"""Files of lists of calls, by what they contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from counterflow.common.text_files import read_text
from counterflow.errors import ConfigError
from counterflow.program.lowering import lower
from counterflow.program.rules import RULES, CheckSubject, require
from counterflow.schedule import formats
from counterflow.schedule.graph import OpGraph

from .calls import CallLists, CommunicatorScope
from .flight_places import DumpPlace, places_of
from .flight_records import FORM, is_flight_record, read_flight_records
from .op_rules import op_findings
from .program_lists import program_lists
from .recorded import read_json, recorded_lists
from .torch_lists import read_torch_lists
from .verdicts import LintFinding


@dataclass(frozen=True, slots=True)
class LintSubject:
    """Lists that were read, and what is known of their ops.

    Attributes:
        lists: the lists of all ranks.
        findings: results of the rules of ops.
        remark: why there are none; empty: there are.
        places: of dumps, the place of each rank.
    """

    lists: CallLists
    findings: tuple[LintFinding, ...] = ()
    remark: str = ""
    places: tuple[DumpPlace, ...] = ()


def read_lists(path: Path, communicators: CommunicatorScope | None = None) -> LintSubject:
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
        lists = read_torch_lists(text, name, communicators or CommunicatorScope.GROUP)
        findings, remark = op_findings(text, name)
        return LintSubject(lists, tuple(findings), remark)
    values = read_json(text, name)
    if "scheme" in values or "orders" in values:
        schedule = formats.loads(text, name)
        require(CheckSubject(schedule), (rule for rule in RULES if not rule.lowered))
        graph = OpGraph(schedule)
        lists = program_lists(lower(schedule), graph, communicators or CommunicatorScope.EDGE)
        return LintSubject(lists)
    if communicators is not None:
        raise ConfigError(f'{name}: recorded calls say their "communicators"; leave out communicators')
    return LintSubject(recorded_lists(values, name))


def read_subject(
    paths: Sequence[Path], communicators: CommunicatorScope | None = None, schedule: Path | None = None
) -> LintSubject:
    """The lists in a file, or those of the dumps of a flight recorder.

    Args:
        paths: a file of lists, or a dump for each rank, or their folder.
        communicators: as in ``read_lists``.
        schedule: of dumps, the file of the schedule that ran.

    Raises:
        ConfigError: a file cannot be read, or has another form.
    """
    dumps = len(paths) > 1 or paths[0].is_dir() or is_flight_record(paths[0])
    if not dumps:
        if schedule is not None:
            raise ConfigError(f"{paths[0]}: is no dump of a flight recorder; leave out the schedule")
        return read_lists(paths[0], communicators)
    records = read_flight_records(paths)
    known = None if schedule is None else read_lists(schedule, communicators).lists
    places, lists = places_of(records, known)
    return LintSubject(replace(lists, form=FORM), places=tuple(places))
