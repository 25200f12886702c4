"""Flags under their earlier names, and flags that mean something else elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..conftest import Run

PLAN = "plan --example chimera-bert48 --scheme dapple"
VERIFY = "verify chimera --stages 2 --micro-batches 2 --steps 1 --json"
DAPPLE = "dapple --stages 2 --micro-batches 2"


def test_earlier_names_are_rewritten_with_one_note(run: Run) -> None:
    old = run(f"{PLAN} --depth 4 --micro-batch=4 --also-micro-batch 3 --even --sync end --json")
    today = "--workers 4 --micro-batch-size 4 --also-micro-batch-size 3 --cuts even --sync-mode end"
    new = run(f"{PLAN} {today} --json")
    assert (old.code, new.code, new.err) == (0, 0, "")
    assert old.json == new.json
    assert old.err == (
        "Note: --depth is now --workers, --micro-batch is now --micro-batch-size, --also-micro-batch is now "
        "--also-micro-batch-size, --even is now --cuts even, --sync is now --sync-mode\n"
    )


def test_the_mode_of_a_sync_has_one_name(run: Run) -> None:
    old, new = run(f"{VERIFY} --sync end"), run(f"{VERIFY} --sync-mode end")
    assert (old.code, old.err, new.code, new.err) == (0, "Note: --sync is now --sync-mode\n", 0, "")
    assert old.json == new.json


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"{PLAN} --sync 3",
            "--sync 3: --sync is the seconds of a sync, which simulate and show take; here ",
        ),
        (f"{VERIFY} --sync 0.5", "--sync 0.5: --sync is the seconds of a sync, which simulate and show take"),
        (f"simulate {DAPPLE} --sync eager", "--sync eager: --sync is the seconds of a sync; its mode is "),
        (
            f"show {DAPPLE} --sync=end",
            "--sync end: --sync is the seconds of a sync; its mode is --sync-mode end",
        ),
        (
            f"{PLAN} --micro-batches 8",
            "--micro-batches 8: plan takes the size of a micro-batch, --micro-batch-size SAMPLES; their "
            "number is --option micro_batches=8\n",
        ),
        (f"{PLAN} --stages 4", "--stages 4: plan takes the depth in workers: --workers 4\n"),
    ],
)
def test_what_means_something_else_is_refused(refused: Callable[..., str], line: str, message: str) -> None:
    shown = refused(line)
    assert shown.startswith(f"Error: {message}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("line", [f"{PLAN} --sync", f"{PLAN} --micro-batch", f"simulate {DAPPLE} --sync"])
def test_a_value_that_is_missing(refused: Callable[..., str], line: str) -> None:
    assert "requires an argument" in refused(line) or "--sync-mode, one of" in refused(line)
