"""``counterflow layout``: Megatron-LM's layout strings, shown and re-derived; torchtitan's keys as ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from counterflow.common.cli_fields import cli_field
from counterflow.common.plurals import plural
from counterflow.common.text_files import read_text
from counterflow.errors import ConfigError
from counterflow.schedule.layouts import LayerKind, Layout, rederive

from ..options.flags import JsonFlag, OptionRecord
from ..output.console import WIDE, console, merge_equal_rows, note, print_json, table_of
from ..output.visible import echo

if TYPE_CHECKING:
    from counterflow.schedule.layouts import Rederived, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChanges(OptionRecord):
    """Model and cluster for which the layout is re-derived."""

    panel: ClassVar[str] = "Re-derive it for another model or cluster; what is not given stays"

    layers: int | None = cli_field(None, "Transformer layers of the model.", metavar="N")
    mtp: int | None = cli_field(None, "Layers for multi-token prediction.", metavar="N")
    stages: int | None = cli_field(None, "Stages of all ranks together.", metavar="D")
    pp: int | None = cli_field(
        None, "Pipeline ranks. Alone, the stages stay and are shared out over the ranks.", metavar="P"
    )
    vpp: int | None = cli_field(None, "Virtual stages of each rank, with --pp or --stages.", metavar="V")


_NAMES = {
    LayerKind.EMBEDDING: "embedding",
    LayerKind.TRANSFORMER: "transformer",
    LayerKind.MTP: "mtp",
    LayerKind.LOSS: "loss",
}


def layout(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="[LAYOUT]",
            help="A string of Megatron-LM's --pipeline-model-parallel-layout: E embedding, t transformer "
            "layer, m MTP layer, L loss; | begins the next stage, *n and (...)*n repeat.",
            show_default=False,
        ),
    ] = None,
    *,
    changes: LayoutChanges,
    torchtitan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="In place of a layout: a job of torchtitan, whose pipeline_parallel_* keys are printed as a "
            "config's sections; --layers says how many layers its model has.",
            rich_help_panel="Other forms",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a pipeline layout of Megatron-LM stage by stage, and re-derive it when layers or ranks change."""
    if torchtitan is not None:
        _translate(torchtitan, text, changes, as_json=as_json)
        return
    if text is None:
        raise ConfigError(
            "no layout: give one, as in counterflow layout 'Et*3|(tt|)*29,m|L', or --torchtitan FILE"
        )
    result = rederive(
        Layout.read(text),
        layers=changes.layers,
        mtp=changes.mtp,
        stages=changes.stages,
        pp=changes.pp,
        vpp=changes.vpp,
    )
    if as_json:
        from counterflow.schedule.layouts.layout_report import shown

        print_json(shown(result))
        return
    _print(result)


def _print(result: Rederived) -> None:
    from rich.text import Text

    out = console(WIDE)
    echo(str(result.layout))
    now, mtp = result.layout.count(LayerKind.TRANSFORMER), result.layout.count(LayerKind.MTP)
    with_mtp = f", {mtp} MTP layer{'s' * (mtp > 1)}" if mtp else ""
    stages = result.pp * result.vpp
    out.print(
        Text(
            f"{plural(now, 'transformer layer')}{with_mtp}; pp {result.pp}, vpp {result.vpp}: "
            f"{plural(stages, 'stage')}"
        )
    )
    chunks = [f"chunk {number}" for number in range(result.vpp)] if result.vpp > 1 else ["layers"]
    table = table_of("rank", *chunks, text_columns=("rank", *chunks), pad_edge=False)
    rows = [tuple(result.chunk(rank, number) for number in range(result.vpp)) for rank in range(result.pp)]
    for ranks, row in merge_equal_rows(rows):
        table.add_row(ranks, *map(_in_words, row))
    out.print(table)
    if result.changed:
        count = len(result.original.stages)
        counted = f"embedding {result.embedding}, loss {result.loss}" + (
            f", MTP {result.mtp}" if result.mtp else ""
        )
        out.print(
            Text(
                f"The layout given had {count} stages, usually of {result.usual} transformer layers. Kept of "
                f"it: what embedding and loss count as, in transformer layers ({counted})"
            )
        )


def _in_words(stage: Stage) -> str:
    counts = {kind: stage.count(kind) for kind in dict.fromkeys(stage)}
    words = [
        f"{count} {_NAMES[kind]}" if kind is LayerKind.TRANSFORMER or count > 1 else _NAMES[kind]
        for kind, count in counts.items()
    ]
    return ", ".join(words) or "empty"


def _translate(path: Path, text: str | None, changes: LayoutChanges, *, as_json: bool) -> None:
    arguments = {
        "LAYOUT": text,
        "--mtp": changes.mtp,
        "--stages": changes.stages,
        "--pp": changes.pp,
        "--vpp": changes.vpp,
    }
    if names := [name for name, value in arguments.items() if value is not None]:
        raise ConfigError(f"--torchtitan {path}: says the pipeline itself; leave out {', '.join(names)}")
    from counterflow.integrations.torchtitan.job_config import TranslatedShown, from_torchtitan

    job = read_text(path, "cannot be read: Is a directory", place=str(path))
    config = from_torchtitan(job, changes.layers, name=str(path))
    if as_json:
        stages = None if config.layout is None else str(config.layout)
        print_json(TranslatedShown.of(sections=config.sections, layout=stages, notes=list(config.notes)))
        return
    echo(config.to_toml(), nl=False)
    for remark in config.notes:
        note(remark)
