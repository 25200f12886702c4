"""``counterflow mesh``: the place of each rank of a config's run, and the weights that it holds."""

from __future__ import annotations

from typing import Annotated

import typer

from counterflow.common.plurals import plural

from ..options.flags import ConfigArgument, JsonFlag, SchemeOption, WorkersOption
from ..output.console import WIDE, console, note, print_json, table_of
from ..output.visible import echo

_MOST_RANKS = 64
"""Number of ranks that are printed; --json has all."""


def mesh(
    config: ConfigArgument = None,
    *,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Change a key, such as mesh.tp=2; may be repeated. counterflow train --keys lists them.",
        ),
    ] = None,
    workers: WorkersOption = None,
    scheme: SchemeOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which rank does what: its replica, worker and place in the stage, its samples, and the weights.

    For each group of weights: the ranks that hold a part, over which of them gradients are summed, and whose
    part counts in the gradient norm. Nothing is started.
    """
    from counterflow.training import load_config
    from counterflow.training.job import prepare
    from counterflow.training.mesh_report import mesh_dims, mesh_report, rank_places

    job = prepare(load_config(config, sets or (), scheme=scheme, workers=workers))
    if as_json:
        print_json(mesh_report(job))
        return
    dims, places = mesh_dims(job.config), rank_places(job)
    sizes = " x ".join(f"{name} {size}" for name, size in dims.items())
    echo(f"{job.schedule} on {plural(len(places), 'rank')}: {sizes}")
    samples, sequences = places[0].samples[1], places[0].sequence[1]
    shares = {"samples": samples > 1, "sequence": sequences > 1}
    table = table_of("rank", *dims, "stages", *(name for name, has in shares.items() if has))
    for place in places[:_MOST_RANKS]:
        share = {"samples": place.samples, "sequence": place.sequence}
        table.add_row(
            str(place.rank),
            *map(str, place.place.values()),
            ", ".join(map(str, place.stages)),
            *(f"{share[name][0]} of {share[name][1]}" for name, has in shares.items() if has),
        )
    console(WIDE).print(table)
    if len(places) > _MOST_RANKS:
        note(f"and {len(places) - _MOST_RANKS} more ranks; --json lists all")
    rehearsal = job.rehearsal()
    if rehearsal is not None:
        for line in str(rehearsal.table).splitlines()[1:]:
            echo(line)
