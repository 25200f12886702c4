"""``counterflow explore``: the live page of schedules, plans and runs."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from counterflow.common.extras import imported
from counterflow.errors import ConfigError

from ..output.console import note


def explore(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN_DIR…]",
            help="Folders of one run or of several runs. Default: runs.",
            show_default=False,
        ),
    ] = None,
    *,
    host: Annotated[
        str,
        typer.Option(
            help="Interface to listen on; beyond this machine the URL carries an access token.",
            rich_help_panel="Server",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.", rich_help_panel="Server"),
    ] = 8765,
    opens: Annotated[
        bool,
        typer.Option("--open/--no-open", help="Open a browser.", rich_help_panel="Server"),
    ] = True,
) -> None:
    """Explore schedules and runs in a browser: change, time, prove and compare them, follow a training."""
    for path in runs or ():
        if not path.is_dir():
            raise ConfigError(f"{path}: there is no such folder")
    for package in ("starlette", "uvicorn"):
        imported(package, "explore")
    from counterflow.explore.schedules import warm
    from counterflow.explore.serve import serve, stand_back
    from counterflow.explore.web_app import application

    stand_back()
    Thread(target=warm, daemon=True).start()
    serve(
        lambda token: application(token, runs or [Path("runs")]),
        host,
        port,
        page="runs" if runs else "",
        opens=opens,
        report_address=lambda address: note(f"Open {address} (Ctrl-C ends)"),
    )
