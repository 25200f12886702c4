"""Schedules as text: one JSON object with one line per worker, ops as they are printed (``F3.7``); or torch's
CSV.

Invariant: a schedule that is written and read back is equal. Reading refuses text of another form, with the
place; whether the schedule is right is left to the checker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterflow.common.plurals import plural
from counterflow.errors import ConfigError

from . import torch_csv
from .ir import Op, OpKind, OptionValue, Schedule
from .placement import Placement
from .workload import SkipLink, Versions, Workload, passes_of

FORMAT = "counterflow-schedule"
VERSION = 1
"""The version of the format."""

_OP = re.compile(
    r"(?P<kind>["
    + "".join(kind.value for kind in OpKind)
    + r"])(?:(?P<one>\d+)|\((?P<group>\d+(?:,\d+)+)\))\.(?P<stage>\d+)"
    r"(?:p(?P<pipe>\d+))?(?::(?P<part>\d+)/(?P<parts>\d+))?(?:v(?P<version>\d+))?"
)
_OP_HELP = (
    "ops look like F3.7 (forward of micro-batch 3, stage 7), B4.0p1 (backward on pipe 1), "
    "F(0,1).2 (two micro-batches at once), B4.0:1/2 (the second half, or slice), I4.0 and W4.0 (input "
    "gradient "
    "and weight gradients of a split backward), R3.7 (recomputation before B3.7 or I3.7), F5.0v2 (weight "
    "version 2)"
)

MOST = 10**9
"""The largest number that is accepted."""

Count = Annotated[int, Field(ge=1, le=MOST)]
Index = Annotated[int, Field(ge=0, le=MOST)]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["counterflow-schedule"]
    format_version: Literal[1]
    scheme: Annotated[str, Field(min_length=1)]
    options: dict[str, OptionValue | bool] = {}
    synchronous: bool = True
    micro_batches: Count
    periods: Count = 1
    placement: Annotated[list[Annotated[list[Index], Field(min_length=1)]], Field(min_length=1)]
    versions: list[Annotated[list[Index], Field(min_length=1)]] | None = None
    steady: list[Annotated[list[Index], Field(min_length=2, max_length=2)]] | None = None
    lengths: list[Count] | None = None
    skips: list[Annotated[list[Index], Field(min_length=2, max_length=2)]] = []
    skips_once: list[Annotated[list[Index], Field(min_length=2, max_length=2)]] = []
    orders: Annotated[list[list[str]], Field(min_length=1)]


KEYS = tuple(_File.model_fields)
"""Keys of the JSON object."""


def dumps(schedule: Schedule) -> str:
    """The schedule as text, for ``loads`` or for a person.

    >>> from counterflow.schedule.schemes import dapple
    >>> loads(dumps(dapple(stages=2, micro_batches=2)), "x.json") == dapple(stages=2, micro_batches=2)
    True
    """
    head: dict[str, object] = {
        "format": FORMAT,
        "format_version": VERSION,
        "scheme": schedule.scheme,
        "options": dict(schedule.options),
        "synchronous": schedule.synchronous,
        "micro_batches": schedule.micro_batches,
        "periods": schedule.periods,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines.append(_rows("placement", [list(pipe) for pipe in schedule.placement.pipes_stages]))
    if schedule.workload.versions is not None:
        lines.append(_rows("versions", [list(row) for row in schedule.workload.versions]))
    if schedule.steady is not None:
        lines.append(_rows("steady", [list(span) for span in schedule.steady]))
    if len({*schedule.workload.lengths}) > 1:
        lines.append(f'  "lengths": {json.dumps(schedule.workload.lengths)}')
    skips = schedule.workload.skips
    for key, once in (("skips", False), ("skips_once", True)):
        if rows := [[skip.source, skip.target] for skip in skips if skip.once is once]:
            lines.append(_rows(key, rows))
    lines.append(_rows("orders", [[str(op) for op in order] for order in schedule.orders]))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rows(key: str, rows: list[list[int]] | list[list[str]]) -> str:
    return f"  {json.dumps(key)}: [\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]"


def loads(text: str, name: str) -> Schedule:
    """The schedule in a text.

    Args:
        text: text in the form that ``dumps`` writes.
        name: name of the text in errors, for example its file's name; if the name ends in ``.csv``, the text
            is torch's CSV.

    Raises:
        ConfigError: the text is not JSON, or has another form; the message says where.
    """
    if name.endswith(torch_csv.SUFFIX):
        return torch_csv.loads(text, name)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}: not JSON, at line {error.lineno}, column {error.colno}: {error.msg}; "
            "is the file cut off or damaged?"
        ) from None
    except ValueError:  # Python limits the digits of a number
        raise ConfigError(f"{name}: a number has thousands of digits; is the file damaged?") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply for a schedule file") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(
            f'{name}: not a schedule file (expected an object with "format": "{FORMAT}"; '
            "`counterflow export SCHEME` writes one)"
        )
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        problems = "\n".join(
            f"  {_path(e['loc'])}: {e['msg']}, got {_shown(e['input'])}" for e in error.errors()[:5]
        )
        raise ConfigError(f"{name}: not a valid schedule file:\n{problems}") from None
    return _schedule(file, name)


def _schedule(file: _File, name: str) -> Schedule:
    workers = len(file.orders)
    stages = len(file.placement[0])
    for pipe, row in enumerate(file.placement):
        if len(row) != stages:
            raise ConfigError(
                f"{name}: placement[{pipe}]: {plural(len(row), 'stage')}, but pipe 0 has {stages}; "
                "every pipe needs all stages"
            )
        for stage, worker in enumerate(row):
            if worker >= workers:
                raise ConfigError(
                    f"{name}: placement[{pipe}][{stage}]: worker {worker}, but there are {workers} orders "
                    f"(workers 0 to {workers - 1})"
                )
    steady = None
    if file.steady is not None:
        steady = tuple((span[0], span[1]) for span in file.steady)
        lengths = [len(order) for order in file.orders]
        fits = len(steady) == workers and all(
            begin < stop <= length for (begin, stop), length in zip(steady, lengths, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"{name}: steady: expected one [first op, one past the last op] per worker, within its order"
            )
    orders = tuple(
        tuple(_op(text, f"{name}: orders[{w}][{i}]") for i, text in enumerate(order))
        for w, order in enumerate(file.orders)
    )
    _refuse_versions(orders, file.periods, name)
    forwards = [op for order in orders for op in order if op.kind.is_forward]
    available, slices = (
        sum(len(op.micro_batches) for op in forwards),
        max((op.parts for op in forwards), default=1),
    )
    if file.micro_batches * file.periods * slices > available:
        sliced = f", in {slices} slices," if slices > 1 else ""
        unit = "slice of a micro-batch" if slices > 1 else "micro-batch"
        raise ConfigError(
            f"{name}: micro_batches={file.micro_batches} and periods={file.periods}{sliced or ','} but the "
            f"orders run {available} forwards in total; each {unit} needs one on every stage"
        )
    if file.lengths is not None and len(file.lengths) != slices:
        raise ConfigError(
            f"{name}: lengths: {len(file.lengths)} numbers, but the ops are of {slices} slices; give one per "
            "slice"
        )
    workload = Workload(
        placement=Placement(workers, tuple(map(tuple, file.placement))),
        micro_batches=file.micro_batches,
        passes=passes_of(op for order in orders for op in order),
        periods=file.periods,
        synchronous=file.synchronous,
        versions=_versions(file, stages, name),
        skips=_skips(file, stages, name),
        lengths=tuple(file.lengths or (1,) * slices),
        further_kinds=tuple(
            kind
            for kind in OpKind
            if not kind.makes and any(op.kind is kind for order in orders for op in order)
        ),
    )
    return Schedule(file.scheme, tuple(file.options.items()), workload, orders, steady)


def _skips(file: _File, stages: int, name: str) -> tuple[SkipLink, ...]:
    links = []
    for key, rows, once in (("skips", file.skips, False), ("skips_once", file.skips_once, True)):
        for place, (source, target) in enumerate(rows):
            if max(source, target) >= stages:
                raise ConfigError(
                    f"{name}: {key}[{place}]: from stage {source} to {target}, but there are "
                    f"{plural(stages, 'stage')}"
                )
            links.append(SkipLink(source, target, once))
    return tuple(sorted(links))


def _refuse_versions(orders: Iterable[Iterable[Op]], periods: int, name: str) -> None:
    for worker, order in enumerate(orders):
        for index, op in enumerate(order):
            if op.version > periods:
                raise ConfigError(
                    f"{name}: orders[{worker}][{index}]: {op} uses version {op.version}, and {periods} "
                    f"periods make no more than {periods}"
                )


def _versions(file: _File, stages: int, name: str) -> Versions | None:
    if file.synchronous:
        if file.versions is not None:
            raise ConfigError(f"{name}: versions: a synchronous schedule has one version; leave them out")
        return None
    if file.versions is None:
        return None
    if len(file.versions) != stages or any(len(row) != file.periods for row in file.versions):
        raise ConfigError(
            f"{name}: versions: expected {stages} rows, one per stage, of {file.periods} periods"
        )
    return tuple(map(tuple, file.versions))


def parse_op(text: str) -> Op:
    """The op in ``text``, which is in the form of ``str(op)``.

    Raises:
        ConfigError: the text is not an op.

    >>> parse_op("B4.0p1:1/2v3").parts
    2
    """
    return _op(text, "op")


def _op(text: str, place: str) -> Op:
    match = _OP.fullmatch(text) if len(text) < 10_000 else None
    if match is None:
        raise ConfigError(f"{place}: {_shown(text)} is not an op; {_OP_HELP}")

    def number(digits: str | None, default: int = 0) -> int:
        if digits is not None and len(digits) > len(str(MOST)):
            raise ConfigError(f"{place}: {_shown(text)}: a number of {len(digits)} digits")
        return default if digits is None else int(digits)

    group = match["group"].split(",") if match["one"] is None else [match["one"]]
    op = Op(
        OpKind(match["kind"]),
        number(match["stage"]),
        tuple(map(number, group)),
        number(match["pipe"]),
        number(match["part"]),
        number(match["parts"], 1),
        number(match["version"]),
    )
    if not op.part < op.parts:
        raise ConfigError(
            f"{place}: {_shown(text)}: parts count from 0, so {op.parts} parts have no part {op.part}"
        )
    return op


def _path(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "the file"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
