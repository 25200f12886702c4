"""The files to which a run's config is handed on its way to a running step.

    python benchmarks/config_walk.py [--verbose]

Trains one step of the built-in example on two workers that are threads, and notes each function of the
package that is given the config itself, up to the first ``Pipeline.step``. A climb is a step from a room to
one above it. What only depends on the config (a schedule, a model) is not followed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from house import ROOMS

import counterflow
from counterflow.cli.app import main as counterflow_command
from counterflow.training.config import RunConfig

ROOT = Path(counterflow.__file__).parent
STEP = ("runtime/pipeline.py", "step")


def walked() -> list[tuple[str, str]]:
    """File and function of each stay, in order; the last is the step."""
    stays: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or STEP in stays or not code.co_filename.startswith(f"{ROOT}/"):
            return
        place = code.co_filename.removeprefix(f"{ROOT}/"), code.co_name
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        has_config = any(isinstance(frame.f_locals.get(name), RunConfig) for name in given)
        if place == STEP or (has_config and (not stays or stays[-1][0] != place[0])):
            stays.append(place)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = ["--steps", "1", "--workers", "2", "--set", "pipeline.transport=local"]
        sys.argv = ["counterflow", "train", *options, "--out", f"{folder}/run"]
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            counterflow_command()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return stays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="each stay")
    args = parser.parse_args()
    stays = walked()
    floors = [ROOMS.index(file.partition("/")[0]) for file, _ in stays]
    climbs = sum(after > before for before, after in pairwise(floors))
    if args.verbose:
        print(*(f"{file}: {function}" for file, function in stays), "", sep="\n")
    print(f"{len({file for file, _ in stays})} files, {len(stays)} stays, climbs to a room above: {climbs}")


if __name__ == "__main__":
    main()
