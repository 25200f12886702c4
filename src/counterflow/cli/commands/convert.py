"""``counterflow convert``: convert the weights of a run to one file or a Hugging Face folder, and back; and a
whole training to torchtitan's folders, and back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterflow.common.number_texts import byte_size

from ..options.flags import JsonFlag
from ..output.console import print_json
from ..output.visible import echo


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A run or a checkpoint, a .safetensors file, or a folder of transformers or torchtitan.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="A new .safetensors file, or a new folder: of transformers from a run, else a checkpoint.",
            show_default=False,
        ),
    ],
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of transformers: its config and tokenizer accompany a run's weights (default: the "
            "run's model.path), or its model's names replace those of files or of torchtitan.",
        ),
    ] = None,
    ema: Annotated[
        bool,
        typer.Option(
            "--ema", help="Convert the average of the weights (train.ema_decay) instead of the weights."
        ),
    ] = False,
    torchtitan: Annotated[
        bool,
        typer.Option("--torchtitan", help="Convert to a folder with which torchtitan goes on training."),
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Class of the optimiser whose state torchtitan's folder has, if that does not show it.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Convert weights bit-exactly: those of a run, or into a checkpoint to start training from.

    A folder of torchtitan also has the optimiser's state, so training goes on, either way.
    """
    from counterflow.integrations.conversion import ConvertedShown
    from counterflow.integrations.conversion import convert as converted

    result = converted(source, target, model, ema=ema, torchtitan=torchtitan, optimizer=optimizer)
    if as_json:
        print_json(ConvertedShown.model_validate(result))
    else:
        echo(f"{result.path}: {result.kind}, {result.tensors:,} tensors, {byte_size(result.bytes)}")
